"""Starts worker processes for an engine, and keeps them for the next engine when this one dies.

Runs in the process that looks after the engine, which imports no numerical library. A worker is a child of this process
and ends with it. See docs/decisions/0076-workers-outlive-the-engine.md.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import selectors
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import Struct

from cotenant.execute.worker.child import ChildProcess

_MOST_BYTES = 64 << 10
_MOST_DESCRIPTORS = 2
WORKER_MODULE = "cotenant.execute.worker.main"
_log = logging.getLogger("cotenant.workers")


class StartWorker(Struct, frozen=True, tag=True):
    """To the keeper, with both ends of the worker's channel, the worker's first: start a worker process."""

    number: int
    tenant: str
    nice: int


class NextWorker(Struct, frozen=True, tag=True):
    """To the keeper: offer the next worker of an earlier engine."""


class WorkerStarted(Struct, frozen=True, tag=True):
    """From the keeper, with a pidfd: a worker process runs."""

    number: int
    pid: int


class WorkerNotStarted(Struct, frozen=True, tag=True):
    """From the keeper: the system cannot start a worker process, for this `errno`."""

    number: int
    error: int


class OfferedWorker(Struct, frozen=True, tag=True):
    """From the keeper, with a pidfd and the engine's end of the channel: a worker that an earlier engine started."""

    number: int
    tenant: str
    pid: int


class NoMoreWorkers(Struct, frozen=True, tag=True):
    """From the keeper: all workers of earlier engines were offered."""


class WorkerEnded(Struct, frozen=True, tag=True):
    """From the keeper: a worker process has ended, as `ChildProcess.wait` says."""

    number: int
    how: str


ToKeeper = StartWorker | NextWorker
FromKeeper = WorkerStarted | WorkerNotStarted | OfferedWorker | NoMoreWorkers | WorkerEnded


class KeeperLink:
    """One end of the socket between an engine and the keeper. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._decode = msgspec.msgpack.Decoder(ToKeeper | FromKeeper).decode

    def fileno(self) -> int:
        """The descriptor of this end."""
        return self._socket.fileno()

    def send(self, message: ToKeeper | FromKeeper, descriptors: Sequence[int] = ()) -> int:
        """Send a message and copies of descriptors. Gives 0, or the `errno` with which the system refuses that."""
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(message)], descriptors)
        except OSError as error:
            _log.debug("%s is not sent: %s", type(message).__name__, error)
            return error.errno or errno.EIO
        return 0

    def receive(self) -> tuple[ToKeeper | FromKeeper | None, list[int]]:
        """The next message, None where the other process has ended; its descriptors belong to the caller."""
        try:
            found = socket.recv_fds(self._socket, _MOST_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return None, []
        return (self._decode(found[0]) if found[0] else None), found[1]

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


@dataclass(slots=True)
class _Worker:
    """A worker process. `channel` is a copy of the engine's end of its channel. `number` is that of the engine."""

    number: int
    tenant: str
    process: ChildProcess
    pidfd: int
    channel: int
    is_offered: bool = True
    """Whether the present engine knows the worker."""
    is_killed: bool = False
    """Whether it is ending, and is offered to no engine."""


class WorkerKeeper:
    """The workers of all engines. Data of what it registers with the selector is a function to call. For one thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._link: KeeperLink | None = None
        self._workers: list[_Worker] = []

    def connect(self) -> socket.socket:
        """A socket for an engine that is about to start. It is offered all workers that there are."""
        self.disconnect()
        for number, worker in zip(itertools.count(-1, -1), self._workers, strict=False):
            worker.number, worker.is_offered = number, worker.is_killed
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link = KeeperLink(ours)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear, self._link))
        return theirs

    def disconnect(self) -> None:
        """The engine has ended. Its workers stay."""
        link, self._link = self._link, None
        if link is not None:
            self._selector.unregister(link.fileno())
            link.close()

    def kill(self) -> None:
        """Kill all workers. The selector's loop buries them. Any thread may call it."""
        for worker in list(self._workers):
            worker.is_killed = True
            worker.process.kill()

    def close(self) -> None:
        """Kill all workers and wait for their ends."""
        self.disconnect()
        self.kill()
        for worker in list(self._workers):
            self._bury(worker)

    def _hear(self, link: KeeperLink) -> None:
        if link is not self._link:  # it was closed after the selector had found something there
            return
        message, descriptors = link.receive()
        match message:
            case StartWorker():
                try:
                    if len(descriptors) < _MOST_DESCRIPTORS:
                        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                    worker = self._start(message, *descriptors)
                except OSError as error:
                    link.send(WorkerNotStarted(message.number, error.errno or errno.EAGAIN))
                    for each in descriptors:
                        os.close(each)
                else:
                    started = WorkerStarted(worker.number, worker.process.pid)
                    if link.send(started, [worker.pidfd]):
                        link.send(started)  # the engine does without, and ends it
            case NextWorker():
                self._offer(link)
            case _:  # the engine has ended
                self.disconnect()

    def _start(self, wanted: StartWorker, theirs: int, ours: int) -> _Worker:
        """Start a worker process. Raises OSError, and closes no descriptor then."""
        process = ChildProcess(WORKER_MODULE, wanted.tenant, theirs, wanted.nice)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            process.close()
            raise
        os.close(theirs)
        worker = _Worker(wanted.number, wanted.tenant, process, pidfd, ours)
        self._workers.append(worker)
        self._selector.register(pidfd, selectors.EVENT_READ, partial(self._bury, worker))
        return worker

    def _offer(self, link: KeeperLink) -> None:
        for worker in self._workers:
            if not worker.is_offered:
                worker.is_offered = True
                offer = OfferedWorker(worker.number, worker.tenant, worker.process.pid)
                if not link.send(offer, [worker.pidfd, worker.channel]):
                    return
                worker.is_killed = True  # no engine can have it
                worker.process.kill()
        link.send(NoMoreWorkers())

    def _bury(self, worker: _Worker) -> None:
        """Release everything of a worker that has ended."""
        self._workers.remove(worker)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        os.close(worker.channel)
        how = worker.process.wait()
        worker.process.close()
        if worker.is_offered and self._link is not None:
            self._link.send(WorkerEnded(worker.number, how))
