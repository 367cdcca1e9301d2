"""When a worker process is given up, and how soon another one is tried."""

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
    """Bounds on what a worker may do.

    A launch hangs when it has not ended after `hang_factor` times what was predicted for it, and `hang_floor_s` at
    least (docs/decisions/0009-tenant-processes.md). A worker that has not loaded its model after `load_limit_s` hangs,
    too. One that lived for `settled_s`, loading included, is replaced at once, and so is the first that did not; the
    next ones after `backoff_s`, doubled each time, up to `backoff_most_s`. All of it was chosen by hand.
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
        """How often the watchdog looks."""
        return min(1.0, self.hang_floor_s / 4)

    def pause_s(self, losses: int) -> float:
        """How long to wait before the next worker, after so many losses in a row."""
        return 0.0 if losses < 2 else min(self.backoff_most_s, self.backoff_s * 2.0 ** min(losses - 2, 30))


class LossKind(StrEnum):
    """Why a worker was lost; the label of the metric."""

    DIED = "died"
    HUNG = "hung"
    MEMORY = "memory"
    UNLOADABLE = "unloadable"

    @property
    def is_lasting(self) -> bool:
        """Whether the next worker finds the same, where this one was lost before it had loaded its model."""
        return self in (LossKind.MEMORY, LossKind.UNLOADABLE)


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """A worker cannot be used any more. `mend` is what to do about a model that cannot be loaded."""

    kind: LossKind
    reason: str
    hint: str = ""

    def error(self, path: Path) -> ModelError:
        """The error of a load that lost its first worker so."""
        kind = WorkerLostError if self.kind is LossKind.DIED else ModelError
        return kind(path, self.reason, self.hint)

    def sentence(self, tenant: str) -> str:
        """What became of the worker; of a model that cannot be loaded the worker tells the reason alone."""
        is_bare = self.kind is LossKind.UNLOADABLE
        return f"the worker of {tenant!r} cannot load its model: {self.reason}" if is_bare else self.reason


def overdue(launches: Iterable[Pending], passed_ns: int, limits: WorkerLimits) -> str | None:
    """Let `passed_ns` pass for the launches that were sent; say which of them takes too long, if one does.

    A launch counts from when it is first seen here, so that none is given up early.
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
