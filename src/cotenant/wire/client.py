"""Minimal blocking HTTP client for inferences with arrays, on the standard library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from cotenant.wire.api import Array
from cotenant.wire.decode import http_outputs
from cotenant.wire.encode import ClientError, http_request


def infer_once(url: str, model: str, inputs: Mapping[str, Array], *, timeout_s: float = 30.0) -> dict[str, Array]:
    """Run one inference on the server at `url` (such as `http://127.0.0.1:8000`); returns its outputs by name.

    Raises ClientError with the server's message if the response has no outputs.
    """
    body, headers = http_request(inputs, {})
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout_s)
    try:
        connection.request("POST", f"/v2/models/{quote(model, safe='')}/infer", body, headers)
        answer = connection.getresponse()
        payload = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise ClientError(f"{url}: no answer ({error}); is the server running?") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise ClientError(f"model {model!r}: {_sentence(payload)}")
    return http_outputs(payload)


def _sentence(payload: bytes) -> str:
    try:
        return str(json.loads(payload)["error"])
    except (ValueError, KeyError, TypeError):
        return repr(payload[:200])
