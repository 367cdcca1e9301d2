"""Measuring one model: L(batch, cores) at each declared shape, its units, and what cutting it costs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.execute.runner import Runner, to_numpy
from cotenant.files import append_entry, read_entries
from cotenant.profile.inputs import DeclaredShape, make_inputs
from cotenant.profile.place import CorePlace, Place
from cotenant.profile.table import ModelProfile, Point
from cotenant.profile.units import measure_units

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


class Journal:
    """Finished measurements of a sweep that may be interrupted, one JSON line each. `path` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        for entry in read_entries(path) if path is not None else ():
            with contextlib.suppress(KeyError, TypeError):  # of something else
                self._known[entry["key"]] = entry["value"]

    def get(self, key: str) -> Any:
        """What was measured under this key, or None."""
        return self._known.get(key)

    def values(self) -> tuple[Any, ...]:
        """All measurements, the oldest first."""
        return tuple(self._known.values())

    def put(self, key: str, value: Any) -> None:
        """Keep a measurement; it is on disk when this returns."""
        self._known[key] = value
        if self._path is not None:
            append_entry(self._path, {"key": key, "value": value})

    def remove(self) -> None:
        """Everything is in the profile now."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


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
        units = _remembered(journal, f"{sweep.digest}/units", lambda: list(measure_units(model, inputs)))
        progress(f"{model.name}: {model.unit_count} units")
        cuts = model.suggest_cuts(units, float(sweep.max_segment_ns))
        ratio = _remembered(
            journal,
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
    key = f"{sweep.digest}/shape{index}/items{items}/cores{len(cores)}"
    found = journal.get(key)
    if found is not None:
        return Point(**found)
    inputs = make_inputs(model.inputs, shape, items, sweep.max_batch > 1)
    threads = place.threads(cores)
    whole = (0, model.unit_count)
    model.prepare([whole], threads)
    with place.at(cores):
        samples = _sample(lambda: to_numpy(model.run(*whole, inputs, threads)), sweep.effort)
    p50, p90, p95, p99 = (max(1, round(value)) for value in np.percentile(samples, (50, 90, 95, 99)))
    point = Point(index, items, len(cores), len(samples), p50, p90, p95, p99)
    journal.put(key, asdict(point))
    return point


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

    samples: dict[Callable[[], None], list[int]] = {run_whole: [], run_segments: []}
    for _ in range(effort.warm_up):
        run_whole()
        run_segments()
    began = time.perf_counter()
    while len(samples[run_whole]) < effort.min_runs or (
        time.perf_counter() - began < effort.budget_s and len(samples[run_whole]) < effort.max_runs
    ):
        for work, values in samples.items():
            start_ns = time.perf_counter_ns()
            work()
            values.append(time.perf_counter_ns() - start_ns)
    return max(1.0, float(np.median(samples[run_segments]) / np.median(samples[run_whole])))


def _sample(work: Callable[[], object], effort: Effort) -> list[int]:
    for _ in range(effort.warm_up):
        work()
    samples: list[int] = []
    began = time.perf_counter()
    while len(samples) < effort.min_runs or (
        time.perf_counter() - began < effort.budget_s and len(samples) < effort.max_runs
    ):
        start_ns = time.perf_counter_ns()
        work()
        samples.append(time.perf_counter_ns() - start_ns)
    return samples


def _remembered(journal: Journal, key: str, measure: Callable[[], Any]) -> Any:
    value = journal.get(key)
    if value is None:
        value = measure()
        journal.put(key, value)
    return value
