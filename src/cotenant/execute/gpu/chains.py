"""Segments of a model captured at loading, for each lane and number of rows: nothing is captured while it serves.

The segments of a chain work on the same tensors: what one leaves is what the next one reads. Rows of a batch are padded
to those of the next chain. All chains of a lane share one memory, as large as the largest of them needs, since they
never run at once; so what a batch has left is copied out where it pauses.
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
"""The first loads kernels and plans, which are of the thread; the second shows what the first has left."""
Run = Callable[[int, int, Named], Named]
"""Submits units [start, end) on these tensors."""


class BatchForm(NamedTuple):
    """What decides which chain a batch runs by. `shapes` are those of a row of each input, and its type; of the whole
    input, and `rows` is 0, where a model takes no batches. `held` is how many rows its tensors have, with padding.
    """

    shapes: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    rows: int
    held: int

    def padded(self, rows: int) -> BatchForm:
        """The same batch in tensors of so many rows."""
        return BatchForm(self.shapes, self.rows, rows)

    def of_rows(self, rows: int) -> BatchForm:
        """The form of so many rows of it, without padding."""
        return BatchForm(self.shapes, rows, rows) if self.rows else self

    def without_padding(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of an output that somebody asked for."""
        is_longer = self.held > self.rows and tensor.ndim and len(tensor) == self.held
        return tensor[: self.rows] if is_longer else tensor


def form_of(inputs: Named, rows: int, max_batch: int) -> BatchForm:
    """The form of a batch that begins."""
    if max_batch > 1:
        return BatchForm(
            tuple([(name, each.dtype, tuple(each.shape[1:])) for name, each in inputs.items()]), rows, rows
        )
    return BatchForm(tuple([(name, each.dtype, tuple(each.shape)) for name, each in inputs.items()]), 0, 0)


class Prepared(Protocol):
    """What was captured of a model for batches of so many rows."""

    rows: int

    def has(self, start: int, end: int) -> bool:
        """Whether these units are in it, from cut to cut."""


class SegmentChain:
    """One model at `rows` rows on one lane: the tensors at each cut, and the graphs between them. 0: not a batch."""

    def __init__(self, rows: int, cuts: Sequence[int], tensors: Sequence[Named], replays: Sequence[Replay]) -> None:
        self.rows = rows
        self._at = {cut: index for index, cut in enumerate(cuts)}
        self._tensors = tensors
        self._replays = replays

    def has(self, start: int, end: int) -> bool:
        """Whether these are two of its cuts."""
        return start in self._at and end in self._at

    def fill(self, start: int, values: Named) -> None:
        """Submit the copies of what is live at a cut, which may have fewer rows than the chain: the others become 0.

        What lies there is of other work. As an index of a table it would end the device's context. Tensors that the
        next units do not read may be left out.
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
        """Submit the units between two cuts. Gives the tensors there, which the next launch writes over."""
        for replay in self._replays[self._at[start] : self._at[end]]:
            replay()
        return self._tensors[self._at[end]]


def warm_segments(lane: StreamLane, run: Run, cuts: Sequence[int], inputs: Named) -> None:
    """Submit a model's segments twice, on the calling thread, the lane's own. Raises what the model does."""
    for _ in range(WARM_RUNS):
        values: Named = {name: lane.upload(value) for name, value in inputs.items()}
        for start, end in pairwise(cuts):
            values = run(start, end, values)


def capture_chain(lane: StreamLane, run: Run, cuts: Sequence[int], inputs: Named, rows: int) -> SegmentChain:
    """Capture a model that is warm, and submit what was captured twice, on the lane's own thread.

    `inputs` lie on the host. Raises what `StreamLane.capture` raises, and what the model does.
    """
    there = {name: lane.upload(value) for name, value in inputs.items()}
    tensors: list[Named] = []
    replays: list[Replay] = []

    def begin() -> Named:
        if not tensors:  # of the lane's memory, too
            tensors.append({name: torch.empty_like(value) for name, value in there.items()})
        return run(cuts[0], cuts[1], tensors[0])

    for start, end in pairwise(cuts):
        replay, outputs = lane.capture(partial(run, start, end, tensors[-1]) if tensors else begin)
        replays.append(replay)
        tensors.append(outputs)
    chain = SegmentChain(rows, cuts, [lane.lend(each) for each in tensors], replays)
    for _ in range(WARM_RUNS):
        chain.fill(cuts[0], there)
        for at, (start, end) in enumerate(pairwise(cuts), 1):  # a cut that cannot be filled shows
            chain.replay(start, end)
            if end != cuts[-1]:
                chain.fill(end, {name: value.clone() for name, value in tensors[at].items()})
    return chain


class Chains:
    """What was captured for launches, by model, share and shape of a row. Not thread-safe for writers."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Share], dict[Any, list[Prepared]]] = {}
        self._dropped: dict[Share, list[object]] = {}
        self.replayed = self.eager = 0
        """Launches so far, with and without a chain."""

    def __len__(self) -> int:
        return sum(len(chains) for shapes in self._known.values() for chains in shapes.values())

    def add(self, model: int, share: Share, form: BatchForm, chain: Prepared) -> None:
        """Keep a chain of the model of that number."""
        known = dict(self._known.get((model, share), {}))
        known[form.shapes] = sorted([*known.get(form.shapes, []), chain], key=lambda each: each.rows)
        self._known[model, share] = known

    def has(self, model: int, share: Share, form: BatchForm, rows: int) -> bool:
        """Whether there is one of exactly so many rows."""
        return rows in [chain.rows for chain in self._known.get((model, share), {}).get(form.shapes, [])]

    def find(self, model: int, share: Share, form: BatchForm | None, start: int, end: int) -> Prepared | None:
        """The smallest chain with room for a batch that has these cuts; None to run unit by unit.

        A batch that has begun stays in tensors of the rows that it has.
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

        Their graphs go with the last one of their share: newer torch (2.13) takes cuBLAS's workspace on a stream away
        with any graph of it, and the others would write on where it was.
        """
        for key in [key for key in self._known if key[0] == model]:
            self._dropped.setdefault(key[1], []).append(self._known.pop(key))
        for share in self._dropped.keys() - {share for _, share in self._known}:
            del self._dropped[share]
