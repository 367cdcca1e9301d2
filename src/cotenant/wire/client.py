"""Minimal blocking HTTP client for inferences with arrays, on the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from cotenant.wire.api import Array
from cotenant.wire.decode import http_outputs
from cotenant.wire.encode import ClientError, http_request
from cotenant.wire.oip import QUERY_KEY


@dataclass(frozen=True, slots=True)
class Reply:
    """The response to one inference. `query` is its number for `cotenant explain`, 0 where the server gave none.

    `took_s` runs from the first byte of the request to the last byte of the response.
    """

    outputs: dict[str, Array]
    query: int
    took_s: float


def infer_once(url: str, model: str, inputs: Mapping[str, Array], *, timeout_s: float = 30.0) -> dict[str, Array]:
    """Run one inference on the server at `url` (such as `http://127.0.0.1:8000`); returns its outputs by name.

    Raises ClientError with the server's message if the response has no outputs.
    """
    return infer(url, model, inputs, timeout_s=timeout_s).outputs


def infer(url: str, model: str, inputs: Mapping[str, Array], *, timeout_s: float = 30.0) -> Reply:
    """As `infer_once`, with the number of the query and its latency as the client sees it."""
    body, headers = http_request(inputs, {})
    begin = time.monotonic()
    status, found, payload = _send(url, "POST", f"/v2/models/{quote(model, safe='')}/infer", body, headers, timeout_s)
    took_s = time.monotonic() - begin
    number = found.get(QUERY_KEY, "")
    if status != 200:
        known = f" (query {number})" if number else ""
        raise ClientError(f"model {model!r}: {_sentence(payload)}{known}")
    return Reply(http_outputs(payload), int(number) if number.isdigit() else 0, took_s)


def model_metadata(url: str, model: str, *, timeout_s: float = 30.0) -> dict[str, Any]:
    """The metadata of a model: `inputs` and `outputs` with `name`, `datatype` and `shape`. Raises ClientError."""
    status, _, payload = _send(url, "GET", f"/v2/models/{quote(model, safe='')}", b"", {}, timeout_s)
    if status != 200:
        raise ClientError(f"model {model!r}: {_sentence(payload)}")
    found = json.loads(payload)
    assert isinstance(found, dict)
    return found


def _send(
    url: str, method: str, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float
) -> tuple[int, http.client.HTTPMessage, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout_s)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise ClientError(f"{url}: no answer ({error}); is the server running?") from None
    finally:
        connection.close()


def _sentence(payload: bytes) -> str:
    try:
        return str(json.loads(payload)["error"])
    except (ValueError, KeyError, TypeError):
        return repr(payload[:200])
