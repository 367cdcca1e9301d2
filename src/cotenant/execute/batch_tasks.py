"""Tensors of a batch that runs as several tasks: launches of some of its rows or units, side by side.

`graph.rewrite` finds the units that may run for some of the rows, and the core checks policies by it. This module
splits and joins tensors along their first dimension, and refuses tensors that do not have one row for each row of the
batch.
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
_Made = tuple[int, int, _Named, int | None]
"""First row, end of the rows, their tensors, and the launch that still computes them, else None."""


class BatchTasks:
    """Tensors that the tasks of one batch pass to each other. The owner serialises calls that write.

    `base` are the tensors live before unit `begin`, where the tasks begin: before unit 0 the inputs. A task adds the
    tensors of its units. On a device, a launch is submitted before its predecessors have ended, so a reader names the
    launches that run before its own. `form` is a note of the executor.
    """

    def __init__(self, items: int, base: _Named, begin: int, form: Any = None) -> None:
        self.form = form
        self.items = items
        self._begin = self._end = begin
        self._inputs = () if begin else tuple(base)
        self._made: list[_Made] = [(0, items, base, None)]
        self._whole: dict[str, Any] = {}
        self._under_way: set[int] = set()
        self._area = 0
        """Sum of rows times units of the tasks that have ended."""
        self._reaches_end = False

    def rows(self, work: Work | None = None, before: Collection[int] = ()) -> TaskRows:
        """The known tensors for the rows of this work, by default all rows; copies nothing yet.

        `before` are launches that have ended on the device when the work begins, so that their tensors may be read.
        """
        first, last = work.rows if work is not None and work.rows else (0, self.items)
        is_first = work is not None and work.start == 0 and bool(self._inputs)
        hidden = self._under_way.difference(before)
        made = tuple(each for each in self._made if each[3] not in hidden) if hidden else tuple(self._made)
        return TaskRows(made, first, last, self._inputs if is_first else None)

    @property
    def base(self) -> _Named:
        """The tensors that the first task begins with; {} once a task has ended, since the worker then has them all."""
        return self._made[0][2] if len(self._made) == 1 else {}

    def trim(self, held: int) -> None:
        """Remove padding from the first tensors: `held` is their number of rows with padding."""
        base = self._made[0][2]
        trimmed = {name: each[: self.items] if each.ndim and len(each) == held else each for name, each in base.items()}
        self._made[0] = 0, self.items, trimmed, None

    def submit(self, work: Work, tensors: _Named, launch: int) -> None:
        """Add tensors that a launch makes, valid once the device has run it; `end` is called when it has ended."""
        self._under_way.add(launch)
        first, last = work.rows or (0, self.items)
        self._made.append((first, last, tensors, launch))

    def end(self, launch: Launch | Run, whole: _Named) -> bool:
        """Record that a submitted launch has ended. Returns whether all rows have run to the model's end.

        `whole` are tensors that are the same for every task: constants, and outputs that were joined elsewhere.
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
        """These outputs of all rows as arrays, joined from all tasks.

        Raises RowsError where an output is missing, or its rows cannot be joined.
        """
        made = [
            (first, last, to_numpy({name: tensors[name] for name in names if name in tensors}), None)
            for first, last, tensors, _ in self._made
        ]
        found = {**TaskRows(made, 0, self.items).tensors(), **self._whole}
        missing = [name for name in names if name not in found]
        if missing:
            raise RowsError(f"output {missing[0]!r} is missing for some of the {self.items} rows of a split batch")
        return found


@dataclass(frozen=True, slots=True)
class TaskRows:
    """Rows [first, last) of tensors that several tasks made. `inputs`, if set: only these tensors."""

    made: Sequence[_Made]
    first: int
    last: int
    inputs: tuple[str, ...] | None = None

    def tensors(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """Tensors of which all these rows exist; with `names`, those among them.

        Raises RowsError for a tensor that does not have one row for each row.
        """
        first, last = self.first, self.last
        found: dict[str, Any] = {}
        chunks: dict[str, list[tuple[int, int, Any]]] = {}
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
                    chunks.setdefault(name, []).append((low, high, cut))
        for name, each in chunks.items():
            each.sort(key=lambda chunk: chunk[0])
            if sum(high - low for low, high, _ in each) == last - first:
                cuts = [cut for _, _, cut in each]
                found[name] = _joined(cuts) if cuts[0].ndim else cuts[0]
        return found


def _cut(name: str, tensor: Any, begin: int, end: int, first: int, last: int) -> Any:
    """Rows [first, last) of a tensor that has rows [begin, end)."""
    array = tensor if _is_torch(tensor) else to_numpy({name: tensor})[name]
    if array.ndim == 0:  # a number, the same for all rows
        return array
    if array.shape[0] != end - begin:
        text = f"tensor {name!r} has shape {array.shape}, expected {end - begin} rows"
        raise RowsError(f"{text}: its batch cannot run as chunks of rows there")
    return array[first - begin : last - begin]


def _is_torch(tensor: Any) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torch"


def _joined(cuts: Sequence[Any]) -> Any:
    """Row chunks as one tensor, on their device."""
    if not _is_torch(cuts[0]):
        return np.concatenate(cuts)
    import torch

    return torch.cat(list(cuts))
