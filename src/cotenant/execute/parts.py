"""The tensors of a batch that runs in parts: launches of some of its rows or of its units, side by side.

Which units may run for some of the rows, `graph.rewrite` tells and the core holds policies to it; here tensors are
taken apart, and put together, along their first dimension, and what has no row for every row is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cotenant.execute.errors import RowsError
from cotenant.execute.runner import to_numpy
from cotenant.work import Work

_Named = Mapping[str, Any]


class Parts:
    """What the parts of one batch need of each other. Not thread-safe: its owner serialises the calls.

    `base` are the tensors with which the first of them begins: the inputs of the model, or what is live at a cut.
    """

    def __init__(self, items: int, base: _Named, from_inputs: bool) -> None:
        self._items = items
        self._inputs = tuple(base) if from_inputs else ()
        self._made: list[tuple[int, int, _Named]] = [(0, items, base)]
        self._outputs: list[tuple[int, int, _Named]] = []

    def rows(self, work: Work | None = None) -> PartRows:
        """What is known of the rows of this work, by default of all, as it is now; nothing is copied yet."""
        first, last = work.rows if work is not None and work.rows else (0, self._items)
        is_first = work is not None and work.start == 0 and bool(self._inputs)
        return PartRows(tuple(self._made), first, last, self._inputs if is_first else None)

    @property
    def base(self) -> _Named:
        """What the first of them begins with; nothing once one has ended, since all is there then where they run."""
        return self._made[0][2] if len(self._made) == 1 else {}

    def add(self, work: Work, tensors: _Named, *, is_last: bool) -> _Named | None:
        """A part has run: keep what it made. Gives the outputs of all rows once they are there, else None.

        Raises RowsError when rows cannot be put together.
        """
        first, last = work.rows or (0, self._items)
        if not is_last:
            self._made.append((first, last, tensors))
            return None
        self._outputs.append((first, last, tensors))
        if sum(last - first for first, last, _ in self._outputs) < self._items:
            return None
        return PartRows(tuple(self._outputs), 0, self._items).tensors()


@dataclass(frozen=True, slots=True)
class PartRows:
    """Rows [first, last) of tensors that parts have made, each by some of them. `inputs`: of these tensors alone."""

    made: Sequence[tuple[int, int, _Named]]
    first: int
    last: int
    inputs: tuple[str, ...] | None = None

    def tensors(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """Each tensor of which all these rows are there, by default, or of these names those that are.

        Raises RowsError where rows are not told apart.
        """
        first, last = self.first, self.last
        found: dict[str, Any] = {}
        pieces: dict[str, list[tuple[int, int, Any]]] = {}
        wanted = self.inputs if names is None else [name for name in self.inputs or names if name in names]
        for begin, end, tensors in self.made:
            chosen = tensors if wanted is None else [name for name in wanted if name in tensors]
            if begin <= first and last <= end:
                for name in chosen:
                    is_all = (begin, end) == (first, last)
                    found[name] = tensors[name] if is_all else _cut(name, tensors[name], begin, end, first, last)
            elif begin < last and first < end:
                low, high = max(begin, first), min(end, last)
                for name in chosen:
                    cut = _cut(name, tensors[name], begin, end, low, high)
                    pieces.setdefault(name, []).append((low, high, cut))
        for name, each in pieces.items():
            each.sort(key=lambda piece: piece[0])
            if name not in found and sum(high - low for low, high, _ in each) == last - first:
                cuts = [cut for _, _, cut in each]
                found[name] = np.concatenate(cuts) if cuts[0].ndim else cuts[0]
        return found


def _cut(name: str, tensor: Any, begin: int, end: int, first: int, last: int) -> Any:
    """Rows [first, last) of a tensor that has rows [begin, end)."""
    array = to_numpy({name: tensor})[name]
    if array.ndim == 0:  # a number, whatever the rows
        return array
    if array.shape[0] != end - begin:
        text = f"tensor {name!r} has shape {array.shape}, expected {end - begin} rows"
        raise RowsError(f"{text}: its batch cannot run in parts of its rows there")
    return array[first - begin : last - begin]
