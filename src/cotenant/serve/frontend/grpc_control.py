"""gRPC methods except inference: health, metadata, configuration, statistics, repository."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from google.protobuf import json_format

from cotenant.serve.frontend.control import NO_OVERRIDES, model_index, model_metadata, model_statistics
from cotenant.serve.frontend.load_line import LoadLine
from cotenant.wire.api import Control, Describe, ServeError, Status
from cotenant.wire.codec import shown
from cotenant.wire.oip import HEALTH_SERVICE, MESSAGES, SERVER_METADATA, SERVICE


def _server_live(backend: Control, message: Any) -> Any:
    return MESSAGES["ServerLiveResponse"](live=backend.live())


def _server_ready(backend: Control, message: Any) -> Any:
    return MESSAGES["ServerReadyResponse"](ready=backend.ready())


def _model_ready(backend: Describe, message: Any) -> Any:
    return MESSAGES["ModelReadyResponse"](ready=backend.model_ready(message.name, message.version))


def _server_metadata(backend: Control, message: Any) -> Any:
    return MESSAGES["ServerMetadataResponse"](**SERVER_METADATA)


def _model_metadata(backend: Describe, message: Any) -> Any:
    return MESSAGES["ModelMetadataResponse"](**model_metadata(backend, message.name, message.version))


def _model_config(backend: Describe, message: Any) -> Any:
    config = dict(backend.config(message.name, message.version))
    response = MESSAGES["ModelConfigResponse"]()
    # The HTTP form may hold keys that clients of gRPC have no field for.
    json_format.ParseDict(config, response.config, ignore_unknown_fields=True)
    return response


def _model_statistics(backend: Control, message: Any) -> Any:
    entries = model_statistics(backend, message.name, message.version)
    return MESSAGES["ModelStatisticsResponse"](model_stats=entries)


def _check_repository(name: str) -> None:
    if name:
        raise ServeError(
            Status.INVALID_ARGUMENT,
            f"repository_name is {shown(name)}, expected an empty one: the server has one repository",
        )


def _index(backend: Control, message: Any) -> Any:
    _check_repository(message.repository_name)
    return MESSAGES["RepositoryIndexResponse"](models=model_index(backend, message.ready))


def _load(line: LoadLine, message: Any) -> Future[None]:
    _check_repository(message.repository_name)
    if message.parameters:
        raise ServeError(Status.UNIMPLEMENTED, NO_OVERRIDES)
    return line.load(message.model_name)


def _unload(line: LoadLine, message: Any) -> Future[None]:
    _check_repository(message.repository_name)
    return line.unload(message.model_name)


def health(backend: Control, message: Any) -> Any:
    """Answer the standard health check: SERVING while queries are accepted. NOT_FOUND for an unknown service."""
    if message.service not in ("", SERVICE, HEALTH_SERVICE):
        raise ServeError(Status.NOT_FOUND, f"service {shown(message.service)} is not served here, only {SERVICE}")
    response = MESSAGES["HealthCheckResponse"]
    return response(status=response.SERVING if backend.live() and backend.ready() else response.NOT_SERVING)


OF_MODEL: dict[str, Callable[[Describe, Any], Any]] = {
    "ModelReady": _model_ready,
    "ModelMetadata": _model_metadata,
    "ModelConfig": _model_config,
}
"""Methods that describe a model."""
CONTROL: dict[str, Callable[[Control, Any], Any]] = {
    **OF_MODEL,
    "ServerLive": _server_live,
    "ServerReady": _server_ready,
    "ServerMetadata": _server_metadata,
    "ModelStatistics": _model_statistics,
    "RepositoryIndex": _index,
}
"""Methods answered by one blocking call; the request type is `<method>Request`."""
PROMPT = frozenset({"ServerLive", "ServerReady", "ServerMetadata", "ModelReady"})
"""Methods of `CONTROL` that never block."""
LOADS: dict[str, Callable[[LoadLine, Any], Future[None]]] = {
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
}
"""Methods that wait in the queue of loads, with the same naming; their answers are empty."""
