"""A world in which launches slow each other down: they share cores and the bandwidth of the memory.

A launch is a row of phases (neighbouring units put together), each with the time `d` that it takes alone and the
bandwidth `r = bytes / d` that it draws then. A phase that is granted `s` of the memory's bandwidth takes

    max(d, bytes / s) / c,        so that it goes at the speed min(1, s / r) of its speed alone, times c

where `c` is its part of the slowest of its cores. Cores are split evenly between the launches that hold them (every
launch wants all of each, so this is max-min fair), less the part that front-ends take. Bandwidth is shared max-min
fairly between what launches would draw at that speed: the roofline of Williams et al. (CACM 2009), with shares.
A launch that is alone takes what the table says, because the table was measured alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from random import Random
from typing import NamedTuple, Protocol

from cotenant.core.actions import Launch
from cotenant.core.predictor import Predictor
from cotenant.errors import InvalidValueError
from cotenant.fair_share import fair_shares
from cotenant.profile.latency_table import LatencyTable
from cotenant.work import Share, Work
from cotenant.world.simulated import WorldEvent
from cotenant.world.stepped import SteppedWorld

FULL_SPEED = 1 << 32
"""Speeds are integers, in parts of this: work left is then exact however often rates change."""
GRAIN_NS = 500_000
"""Units are put together to phases of at least this length alone: what is shorter does not move anybody's end."""
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that the units of one model move: `weight_bytes` once a launch, `row_bytes` a row, by declared shape.

    `memory_share` is the share of them that reaches the memory; caches serve the rest. It is fitted.

    Raises InvalidValueError when the lengths differ or a value is negative.
    """

    weight_bytes: tuple[int, ...]
    row_bytes: tuple[tuple[int, ...], ...]
    memory_share: float = 1.0

    def __post_init__(self) -> None:
        if not self.row_bytes or any(len(row) != len(self.weight_bytes) for row in self.row_bytes):
            expected = f"for each declared shape one number a unit, {len(self.weight_bytes)}"
            raise InvalidValueError("traffic", "row_bytes", [len(row) for row in self.row_bytes], expected)
        if min(self.weight_bytes, default=-1) < 0 or min(map(min, self.row_bytes)) < 0:
            raise InvalidValueError("traffic", "bytes", (self.weight_bytes, self.row_bytes), "numbers from 0")
        if not self.memory_share >= 0:
            raise InvalidValueError("traffic", "memory_share", self.memory_share, "a number from 0")

    def unit_bytes(self, shape: int, items: int) -> list[float]:
        """Bytes to and from the memory of each unit, for `items` rows of a declared shape (beyond: the last one)."""
        rows = self.row_bytes[min(shape, len(self.row_bytes) - 1)]
        share = self.memory_share
        return [(weight + items * row) * share for weight, row in zip(self.weight_bytes, rows, strict=True)]


@dataclass(frozen=True, slots=True)
class Contention:
    """The memory of a machine and who uses it how much.

    `bandwidth_bytes_per_s` is what all cores draw together at most; None where the cores could not saturate it, so that
    nobody waits for it. `core_bytes_per_s` is what one core draws at most, None where that is not known. Tenants that
    `traffic` does not name move nothing.

    Raises InvalidValueError when a bandwidth is not positive.
    """

    bandwidth_bytes_per_s: int | None = None
    core_bytes_per_s: int | None = None
    traffic: Mapping[str, Traffic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "core_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValueError("contention", name, value, "a positive number, or None")


class Phase(NamedTuple):
    """A stretch of a launch: its time alone, and the bandwidth that it draws then."""

    alone_ns: int
    bytes_per_s: int


class CoreLoad(NamedTuple):
    """What runs at one instant: on which cores, and what it would draw at full speed."""

    cores: tuple[int, ...]
    bytes_per_s: int


def speeds(loads: Sequence[CoreLoad], bandwidth_bytes_per_s: int | None, front_end_share: float = 0.0) -> list[int]:
    """Speed of each load in parts of FULL_SPEED, at least 1. The module's text has the formula."""
    holders: dict[int, int] = {}
    for load in loads:
        for core in load.cores:
            holders[core] = holders.get(core, 0) + 1
    whole = round(FULL_SPEED * (1.0 - front_end_share))
    made = [whole // max([holders[core] for core in load.cores]) for load in loads]
    if bandwidth_bytes_per_s is not None:
        demands = [load.bytes_per_s * speed // FULL_SPEED for load, speed in zip(loads, made, strict=True)]
        if sum(demands) > bandwidth_bytes_per_s:
            shares = fair_shares(demands, [1] * len(demands), bandwidth_bytes_per_s)
            made = [
                speed * int(share) // demand if share < demand else speed
                for speed, share, demand in zip(made, shares, demands, strict=True)
            ]
    return [max(1, speed) for speed in made]


class _Run(NamedTuple):
    """A launch under way, or about to begin. `phase` counts those that are over; `left` is work of the present one, in
    ns times FULL_SPEED."""

    id: int
    begin_ns: int
    cores: tuple[int, ...]
    phases: tuple[Phase, ...]
    phase: int
    left: int
    error: str | None


class TabledLatencies(Predictor, Protocol):
    """Latencies alone, and the tables that they come from."""

    @property
    def tables(self) -> Mapping[str, LatencyTable]:
        """By tenant."""


class ContentionWorld(SteppedWorld[_Run]):
    """Launches take what the table says when they are alone, times a log-normal factor, and longer beside others.

    `noise` is the standard deviation of the logarithm of that factor and `failure_rate` the share of launches that
    fail, as in TableWorld. `front_end_share` is the part of every core that front-ends take. A launch may be started
    ahead of its time (a decision is charged): it takes part from then on.

    Raises InvalidValueError when `front_end_share` is not a share, or the traffic of a tenant does not fit its table.
    """

    def __init__(
        self,
        table: TabledLatencies,
        contention: Contention,
        *,
        front_end_share: float = 0.0,
        noise: float = 0.0,
        failure_rate: float = 0.0,
        seed: int = 0,
        grain_ns: int = GRAIN_NS,
    ) -> None:
        if not 0.0 <= front_end_share < 1.0:
            raise InvalidValueError("contention world", "front_end_share", front_end_share, "from 0 to less than 1")
        for name, traffic in contention.traffic.items():
            units = len(table.tables[name].unit_weights) if name in table.tables else len(traffic.weight_bytes)
            if len(traffic.weight_bytes) != units:
                raise InvalidValueError(
                    f"traffic of {name!r}", "number of units", len(traffic.weight_bytes), f"{units}, as in its table"
                )
        super().__init__()
        self._table = table
        self._contention = contention
        self._front_end_share = front_end_share
        self._noise = noise
        self._failure_rate = failure_rate
        self._random = Random(seed)
        self._grain_ns = grain_ns
        self._known: dict[tuple[Work, int], list[tuple[int, float]]] = {}

    def start(self, launch: Launch, now_ns: int) -> None:
        """See World."""
        phases = self._phases(launch, exp(self._random.gauss(0.0, self._noise)) if self._noise else 1.0)
        error = None
        if self._failure_rate and self._random.random() < self._failure_rate:
            error = "injected fault"
        begin = max(now_ns, self._steps[0][0])
        self._add(_Run(launch.id, begin, launch.share.cores, phases, 0, phases[0].alone_ns * FULL_SPEED, error))

    def expand(self, launch: int, share: Share, now_ns: int) -> None:
        """See World: here launches keep the share that they began with."""

    def _event_of(self, runs: tuple[_Run, ...]) -> WorldEvent | None:
        """The end of the finished launch with the smallest number."""
        best = None
        for run in runs:
            if run.phase == len(run.phases) and (best is None or run.id < best.id):
                best = run
        return None if best is None else WorldEvent(best.id, best.error)

    def _after(self, now_ns: int, runs: tuple[_Run, ...]) -> tuple[int, tuple[_Run, ...]] | None:
        """The state at the next end of a phase or begin of a launch; None when nothing is to come."""
        active = [run for run in runs if run.begin_ns <= now_ns and run.phase < len(run.phases)]
        loads = [CoreLoad(run.cores, run.phases[run.phase].bytes_per_s) for run in active]
        rates = speeds(loads, self._contention.bandwidth_bytes_per_s, self._front_end_share)
        waits = [run.begin_ns - now_ns for run in runs if run.begin_ns > now_ns]
        waits += [-(-run.left // rate) for run, rate in zip(active, rates, strict=True)]
        if not waits:
            return None
        span = min(waits)
        rate_of = {run.id: rate for run, rate in zip(active, rates, strict=True)}
        return now_ns + span, tuple([_moved(run, rate_of.get(run.id, 0) * span) for run in runs])

    def _phases(self, launch: Launch, factor: float) -> tuple[Phase, ...]:
        work, cores = launch.work, launch.share.size
        alone = self._table.latency_ns(work, cores, launch.share.device)
        total = int(alone * factor) or 1
        memory = self._contention.bandwidth_bytes_per_s
        if memory is None or work.tenant not in self._contention.traffic:
            return (Phase(total, 0),)
        key = (work, cores)
        pieces = self._known.get(key)
        if pieces is None:
            pieces = self._known[key] = self._pieces(work, alone)
        core = self._contention.core_bytes_per_s
        most = memory if core is None else min(memory, core * cores)  # it was measured alone: it cannot draw more
        phases: list[Phase] = []
        begin = 0
        for until, moved in pieces:
            end = until * total // alone
            if end > begin:
                phases.append(Phase(end - begin, min(most, round(moved * _NS_PER_S / (end - begin)))))
                begin = end
        return tuple(phases)

    def _pieces(self, work: Work, alone_ns: int) -> list[tuple[int, float]]:
        """Phases of work: the time at which each ends when it runs alone, and the bytes that it moves."""
        weights = self._table.tables[work.tenant].unit_weights[work.start : work.end]
        moved = self._contention.traffic[work.tenant].unit_bytes(work.shape, work.items)
        total = sum(weights) or 1.0
        pieces: list[tuple[int, float]] = []
        done, begin, inside = 0.0, 0, 0.0
        for weight, unit_bytes in zip(weights, moved[work.start : work.end], strict=True):
            done += weight
            inside += unit_bytes
            until = min(alone_ns, round(alone_ns * done / total))
            if until - begin >= self._grain_ns:
                pieces.append((until, inside))
                begin, inside = until, 0.0
        if pieces and alone_ns - begin < self._grain_ns:  # the rest is short, or has no time at all
            inside += pieces.pop()[1]
            begin = pieces[-1][0] if pieces else 0
        if begin < alone_ns:
            pieces.append((alone_ns, inside))
        return pieces


def phase_time_ns(phase: Phase, granted_bytes_per_s: int) -> float:
    """Time that a phase takes on cores of its own when it is granted so much of the memory's bandwidth."""
    if phase.bytes_per_s <= granted_bytes_per_s:
        return float(phase.alone_ns)
    return phase.alone_ns * phase.bytes_per_s / granted_bytes_per_s


def _moved(run: _Run, work: int) -> _Run:
    """The launch after some work. Less than a nanosecond of it may reach into the next phase, and counts there."""
    if not work:
        return run
    left, phase, phases = run.left - work, run.phase, run.phases
    while left <= 0 and phase < len(phases):
        phase += 1
        if phase < len(phases):
            left += phases[phase].alone_ns * FULL_SPEED
    return _Run(run.id, run.begin_ns, run.cores, phases, phase, left, run.error)
