"""What both front-ends say alike: the server's name, its extensions, the messages of the protocol.

The message classes are built from the compiled descriptors in `oip.binpb` inside a descriptor pool of their own,
because clients of the same protocol (tritonclient, KServe) register the same names in the default pool of the process.
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
"""Extensions are those that work: sequences, shared memory, trace and logging settings are not served."""

NO_SHARED_MEMORY = "shared memory is not supported; send tensors in the request (binary tensor data is without copies)"

QUERY_KEY = "x-cotenant-query"
"""Name of the header (HTTP), response parameter and trailing metadata (gRPC) with the number of the query, as
`cotenant explain` takes it."""

SPENT_KEY = "x-cotenant-spent-us"
"""Name of the header (HTTP) and metadata (gRPC) by which a gateway that sends a query again says how many microseconds
of its time-out have passed."""

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"


REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The same service under two names."""


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
"""The descriptors of the protocol, and the message class by its short name, e.g. `ModelInferRequest`."""
