"""Worker processes of an engine that outlive it: the engine's side of `worker_keeper`.

The keeper starts and buries the processes. This side holds the channel of each worker, and offers those of an earlier
engine to the supervisors of their tenants.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import secrets
import signal
import socket
import threading
import time
from contextlib import suppress

from cotenant.execute.worker.channel import Channel, Expect, Reset
from cotenant.execute.worker.worker_keeper import (
    KeeperLink,
    NextWorker,
    NoMoreWorkers,
    OfferedWorker,
    StartWorker,
    WorkerEnded,
    WorkerNotStarted,
    WorkerStarted,
)
from cotenant.linux import cpu_s, open_statm, resident_bytes

_log = logging.getLogger("cotenant.workers")


class KeptWorker:
    """A worker process that is a child of the keeper. Has the methods of `WorkerProcess`.

    `token` is that of the Reset that a worker of an earlier engine was sent at `reset_s` of the monotonic clock.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pid = 0
        self.token = 0
        self.reset_s = 0.0
        self.error = 0
        """Why the process cannot be started, as an `errno`."""
        self.is_known = threading.Event()
        """Set once it runs, or cannot be started."""
        self._how = ""
        self._has_ended = threading.Event()
        self._pidfd = self._statm = -1

    def run(self, pid: int, pidfd: int) -> None:
        """The process runs. `pidfd` belongs to this object from now on."""
        self.pid, self._pidfd = pid, pidfd
        with suppress(OSError):  # it has ended already
            statm = open_statm(pid)
            try:
                signal.pidfd_send_signal(pidfd, 0)  # else the number may be that of another process by now
                self._statm = statm
            except OSError:
                os.close(statm)
        self.is_known.set()

    def end(self, how: str) -> None:
        """The process has ended."""
        self._how = how
        self._has_ended.set()

    def is_there(self) -> bool:
        """Whether it could be started, and has not ended."""
        self.is_known.wait()
        return not self.error and not self._has_ended.is_set()

    def resident_bytes(self) -> int:
        """Resident memory, shared pages included; 0 once it is dead."""
        return 0 if self._statm < 0 or self._has_ended.is_set() else resident_bytes(self._statm)

    def cpu_s(self) -> float:
        """Processor time that it has used, all threads, in seconds; 0.0 once it is dead."""
        return 0.0 if self._has_ended.is_set() else cpu_s(self.pid)

    def kill(self) -> None:
        """End the process at once."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> str:
        """Wait for the end of the process and say how it came about."""
        self._has_ended.wait()
        return self._how

    def close(self) -> None:
        """Release the channel and what tells of the process; only after `wait`."""
        self.channel.close()
        for each in (self._pidfd, self._statm):
            if each >= 0:
                os.close(each)
        self._pidfd = self._statm = -1


class KeptWorkers:
    """The workers of this engine, and those of the engine before it. Thread-safe.

    Every worker of an earlier engine gets a Reset at once, so that its launches end while models are being loaded.
    """

    def __init__(self, end: socket.socket) -> None:
        self._link = KeeperLink(end)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._workers: dict[int, KeptWorker] = {}
        """Processes that have not ended, by number."""
        self._offered: dict[str, list[KeptWorker]] = {}
        """Workers of an earlier engine, by tenant."""
        self._expected: dict[str, KeptWorker] = {}
        """Workers that wait for their model, by tenant."""
        self._are_offered = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="cotenant-kept-workers", daemon=True)
        self._thread.start()
        self._link.send(NextWorker())

    def expect(self, tenant: str, nice: int, suffix: str) -> None:
        """Start a worker for the next `start` of this tenant, which imports what files that end in `suffix` need.

        Does not wait for it. Starts none for a tenant that has one, or one of an earlier engine. Raises OSError.
        """
        with self._lock:
            is_there = tenant in self._expected or tenant in self._offered
        if not is_there:
            worker = self._begin(tenant, nice)
            worker.channel.post(Expect(suffix))
            with self._lock:
                unused = self._expected.pop(tenant, None)
                self._expected[tenant] = worker
            _bury(unused)

    def forget(self, tenant: str) -> None:
        """End the worker of `expect` that no `start` has taken."""
        with self._lock:
            unused = self._expected.pop(tenant, None)
        _bury(unused)

    def start(self, tenant: str, nice: int) -> KeptWorker:
        """Start a worker process, or give the one of `expect`. Raises OSError."""
        with self._lock:
            worker = self._expected.pop(tenant, None)
        if worker is not None and not worker.is_there():
            _bury(worker)
            worker = None
        worker = worker or self._begin(tenant, nice)
        worker.is_known.wait()
        if worker.error:
            worker.channel.shut()
            worker.channel.close()
            raise OSError(worker.error, os.strerror(worker.error))
        return worker

    def _begin(self, tenant: str, nice: int) -> KeptWorker:
        channel, theirs = Channel.pair()
        worker, number = KeptWorker(channel), next(self._numbers)
        try:
            with self._lock:
                self._workers[number] = worker
            error = self._link.send(StartWorker(number, tenant, nice), [theirs.fileno(), channel.fileno()])
        finally:
            theirs.close()
        if error:
            self._refuse(number, error)
        return worker

    def adopt(self, tenant: str) -> KeptWorker | None:
        """A worker of an earlier engine for this tenant, which nothing else is given. It was sent a Reset."""
        self._are_offered.wait()
        with self._lock:
            found = self._offered.get(tenant)
            return found.pop() if found else None

    def release(self) -> None:
        """End the workers that no model has adopted: all models are loaded."""
        self._are_offered.wait()
        with self._lock:
            left, self._offered = self._offered, {}
        for tenant, workers in left.items():
            for worker in workers:
                _log.warning("a worker of %r from before the restart is not needed: it is ended", tenant)
                _bury(worker)

    def _listen(self) -> None:
        while True:
            message, descriptors = self._link.receive()
            match message:
                case WorkerStarted(number, pid) if descriptors:
                    self._workers[number].run(pid, *descriptors)
                case WorkerStarted(number):
                    self._refuse(number, errno.EMFILE)
                case WorkerNotStarted(number, error):
                    self._refuse(number, error)
                case OfferedWorker():
                    if len(descriptors) > 1:
                        self._take(message, *descriptors)
                    self._link.send(NextWorker())
                case NoMoreWorkers():
                    self._are_offered.set()
                case WorkerEnded(number, how):
                    with self._lock:
                        ended = self._workers.pop(number, None)
                    if ended is not None:
                        ended.end(how)
                case _:  # the keeper has ended, and this process ends with it
                    self._are_offered.set()
                    return

    def _refuse(self, number: int, error: int) -> None:
        """A worker is not there: cannot be started, or this process has no descriptor left for it."""
        with self._lock:
            worker = self._workers.pop(number)
        worker.error = error
        worker.is_known.set()

    def _take(self, offer: OfferedWorker, pidfd: int, channel: int) -> None:
        worker = KeptWorker(Channel(socket.socket(fileno=channel)))
        worker.run(offer.pid, pidfd)
        worker.token, worker.reset_s = secrets.randbits(62), time.monotonic()
        with self._lock:
            self._workers[offer.number] = worker
            self._offered.setdefault(offer.tenant, []).append(worker)
        worker.channel.post(Reset(worker.token))


def _bury(worker: KeptWorker | None) -> None:
    """End a worker that no supervisor has, if there is one."""
    if worker is None:
        return
    if worker.is_there():
        worker.kill()
        worker.wait()
    worker.close()
