"""Measuring one model: L(batch, cores) at each declared shape, its units, and what cutting it costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cotenant.execute.place import CorePlace, Place
from cotenant.execute.runner import Runner, to_numpy
from cotenant.measure.campaign import Journal
from cotenant.measure.inputs import DeclaredShape, make_inputs
from cotenant.profile.profile_file import ModelProfile, Point

Progress = Callable[[str], None]
"""Told what has been measured after each step."""
CORES = CorePlace()


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure each point: at least `min_runs`, then until `budget_s` is spent or `max_runs` are done."""

    budget_s: float = 0.5
    min_runs: int = 7
    max_runs: int = 200
    warm_up: int = 2


QUICK = Effort(budget_s=0.1, min_runs=3, max_runs=20, warm_up=1)
"""For models that are served without a profile."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to measure of a model. `core_sets` are the partitions' cores, one set per size."""

    digest: str
    shapes: tuple[DeclaredShape, ...]
    max_batch: int
    core_sets: tuple[tuple[int, ...], ...]
    max_segment_ns: int
    effort: Effort = Effort()

    @property
    def batches(self) -> tuple[int, ...]:
        """Powers of two up to the largest batch, and that itself."""
        sizes = [1]
        while sizes[-1] * 2 <= self.max_batch:
            sizes.append(sizes[-1] * 2)
        return tuple(sizes if sizes[-1] == self.max_batch else [*sizes, self.max_batch])

    @property
    def largest_shape(self) -> DeclaredShape:
        """The one with the most elements, at which units are measured: no segment is longer at any other."""
        return max(self.shapes, key=lambda shape: sum(math.prod(dims) for dims in shape.values()))

    @property
    def steps(self) -> int:
        """Number of calls of the progress function."""
        return len(self.shapes) * len(self.batches) * len(self.core_sets) + 2


def measure_model(
    model: Runner, sweep: Sweep, journal: Journal, progress: Progress, place: Place = CORES
) -> ModelProfile:
    """Measure all of a sweep that the journal does not hold, on the calling thread, at a place.

    Raises ModelError when the model cannot be run at a declared shape or batch.
    """
    points = []
    for index, shape in enumerate(sweep.shapes):
        for cores in sweep.core_sets:
            for items in sweep.batches:
                points.append(_point(model, sweep, journal, place, index, shape, items, cores))
                progress(f"{model.name}: {items} row{'s' if items > 1 else ''} on {len(cores)} {place.unit}(s)")
    inputs = make_inputs(model.inputs, sweep.largest_shape, 1, sweep.max_batch > 1)
    with place.at(sweep.core_sets[0]):
        units = journal.remember(f"{sweep.digest}/units", lambda: list(model.unit_ns(inputs)))
        progress(f"{model.name}: {model.unit_count} units")
        cuts = model.suggest_cuts(units, float(sweep.max_segment_ns))
        ratio = journal.remember(
            f"{sweep.digest}/segments/{'-'.join(map(str, cuts))}",
            lambda: _segment_ratio(model, cuts, inputs, sweep.effort),
        )
        progress(f"{model.name}: {len(cuts) - 1} segments")
    return ModelProfile(sweep.digest, tuple(points), tuple(units), cuts, float(ratio))


def _point(
    model: Runner,
    sweep: Sweep,
    journal: Journal,
    place: Place,
    index: int,
    shape: DeclaredShape,
    items: int,
    cores: tuple[int, ...],
) -> Point:
    def measure() -> dict[str, int]:
        inputs = make_inputs(model.inputs, shape, items, sweep.max_batch > 1)
        threads = place.threads(cores)
        whole = (0, model.unit_count)
        model.prepare([whole], threads)
        with place.at(cores):
            samples = _sample(lambda: to_numpy(model.run(*whole, inputs, threads)), sweep.effort)
        p50, p90, p95, p99 = (max(1, round(value)) for value in np.percentile(samples, (50, 90, 95, 99)))
        return asdict(Point(index, items, len(cores), len(samples), p50, p90, p95, p99))

    return Point(**journal.remember(f"{sweep.digest}/shape{index}/items{items}/cores{len(cores)}", measure))


def _segment_ratio(model: Runner, cuts: Sequence[int], inputs: dict[str, Any], effort: Effort) -> float:
    """Latency of running segment by segment over that of one run; medians of interleaved runs."""
    if len(cuts) == 2:
        return 1.0
    whole = (0, model.unit_count)
    ranges = list(pairwise(cuts))
    model.prepare([whole, *ranges])

    def run_segments() -> None:
        tensors: Any = inputs
        for start, end in ranges:
            tensors = model.run(start, end, tensors)
        to_numpy(tensors)  # which waits, where others than this thread run it

    def run_whole() -> None:
        to_numpy(model.run(*whole, inputs))

    together, cut = _in_turns((run_whole, run_segments), effort)
    return max(1.0, float(np.median(cut) / np.median(together)))


def _sample(work: Callable[[], object], effort: Effort) -> list[int]:
    return _in_turns((work,), effort)[0]


def _in_turns(works: Sequence[Callable[[], object]], effort: Effort) -> list[list[int]]:
    """Latencies of each in ns."""
    for _ in range(effort.warm_up):
        for work in works:
            work()
    samples: list[list[int]] = [[] for _ in works]
    began = time.perf_counter()
    while len(samples[0]) < effort.min_runs or (
        time.perf_counter() - began < effort.budget_s and len(samples[0]) < effort.max_runs
    ):
        for work, values in zip(works, samples, strict=True):
            start_ns = time.perf_counter_ns()
            work()
            values.append(time.perf_counter_ns() - start_ns)
    return samples
