"""The base class of executors of real models."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
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
    """Keeps tensors in `Batches`, computes on cores, without workers. Other executors override these methods."""

    lanes_change = True
    has_tasks = False
    """Whether a batch may run as several launches side by side."""
    has_parallel_loads = False
    """Whether `load` may run on several threads at once."""

    def __init__(self) -> None:
        self.on_event: Callable[[Event], None] = lambda _: None
        self.readers: Readers | None = None
        self.starter: WorkerStarter | None = None
        self._batches = Batches(has_tasks=self.has_tasks)
        self._lock = threading.Lock()
        self.put = self._batches.put
        self.take = self._batches.take
        self.discard = self._batches.discard
        self._late: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._late_thread = threading.Thread(target=self._end_late, name="cotenant-failed-launches", daemon=True)
        self._late_thread.start()  # now, and not in the middle of a decision's actions

    def expecting(self, tenant: str, suffix: str) -> AbstractContextManager[None]:
        """Does nothing: there are no workers."""
        return nullcontext()

    @property
    def max_answer_bytes(self) -> int:
        """Largest size of the outputs of one launch, in bytes."""
        return self._batches.max_answer_bytes

    @max_answer_bytes.setter
    def max_answer_bytes(self, limit: int) -> None:
        self._batches.max_answer_bytes = limit

    @property
    def kept(self) -> int:
        """Number of queries and batches of which tensors are kept."""
        return len(self._batches)

    @property
    def target(self) -> TargetDevice:
        """The cores of this machine."""
        return CoreTarget()

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        """Run a launch. An exception of `_start` is reported from another thread: this one holds the driver's lock."""
        try:
            self._start(launch, on_end)
        except Exception as error:
            self._end_later(launch, reason_of(error), on_end)

    def _start(self, launch: Launch, on_end: OnEnd) -> None:
        """Start a launch. An exception is the reason why it fails; then `on_end` must not be called."""
        raise NotImplementedError

    def _end_later(self, launch: Launch, reason: str, on_end: OnEnd) -> None:
        """Report a failed launch from the thread of `_end_late`."""
        self._late.put(partial(on_end, launch.id, reason, Timing()))

    def _end_late(self) -> None:
        """Report launches that could not be started, until the queue gives None."""
        while (end := self._late.get()) is not None:
            try:
                end()
            except Exception:  # the other launches still have to end
                _log.exception("ending a launch failed")

    def close(self, until_s: float | None = None) -> None:
        """Wait until launches that could not be started are reported, or until `until_s` of the monotonic clock."""
        self._late.put(None)
        if threading.current_thread() is not self._late_thread:
            self._late_thread.join(left_s(until_s))

    def enqueue(self, launch: Launch) -> None:
        """Ignore the announcement: a launch begins when it is started."""

    def expand(self, launch: int, share: Share, on_expanded: OnExpanded) -> bool:
        """False: launches cannot be expanded."""
        return False

    def release(self, batch: int) -> None:
        """Forget the intermediate tensors of a batch."""
        self._batches.release(batch)

    def announce(self, tenant: str) -> None:
        """Do nothing: no tenant has a state to report."""

    def cancel_loads(self) -> None:
        """Do nothing: a load in this process runs to its end."""

    def problem(self, tenant: str) -> str:
        """Always "": every loaded tenant can be served."""
        return ""

    def lasting_problem(self, tenant: str) -> str:
        """The same as `problem`: without workers no problem is temporary."""
        return self.problem(tenant)

    def workers(self) -> list[WorkerStatus]:
        """No worker processes."""
        return []

    def launch_counts(self) -> Mapping[str, int]:
        """No counts: all launches run in the same way."""
        return {}
