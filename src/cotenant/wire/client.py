"""Inference over HTTP, with arrays in and out: a small blocking client on the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote, urlsplit

from cotenant.wire.api import Array
from cotenant.wire.decode import http_outputs
from cotenant.wire.encode import ClientError, http_request
from cotenant.wire.oip import QUERY_KEY


@dataclass(frozen=True, slots=True)
class InferReply:
    """The response to one inference. `query` is its number for `cotenant explain`, 0 where the server gave none.

    `took_s` runs from the first byte of the request to the last byte of the response.
    """

    outputs: dict[str, Array]
    query: int
    took_s: float


class InferenceClient:
    """A client of the server at `url`, such as `http://127.0.0.1:8000`. It keeps one connection open between requests.

    A client serves one thread at a time. `with` closes the connection at the end, and so does `close`.

    >>> with InferenceClient("http://127.0.0.1:8000") as client:  # doctest: +SKIP
    ...     reply = client.infer("resnet", {"image": image})
    ...     print(reply.outputs["scores"].argmax(), reply.took_s, reply.query)
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self.url = url
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or 80
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"cotenant.Client({self.url!r})"

    def close(self) -> None:
        """Close the connection. The next request opens another one."""
        self._connection.close()

    def infer(self, model: str, inputs: Mapping[str, Array]) -> InferReply:
        """Send one query and wait for its outputs.

        Raises ClientError with the server's own sentence when it does not answer with outputs.
        """
        body, headers = http_request(inputs, {})
        begin = time.monotonic()
        status, found, payload = self._send("POST", f"/v2/models/{quote(model, safe='')}/infer", body, headers)
        took_s = time.monotonic() - begin
        number = found.get(QUERY_KEY, "")
        if status != 200:
            known = f" (query {number})" if number else ""
            raise ClientError(f"model {model!r}: {_sentence(payload)}{known}")
        return InferReply(http_outputs(payload), int(number) if number.isdigit() else 0, took_s)

    def metadata(self, model: str) -> dict[str, Any]:
        """The metadata of a model: `inputs` and `outputs` with `name`, `datatype` and `shape`. Raises ClientError."""
        status, _, payload = self._send("GET", f"/v2/models/{quote(model, safe='')}", b"", {})
        if status != 200:
            raise ClientError(f"model {model!r}: {_sentence(payload)}")
        found = json.loads(payload)
        assert isinstance(found, dict)
        return found

    def ready(self) -> bool:
        """Whether the server accepts queries; False where no server answers, too."""
        try:
            return self._send("GET", "/v2/health/ready", b"", {})[0] == 200
        except ClientError:
            return False

    def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        is_reused = self._connection.sock is not None
        try:
            try:
                return self._exchange(method, path, body, headers)
            except (ConnectionError, http.client.BadStatusLine):
                self.close()
                if not is_reused:
                    raise
                return self._exchange(method, path, body, headers)  # the server had closed the idle connection
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ClientError(f"{self.url}: no answer ({error}); is the server running?") from None

    def _exchange(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        self._connection.request(method, path, body, dict(headers))
        answer = self._connection.getresponse()
        return answer.status, answer.headers, answer.read()


def infer_once(url: str, model: str, inputs: Mapping[str, Array], *, timeout_s: float = 30.0) -> dict[str, Array]:
    """Run one inference on the server at `url` (such as `http://127.0.0.1:8000`); returns its outputs by name.

    Raises ClientError with the server's message if the response has no outputs.
    """
    with InferenceClient(url, timeout_s=timeout_s) as client:
        return client.infer(model, inputs).outputs


def _sentence(payload: bytes) -> str:
    try:
        return str(json.loads(payload)["error"])
    except (ValueError, KeyError, TypeError):
        return repr(payload[:200])
