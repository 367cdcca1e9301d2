"""The tensors of a batch that runs in parts: launches of some of its rows or of its units, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cotenant.execute.errors import RowsError
from cotenant.execute.runner import to_numpy
from cotenant.work import Work

_Named = Mapping[str, Any]


class Parts:
    """What the parts of one batch need of each other. Not thread-safe: its owner serialises the calls.

    `base` are the tensors with which the first of them begins: the inputs of the model, or what is live at a cut.
    Tensors are taken apart, and put together, along their first dimension.
    """

    def __init__(self, items: int, base: _Named, from_inputs: bool) -> None:
        self._items = items
        self._inputs = tuple(base) if from_inputs else ()
        self._made: list[tuple[int, int, _Named]] = [(0, items, base)]
        self._outputs: list[tuple[int, int, _Named]] = []

    def tensors(self, work: Work | None = None) -> _Named:
        """What is known of the rows of this work, by default of all. Raises RowsError where rows are not told apart."""
        first, last = work.rows if work is not None and work.rows else (0, self._items)
        found = _rows(self._made, first, last)
        if work is not None and work.start == 0 and self._inputs:
            found = {name: found[name] for name in self._inputs}
        return found

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
        return _rows(self._outputs, 0, self._items)


def _rows(made: Sequence[tuple[int, int, _Named]], first: int, last: int) -> dict[str, Any]:
    """Rows [first, last) of every tensor that has them all."""
    found: dict[str, Any] = {}
    pieces: dict[str, list[tuple[int, int, Any]]] = {}
    for begin, end, tensors in made:
        if begin <= first and last <= end:
            for name, tensor in tensors.items():
                found[name] = tensor if (begin, end) == (first, last) else _cut(name, tensor, begin, end, first, last)
        elif begin < last and first < end:
            low, high = max(begin, first), min(end, last)
            for name, tensor in tensors.items():
                cut = _cut(name, tensor, begin, end, low, high)
                pieces.setdefault(name, []).append((low, high, cut))
    for name, each in pieces.items():
        each.sort(key=lambda piece: piece[0])
        if sum(high - low for low, high, _ in each) == last - first:
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
