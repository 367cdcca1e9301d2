"""Captured segments of a model, for each lane and batch size; they are captured when the model is loaded.

The segments of a chain work on the same tensors: a segment reads what the one before it wrote. A batch is padded to the
rows of the next larger chain. A lane runs one chain at a time, so its chains share memory of the size of the largest
one. Tensors of a paused batch are copied out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from cotenant.execute.gpu.streams import Named, Replay, StreamLane
from cotenant.work import Share

WARM_RUNS = 2
"""The first run loads kernels and plans of the thread; the second uses memory that the first has freed."""
Run = Callable[[int, int, Named], Named]
"""Submits units [start, end) on these tensors."""


class BatchForm(NamedTuple):
    """Key by which a batch finds its chain. `held` is the number of rows of its tensors, with padding.

    `shapes` are the shape of a row and the type of each input; of a model without batches whole shapes, and `rows` is
    0.
    """

    shapes: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    rows: int
    held: int

    def padded(self, rows: int) -> BatchForm:
        """The same batch in tensors of so many rows."""
        return BatchForm(self.shapes, self.rows, rows)

    def of_rows(self, rows: int) -> BatchForm:
        """The form of a chunk of so many rows, without padding."""
        return BatchForm(self.shapes, rows, rows) if self.rows else self

    def without_padding(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of an output that belong to the batch."""
        is_longer = self.held > self.rows and tensor.ndim and len(tensor) == self.held
        return tensor[: self.rows] if is_longer else tensor


def form_of(inputs: Named, rows: int, max_batch: int) -> BatchForm:
    """The form of a batch at its first unit."""
    if max_batch > 1:
        return BatchForm(
            tuple([(name, each.dtype, tuple(each.shape[1:])) for name, each in inputs.items()]), rows, rows
        )
    return BatchForm(tuple([(name, each.dtype, tuple(each.shape)) for name, each in inputs.items()]), 0, 0)


class Prepared(Protocol):
    """Captured graphs of a model for batches of `rows` rows."""

    rows: int

    def has(self, start: int, end: int) -> bool:
        """Whether both boundaries of these units are cuts of the captured graphs."""


class SegmentChain:
    """One model at `rows` rows (0: not batched) on one lane: tensors at each cut, and captured graphs between cuts."""

    def __init__(self, rows: int, cuts: Sequence[int], tensors: Sequence[Named], replays: Sequence[Replay]) -> None:
        self.rows = rows
        self._at = {cut: index for index, cut in enumerate(cuts)}
        self._tensors = tensors
        self._replays = replays

    def has(self, start: int, end: int) -> bool:
        """Whether both are cuts of the chain."""
        return start in self._at and end in self._at

    def fill(self, start: int, values: Named) -> None:
        """Submit copies of the live tensors at a cut. Rows that are missing become 0; unread tensors may be left out.

        Rows of earlier work would otherwise stay: as an index of a table, one could end the context.
        """
        for name, tensor in self._tensors[self._at[start]].items():
            value = values.get(name)
            if value is None:
                continue
            if value.shape != tensor.shape:
                tensor[len(value) :].zero_()
                tensor = tensor[: len(value)]
            tensor.copy_(value, non_blocking=True)

    def replay(self, start: int, end: int) -> Named:
        """Submit the units between two cuts. Returns the tensors there, which the next launch overwrites."""
        for replay in self._replays[self._at[start] : self._at[end]]:
            replay()
        return self._tensors[self._at[end]]


def warm_segments(lane: StreamLane, run: Run, cuts: Sequence[int], inputs: Named) -> None:
    """Submit a model's segments twice, on the lane's own thread. Raises exceptions of the model."""
    for _ in range(WARM_RUNS):
        values: Named = {name: lane.upload(value) for name, value in inputs.items()}
        for start, end in pairwise(cuts):
            values = run(start, end, values)


def capture_chain(lane: StreamLane, run: Run, cuts: Sequence[int], inputs: Named, rows: int) -> SegmentChain:
    """Capture a model after warm-up, and submit the captured graphs twice, on the lane's own thread.

    `inputs` are on the host. Raises as `StreamLane.capture`, and exceptions of the model.
    """
    there = {name: lane.upload(value) for name, value in inputs.items()}
    tensors: list[Named] = []
    replays: list[Replay] = []

    def begin() -> Named:
        if not tensors:  # allocated during the capture: from the lane's memory
            tensors.append({name: torch.empty_like(value) for name, value in there.items()})
        return run(cuts[0], cuts[1], tensors[0])

    for start, end in pairwise(cuts):
        replay, outputs = lane.capture(partial(run, start, end, tensors[-1]) if tensors else begin)
        replays.append(replay)
        tensors.append(outputs)
    chain = SegmentChain(rows, cuts, [lane.unowned(each) for each in tensors], replays)
    for _ in range(WARM_RUNS):
        chain.fill(cuts[0], there)
        for at, (start, end) in enumerate(pairwise(cuts), 1):  # fails for a cut that cannot be filled
            chain.replay(start, end)
            if end != cuts[-1]:
                chain.fill(end, {name: value.clone() for name, value in tensors[at].items()})
    return chain


class Chains:
    """Captured graphs by model, share and shape of a row. One writer at a time."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Share], dict[Any, list[Prepared]]] = {}
        self._dropped: dict[Share, list[object]] = {}
        self.replayed = self.eager = 0
        """Launches so far, with and without a chain."""

    def __len__(self) -> int:
        return sum(len(chains) for shapes in self._known.values() for chains in shapes.values())

    def add(self, model: int, share: Share, form: BatchForm, chain: Prepared) -> None:
        """Add a chain of the model with that number."""
        known = dict(self._known.get((model, share), {}))
        known[form.shapes] = sorted([*known.get(form.shapes, []), chain], key=lambda each: each.rows)
        self._known[model, share] = known

    def has(self, model: int, share: Share, form: BatchForm, rows: int) -> bool:
        """Whether there is a chain of exactly so many rows."""
        return rows in [chain.rows for chain in self._known.get((model, share), {}).get(form.shapes, [])]

    def find(self, model: int, share: Share, form: BatchForm | None, start: int, end: int) -> Prepared | None:
        """The smallest chain that holds the batch and has these cuts; None to run unit by unit.

        A paused batch needs a chain with exactly the rows that its tensors have.
        """
        chain = None
        shapes = self._known.get((model, share))
        if shapes is not None and form is not None:
            chains = shapes.get(form.shapes, [])
            at = bisect_left(chains, form.held if start else form.rows, key=lambda chain: chain.rows)
            if at < len(chains) and chains[at].has(start, end) and not (start and chains[at].rows != form.held):
                chain = chains[at]
        if chain is None:
            self.eager += 1
        else:
            self.replayed += 1
        return chain

    def drop(self, model: int) -> None:
        """Forget the chains of a model; launches under way keep theirs.

        Graphs of a share are freed together: torch 2.13 frees cuBLAS's workspace of a stream with any of its graphs.
        The other graphs would still write there.
        """
        for key in [key for key in self._known if key[0] == model]:
            self._dropped.setdefault(key[1], []).append(self._known.pop(key))
        for share in self._dropped.keys() - {share for _, share in self._known}:
            del self._dropped[share]
