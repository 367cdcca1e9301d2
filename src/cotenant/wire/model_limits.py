"""Check of a model against the protocol's limits at load time: every served model must be reachable by a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cotenant.errors import ConfigError
from cotenant.graph.datatypes import numpy_type
from cotenant.graph.dfg import Tensor
from cotenant.wire.api import ModelMetadata, TensorSpec
from cotenant.wire.codec import DATATYPE_OF, DTYPES, Limits, shown


def carried(
    model: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    shapes: Sequence[Mapping[str, Sequence[int]]],
    limits: Limits = Limits(),
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The inputs and outputs of a model on the wire; a request can carry all inputs at each of the declared `shapes`.

    Raises ConfigError with all problems; each names the model, the tensor, and its type or the limit.
    """
    where = f"model {model!r}"
    faults: list[str] = []
    if len(inputs) > limits.max_inputs:
        faults.append(
            f"{where} has {len(inputs)} inputs, and a request carries at most {limits.max_inputs}: join some of them "
            "into one"
        )
    specs = [_spec(where, tensor, faults) for tensor in (*inputs, *outputs)]
    for spec in specs[: len(inputs)]:
        for dims in (spec.shape, *(shape[spec.name] for shape in shapes)):
            if len(dims) > limits.max_dims:
                faults.append(
                    f"{where}: input {shown(spec.name)} has {len(dims)} dimensions, and a tensor of a request has at "
                    f"most {limits.max_dims}: flatten it in the model"
                )
            if math.prod(dim for dim in dims if dim > 0) > limits.max_elements:
                faults.append(
                    f"{where}: input {shown(spec.name)} has the shape {shown(list(dims))}, and a tensor of a request "
                    f"has at most {limits.max_elements} elements: split the input in the model"
                )
    if faults:
        raise ConfigError(*faults)
    return tuple(specs[: len(inputs)]), tuple(specs[len(inputs) :])


def _spec(where: str, tensor: Tensor, faults: list[str]) -> TensorSpec:
    dtype = numpy_type(tensor.dtype)
    datatype = "BYTES" if dtype is not None and dtype.kind == "U" else DATATYPE_OF.get(dtype) if dtype else None
    if datatype is None:
        faults.append(
            f"{where}: the protocol cannot carry tensor {tensor.name!r} of type {tensor.dtype or 'unknown'}; "
            "convert it to a type of the protocol in the model"
        )
    if tensor.shape is None:
        return TensorSpec(tensor.name, datatype or "", (-1,), is_ranked=False)
    return TensorSpec(tensor.name, datatype or "", tuple(dim if isinstance(dim, int) else -1 for dim in tensor.shape))


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
