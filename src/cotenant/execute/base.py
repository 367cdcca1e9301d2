"""What executors of real models have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from cotenant.core.actions import Launch
from cotenant.core.events import Event
from cotenant.execute.batches import Batches
from cotenant.execute.place import CorePlace, Place
from cotenant.execute.protocol import OnGrew, WorkerStatus
from cotenant.work import Share


class BaseExecutor:
    """Keeps tensors in `Batches`, computes on cores, and has neither workers nor trouble: who has, says so."""

    lanes_change = True
    has_parts = False
    """Whether a batch may run as several launches side by side."""

    def __init__(self) -> None:
        self.on_event: Callable[[Event], None] = lambda _: None
        self._batches = Batches(has_parts=self.has_parts)
        self._lock = threading.Lock()
        self.put = self._batches.put
        self.take = self._batches.take
        self.discard = self._batches.discard

    @property
    def kept(self) -> int:
        """How many queries and batches tensors are kept of."""
        return len(self._batches)

    @property
    def place(self) -> Place:
        """See ModelExecutor."""
        return CorePlace()

    def enqueue(self, launch: Launch) -> None:
        """See Executor: a launch is begun when it starts."""

    def grow(self, launch: int, share: Share, on_grew: OnGrew) -> bool:
        """See Executor: a launch goes on as it was."""
        return False

    def release(self, batch: int) -> None:
        """See Executor."""
        self._batches.release(batch)

    def announce(self, tenant: str) -> None:
        """See ModelExecutor: there is nothing to say."""

    def cancel_loads(self) -> None:
        """See ModelExecutor: a load in this process goes on to its end."""

    def problem(self, tenant: str) -> str:
        """See ModelExecutor: there is none."""
        return ""

    def lasting_problem(self, tenant: str) -> str:
        """See ModelExecutor: what cannot be served without workers, cannot be for good."""
        return self.problem(tenant)

    def workers(self) -> list[WorkerStatus]:
        """See ModelExecutor: there are none."""
        return []

    def launch_counts(self) -> Mapping[str, int]:
        """See ModelExecutor: there is none."""
        return {}
