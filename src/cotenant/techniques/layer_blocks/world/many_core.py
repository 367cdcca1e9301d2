"""A world of one processor with many cores and slices of cache, whose memory the launches share.

A launch runs its units one after another on the cores of its share, each as the implementation that its version names.
A unit takes max(its time alone, its bytes / its part of the bandwidth); the bandwidth is shared max-min fairly between
the units that run, every thread counted as one who asks, and changes with every start, expansion and end of a unit.
Launches hold cores of their own: nobody waits for a core here.

A launch that starts with fewer cores than it wants (`BlockBasis.wanted`) first pays a conflict cost: threads have to be
made and moved when it expands. VELTAIR measured a mean of 220 us and a median of 100 us per layer (figure 5b), so the
cost is drawn from a log-normal law of these two; the same query pays the same at the same unit under every policy.
It expands at the next of its stops. `weights` of a query are cold only so far as the tables say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, sqrt
from random import Random
from typing import NamedTuple

from cotenant.core.actions import Launch
from cotenant.errors import InvalidValueError
from cotenant.profile.latency_table import LatencyTable
from cotenant.profile.version_table import UnitCosts, VersionTable
from cotenant.techniques.layer_blocks.policy.block_basis import BlockBasis
from cotenant.techniques.layer_blocks.world.many_core_rules import FULL, conflict_at, next_span_ns, set_rates
from cotenant.work import Share
from cotenant.world.simulated import WorldEvent
from cotenant.world.stepped import SteppedWorld

MEAN_CONFLICT_NS, MEDIAN_CONFLICT_NS = 220_000, 100_000
"""VELTAIR, section 3.2 and figure 5b."""
CONFLICTS = 4096
"""How many conflict costs are drawn; they are used again and again."""
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ManyCore:
    """The machine: its memory's bandwidth, and the law of the costs of conflicts.

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
        """The costs of conflicts, of which `conflict_at` picks one."""
        drawn = Random(self.seed)
        spread = sqrt(2.0 * log(self.mean_conflict_ns / self.median_conflict_ns))
        middle = log(self.median_conflict_ns)
        return tuple(max(1, round(drawn.lognormvariate(middle, spread))) for _ in range(CONFLICTS))


class _ManyCoreRun(NamedTuple):
    """A launch under way: the unit that runs, which is its first minus 1 while it pays for a conflict."""

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
    """Cores from the next stop on; 0 when it does not expand."""
    expanded: bool
    left: int
    """Work of the present unit, in parts of a nanosecond."""
    stall_ns: int

    @property
    def cost(self) -> tuple[int, int, int]:
        """Time alone, bytes and threads of what runs."""
        if self.stall_ns:
            return self.stall_ns, 0, 1
        costs = self.costs
        at = (self.version * costs.cores + self.cores - 1) * costs.units + self.unit
        return costs.ns[at] * self.rows, costs.moved[at] * self.rows, costs.threads[at]


class ManyCoreWorld(SteppedWorld[_ManyCoreRun]):
    """See above. Rows of a batch are believed to come one after another: each takes what the table says.

    A share with more cores than the table has runs as on as many as that.
    """

    def __init__(self, tables: Mapping[str, VersionTable], machine: ManyCore) -> None:
        super().__init__()
        self._costs = {name: table.costs() for name, table in tables.items()}
        self._bandwidth = machine.bandwidth_bytes_per_s / _NS_PER_S
        self._conflicts = machine.conflicts_ns()

    def start(self, launch: Launch, now_ns: int) -> None:
        """See World. Raises InvalidValueError for a tenant without a table, or units that it does not have."""
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
        """See World."""
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
    """A launch that is to expand, where it has a stop left."""
    can = any(run.unit < stop < run.end for stop in run.stops)
    return run._replace(wider=min(cores, run.costs.cores)) if can else run


def _gone_on(run: _ManyCoreRun, work: int) -> _ManyCoreRun:
    """A launch after some work. A unit ends at a whole nanosecond; what is left of that counts for nobody."""
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
    """The world of models with versions measured on a machine of known bandwidth; None where a model has none."""
    versions = {name: each.versions for name, each in tables.items() if isinstance(each.versions, VersionTable)}
    bandwidth = min([each.bandwidth_bytes_per_s for each in versions.values()], default=0)
    if not bandwidth or len(versions) < len(tables):
        return None
    return ManyCoreWorld(versions, ManyCore(bandwidth, seed=seed))
