"""Check of a model against the protocol's limits at load time: every served model must be reachable by a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cotenant.errors import ConfigError
from cotenant.wire.api import ModelMetadata
from cotenant.wire.codec import DTYPES, Limits, shown


def check_model(
    metadata: ModelMetadata, shapes: Sequence[Mapping[str, Sequence[int]]], limits: Limits = Limits()
) -> None:
    """Check that a request can carry all inputs of a model at each of the declared `shapes`.

    Raises ConfigError that names the model, the input and the limit.
    """
    where = f"model {metadata.name!r}"
    count = len(metadata.inputs)
    if count > limits.max_inputs:
        raise ConfigError(
            f"{where} has {count} inputs, and a request carries at most {limits.max_inputs}: join some of them into one"
        )
    for spec in metadata.inputs:
        for dims in (spec.shape, *(shape[spec.name] for shape in shapes)):
            if len(dims) > limits.max_dims:
                raise ConfigError(
                    f"{where}: input {shown(spec.name)} has {len(dims)} dimensions, and a tensor of a request has at "
                    f"most {limits.max_dims}"
                )
            if math.prod(dim for dim in dims if dim > 0) > limits.max_elements:
                raise ConfigError(
                    f"{where}: input {shown(spec.name)} has the shape {shown(list(dims))}, and a tensor of a request "
                    f"has at most {limits.max_elements} elements"
                )


def least_request_bytes(metadata: ModelMetadata, shapes: Sequence[Mapping[str, Sequence[int]]]) -> int:
    """Bytes of the tensors of the smallest request: one row at a declared shape; a BYTES element counts 4 bytes."""
    batched = metadata.max_batch_size > 0
    return min(
        sum(
            math.prod(shape[spec.name][batched:]) * (4 if spec.datatype == "BYTES" else DTYPES[spec.datatype].itemsize)
            for spec in metadata.inputs
        )
        for shape in shapes
    )
