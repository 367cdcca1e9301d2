"""Server metadata, keys and protobuf messages of the Open Inference Protocol.

The message classes come from the compiled descriptors in `oip.binpb`. They use a separate descriptor pool, because
clients of the protocol (tritonclient, KServe) register the same names in the default pool.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from cotenant import __version__

SERVER_METADATA = {
    "name": "cotenant",
    "version": __version__,
    "extensions": (
        "classification",
        "model_repository",
        "model_configuration",
        "statistics",
        "schedule_policy",
        "binary_tensor_data",
    ),
}
"""Name, version and supported extensions; sequences, shared memory, trace and logging settings are not supported."""

NO_SHARED_MEMORY = "shared memory is not supported; send tensors in the request (binary tensor data is without copies)"

QUERY_KEY = "x-cotenant-query"
"""Key of the query number for `cotenant explain`: header in HTTP, response parameter and trailing metadata in gRPC."""

SPENT_KEY = "x-cotenant-spent-us"
"""Key for gateways that retry a query: microseconds of its time-out that have passed. Header or metadata."""

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"


REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""Current and older name of the same service."""


def _load_messages() -> tuple[Any, dict[str, Any]]:
    files = descriptor_pb2.FileDescriptorSet.FromString(
        resources.files("cotenant.wire").joinpath("oip.binpb").read_bytes()
    )
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    names = [(f"{file.package}.{message.name}", message.name) for file in files.file for message in file.message_type]
    return pool, {short: message_factory.GetMessageClass(pool.FindMessageTypeByName(full)) for full, short in names}


POOL, MESSAGES = _load_messages()
"""Descriptor pool of the protocol, and message classes by short name, such as `ModelInferRequest`."""
