"""Measures one model alone: its latency by batch and cores at each declared shape, its units, and the cost of cuts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from cotenant.execute.batches import row_buckets
from cotenant.execute.core_target import CoreTarget
from cotenant.execute.protocol import LoadSpec, Run, TargetDevice
from cotenant.execute.runner import Runner
from cotenant.execute.strategy import strategies
from cotenant.linux import thread_waits
from cotenant.measure.busy import OthersTime
from cotenant.measure.campaign import Journal
from cotenant.measure.inputs import DeclaredShape, make_inputs
from cotenant.measure.samples import NO_SAMPLES, Samples
from cotenant.profiles.merging import Merging
from cotenant.profiles.profile_file import ModelProfile, Point
from cotenant.profiles.version_table import VersionTable
from cotenant.work import CPU, Share

Progress = Callable[[str], None]
"""Called after each step with the name of the measurement."""
CORES = CoreTarget()
REPEATS = 2
"""Further measurements of a point that other processes have disturbed."""
STEAL_FACTOR, STEAL_NS = 1.05, 20_000
"""Wall time over processor time, and beyond it in ns, from which on others have taken the core from a thread."""
LEAST_FLOORS = 3
"""Least length of a segment in multiples of an empty launch: a shorter one costs more than it gains."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Duration of a measurement: at least `min_runs` runs, then until `budget_s` is spent or `max_runs` are done."""

    budget_s: float = 0.5
    min_runs: int = 7
    max_runs: int = 200
    warm_up: int = 2


