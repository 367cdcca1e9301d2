"""Measures one model alone: its latency by batch and cores at each declared shape, its units, and the cost of cuts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
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
from cotenant.profiles.profile_file import ModelProfile, Point, highest_quantile
from cotenant.profiles.version_table import VersionTable
from cotenant.work import CPU, Share

Progress = Callable[[str], None]
"""Called after each step with the name of the measurement."""
CORES = CoreTarget()
STEAL_FACTOR, STEAL_NS = 1.05, 20_000
"""Wall time over processor time, and beyond it in ns, from which on others have taken the core from a thread."""
LEAST_FLOORS = 3
"""Least length of a segment in multiples of an empty launch: a shorter one costs more than it gains."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Duration of a measurement: at least `min_runs` runs, then until `budget_s` is spent or `max_runs` are done.

    A disturbed measurement is repeated up to `repeats` times.
    """

    budget_s: float = 0.5
    min_runs: int = 7
    max_runs: int = 200
    warm_up: int = 2
    repeats: int = 3


QUICK = Effort(budget_s=0.1, min_runs=3, max_runs=20, warm_up=1, repeats=1)
"""For models that are served without a profile."""


@dataclass(slots=True)
class Runs:
    """Runs of one work, in ns: latency and processor time of each.

    `preempted_ns`: wall time that other processes took from single-threaded runs, in all; no latency has it.
    """

    latency_ns: list[int] = field(default_factory=list)
    cpu_ns: list[int] = field(default_factory=list)
    preempted_ns: int = 0


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
            runs, is_disturbed = undisturbed(partial(run(), share, inputs, whole), sweep.effort, target, share)
            p50, p90, p95, p99 = (quantile_ns(runs.latency_ns, percent) for percent in (50, 90, 95, 99))
            count, cpu_ns = len(runs.cpu_ns), quantile_ns(runs.cpu_ns, 50)
            return asdict(Point(index, items, share.size, count, p50, p90, p95, p99, is_disturbed, cpu_ns))

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
    return max(1.0, float(np.median(cut.latency_ns) / np.median(together.latency_ns)))


def quantile_ns(samples_ns: Sequence[int], percent: int) -> int:
    """A percentile of runs in ns, at least 1; the longest run where they are too few (`highest_quantile`)."""
    is_given = percent <= highest_quantile(len(samples_ns))
    return max(1, round(np.percentile(samples_ns, percent)) if is_given else max(samples_ns))


def undisturbed(work: Callable[[], object], effort: Effort, target: TargetDevice, share: Share) -> tuple[Runs, bool]:
    """Runs with as little influence of other processes as possible, and whether they are still disturbed.

    Disturbed runs (`busy.taken_share`) are measured up to `effort.repeats` times more; the least disturbed are kept.
    For work on the calling thread alone, processor time replaces wall time if another process took the core.
    """
    is_inline = target.runs_inline(share)
    tries: list[tuple[OthersTime, Runs]] = []
    while len(tries) <= effort.repeats and all(others.is_disturbed for others, _ in tries):
        with OthersTime(share.cores if target.device == CPU else ()) as others, target.at(share):
            [runs] = in_turns((work,), effort, is_inline=is_inline)
        others.preempted_s = runs.preempted_ns / 1e9
        tries.append((others, runs))
    others, runs = min(tries, key=lambda each: each[0].share)
    return runs, others.is_disturbed


def in_turns(works: Sequence[Callable[[], object]], effort: Effort, *, is_inline: bool = False) -> list[Runs]:
    """Runs of works, run alternately. With `is_inline`, no latency has time that other processes took from the core.

    The processor time is that of the calling thread with `is_inline`, else of all threads of this process.
    """
    for _ in range(effort.warm_up):
        for work in works:
            work()
    made = [Runs() for _ in works]
    clock_ns = time.thread_time_ns if is_inline else time.process_time_ns
    began = time.perf_counter()
    while len(made[0].cpu_ns) < effort.min_runs or (
        time.perf_counter() - began < effort.budget_s and len(made[0].cpu_ns) < effort.max_runs
    ):
        for work, runs in zip(works, made, strict=True):
            waited, began_ns, start_ns = thread_waits(), clock_ns(), time.perf_counter_ns()
            work()  # no other statement between the two readings of the wall clock
            wall_ns, own_ns = time.perf_counter_ns() - start_ns, clock_ns() - began_ns
            has_steal_time = is_inline and wall_ns > STEAL_FACTOR * own_ns + STEAL_NS and thread_waits() == waited
            runs.latency_ns.append(own_ns if has_steal_time else wall_ns)
            runs.cpu_ns.append(own_ns)
            runs.preempted_ns += wall_ns - own_ns if has_steal_time else 0
    return made
