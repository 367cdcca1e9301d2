"""Checks the inputs of a torch model against the exported program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cotenant.execute.errors import TensorError
from cotenant.execute.torch.index_bounds import Limits
from cotenant.graph.dfg import Tensor
from cotenant.graph.torch import TYPES
from cotenant.graph.torch_sizes import Ranges, expression_of

_OTHERS = {"float32": "float", "float64": "double"}
"""Types with other names in ONNX than in numpy."""


class InputCheck:
    """Raises TensorError for a missing or unknown input, or one of another type or shape.

    A dynamic dimension has bounds, and must be equal in all inputs that have it: otherwise the program would return
    wrong results without an error.
    """

    def __init__(
        self, model: str, inputs: Sequence[Tensor], examples: Sequence[torch.Tensor], ranges: Ranges, limits: Limits
    ) -> None:
        self._model = model
        self._limits = limits
        self._inputs = tuple(inputs)
        self._dims = [[_dim(dim, ranges) for dim in example.shape] for example in examples]

    def __call__(self, tensors: Mapping[str, Any]) -> None:
        """Check the inputs of one run."""
        sizes: dict[str, int] = {}
        for tensor, dims in zip(self._inputs, self._dims, strict=True):
            value = tensors.get(tensor.name)
            if value is None:
                names = ", ".join(each.name for each in self._inputs)
                raise self._error(f"input {tensor.name!r} is missing; its inputs are {names}")
            given = tuple(np.shape(value)) if not isinstance(value, torch.Tensor) else tuple(value.shape)
            pairs = zip(given, dims, strict=False)
            if len(given) != len(dims) or not all(_fits(size, dim, sizes) for size, dim in pairs):
                raise self._error(f"input {tensor.name!r} has shape {given}, expected {_shown(dims)}")
            dtype = TYPES.get(value.dtype) if isinstance(value, torch.Tensor) else _type_of(np.asarray(value).dtype)
            if dtype != tensor.dtype:
                raise self._error(f"input {tensor.name!r} is {dtype}, expected {tensor.dtype}")
        if len(tensors) > len(self._inputs):
            extra = sorted(set(tensors) - {each.name for each in self._inputs})[0]
            raise TensorError(f"model {self._model!r} has no input {extra!r}; leave it out")

    def check_values(self, tensors: Mapping[str, Any]) -> None:
        """Check the values of given inputs that are indices: tensors on the host."""
        for name, (low, high) in self._limits.items():
            if name not in tensors:
                continue
            value = np.asarray(tensors[name])
            if value.size and not low <= (least := value.min()) <= (most := value.max()) <= high:
                wrong = least if least < low else most
                text = f"input {name!r} has the value {wrong}, expected an index from {low} to {high}"
                raise self._error(text)

    def _error(self, text: str) -> TensorError:
        return TensorError(f"model {self._model!r}: {text}")


def _type_of(dtype: Any) -> str:
    text = str(dtype)  # with its byte order, if not the native one
    known = f"tensor({_OTHERS.get(text, text)})"
    return known if known in TYPES.values() else text


_Dim = int | tuple[str, int, int | None] | None


def _dim(dim: Any, ranges: Ranges) -> _Dim:
    expression = expression_of(dim)
    if isinstance(expression, int):
        return expression
    symbol = str(expression)
    return (symbol, *ranges.get(symbol, (0, None))) if getattr(expression, "is_Symbol", False) else None


def _fits(size: int, dim: _Dim, sizes: dict[str, int]) -> bool:
    if dim is None:
        return True
    if isinstance(dim, int):
        return size == dim
    symbol, low, high = dim
    return low <= size and (high is None or size <= high) and sizes.setdefault(symbol, size) == size


def _shown(dims: Sequence[_Dim]) -> tuple[int | str | None, ...]:
    """Sizes; for dynamic dimensions their names with the bounds."""
    return tuple(
        dim if not isinstance(dim, tuple) else f"{dim[0]} in {dim[1]} to {'any' if dim[2] is None else dim[2]}"
        for dim in dims
    )
