"""Sizes that torch keeps as symbolic expressions: binds symbols to shapes, and evaluates sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cotenant.graph.errors import GraphError

Ranges = Mapping[str, tuple[int, int | None]]
"""By symbol: the smallest and the largest size, None for no largest size."""

_ANY = 1 << 31


def expression_of(size: Any) -> Any:
    """A size as an int or as a sympy expression; None for other values."""
    if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        expression: Any = size.node.expr
        return int(expression) if getattr(expression, "is_Integer", False) else expression
    return size if isinstance(size, int | float) else None


@dataclass(slots=True)
class Sizes:
    """Values of the symbols. `assumed` names the dimensions that were not given."""

    values: dict[Any, int]
    assumed: tuple[str, ...]
    _known: dict[Any, int | None] = field(default_factory=dict)

    @classmethod
    def bound(
        cls,
        names: Sequence[str],
        inputs: Sequence[torch.Tensor],
        shapes: Mapping[str, Sequence[int]],
        ranges: Ranges,
    ) -> Sizes:
        """Bind every input to a fixed shape. Raises GraphError when a name, rank or size does not fit."""
        unknown = sorted(set(shapes) - set(names))
        if unknown:
            raise GraphError(
                f"shapes name an input {unknown[0]!r} that the model does not have; its inputs are {', '.join(names)}"
            )
        values: dict[Any, int] = {}
        for name, tensor in zip(names, inputs, strict=True):
            given = shapes.get(name)
            if given is None:
                continue
            declared = [expression_of(dim) for dim in tensor.shape]
            fits = len(given) == len(declared) and all(
                values.setdefault(dim, size) == size if getattr(dim, "is_Symbol", False) else _fits(dim, size)
                for dim, size in zip(declared, given, strict=True)
            )
            if not fits:
                shown = tuple(dim if isinstance(dim, int) else str(dim) for dim in declared)
                raise GraphError(f"input {name!r} cannot have shape {tuple(given)}: the model declares {shown}")
        assumed: dict[str, None] = {}
        for tensor in inputs:
            for dim in tensor.shape:
                for symbol in sorted(getattr(expression_of(dim), "free_symbols", ()), key=str):
                    if symbol not in values:
                        values[symbol] = max(1, ranges.get(str(symbol), (1, None))[0])
                        assumed[str(symbol)] = None
        return cls(values, tuple(assumed))

    def size(self, dim: Any) -> int | None:
        """The size of a dimension; None when it depends on more than the inputs' shapes."""
        if isinstance(dim, int):
            return dim
        expression = expression_of(dim)
        if expression not in self._known:
            found = expression.xreplace(self.values) if hasattr(expression, "xreplace") else expression
            is_number = getattr(found, "is_number", isinstance(found, int))
            self._known[expression] = int(found) if is_number else None
        return self._known[expression]

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """A tensor's shape; None when one of its dimensions is unknown."""
        sizes = [self.size(dim) for dim in tensor.shape]
        known = tuple(size for size in sizes if size is not None)
        return known if len(known) == len(sizes) else None


def limits(program: torch.export.ExportedProgram) -> Ranges:
    """Allowed sizes of the exported program; another trace of it may be stricter than necessary."""
    found: dict[str, tuple[int, int | None]] = {}
    for symbol, bounds in program.range_constraints.items():
        lower, upper = bounds.lower, bounds.upper
        is_bounded = getattr(upper, "is_Integer", False) and int(upper) < _ANY
        least = int(lower) if getattr(lower, "is_Integer", False) else 0
        found[str(symbol)] = least, int(upper) if is_bounded else None
    return found


def _fits(declared: Any, size: int) -> bool:
    return not isinstance(declared, int) or declared == size
