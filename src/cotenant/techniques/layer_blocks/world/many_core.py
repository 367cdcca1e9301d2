"""A simulated CPU with many cores and cache slices, and one memory that all launches share.

A launch runs its units one after another on the cores of its share, in its version. A unit takes `max(its time alone,
its bytes / its bandwidth)`. Running units share the bandwidth max-min fairly, weighted by threads; shares change with
every start, expansion and end of a unit. No launch waits for a core.

A launch with fewer cores than it wants (`BlockBasis.wanted`) first pays a conflict cost, for threads that are created
and moved when it expands. VELTAIR (section 3.2, Fig. 5b) gives mean and median per layer; the cost is log-normal with
these. It depends on query and unit only, so that policies are comparable. The launch expands at its next stop. Cold
weights count only as far as the tables have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, sqrt
from random import Random
from typing import NamedTuple

from cotenant.core.actions import Launch
from cotenant.errors import InvalidValueError
from cotenant.profiles.latency_table import LatencyTable
from cotenant.profiles.version_table import UnitCosts, VersionTable
from cotenant.techniques.layer_blocks.policy.block_basis import BlockBasis
from cotenant.techniques.layer_blocks.world.many_core_rules import FULL, conflict_at, next_span_ns, set_rates
from cotenant.work import Share
from cotenant.world.simulated import WorldEvent
from cotenant.world.stepped import SteppedWorld

MEAN_CONFLICT_NS, MEDIAN_CONFLICT_NS = 220_000, 100_000
"""Conflict cost in ns: VELTAIR, section 3.2 and Fig. 5b."""
CONFLICTS = 4096
"""Number of distinct random conflict costs."""
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ManyCore:
    """The machine: memory bandwidth, and the distribution of conflict costs.

    Raises InvalidValueError when a number is not positive, or the median is above the mean.
    """

    bandwidth_bytes_per_s: int
    mean_conflict_ns: int = MEAN_CONFLICT_NS
    median_conflict_ns: int = MEDIAN_CONFLICT_NS
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "mean_conflict_ns", "median_conflict_ns"):
            if getattr(self, name) < 1:
                raise InvalidValueError("many cores", name, getattr(self, name), "a positive number")
        if self.median_conflict_ns > self.mean_conflict_ns:
            raise InvalidValueError(
                "many cores",
                "median_conflict_ns",
                self.median_conflict_ns,
                f"at most the mean, {self.mean_conflict_ns}",
            )

    def conflicts_ns(self) -> tuple[int, ...]:
        """The conflict costs, of which `conflict_at` selects one."""
        drawn = Random(self.seed)
        spread = sqrt(2.0 * log(self.mean_conflict_ns / self.median_conflict_ns))
        middle = log(self.median_conflict_ns)
        return tuple(max(1, round(drawn.lognormvariate(middle, spread))) for _ in range(CONFLICTS))


class _ManyCoreRun(NamedTuple):
    """A running launch. `unit` is the present unit; with a conflict cost to pay (`stall_ns`) it has not started."""

    id: int
    begin_ns: int
    costs: UnitCosts
    version: int
    unit: int
    end: int
    stops: tuple[int, ...]
    cores: int
    rows: int
    wider: int
    """Cores from the next stop on; 0 without an expansion."""
    expanded: bool
    left: int
    """Work left in the present unit, in fractions of a nanosecond (`FULL`)."""
    stall_ns: int

    @property
    def cost(self) -> tuple[int, int, int]:
        """Time alone, bytes and threads of the present unit or conflict."""
        if self.stall_ns:
            return self.stall_ns, 0, 1
        costs = self.costs
        at = (self.version * costs.cores + self.cores - 1) * costs.units + self.unit
        return costs.ns[at] * self.rows, costs.moved[at] * self.rows, costs.threads[at]


class ManyCoreWorld(SteppedWorld[_ManyCoreRun]):
    """The world of this module. Rows of a batch run one after another: each takes the time of the table.

    A share with more cores than the table runs as on the table's cores.
    """

    def __init__(self, tables: Mapping[str, VersionTable], machine: ManyCore) -> None:
        super().__init__()
        self._costs = {name: table.costs() for name, table in tables.items()}
        self._bandwidth = machine.bandwidth_bytes_per_s / _NS_PER_S
        self._conflicts = machine.conflicts_ns()

    def start(self, launch: Launch, now_ns: int) -> None:
        """Start a launch. Raises InvalidValueError for a tenant without a table, or unknown units."""
        work, costs = launch.work, self._costs.get(launch.work.tenant)
        if costs is None:
            raise InvalidValueError("many-core world", "tenant", work.tenant, f"one of {', '.join(self._costs)}")
        if work.end > costs.units:
            raise InvalidValueError(f"launch of {work.tenant!r}", "end", work.end, f"at most {costs.units} units")
        stall = 0
        basis = launch.basis
        if isinstance(basis, BlockBasis) and basis.wanted > launch.share.size:
            stall = self._conflicts[conflict_at(launch.queries[0], work.start, len(self._conflicts))]
        run = _ManyCoreRun(
            launch.id,
            max(now_ns, self._steps[0][0]),
            costs,
            min(work.version, costs.versions - 1),
            work.start,
            work.end,
            launch.stops,
            min(launch.share.size, costs.cores),
            work.items,
            0,
            False,
            0,
            stall,
        )
        self._add(run._replace(left=run.cost[0] * FULL))

    def expand(self, launch: int, share: Share, now_ns: int) -> None:
        """Expand a running launch to another share at its next stop."""
        self._forget(now_ns)
        self._steps = [
            (at, tuple([_widened(run, share.size) if run.id == launch else run for run in runs]))
            for at, runs in self._steps
        ]

    def _event_of(self, runs: tuple[_ManyCoreRun, ...]) -> WorldEvent | None:
        best: _ManyCoreRun | None = None
        for run in runs:
            if (run.expanded or run.unit == run.end) and (
                best is None or (not run.expanded, run.id) < (not best.expanded, best.id)
            ):
                best = run
        return None if best is None else WorldEvent(best.id, expanded=best.expanded)

    def _handed_out(self, run: _ManyCoreRun) -> _ManyCoreRun | None:
        return run._replace(expanded=False) if run.expanded else None

    def _after(self, now_ns: int, runs: tuple[_ManyCoreRun, ...]) -> tuple[int, tuple[_ManyCoreRun, ...]] | None:
        active = [run for run in runs if run.begin_ns <= now_ns and run.unit < run.end]
        count = len(active)
        ns, moved, threads = zip(*[run.cost for run in active], strict=True) if active else ((), (), ())
        demand, rates = [0.0] * count, [0] * count
        set_rates(count, ns, moved, threads, self._bandwidth, demand, rates)
        span = next_span_ns(count, [run.left for run in active], rates)
        waits = [run.begin_ns - now_ns for run in runs if run.begin_ns > now_ns] + ([span] if active else [])
        if not waits:
            return None
        span = min(waits)
        rate_of = {run.id: rate for run, rate in zip(active, rates, strict=True)}
        return now_ns + span, tuple([_gone_on(run, rate_of.get(run.id, 0) * span) for run in runs])


def _widened(run: _ManyCoreRun, cores: int) -> _ManyCoreRun:
    """A launch that will expand, if it has a stop left."""
    can = any(run.unit < stop < run.end for stop in run.stops)
    return run._replace(wider=min(cores, run.costs.cores)) if can else run


def _gone_on(run: _ManyCoreRun, work: int) -> _ManyCoreRun:
    """A launch after some work. A unit ends at a whole nanosecond; work beyond it is lost."""
    if not work:
        return run
    left = run.left - work
    if left > 0:
        return run._replace(left=left)
    unit = run.unit if run.stall_ns else run.unit + 1
    after = run._replace(unit=unit, stall_ns=0)
    if after.wider and unit in run.stops and unit < run.end:
        after = after._replace(cores=after.wider, wider=0, expanded=True)
    return after._replace(left=after.cost[0] * FULL) if unit < run.end else after._replace(left=0)


def world_of(tables: Mapping[str, LatencyTable], seed: int) -> ManyCoreWorld | None:
    """The world of models with versions measured on a machine of known bandwidth; None if a model has none."""
    versions = {name: each.versions for name, each in tables.items() if isinstance(each.versions, VersionTable)}
    bandwidth = min([each.bandwidth_bytes_per_s for each in versions.values()], default=0)
    if not bandwidth or len(versions) < len(tables):
        return None
    return ManyCoreWorld(versions, ManyCore(bandwidth, seed=seed))
