"""A world with contention: launches slow each other down, as they share cores and memory bandwidth.

A launch is a sequence of phases (runs of units), each with its time alone `d` and its bandwidth alone `r = bytes / d`.
With the bandwidth `s` a phase takes

    max(d, bytes / s) / c,        a speed of c * min(1, s / r) relative to its speed alone

where `c` is its part of its slowest core. Launches on a core share it equally, less the part of front ends: each wants
all of it, so this is max-min fair. Bandwidth is shared max-min fairly among their demands at that speed. This is the
roofline model of Williams et al. (CACM 2009), with shares. A launch alone takes the latency of its table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from random import Random
from typing import NamedTuple, Protocol

from typing_extensions import override

from cotenant.core.actions import Launch
from cotenant.core.predictor import Predictor
from cotenant.errors import InvalidValueError
from cotenant.fair_share import fair_shares
from cotenant.profiles.latency_table import LatencyTable
from cotenant.work import Share, Work
from cotenant.world.simulated import WorldEvent
from cotenant.world.stepped import SteppedWorld

FULL_SPEED = 1 << 32
"""Unit of speeds, which are integers, so that the remaining work stays exact over many changes of speed."""
GRAIN_NS = 500_000
"""Least time alone of a phase; shorter phases have no effect on the ends of launches."""
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """Memory traffic of the units of a model: `weight_bytes` for each launch, `row_bytes` for each row, by shape.

    `memory_share` is the fitted part of it that reaches the memory; caches serve the rest.

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
        """Memory traffic of each unit in bytes, for `items` rows of a declared shape (beyond: the last)."""
        rows = self.row_bytes[min(shape, len(self.row_bytes) - 1)]
        share = self.memory_share
        return [(weight + items * row) * share for weight, row in zip(self.weight_bytes, rows, strict=True)]


@dataclass(frozen=True, slots=True)
class Contention:
    """Memory bandwidth of a machine, and the traffic of its tenants.

    `bandwidth_bytes_per_s` is the limit of all cores together; None if they cannot saturate the memory.
    `core_bytes_per_s` is the limit of one core; None if unknown. A tenant without `traffic` has none.

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
    """A run of units of a launch: its time alone, and its bandwidth alone."""

    alone_ns: int
    bytes_per_s: int


class CoreLoad(NamedTuple):
    """A running launch at one instant: its cores, and its bandwidth at full speed."""

    cores: tuple[int, ...]
    bytes_per_s: int


def speeds(loads: Sequence[CoreLoad], bandwidth_bytes_per_s: int | None, front_end_share: float = 0.0) -> list[int]:
    """Speed of each load in parts of FULL_SPEED, at least 1, by the formula of this module."""
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
    """A launch that runs or will begin. `phase` counts its past phases; `left` is the remaining work of the present
    one, in ns times FULL_SPEED."""

    id: int
    begin_ns: int
    cores: tuple[int, ...]
    phases: tuple[Phase, ...]
    phase: int
    left: int
    error: str | None


class TabledLatencies(Predictor, Protocol):
    """Latencies alone, with their tables."""

    @property
    def tables(self) -> Mapping[str, LatencyTable]:
        """Latency tables by tenant."""


class ContentionWorld(SteppedWorld[_Run]):
    """Launches alone take the latency of their table times a log-normal factor; together they take longer.

    `noise` is the standard deviation of the logarithm of that factor and `failure_rate` the share of launches that
    fail, as in TableWorld. `front_end_share` is the part of each core that front ends use. A launch may have a begin in
    the future, after a charged decision; it uses cores from its begin on.

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
        self._phases_of: dict[tuple[Work, int], list[tuple[int, float]]] = {}

    @override
    def start(self, launch: Launch, now_ns: int) -> None:
        phases = self._phases(launch, exp(self._random.gauss(0.0, self._noise)) if self._noise else 1.0)
        error = None
        if self._failure_rate and self._random.random() < self._failure_rate:
            error = "injected fault"
        begin = max(now_ns, self._steps[0][0])
        self._add(_Run(launch.id, begin, launch.share.cores, phases, 0, phases[0].alone_ns * FULL_SPEED, error))

    @override
    def expand(self, launch: int, share: Share, now_ns: int) -> None:
        """Do nothing: launches keep their first share."""

    @override
    def _event_of(self, runs: tuple[_Run, ...]) -> WorldEvent | None:
        best = None
        for run in runs:
            if run.phase == len(run.phases) and (best is None or run.id < best.id):
                best = run
        return None if best is None else WorldEvent(best.id, best.error)

    @override
    def _after(self, now_ns: int, runs: tuple[_Run, ...]) -> tuple[int, tuple[_Run, ...]] | None:
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
        phases_alone = self._phases_of.get(key)
        if phases_alone is None:
            phases_alone = self._phases_of[key] = self._phases_alone(work, alone)
        core = self._contention.core_bytes_per_s
        most = memory if core is None else min(memory, core * cores)  # the limit of a launch alone, as measured
        phases: list[Phase] = []
        begin = 0
        for until, moved in phases_alone:
            end = until * total // alone
            if end > begin:
                phases.append(Phase(end - begin, min(most, round(moved * _NS_PER_S / (end - begin)))))
                begin = end
        return tuple(phases)

    def _phases_alone(self, work: Work, alone_ns: int) -> list[tuple[int, float]]:
        """Phases of work alone: the end of each, from the begin of the work, and its traffic in bytes."""
        weights = self._table.tables[work.tenant].unit_weights[work.start : work.end]
        moved = self._contention.traffic[work.tenant].unit_bytes(work.shape, work.items)
        total = sum(weights) or 1.0
        phases_alone: list[tuple[int, float]] = []
        done, begin, inside = 0.0, 0, 0.0
        for weight, unit_bytes in zip(weights, moved[work.start : work.end], strict=True):
            done += weight
            inside += unit_bytes
            until = min(alone_ns, round(alone_ns * done / total))
            if until - begin >= self._grain_ns:
                phases_alone.append((until, inside))
                begin, inside = until, 0.0
        if phases_alone and alone_ns - begin < self._grain_ns:  # the last phase is too short: merge it
            inside += phases_alone.pop()[1]
            begin = phases_alone[-1][0] if phases_alone else 0
        if begin < alone_ns:
            phases_alone.append((alone_ns, inside))
        return phases_alone


def phase_time_ns(phase: Phase, granted_bytes_per_s: int) -> float:
    """Time of a phase on its own cores, with this memory bandwidth."""
    if phase.bytes_per_s <= granted_bytes_per_s:
        return float(phase.alone_ns)
    return phase.alone_ns * phase.bytes_per_s / granted_bytes_per_s


def _moved(run: _Run, work: int) -> _Run:
    """The launch after this work. The excess over the present phase, less than 1 ns, counts in the next phase."""
    if not work:
        return run
    left, phase, phases = run.left - work, run.phase, run.phases
    while left <= 0 and phase < len(phases):
        phase += 1
        if phase < len(phases):
            left += phases[phase].alone_ns * FULL_SPEED
    return _Run(run.id, run.begin_ns, run.cores, phases, phase, left, run.error)