QUICK = Effort(budget_s=0.1, min_runs=3, max_runs=20, warm_up=1)
"""For models that are served without a profile."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points to measure of a model. `shares` has one share of each size.

    `splits` (see `Tenant`) and `merging` are copied to the profile.
    """

    digest: str
    shapes: tuple[DeclaredShape, ...]
    max_batch: int
    shares: tuple[Share, ...]
    max_segment_ns: int
    effort: Effort = Effort()
    splits: tuple[tuple[int, ...], ...] | UnsetType = UNSET
    samples: Samples = NO_SAMPLES
    merging: Merging | UnsetType = UNSET

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes to measure: see `row_buckets`."""
        return row_buckets(self.max_batch)

    @property
    def largest_shape(self) -> DeclaredShape:
        """The shape with the most elements. Units are measured there: no segment is longer at another shape."""
        return max(self.shapes, key=lambda shape: sum(math.prod(dims) for dims in shape.values()))

    @property
    def steps(self) -> int:
        """Number of calls of the progress function."""
        return len(self.shapes) * len(self.batches) * len(self.shares) + 2


def measure_model(
    model: Runner, sweep: Sweep, journal: Journal, progress: Progress, target: TargetDevice = CORES
) -> ModelProfile:
    """Measure the points of a sweep that the journal lacks, on a target device, as the model is served there.

    Raises ModelError when the model cannot run at a declared shape or batch.
    """
    inputs = make_inputs(model.inputs, sweep.largest_shape, 1, sweep.max_batch > 1, sweep.samples)
    units = journal.remember(f"{sweep.digest}/units", lambda: list(target.unit_ns(model, inputs, sweep.shares[0])))
    progress(f"{model.name}: {model.unit_count} units")
    floor = journal.remember(f"{sweep.digest}/floor", lambda: target.floor_ns(sweep.shares[0]))
    cuts = model.suggest_cuts(units, float(max(sweep.max_segment_ns, LEAST_FLOORS * floor)))
    points = []
    with ExitStack() as stack:
        spec = LoadSpec(sweep.shares, cuts, sweep.shapes, sweep.max_batch)
        run = cache(lambda: stack.enter_context(target.ready(model, spec)))  # not called if the journal has all

        def measure(index: int, share: Share, items: int) -> dict[str, object]:
            inputs = make_inputs(model.inputs, sweep.shapes[index], items, sweep.max_batch > 1, sweep.samples)
            whole = [(0, model.unit_count)]
            samples, is_disturbed = undisturbed(lambda: run()(share, inputs, whole), sweep.effort, target, share)
            p50, p90, p95, p99 = (max(1, round(value)) for value in np.percentile(samples, (50, 90, 95, 99)))
            return asdict(Point(index, items, share.size, len(samples), p50, p90, p95, p99, is_disturbed))

        for index in range(len(sweep.shapes)):
            for share in sweep.shares:
                for items in sweep.batches:
                    key = f"{sweep.digest}/shape{index}/items{items}/cores{share.size}"
                    points.append(Point(**journal.remember(key, partial(measure, index, share, items))))
                    progress(f"{model.name}: {items} row{'s' if items > 1 else ''} on {share.size} {target.unit}(s)")
        ratio = journal.remember(
            f"{sweep.digest}/segments/{'-'.join(map(str, cuts))}",
            lambda: _segment_ratio(run, target, sweep.shares[0], cuts, inputs, sweep.effort),
        )
        progress(f"{model.name}: {len(cuts) - 1} segments")
    whole = {point.cores: point.p50_ns for point in points if (point.shape, point.items) == (0, 1)}
    tables = (each.versions(model, sweep.shapes[0], units, whole) for each in strategies().values())
    versions: VersionTable | UnsetType = next((table for table in tables if table is not UNSET), UNSET)
    rest = target.is_padded, versions, sweep.splits, sweep.merging
    return ModelProfile(sweep.digest, tuple(points), tuple(units), cuts, float(ratio), *rest)


def _segment_ratio(
    run: Callable[[], Run],
    target: TargetDevice,
    share: Share,
    cuts: Sequence[int],
    inputs: dict[str, Any],
    effort: Effort,
) -> float:
    """Latency of a run segment by segment over that of a whole run; medians of interleaved runs."""
    if len(cuts) == 2:
        return 1.0
    ways = [[(0, cuts[-1])], list(pairwise(cuts))]
    with target.at(share):
        works = [partial(run(), share, inputs, way) for way in ways]
        together, cut = in_turns(works, effort, is_inline=target.runs_inline(share))
    return max(1.0, float(np.median(cut) / np.median(together)))


def undisturbed(
    work: Callable[[], object], effort: Effort, target: TargetDevice, share: Share
) -> tuple[list[int], bool]:
    """Latencies in ns with as little influence of other processes as possible, and whether they are still disturbed.

    For work on the calling thread alone, processor time replaces wall time if another process took the core. Work on
    several cores is measured up to REPEATS times more, until other processes take little of their time.
    """
    is_inline = target.runs_inline(share)
    best = list[int]()
    for _ in range(1 if is_inline else 1 + REPEATS):
        with OthersTime(share.cores if target.device == CPU else ()) as others, target.at(share):
            samples = in_turns((work,), effort, is_inline=is_inline)[0]
        if not best or np.median(samples) < np.median(best):
            best = samples
        if is_inline or not others.is_disturbed:
            return samples, False
    return best, True


def in_turns(works: Sequence[Callable[[], object]], effort: Effort, *, is_inline: bool = False) -> list[list[int]]:
    """Latencies in ns, run alternately. With `is_inline`, time that other processes took from the core is left out."""
    for _ in range(effort.warm_up):
        for work in works:
            work()
    samples: list[list[int]] = [[] for _ in works]
    began = time.perf_counter()
    while len(samples[0]) < effort.min_runs or (
        time.perf_counter() - began < effort.budget_s and len(samples[0]) < effort.max_runs
    ):
        for work, values in zip(works, samples, strict=True):
            waited, began_ns, start_ns = thread_waits(), time.thread_time_ns(), time.perf_counter_ns()
            work()  # no other statement between the two readings of the wall clock
            wall_ns, own_ns = time.perf_counter_ns() - start_ns, time.thread_time_ns() - began_ns
            has_steal_time = is_inline and wall_ns > STEAL_FACTOR * own_ns + STEAL_NS and thread_waits() == waited
            values.append(own_ns if has_steal_time else wall_ns)
    return samples
