"""The tensors of a batch that runs in parts: launches of some of its rows or of its units, side by side.

Which units may run for some of the rows, `graph.rewrite` tells and the core holds policies to it; here tensors are
taken apart, and put together, along their first dimension, and what has no row for every row is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cotenant.execute.errors import RowsError
from cotenant.execute.runner import to_numpy
from cotenant.work import Work

if TYPE_CHECKING:
    from cotenant.core.actions import Launch
    from cotenant.execute.worker.channel import Run

_Named = Mapping[str, Any]
_Piece = tuple[int, int, _Named, int | None]
"""The first row and the one behind the last, their tensors, and which launch makes them, where it is on its way."""


class Parts:
    """What the parts of one batch need of each other. Its owner serialises the calls that write.

    `base` are the tensors live before unit `begin`, with which the parts begin; before unit 0 the inputs of the model.
    A part gives what its units make; tensors of `base` that live on are joined with that here.
    Where launches are submitted behind others, what they make is there before they have ended: who reads it says which
    launches the device puts before his own. `form` is what an executor notes of the batch.
    """

    def __init__(self, items: int, base: _Named, begin: int, form: Any = None) -> None:
        self.form = form
        self.items = items
        self._begin = self._end = begin
        self._inputs = () if begin else tuple(base)
        self._made: list[_Piece] = [(0, items, base, None)]
        self._whole: dict[str, Any] = {}
        self._under_way: set[int] = set()
        self._area = 0
        """Rows times units of the parts that have ended."""
        self._reaches_end = False

    def rows(self, work: Work | None = None, before: Collection[int] = ()) -> PartRows:
        """What is known of the rows of this work, by default of all, as it is now; nothing is copied yet."""
        first, last = work.rows if work is not None and work.rows else (0, self.items)
        is_first = work is not None and work.start == 0 and bool(self._inputs)
        hidden = self._under_way.difference(before)
        made = tuple(each for each in self._made if each[3] not in hidden) if hidden else tuple(self._made)
        return PartRows(made, first, last, self._inputs if is_first else None)

    @property
    def base(self) -> _Named:
        """What the first of them begins with; nothing once one has ended, since all is there then where they run."""
        return self._made[0][2] if len(self._made) == 1 else {}

    def trim(self, held: int) -> None:
        """Leave out rows beyond those of the batch, of which tensors that were padded have `held`."""
        base = self._made[0][2]
        trimmed = {name: each[: self.items] if each.ndim and len(each) == held else each for name, each in base.items()}
        self._made[0] = 0, self.items, trimmed, None

    def submit(self, work: Work, tensors: _Named, launch: int) -> None:
        """A launch was submitted that will have made these when its device has come so far, and `end` was called."""
        self._under_way.add(launch)
        first, last = work.rows or (0, self.items)
        self._made.append((first, last, tensors, launch))

    def end(self, launch: Launch | Run, whole: _Named) -> bool:
        """A launch that was submitted has ended. Gives whether the model has run to its end for all rows.

        `whole` are tensors that are the same for every part: constants, and what was joined elsewhere.
        """
        work = launch.work
        first, last = work.rows or (0, self.items)
        self._under_way.discard(launch.id)
        self._whole.update(whole)
        self._area += (last - first) * (work.end - work.start)
        self._end = max(self._end, work.end)
        self._reaches_end |= launch.last
        return self._reaches_end and self._area == self.items * (self._end - self._begin)

    def outputs(self, names: Collection[str]) -> _Named:
        """These outputs of all rows as arrays, whichever part made them, and what is the same for every part.

        Raises RowsError where one is missing, or its rows cannot be put together.
        """
        made = [
            (first, last, to_numpy({name: tensors[name] for name in names if name in tensors}), None)
            for first, last, tensors, _ in self._made
        ]
        found = {**PartRows(made, 0, self.items).tensors(), **self._whole}
        missing = [name for name in names if name not in found]
        if missing:
            raise RowsError(f"output {missing[0]!r} is missing for some of the {self.items} rows of a batch in parts")
        return found


@dataclass(frozen=True, slots=True)
class PartRows:
    """Rows [first, last) of tensors that parts have made, each by some of them. `inputs`: of these tensors alone."""

    made: Sequence[_Piece]
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
        for begin, end, tensors, _ in self.made:
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
            if sum(high - low for low, high, _ in each) == last - first:
                cuts = [cut for _, _, cut in each]
                found[name] = _joined(cuts) if cuts[0].ndim else cuts[0]
        return found


def _cut(name: str, tensor: Any, begin: int, end: int, first: int, last: int) -> Any:
    """Rows [first, last) of a tensor that has rows [begin, end)."""
    array = tensor if _is_torch(tensor) else to_numpy({name: tensor})[name]
    if array.ndim == 0:  # a number, whatever the rows
        return array
    if array.shape[0] != end - begin:
        text = f"tensor {name!r} has shape {array.shape}, expected {end - begin} rows"
        raise RowsError(f"{text}: its batch cannot run in parts of its rows there")
    return array[first - begin : last - begin]


def _is_torch(tensor: Any) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torch"


def _joined(cuts: Sequence[Any]) -> Any:
    """Rows below each other, on the device on which they are."""
    if not _is_torch(cuts[0]):
        return np.concatenate(cuts)
    import torch

    return torch.cat(list(cuts))
