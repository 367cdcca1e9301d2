"""Made-up inputs of a model at a declared shape, for measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cotenant.errors import ConfigError
from cotenant.graph.datatypes import numpy_type
from cotenant.graph.dfg import Tensor
from cotenant.measure.samples import NO_SAMPLES, Samples

DeclaredShape = Mapping[str, Sequence[int]]


def check_shapes(model: str, inputs: Sequence[Tensor], shapes: Sequence[DeclaredShape]) -> tuple[DeclaredShape, ...]:
    """The shapes to profile at: those declared, or the model's own where it has no open dimension but the first.

    Raises ConfigError when a declared shape names an unknown input or does not fit, or when one must be declared.
    """
    known = {tensor.name: tensor for tensor in inputs}
    for shape in shapes:
        for name, dims in shape.items():
            if name not in known:
                raise ConfigError(f"model {model!r}: [[model.shapes]] names input {name!r}; it has {', '.join(known)}")
            declared = known[name].shape
            if declared is not None and not _fits(dims, declared):
                raise ConfigError(
                    f"model {model!r}: [[model.shapes]] gives {name!r} the shape {list(dims)}, "
                    f"the model takes {[dim if isinstance(dim, int) else -1 for dim in declared]}"
                )
    complete = []
    for shape in shapes or ({},):
        missing = [tensor.name for tensor in inputs if tensor.name not in shape and not _is_closed(tensor)]
        if missing:
            raise ConfigError(
                f"model {model!r}: the shape of input {missing[0]!r} is open; say at which shape to profile it: "
                f"add [[model.shapes]] with a line like '{missing[0]} = [1, ...]' to its config.toml"
            )
        complete.append({tensor.name: shape.get(tensor.name) or _closed(tensor) for tensor in inputs})
    return tuple(complete)


def make_inputs(
    inputs: Sequence[Tensor], shape: DeclaredShape, items: int, batched: bool, samples: Samples = NO_SAMPLES
) -> dict[str, Any]:
    """Inputs of `items` rows: those of `samples`, else numbers around 0, small positive integers, short texts.

    Always the same ones.
    """
    rng = np.random.default_rng(0)
    made: dict[str, Any] = {}
    for tensor in inputs:
        dims = tuple(shape[tensor.name])
        dims = (items, *dims[1:]) if batched and dims else dims
        dtype = numpy_type(tensor.dtype) or np.dtype(np.float32)
        given = samples.draw(tensor.name, dtype, dims, rng)
        if given is not None:
            made[tensor.name] = given
        elif tensor.dtype == "tensor(bfloat16)" or dtype.kind == "f":
            made[tensor.name] = rng.standard_normal(dims).astype(dtype)
        elif dtype.kind == "U":
            made[tensor.name] = np.full(dims, "text", dtype=np.object_)
        else:
            made[tensor.name] = np.ones(dims, dtype)
    return made


def _fits(dims: Sequence[int], declared: Sequence[object]) -> bool:
    return len(dims) == len(declared) and all(
        not isinstance(known, int) or known == dim for dim, known in zip(dims, declared, strict=True)
    )


def _is_closed(tensor: Tensor) -> bool:
    return tensor.shape is not None and all(isinstance(dim, int) for dim in tensor.shape[1:])


def _closed(tensor: Tensor) -> list[int]:
    return [dim if isinstance(dim, int) else 1 for dim in tensor.shape or ()]
