"""Limits of a worker process: when it counts as lost, and when it is replaced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cotenant.execute.errors import ModelError, WorkerLostError
from cotenant.execute.worker.lane_link import Pending

_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bounds on a worker. All values were chosen by hand.

    A launch hangs after `hang_factor` times its predicted latency, at least `hang_floor_s`
    (docs/decisions/0009-tenant-processes.md); a worker hangs if it has not loaded its model after `load_limit_s`. A
    worker that lived for `settled_s`, loading included, is replaced at once, as is the first that did not. The next
    ones are replaced after `backoff_s`, doubled each time, up to `backoff_most_s`.
    """

    hang_factor: float = 20.0
    hang_floor_s: float = 10.0
    load_limit_s: float = 300.0
    memory_bytes: int | None = None
    settled_s: float = 5.0
    backoff_s: float = 0.5
    backoff_most_s: float = 30.0

    @property
    def tick_s(self) -> float:
        """Interval of the watchdog's checks in seconds."""
        return min(1.0, self.hang_floor_s / 4)

    def pause_s(self, losses: int) -> float:
        """Delay of the next worker in seconds, after so many consecutive losses."""
        return 0.0 if losses < 2 else min(self.backoff_most_s, self.backoff_s * 2.0 ** min(losses - 2, 30))


class LossKind(StrEnum):
    """Why a worker was lost; a label of the metric."""

    DIED = "died"
    HUNG = "hung"
    MEMORY = "memory"
    UNLOADABLE = "unloadable"

    @property
    def is_lasting(self) -> bool:
        """Whether the next worker will fail too, if this one was lost before it had loaded its model."""
        return self in (LossKind.MEMORY, LossKind.UNLOADABLE)


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """The loss of a worker. `hint` says how to fix a model that cannot be loaded."""

    kind: LossKind
    reason: str
    hint: str = ""

    def error(self, path: Path) -> ModelError:
        """The error of a load that lost its first worker."""
        kind = WorkerLostError if self.kind is LossKind.DIED else ModelError
        return kind(path, self.reason, self.hint)

    def sentence(self, tenant: str) -> str:
        """The loss as a sentence about the tenant's worker."""
        is_bare = self.kind is LossKind.UNLOADABLE
        return f"the worker of {tenant!r} cannot load its model: {self.reason}" if is_bare else self.reason


def overdue(launches: Iterable[Pending], passed_ns: int, limits: WorkerLimits) -> str | None:
    """Add `passed_ns` to the waits of sent launches; return a sentence about one that takes too long, else None.

    A launch counts from its first check here, so that no launch counts as hung too early.
    """
    for pending in launches:
        if not pending.is_sent:
            continue
        pending.waited_ns = 0 if pending.waited_ns < 0 else pending.waited_ns + passed_ns
        predicted_ns = pending.launch.predicted_ns
        if pending.waited_ns >= max(limits.hang_floor_s * _S, limits.hang_factor * predicted_ns):
            waited_s = pending.waited_ns / _S
            return f"a launch predicted to take {predicted_ns / 1e6:.1f} ms had not ended after {waited_s:.1f} s"
    return None
