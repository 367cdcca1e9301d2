"""Random ways to run a batch: whole, cut, in chunks of rows, in tasks of units; and what carries them out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

from cotenant.core.actions import Launch
from cotenant.execute.protocol import Executor, LoadSpec, ModelExecutor, Timing
from cotenant.execute.runner import Runner
from cotenant.graph.dfg import Dfg, Tensor
from cotenant.work import Share, Work
from port_graphs import Arrays, spoil, wrong_outputs

WAIT_S = 30.0
Tile = tuple[int, int, tuple[int, ...]]
"""The first unit and the one behind the last, and the rows, "()" for all."""
Stage = list[Tile]
"""Launches that are decided together, in an order in which they can run one by one."""


def random_stages(rng: Random, dfg: Dfg, runs: Sequence[Sequence[int]], rows: int) -> list[Stage]:
    """Stages that run each unit for each row once. `runs` are those of the model's row graph."""
    stages: list[Stage] = []
    at, count = 0, len(dfg.units)
    while at < count:
        end = count if rng.random() < 0.5 else rng.randint(at + 1, count)
        make = rng.choice((_chunks, _chunks, _tasks, _whole))
        stages.append(make(rng, dfg, runs, rows, at, end))
        at = end
    return stages


def _whole(rng: Random, dfg: Dfg, runs: Sequence[Sequence[int]], rows: int, at: int, end: int) -> Stage:
    return [(at, end, ())]


def _chunks(rng: Random, dfg: Dfg, runs: Sequence[Sequence[int]], rows: int, at: int, end: int) -> Stage:
    """Chunks of rows of some units, cut inside at random; the units before and behind them for all rows."""
    inside = [edges for run in runs if len(edges := [edge for edge in run if at <= edge <= end]) > 1]
    if rows < 2 or not inside:
        return [(at, end, ())]
    edges = rng.choice(inside)
    low, high = sorted(rng.sample(edges, 2))
    high = edges[-1] if rng.random() < 0.6 else high
    bounds = [0, *sorted(rng.sample(range(1, rows), rng.randint(1, min(2, rows - 1)))), rows]
    waiting = []
    for first, last in pairwise(bounds):
        cuts = [low, *(edge for edge in edges if low < edge < high and rng.random() < 0.3), high]
        waiting.append([(start, stop, (first, last)) for start, stop in pairwise(cuts)])
    tiles: Stage = [(at, low, ())] if at < low else []
    while waiting := [each for each in waiting if each]:
        tiles.append(rng.choice(waiting).pop(0))
    return [*tiles, (high, end, ())] if high < end else tiles


def _tasks(rng: Random, dfg: Dfg, runs: Sequence[Sequence[int]], rows: int, at: int, end: int) -> Stage:
    """Two tasks of which the second reads nothing of the first, second first, or the whole."""
    known = set(dfg.live(at))
    middles = [cut for cut in range(at + 1, end) if known.issuperset(_reads(dfg, cut, end))]
    if not middles:
        return [(at, end, ())]
    cut = rng.choice(middles)
    return [(cut, end, ()), (at, cut, ())]


def _reads(dfg: Dfg, start: int, end: int) -> set[str]:
    made = {name for unit in dfg.units[start:end] for name in unit.outputs}
    return {name for unit in dfg.units[start:end] for name in unit.inputs} - made


Way = Callable[[Random], list[Stage]]
Answer = Callable[[Arrays], Arrays]
ROWS = 5
"""Of the batches of `check_answers`."""


def ways(model: Runner, count: int) -> list[Way]:
    """The whole, every unit, and random stages of chunks and tasks, of batches of `ROWS` rows."""
    units = model.unit_count
    runs = model.row_graph({tensor.name: (1, *_row_of(tensor)) for tensor in model.inputs}).runs
    every: list[Stage] = [[(unit, unit + 1, ())] for unit in range(units)]
    random = partial(random_stages, dfg=model.dfg, runs=runs, rows=ROWS)
    return [lambda _: [[(0, units, ())]], lambda _: every, *([random] * count)]


def _row_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(dim for dim in (tensor.shape or ())[1:] if isinstance(dim, int))


def check_answers(
    executor: ModelExecutor,
    model: Runner,
    answer: Answer,
    feeds: Callable[[int, int], Arrays],
    ways: Sequence[Way],
    cuts: tuple[int, ...] = (),
) -> None:
    """Run a batch each way; unload the model, write over free memory, and compare with the result of `answer`.

    `feeds` makes inputs of a seed and a number of rows.
    """
    rng = Random(len(ways))
    shapes = {tensor.name: (1, *_row_of(tensor)) for tensor in model.inputs}
    units, share = model.unit_count, Share((0,))
    loaded = executor.load("ports", model, LoadSpec((share,), cuts or (0, units), (shapes,), max_batch=8))
    executor.add_model("ports", loaded)
    lead = Lead(executor, "ports", units, share)
    kept: list[tuple[list[Stage], Mapping[str, Any], Arrays]] = []
    for at, way in enumerate(ways):
        stages = way(rng)
        given = feeds(at, ROWS)
        [got] = lead.run(stages, [{name: array.copy() for name, array in given.items()}])
        kept.append((stages, got, answer(given)))
    executor.remove_model("ports")
    loaded.close()
    held = [spoil(right) for _, _, right in kept]
    assert held
    for stages, got, right in kept:
        assert not wrong_outputs(got, right), stages


class Lead:
    """Has an executor run batches, one launch after the other, and tells what it has answered."""

    def __init__(self, executor: Executor, tenant: str, units: int, share: Share = Share((0,))) -> None:
        self._executor = executor
        self._tenant, self._units, self._share = tenant, units, share
        self._launches = self._batches = self._queries = 0

    def run(self, stages: Sequence[Stage], inputs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Run queries with these inputs as one batch. Gives an answer each. Raises AssertionError where one fails."""
        queries = tuple(range(self._queries, self._queries + len(inputs)))
        batch = self._batches
        self._queries, self._batches = self._queries + len(inputs), batch + 1
        for query, each in zip(queries, inputs, strict=True):
            self._executor.put(query, each)
        rows = sum(len(next(iter(each.values()))) for each in inputs)
        for stage in stages:
            for tile in stage:
                error = self._launch(batch, queries, rows, tile, is_part=len(stage) > 1)
                assert error is None, f"{error} of {stage}, {stages}"
        return [self._executor.take(query) for query in queries]

    def _launch(self, batch: int, queries: tuple[int, ...], rows: int, tile: Tile, *, is_part: bool) -> str | None:
        start, end, some = tile
        work = Work(self._tenant, 0, rows, start, end)
        work = work.part(*some) if some else work
        launch = Launch(self._launches, batch, queries, work, end == self._units, self._share, 1, part=is_part)
        self._launches += 1
        ended: list[str | None] = []
        is_over = threading.Event()

        def on_end(number: int, error: str | None, timing: Timing) -> None:
            ended.append(error)
            is_over.set()

        self._executor.start(launch, on_end)
        assert is_over.wait(WAIT_S), launch
        return ended[0]
