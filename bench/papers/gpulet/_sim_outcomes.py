"""What goes into and comes out of the simulation of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.papers.gpulet._arrivals import Times
from cotenant.techniques.partitions.plan.types import Plan


@dataclass(frozen=True, slots=True)
class PlanChange:
    """From `at_ns` on another plan is in force.

    Waiting rows move to it, and launches under way finish first. A device with other partitions starts them when its
    last launch has ended. The caller adds the time that the change takes while the old plan serves (10 to 15 s in
    GPU-let, section 4.5).
    """

    at_ns: int
    plan: Plan


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Every query of a tenant or application: when it came and how long it took; latency -1 for one that was dropped.

    Both of shape (queries,), in ns, in the order of arrival.
    """

    arrival_ns: Times
    latency_ns: Times
    slo_ns: int

    def missed(self) -> npt.NDArray[np.bool_]:
        """Which were late or dropped."""
        return (self.latency_ns < 0) | (self.latency_ns > self.slo_ns)

    def by_window(self, window_ns: int, duration_ns: int) -> tuple[Times, Times]:
        """How many came in each window of time, and how many of those were late or dropped."""
        edges = np.arange(0, duration_ns + window_ns, window_ns)
        offered, _ = np.histogram(self.arrival_ns, edges)
        missed, _ = np.histogram(self.arrival_ns[self.missed()], edges)
        return offered.astype(np.int64), missed.astype(np.int64)


@dataclass(frozen=True, slots=True)
class TenantOutcome:
    """What became of the queries of a tenant or application. Percentiles are of those answered, 0 where there are none.

    `offered` is the sum of `in_slo`, `late` and `dropped`.
    """

    name: str
    offered: int
    in_slo: int
    late: int
    dropped: int
    p50_ns: int
    p99_ns: int

    @property
    def violation_share(self) -> float:
        """Late and dropped, as a share of those offered; 0 where none was."""
        return (self.late + self.dropped) / self.offered if self.offered else 0.0


@dataclass(frozen=True, slots=True)
class PartitionUse:
    """A partition of a plan while that was in force. `device` and `index` are positions in the plan.

    `end_ns` is 0 where it was in force to the end.
    """

    device: int
    index: int
    size: int
    start_ns: int
    end_ns: int
    busy_ns: int
    turns: int
    rows: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """The outcomes in the order of the loads, then of the applications; the answers by the same names."""

    outcomes: tuple[TenantOutcome, ...]
    answers: Mapping[str, Answers]
    partitions: tuple[PartitionUse, ...]

    def outcome(self, name: str) -> TenantOutcome:
        """Of one tenant or application. Raises KeyError for an unknown one."""
        return {outcome.name: outcome for outcome in self.outcomes}[name]

    @property
    def violation_share(self) -> float:
        """Late and dropped, as a share of all that were offered."""
        offered = sum(outcome.offered for outcome in self.outcomes)
        return sum(outcome.late + outcome.dropped for outcome in self.outcomes) / offered if offered else 0.0
