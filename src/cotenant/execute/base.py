"""What executors of real models have in common."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue

from cotenant.core.actions import Launch
from cotenant.core.events import Event
from cotenant.execute.batches import Batches, reason_of
from cotenant.execute.core_target import CoreTarget
from cotenant.execute.protocol import OnEnd, OnExpanded, Readers, TargetDevice, Timing, WorkerStarter, WorkerStatus
from cotenant.execute.threads.lanes import left_s
from cotenant.work import Share

_log = logging.getLogger("cotenant.execute")


class BaseExecutor:
    """Keeps tensors in `Batches`, computes on cores, and has neither workers nor trouble: who has, says so."""

    lanes_change = True
    has_parts = False
    """Whether a batch may run as several launches side by side."""

    def __init__(self) -> None:
        self.on_event: Callable[[Event], None] = lambda _: None
        self.readers: Readers | None = None
        self.starter: WorkerStarter | None = None
        self._batches = Batches(has_parts=self.has_parts)
        self._lock = threading.Lock()
        self.put = self._batches.put
        self.take = self._batches.take
        self.discard = self._batches.discard
        self._late: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._late_thread = threading.Thread(target=self._end_late, name="cotenant-failed-launches", daemon=True)
        self._late_thread.start()  # now, and not in the middle of a decision's actions

    @property
    def max_answer_bytes(self) -> int:
        """See ModelExecutor."""
        return self._batches.max_answer_bytes

    @max_answer_bytes.setter
    def max_answer_bytes(self, limit: int) -> None:
        self._batches.max_answer_bytes = limit

    @property
    def kept(self) -> int:
        """How many queries and batches tensors are kept of."""
        return len(self._batches)

    @property
    def target(self) -> TargetDevice:
        """See ModelExecutor."""
        return CoreTarget()

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        """See Executor. What `_start` raises ends the launch, from another thread: this one holds the driver's lock."""
        try:
            self._start(launch, on_end)
        except Exception as error:
            self._end_later(launch, reason_of(error), on_end)

    def _start(self, launch: Launch, on_end: OnEnd) -> None:
        """Start a launch; what it raises is the reason why that cannot be, and then `on_end` is not called."""
        raise NotImplementedError

    def _end_later(self, launch: Launch, reason: str, on_end: OnEnd) -> None:
        self._late.put(partial(on_end, launch.id, reason, Timing()))

    def _end_late(self) -> None:
        """End launches that could not be started, until there is None."""
        while (end := self._late.get()) is not None:
            try:
                end()
            except Exception:  # the others still have to end
                _log.exception("ending a launch failed")

    def close(self, until_s: float | None = None) -> None:
        """See Executor. Launches that could not be started have ended then, or it is `until_s`."""
        self._late.put(None)
        if threading.current_thread() is not self._late_thread:
            self._late_thread.join(left_s(until_s))

    def enqueue(self, launch: Launch) -> None:
        """See Executor: a launch is begun when it starts."""

    def expand(self, launch: int, share: Share, on_expanded: OnExpanded) -> bool:
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
