"""Every HTTP endpoint but infer: health, metadata, configuration, statistics, repository, metrics.

Plain functions that may block (a model is loaded in them), so the application runs them outside of its event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from cotenant.serve.api import Backend, Duration, ModelStatistics, ServeError, Status, TensorSpec
from cotenant.serve.codec_http import parse_json
from cotenant.serve.http_routes import Endpoint, Route
from cotenant.serve.oip import EXTENSIONS, SERVER_NAME, SERVER_VERSION

JSON_TYPE = b"application/json"
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

NO_OVERRIDES = (
    "parameters of a load request ('config', 'file:...') are not supported: change the files of the model repository "
    "and load again"
)

_encode = msgspec.json.Encoder().encode


class Answer(NamedTuple):
    """A complete HTTP answer."""

    status: int
    content_type: bytes
    body: bytes | list[bytes | memoryview]


class _IndexBody(msgspec.Struct):
    ready: bool = False


class _LoadBody(msgspec.Struct):
    parameters: dict[str, Any] | None = None


_decode_index = msgspec.json.Decoder(_IndexBody).decode
_decode_load = msgspec.json.Decoder(_LoadBody).decode


def json_answer(status: int, value: Any) -> Answer:
    """Make an answer with a JSON body."""
    return Answer(status, JSON_TYPE, _encode(value))


def error_answer(status: int, message: str) -> Answer:
    """Make the answer `{"error": message}`."""
    return json_answer(status, {"error": message or "the request failed without a reason"})


def _server(backend: Backend, route: Route, body: bytes) -> Answer:
    return json_answer(200, {"name": SERVER_NAME, "version": SERVER_VERSION, "extensions": EXTENSIONS})


def _live(backend: Backend, route: Route, body: bytes) -> Answer:
    live = backend.live()
    return json_answer(200, {"live": True}) if live else error_answer(503, "the server is not live")


def _ready(backend: Backend, route: Route, body: bytes) -> Answer:
    ready = backend.ready()
    return json_answer(200, {"ready": True}) if ready else error_answer(503, "the server is not ready")


def _model_ready(backend: Backend, route: Route, body: bytes) -> Answer:
    if backend.model_ready(route.model, route.version):
        return json_answer(200, {"name": route.model, "ready": True})
    return error_answer(503, f"model {route.model!r} is not ready")


def _tensors(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
    return [{"name": spec.name, "datatype": spec.datatype, "shape": spec.shape} for spec in specs]


def _model(backend: Backend, route: Route, body: bytes) -> Answer:
    metadata = backend.metadata(route.model, route.version)
    return json_answer(
        200,
        {
            "name": metadata.name,
            "versions": metadata.versions,
            "platform": metadata.platform,
            "inputs": _tensors(metadata.inputs),
            "outputs": _tensors(metadata.outputs),
        },
    )


def _config(backend: Backend, route: Route, body: bytes) -> Answer:
    return json_answer(200, dict(backend.config(route.model, route.version)))


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}


def _model_statistics(entry: ModelStatistics) -> dict[str, Any]:
    none = Duration()
    return {
        "name": entry.name,
        "version": entry.version,
        "last_inference": entry.last_inference_ms,
        "inference_count": entry.inference_count,
        "execution_count": entry.execution_count,
        "inference_stats": {
            "success": _duration(entry.success),
            "fail": _duration(entry.fail),
            "queue": _duration(entry.queue),
            "compute_input": _duration(entry.compute_input),
            "compute_infer": _duration(entry.compute_infer),
            "compute_output": _duration(entry.compute_output),
            "cache_hit": _duration(none),
            "cache_miss": _duration(none),
        },
        "batch_stats": [],
        "memory_usage": [],
        "response_stats": {},
    }


def _statistics(backend: Backend, route: Route, body: bytes) -> Answer:
    entries = backend.statistics(route.model, route.version)
    return json_answer(200, {"model_stats": [_model_statistics(entry) for entry in entries]})


def _index(backend: Backend, route: Route, body: bytes) -> Answer:
    wanted = parse_json("request JSON", _decode_index, body) if body.strip() else _IndexBody()
    entries = backend.index(wanted.ready)
    return json_answer(
        200,
        [
            {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
            for entry in entries
        ],
    )


def _load(backend: Backend, route: Route, body: bytes) -> Answer:
    wanted = parse_json("request JSON", _decode_load, body) if body.strip() else _LoadBody()
    if wanted.parameters:
        raise ServeError(Status.UNIMPLEMENTED, NO_OVERRIDES)
    backend.load(route.model)
    return json_answer(200, {})


def _unload(backend: Backend, route: Route, body: bytes) -> Answer:
    if body.strip():
        parse_json("request JSON", _decode_load, body)
    backend.unload(route.model)
    return json_answer(200, {})


def _metrics(backend: Backend, route: Route, body: bytes) -> Answer:
    return Answer(200, METRICS_TYPE, backend.metrics())


def _plan(backend: Backend, route: Route, body: bytes) -> Answer:
    return json_answer(200, dict(backend.plan()))


CONTROL: dict[Endpoint, Callable[[Backend, Route, bytes], Answer]] = {
    Endpoint.SERVER: _server,
    Endpoint.LIVE: _live,
    Endpoint.READY: _ready,
    Endpoint.MODEL: _model,
    Endpoint.MODEL_READY: _model_ready,
    Endpoint.CONFIG: _config,
    Endpoint.STATISTICS: _statistics,
    Endpoint.INDEX: _index,
    Endpoint.LOAD: _load,
    Endpoint.UNLOAD: _unload,
    Endpoint.METRICS: _metrics,
    Endpoint.PLAN: _plan,
}
"""The endpoints that are answered by one blocking call."""
