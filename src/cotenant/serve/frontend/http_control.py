"""HTTP endpoints except inference: health, metadata, configuration, statistics, repository, metrics.

They are functions that may block, so HttpApp runs them in threads. Loads wait in a queue instead.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from cotenant.serve.frontend.control import NO_OVERRIDES, model_index, model_metadata, model_statistics
from cotenant.serve.frontend.http_connection import Answer
from cotenant.serve.frontend.http_routes import Endpoint, HttpRoute
from cotenant.serve.frontend.load_line import LoadLine
from cotenant.wire.api import Control, Describe, ServeError, Status
from cotenant.wire.codec_http import parse_json
from cotenant.wire.oip import SERVER_METADATA

JSON_TYPE = b"application/json"
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_encode = msgspec.json.Encoder().encode


class _IndexBody(msgspec.Struct):
    ready: bool = False


class _LoadBody(msgspec.Struct):
    parameters: dict[str, Any] | None = None


_decode_index = msgspec.json.Decoder(_IndexBody).decode
_decode_load = msgspec.json.Decoder(_LoadBody).decode


def json_answer(status: int, value: Any, fields: bytes = b"") -> Answer:
    """Create an answer with a JSON body."""
    return Answer(status, JSON_TYPE, _encode(value), fields)


def error_answer(status: int, message: str, fields: bytes = b"") -> Answer:
    """Create the answer `{"error": message}`."""
    return json_answer(status, {"error": message or "the request failed without a reason"}, fields)


def _server(backend: Control, route: HttpRoute, body: bytes) -> Answer:
    return json_answer(200, SERVER_METADATA)


def _live(backend: Control, route: HttpRoute, body: bytes) -> Answer:
    live = backend.live()
    return json_answer(200, {"live": True}) if live else error_answer(503, "the server is not live")


def _ready(backend: Control, route: HttpRoute, body: bytes) -> Answer:
    ready = backend.ready()
    return json_answer(200, {"ready": True}) if ready else error_answer(503, "the server is not ready")


def _model_ready(backend: Describe, route: HttpRoute, body: bytes) -> Answer:
    if backend.model_ready(route.model, route.version):
        return json_answer(200, {"name": route.model, "ready": True})
    return error_answer(503, f"model {route.model!r} is not ready")


def _model(backend: Describe, route: HttpRoute, body: bytes) -> Answer:
    metadata = model_metadata(backend, route.model, route.version)
    parameters = backend.config(route.model, route.version).get("parameters", {})
    if (merging := parameters.get("merging")) is not None:
        metadata["parameters"] = {"merging": merging["string_value"]}
    return json_answer(200, metadata)


def _config(backend: Describe, route: HttpRoute, body: bytes) -> Answer:
    return json_answer(200, dict(backend.config(route.model, route.version)))


def _statistics(backend: Control, route: HttpRoute, body: bytes) -> Answer:
    uncounted: dict[str, Any] = {"batch_stats": [], "memory_usage": [], "response_stats": {}}
    entries = model_statistics(backend, route.model, route.version)
    return json_answer(200, {"model_stats": [entry | uncounted for entry in entries]})


def _index(backend: Control, route: HttpRoute, body: bytes) -> Answer:
    wanted = parse_json("request JSON", _decode_index, body) if body.strip() else _IndexBody()
    return json_answer(200, model_index(backend, wanted.ready))


def _load(line: LoadLine, route: HttpRoute, body: bytes) -> Future[None]:
    wanted = parse_json("request JSON", _decode_load, body) if body.strip() else _LoadBody()
    if wanted.parameters:
        raise ServeError(Status.UNIMPLEMENTED, NO_OVERRIDES)
    return line.load(route.model)


def _unload(line: LoadLine, route: HttpRoute, body: bytes) -> Future[None]:
    if body.strip():
        parse_json("request JSON", _decode_load, body)
    return line.unload(route.model)


def _metrics(backend: Control, route: HttpRoute, body: bytes) -> Answer:
    return Answer(200, METRICS_TYPE, backend.metrics())


def _plan(backend: Control, route: HttpRoute, body: bytes) -> Answer:
    return json_answer(200, dict(backend.plan()))


OF_MODEL: dict[Endpoint, Callable[[Describe, HttpRoute, bytes], Answer]] = {
    Endpoint.MODEL: _model,
    Endpoint.MODEL_READY: _model_ready,
    Endpoint.CONFIG: _config,
}
"""Endpoints that describe a model."""
CONTROL: dict[Endpoint, Callable[[Control, HttpRoute, bytes], Answer]] = {
    **OF_MODEL,
    Endpoint.SERVER: _server,
    Endpoint.LIVE: _live,
    Endpoint.READY: _ready,
    Endpoint.STATISTICS: _statistics,
    Endpoint.INDEX: _index,
    Endpoint.METRICS: _metrics,
    Endpoint.PLAN: _plan,
}
"""Endpoints answered by one blocking call."""
LOADS: dict[Endpoint, Callable[[LoadLine, HttpRoute, bytes], Future[None]]] = {
    Endpoint.LOAD: _load,
    Endpoint.UNLOAD: _unload,
}
"""Endpoints that wait in the queue of loads, and answer with an empty object."""
