"""Every gRPC method but infer: health, metadata, configuration, statistics, repository."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf import json_format

from cotenant.serve.api import Backend, Duration, ServeError, Status, TensorSpec
from cotenant.serve.codec import shown
from cotenant.serve.http_control import NO_OVERRIDES
from cotenant.serve.oip import EXTENSIONS, HEALTH_SERVICE, MESSAGES, SERVER_NAME, SERVER_VERSION, SERVICE


def _server_live(backend: Backend, message: Any) -> Any:
    return MESSAGES["ServerLiveResponse"](live=backend.live())


def _server_ready(backend: Backend, message: Any) -> Any:
    return MESSAGES["ServerReadyResponse"](ready=backend.ready())


def _model_ready(backend: Backend, message: Any) -> Any:
    return MESSAGES["ModelReadyResponse"](ready=backend.model_ready(message.name, message.version))


def _server_metadata(backend: Backend, message: Any) -> Any:
    return MESSAGES["ServerMetadataResponse"](name=SERVER_NAME, version=SERVER_VERSION, extensions=EXTENSIONS)


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}


def _model_metadata(backend: Backend, message: Any) -> Any:
    metadata = backend.metadata(message.name, message.version)
    return MESSAGES["ModelMetadataResponse"](
        name=metadata.name,
        versions=metadata.versions,
        platform=metadata.platform,
        inputs=[_tensor(spec) for spec in metadata.inputs],
        outputs=[_tensor(spec) for spec in metadata.outputs],
    )


def _model_config(backend: Backend, message: Any) -> Any:
    config = dict(backend.config(message.name, message.version))
    response = MESSAGES["ModelConfigResponse"]()
    # The HTTP form may hold keys that clients of gRPC have no field for.
    json_format.ParseDict(config, response.config, ignore_unknown_fields=True)
    return response


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}


def _model_statistics(backend: Backend, message: Any) -> Any:
    none = {"count": 0, "ns": 0}
    response = MESSAGES["ModelStatisticsResponse"]()
    for entry in backend.statistics(message.name, message.version):
        response.model_stats.add(
            name=entry.name,
            version=entry.version,
            last_inference=entry.last_inference_ms,
            inference_count=entry.inference_count,
            execution_count=entry.execution_count,
            inference_stats={
                "success": _duration(entry.success),
                "fail": _duration(entry.fail),
                "queue": _duration(entry.queue),
                "compute_input": _duration(entry.compute_input),
                "compute_infer": _duration(entry.compute_infer),
                "compute_output": _duration(entry.compute_output),
                "cache_hit": none,
                "cache_miss": none,
            },
        )
    return response


def _check_repository(name: str) -> None:
    if name:
        raise ServeError(
            Status.INVALID_ARGUMENT, f"repository_name is {shown(name)}, expected none: there is one repository"
        )


def _index(backend: Backend, message: Any) -> Any:
    _check_repository(message.repository_name)
    response = MESSAGES["RepositoryIndexResponse"]()
    for entry in backend.index(message.ready):
        response.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
    return response


def _load(backend: Backend, message: Any) -> Any:
    _check_repository(message.repository_name)
    if message.parameters:
        raise ServeError(Status.UNIMPLEMENTED, NO_OVERRIDES)
    backend.load(message.model_name)
    return MESSAGES["RepositoryModelLoadResponse"]()


def _unload(backend: Backend, message: Any) -> Any:
    _check_repository(message.repository_name)
    backend.unload(message.model_name)
    return MESSAGES["RepositoryModelUnloadResponse"]()


def health(backend: Backend, message: Any) -> Any:
    """Answer the standard health check: SERVING while queries are accepted. NOT_FOUND for a service not served."""
    if message.service not in ("", SERVICE, HEALTH_SERVICE):
        raise ServeError(Status.NOT_FOUND, f"service {shown(message.service)} is not served here, only {SERVICE}")
    response = MESSAGES["HealthCheckResponse"]
    return response(status=response.SERVING if backend.live() and backend.ready() else response.NOT_SERVING)


CONTROL: dict[str, Callable[[Backend, Any], Any]] = {
    "ServerLive": _server_live,
    "ServerReady": _server_ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _server_metadata,
    "ModelMetadata": _model_metadata,
    "ModelConfig": _model_config,
    "ModelStatistics": _model_statistics,
    "RepositoryIndex": _index,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
}
"""The methods that are answered by one blocking call; the request of each is `<method>Request`."""
