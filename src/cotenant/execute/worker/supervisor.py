"""Supervisor of one tenant's worker process: starts it, receives its completions, and replaces it when it fails.

Each worker has one thread. It sleeps in `receive`, or, if a server's loop reads completions, until the loop passes a
message on. A slow tick wakes it for the watchdog and the memory limit. The core is notified of failures by events, and
decides what they mean for scheduling.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from cotenant.core.actions import Launch
from cotenant.core.events import Event, TenantResumed, TenantSuspended
from cotenant.execute.batches import Batches, BatchTensors, reason_of
from cotenant.execute.protocol import OnEnd, OnExpanded, Readers, Timing, WorkerStarter, WorkerStatus
from cotenant.execute.sessions import SessionSet, Wanted
from cotenant.execute.threads.lanes import left_s
from cotenant.execute.worker.channel import (
    Ended,
    ExpandRun,
    Keep,
    Message,
    Open,
    Ready,
    Refused,
    ReleaseBatch,
    SessionsPrepared,
    Started,
    WasReset,
)
from cotenant.execute.worker.completion_affinity import CompletionAffinity
from cotenant.execute.worker.kept_workers import KeptWorker
from cotenant.execute.worker.lane_link import LaneLink, Pending
from cotenant.execute.worker.limits import LossKind, WorkerLimits, WorkerLoss, overdue
from cotenant.execute.worker.process import WorkerProcess, WorkerState
from cotenant.shortages import report_error, start_thread
from cotenant.work import Share

_log = logging.getLogger("cotenant.workers")
_MIB = 1 << 20
_S = 1_000_000_000
_KILLED_S = 1.0
"""Wait in seconds for the end of a killed worker when the server stops."""


class WorkerSupervisor:
    """Supervises one tenant's worker. Implements `Loaded`."""

    def __init__(
        self,
        model: Open,
        limits: WorkerLimits,
        batches: Batches,
        on_event: Callable[[Event], None],
        readers: Readers | None = None,
        starter: WorkerStarter | None = None,
    ) -> None:
        self.tenant = model.tenant
        self._model = model
        self._sessions = SessionSet(model)
        self._limits = limits
        self._batches = batches
        self._on_event = on_event
        self._readers = readers
        self._starter = starter
        self._received: SimpleQueue[Message | Exception | None] = SimpleQueue()
        """Messages that the loop passes to the thread."""
        self._lock = threading.Lock()  # held briefly: a waiting thread may hold the driver's lock
        self._telling = threading.Lock()  # held while the core is notified: never take it under the driver's lock
        self._state = WorkerState.DOWN
        self._closing = threading.Event()
        self._first = threading.Event()
        self._refusal: WorkerLoss | None = None
        self._process: WorkerProcess | KeptWorker | None = None
        self._links: dict[tuple[int, ...], LaneLink] = {}
        self._pending: dict[int, Pending] = {}
        self._problem = ""
        self.lasting_problem = ""
        """Why the next worker would fail as the last one did, or ""."""
        self._losses: Counter[str] = Counter()
        self._affinity = CompletionAffinity()
        self._start_ns = self._load_ns = self._idle_ns = self._last_ns = 0
        name, work = f"cotenant-worker-{self.tenant}", lambda: self._sessions.hold(self._keep)
        self._thread = threading.Thread(target=work, name=name, daemon=True)

    def load(self) -> None:
        """Start the worker and wait until it has loaded the model. Raises ModelError when it cannot."""
        try:
            start_thread(self._thread, f"the model of {self.tenant!r} is not loaded")
        except RuntimeError:
            loss = self._lost(LossKind.DIED, "cannot be started: the system has no thread for it")
            raise loss.error(Path(self._model.path)) from None
        self._first.wait()
        if self._refusal is not None:
            self.join()
            raise self._refusal.error(Path(self._model.path))

    def start(self, launch: Launch, batch: BatchTensors, on_end: OnEnd) -> str | None:
        """Run a launch; never blocks. Returns the reason if it cannot be started; `on_end` is not called then."""
        with self._lock:
            if self._closing.is_set() or self._state is WorkerState.DOWN:
                return self._problem or f"the worker of {self.tenant!r} is not there any more"
            pending = self._pending[launch.id] = Pending(launch, on_end, batch)
            return self._put(pending) if self._state is WorkerState.UP else None

    def expand(self, launch: int, share: Share, on_expanded: OnExpanded) -> None:
        """Ask the worker to expand a launch; does nothing for a launch of another worker."""
        if (pending := self._pending.get(launch)) is not None:
            pending.on_expanded = on_expanded
            self._send(ExpandRun(launch, share.cores))

    def release(self, batch: int) -> None:
        """Forget the tensors of a batch."""
        self._send(ReleaseBatch(batch))

    def prepare(self, sessions: Wanted, shapes: dict[str, tuple[int, ...]]) -> None:
        """Let the worker load further sessions and run each once; blocks. Raises ModelError when it cannot.

        Does not wait for a worker that is down or lost: the next one loads them with the model.
        """
        self._sessions.prepare(sessions, shapes, self._send)

    def keep(self, sessions: Wanted) -> None:
        """Let the worker unload all other sessions."""
        self._sessions.keep(sessions, self._send)

    def announce(self) -> None:
        """The core knows the tenant from now on: notify it if the worker has been lost meanwhile."""
        with self._telling:
            if self._state is not WorkerState.UP:
                self._on_event(TenantSuspended(self.tenant, self._problem))

    def close(self) -> None:
        """Refuse new launches, and end the worker after those under way."""
        with self._telling, self._lock:
            self._closing.set()
            if self._state is WorkerState.UP:
                self._shut_if_idle()
            elif self._process is not None:
                self._process.kill()

    def join(self, until_s: float | None = None) -> None:
        """Wait until the worker has ended. It is killed at `until_s` of the monotonic clock."""
        if (thread := self._thread) is threading.current_thread() or thread.ident is None:
            return
        thread.join(left_s(until_s))
        with self._lock:
            if self._process is not None:
                self._process.kill()
        thread.join(_KILLED_S)

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs; the worker may still exist then."""
        return self._thread.is_alive()

    @property
    def problem(self) -> str:
        """Why the tenant cannot be served at the moment, or ""."""
        return "" if self._state is WorkerState.UP else self._problem

    @property
    def status(self) -> WorkerStatus:
        """For the metrics page."""
        with self._lock:
            process, times = self._process, (self._start_ns, self._load_ns)
            pid, resident = (process.pid, process.resident_bytes()) if process else (0, 0)
            cpu_s = process.cpu_s() if process else 0.0
            return WorkerStatus(self.tenant, pid, resident, *times, dict(self._losses), cpu_s)

    # --- the supervisor's thread --------------------------------------------------------------------------------------

    def _keep(self) -> None:
        losses = 0
        while not self._closing.wait(self._limits.pause_s(losses)):
            began = time.monotonic()
            try:
                loss = self._open()
                if loss is None:
                    self._resume()
                    loss = self._serve()
            except Exception as error:  # after any error, launches end and the tenant gets another worker
                _log.exception("supervising the worker of %r failed", self.tenant)
                loss = self._broken(error)
            if loss is None:
                break
            losses = 1 if time.monotonic() - began >= self._limits.settled_s else losses + 1
            self._lose(loss)
            if not self._first.is_set():
                self._refusal = loss
                self._first.set()
                return
        self._end_process()
        if not self._first.is_set():  # closed before the first worker started
            self._refusal = self._lost(LossKind.DIED, "is not needed any more")
            self._first.set()

    def _open(self) -> WorkerLoss | None:
        """Start a worker and let it load the model."""
        began = time.monotonic_ns()
        with self._lock:
            self._affinity.leave()  # the worker inherits the cores of this thread
        while (left := self._left()) is not None:
            if self._adopt(left, began):
                return None
        try:
            made = self._starter.start if self._starter else WorkerProcess
            process: WorkerProcess | KeptWorker = made(self.tenant, self._model.lane_nice)
        except OSError as error:
            report_error(error, f"the worker of {self.tenant!r} is not started")
            return self._lost(LossKind.DIED, f"cannot be started ({error.strerror})")
        with self._lock:
            self._process = process
            if self._closing.is_set():  # `close` was called before the process existed
                process.kill()
        process.channel.wait_at_most(self._limits.tick_s)
        at = began
        while True:
            try:
                message = process.channel.receive()
            except TimeoutError:
                if time.monotonic_ns() - began < self._limits.load_limit_s * _S:
                    continue
                return self._lost(LossKind.HUNG, f"had not loaded its model after {self._limits.load_limit_s:g} s")
            except Exception as error:
                return self._broken(error)
            at, last = time.monotonic_ns(), at
            match message:
                case Started():
                    self._start_ns = at - last
                    process.channel.post(self._sessions.begin())
                case Ready() | SessionsPrepared(""):
                    self._load_ns = at - began - self._start_ns
                    if (loss := self._look(process)) is not None:
                        return loss
                    with self._lock:
                        rest = self._sessions.rest()
                        if rest is None:
                            self._state = WorkerState.UP
                            self.lasting_problem = ""
                            return None
                    process.channel.post(rest)
                case SessionsPrepared(reason):
                    return WorkerLoss(LossKind.UNLOADABLE, reason)
                case Refused(reason, hint):
                    return WorkerLoss(LossKind.UNLOADABLE, reason, hint)
                case _:
                    return self._died()

    def _left(self) -> KeptWorker | None:
        """A worker of the engine before this one, before the first worker of this supervisor is there."""
        left: KeptWorker | None = None
        if self._starter is not None and not self._first.is_set():
            left = self._starter.adopt(self.tenant)
        return left

    def _adopt(self, worker: KeptWorker, began_ns: int) -> bool:
        """Take over a worker of the engine before this one, which has the model loaded; end one that does not fit."""
        with self._lock:
            self._process = worker
            if self._closing.is_set():
                worker.kill()
        problem = self._await_reset(worker)
        if not problem and (loss := self._look(worker)) is not None:
            problem = loss.reason
        if problem:
            _log.warning("the worker of %r is not taken over: it %s; another one is started", self.tenant, problem)
            self._end_process()
            return False
        self._load_ns = time.monotonic_ns() - began_ns
        with self._lock:
            self._state = WorkerState.UP
        worker.channel.post(Keep(tuple(threads for threads, _ in self._sessions.model.sessions)))
        _log.info("the worker of %r is taken over with its model loaded", self.tenant)
        return True

    def _await_reset(self, worker: KeptWorker) -> str:
        """Wait until a worker is reset. Why it cannot be taken over, or ""."""
        worker.channel.wait_at_most(self._limits.tick_s)
        until_s = max(worker.reset_s + self._limits.hang_floor_s, time.monotonic() + self._limits.tick_s)
        while True:
            message: Message | None = None
            try:
                message = worker.channel.receive()
            except TimeoutError:
                if time.monotonic() < until_s:
                    worker.channel.flush()
                    continue
                return f"has not ended its launches after {self._limits.hang_floor_s:g} s"
            except Exception as error:
                return f"cannot be understood ({reason_of(error)})"
            if message is None:
                return "has ended"
            if isinstance(message, WasReset) and message.token == worker.token:
                return self._sessions.adopt(message.model)
            if time.monotonic() >= until_s:
                return "talks on"

    def _serve(self) -> WorkerLoss | None:
        """Receive completions until the worker is lost; None if it has ended as requested."""
        process, readers = self._process, self._readers
        assert process is not None
        self._last_ns, self._idle_ns = time.monotonic_ns(), 0
        if readers is None:
            return self._take(process, process.channel.receive)
        descriptor, self._received = process.channel.fileno(), SimpleQueue()
        readers.add(descriptor, partial(self._read, process, self._received))
        try:
            return self._take(process, self._wait)
        finally:  # before launches end for another reason, so that each ends once
            readers.remove(descriptor)

    def _wait(self) -> Message | None:
        """The next message that the loop passes to this thread. Raises as `Channel.receive`."""
        try:
            received = self._received.get(timeout=self._limits.tick_s)
        except Empty:
            raise TimeoutError("no message has come") from None
        if isinstance(received, Exception):
            raise received
        return received

    def _read(self, process: WorkerProcess | KeptWorker, received: SimpleQueue[Message | Exception | None]) -> None:
        """Receive messages on the loop: completions are handled there, other messages and the end go to the thread."""
        message: Message | Exception | None
        while True:
            try:
                message = process.channel.receive(waits=False)
            except TimeoutError:
                break
            except Exception as error:
                message = error
            if self._is_taken(message):
                continue
            received.put(message)
            if not isinstance(message, SessionsPrepared):
                assert self._readers is not None
                self._readers.remove(process.channel.fileno())
                return
        process.channel.flush()
        if self._limits.memory_bytes is not None and process.resident_bytes() > self._limits.memory_bytes:
            received.put(TimeoutError())  # like a tick: check now

    def _take(self, process: WorkerProcess | KeptWorker, receive: Callable[[], Message | None]) -> WorkerLoss | None:
        while True:
            message, is_tick = None, False
            try:
                message = receive()
            except TimeoutError:
                is_tick = True
            except Exception as error:
                return self._broken(error)
            if not is_tick and not self._is_taken(message) and not isinstance(message, SessionsPrepared):
                with self._lock:
                    is_done = self._closing.is_set() and not self._pending
                return None if is_done else self._died()
            process.channel.flush()
            if (loss := self._look(process)) is not None:
                return loss
            if isinstance(message, SessionsPrepared):  # after the check: its sessions fit into the memory limit
                self._sessions.end(message.reason)

    def _is_taken(self, message: object) -> bool:
        """Whether a message was a completion or an expansion, which is handled here."""
        if isinstance(message, Ended):
            self._ended(message)
        elif isinstance(message, ExpandRun):
            self._pending[message.launch].on_expanded(message.launch)
        else:
            return False
        return True

    def _ended(self, message: Ended) -> None:
        pending = self._pending.get(message.launch)
        if pending is None:
            return
        launch, error, link = pending.launch, message.error, self._links[pending.launch.share.cores]
        began = time.monotonic_ns()
        try:
            if error is None and launch.part:  # the worker joins tasks: one of its messages has all outputs
                joined = self._batches.join(launch, (), {}, link.outputs(message.outputs))
                if joined is not None:
                    self._batches.finish(launch, *joined)
            elif error is None and launch.last:
                self._batches.finish(launch, pending.batch, link.outputs(message.outputs))
            elif error is None:
                self._batches.pause(launch, pending.batch, {})
        except Exception as caught:
            error = reason_of(caught)
        input_ns, output_ns = pending.input_ns + message.input_ns, message.output_ns + time.monotonic_ns() - began
        failed: list[tuple[Pending, str]] = []
        with self._lock:
            del self._pending[launch.id]
            while (following := link.next()) is not None:
                problem = self._put(following)
                if problem is None:
                    break
                failed.append((following, problem))
            if self._closing.is_set():
                self._shut_if_idle()
        timing = Timing(input_ns, message.infer_ns, output_ns, message.task_times, message.steal_ns, began)
        pending.on_end(launch.id, error, timing)
        for each, problem in failed:
            each.on_end(each.launch.id, problem, Timing())

    def _look(self, process: WorkerProcess | KeptWorker) -> WorkerLoss | None:
        """Check the memory limit at every message, and the watchdog once a tick."""
        limit = self._limits.memory_bytes
        if limit is not None and (held := process.resident_bytes()) > limit:
            sizes = f"of {limit / _MIB:g} MiB (it held {held / _MIB:.0f} MiB)"
            return self._lost(LossKind.MEMORY, f"exceeded its memory limit {sizes}")
        now = time.monotonic_ns()
        tick_ns = int(self._limits.tick_s * _S)
        if now - self._last_ns < tick_ns:
            return None
        # A late tick means that this process was delayed as well (a stopped or overloaded machine).
        passed, self._last_ns = min(now - self._last_ns, 2 * tick_ns), now
        with self._lock:
            hung = overdue(self._pending.values(), passed, self._limits)
            if hung is not None:
                return self._lost(LossKind.HUNG, f"hung: {hung}")
            if self._closing.is_set() and not self._pending:
                self._idle_ns += passed
                if self._idle_ns > self._limits.hang_floor_s * _S:
                    process.kill()  # it does not end as requested
        return None

    def _resume(self) -> None:
        """The worker is ready: notify waiting callers. Ends it if the supervisor was closed meanwhile."""
        with self._telling:
            with self._lock:
                if self._closing.is_set():
                    self._shut_if_idle()
            if not self._first.is_set():
                self._first.set()
            elif not self._closing.is_set():
                times = self._start_ns / _S, self._load_ns / _S
                _log.info("the worker of %r is up again: replaced in %.2f s, loaded in %.2f s", self.tenant, *times)
                self._on_event(TenantResumed(self.tenant))

    def _lose(self, loss: WorkerLoss) -> None:
        """Notify the core before the launches end, so that it starts no further launches; then end them."""
        if self._process is not None:
            self._process.kill()
        if loss.kind.is_lasting:
            self._sessions.end(loss.reason)  # the next worker does not try them again
        with self._telling:
            with self._lock:
                self._problem = reason = loss.sentence(self.tenant)
                was_up = self._state is WorkerState.UP
                self.lasting_problem = reason if loss.kind.is_lasting and not was_up else ""
                if was_up:
                    self._state = WorkerState.FAILING
                self._losses[loss.kind.value] += 1
            if not self._closing.is_set() and self._first.is_set():
                _log.error("%s", reason)
                if was_up:
                    self._on_event(TenantSuspended(self.tenant, reason))
        with self._lock:
            self._state = WorkerState.DOWN
            ended, self._pending = list(self._pending.values()), {}
        self._end_process()
        for pending in ended:
            pending.on_end(pending.launch.id, loss.reason, Timing(pending.input_ns))

    def _end_process(self) -> None:
        with self._lock:
            self._state = WorkerState.DOWN
            process, self._process = self._process, None
            links, self._links = list(self._links.values()), {}
            for link in links:
                link.close()
        self._sessions.end("")
        if process is not None:
            process.kill()
            process.wait()
            process.close()

    def _put(self, pending: Pending) -> str | None:
        """Pass a launch to its lane; returns the reason if that fails. Called under the lock."""
        assert self._process is not None
        cores = pending.launch.share.cores
        if self._readers is None:
            self._affinity.follow(self._thread, [each.launch.share.cores[0] for each in self._pending.values()])
        try:
            link = self._links.get(cores)
            if link is None:
                link = self._links[cores] = LaneLink(self._process.channel, cores)
            link.put(pending)
        except Exception as error:
            if isinstance(error, OSError):
                report_error(error, f"a launch of {self.tenant!r} fails")
            del self._pending[pending.launch.id]
            if pending.launch.work.start > 0:
                self._process.channel.post(ReleaseBatch(pending.launch.batch))
            return reason_of(error)
        return None

    def _send(self, message: Message) -> bool:
        """Send a message to the worker, if it is up."""
        with self._lock:
            if self._state is not WorkerState.UP or self._process is None:
                return False
            self._process.channel.post(message)
            return True

    def _shut_if_idle(self) -> None:
        """Ask the worker to end if no launch is under way. Called under the lock."""
        if not self._pending and self._process is not None:
            for link in self._links.values():
                link.shut()
            self._process.channel.shut()

    def _died(self) -> WorkerLoss:
        assert self._process is not None
        self._process.kill()  # it may only have closed its end
        return self._lost(LossKind.DIED, self._process.wait())

    def _broken(self, error: Exception) -> WorkerLoss:
        return self._lost(LossKind.DIED, f"cannot be understood ({reason_of(error)})")

    def _lost(self, kind: LossKind, how: str) -> WorkerLoss:
        return WorkerLoss(kind, f"the worker of {self.tenant!r} {how}")
