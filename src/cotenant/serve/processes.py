"""Supervisor of a server's processes: starts, restarts and stops an engine and its front-ends.

The supervisor owns the client sockets and the engine's socket. It replaces a process that dies; no connection is
refused meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from cotenant.config import ServerConfig
from cotenant.errors import CotenantError
from cotenant.execute.worker.child import ChildProcess
from cotenant.execute.worker.worker_keeper import WorkerKeeper
from cotenant.serve.client_sockets import ClientSockets
from cotenant.serve.listening import BACKLOG

ENGINE = "engine"
FRONTEND_NICE = 7
"""Nice value of front-ends: below the lanes that run models (`execute.registry.LANE_NICE`)."""
_MOST_BYTES = 1 << 20
_SETTLED_S = 30.0
"""Uptime in seconds after which the restart backoff is reset."""
_PAUSES_S = (0.0, 0.2, 1.0, 5.0)
"""Restart backoff in seconds, by the number of consecutive losses."""
_MOST_LOSSES = 2
"""Engines lost in a row that leave their workers to the next one. After more of them, workers start anew."""
_END_S = 1.35
"""Seconds after the deadline of a stop before processes are killed. Enough for an engine to abort and close its trace,
and less than `cli.signals.LATE_S`."""
_log = logging.getLogger("cotenant.server")


class StartServing(Struct, frozen=True, tag=True):
    """First message to a process, with its sockets: repository and settings."""

    repository: str
    settings: ServerConfig
    path: str
    """Path of the engine's socket for front-ends."""
    records: bool = True
    stale: bool = False
    frontends: int = 1
    replaces: bool = False
    """Front-ends accept connections only when all models are loaded, however long that takes."""


class Stop(Struct, frozen=True, tag=True):
    """To a process: finish current work by this time of the monotonic clock."""

    until_s: float
    retires: bool = False
    """To a front-end: another server accepts connections from now on. Connections end after their next answer."""


class HangUp(Struct, frozen=True, tag=True):
    """To the engine: SIGHUP was received."""


class Up(Struct, frozen=True, tag=True):
    """From a process: it serves. The engine reports what it serves."""

    report: dict[str, Any] = {}


class Unable(Struct, frozen=True, tag=True):
    """From a process: it cannot serve, with the reason."""

    reason: str


def loads_folder(path: str) -> Path:
    """Where engines keep the results of loads for each other; `path` is that of `StartServing`."""
    return Path(path).with_name("loads")


class ControlChannel:
    """One end of the channel between a process and its supervisor (SOCK_SEQPACKET: one packet a message)."""

    def __init__(self, bound: socket.socket) -> None:
        self._socket = bound
        self._decode = msgspec.json.Decoder(StartServing | Stop | HangUp | Up | Unable).decode
        self.descriptors: list[int] = []
        """File descriptors that came with the last message."""

    @classmethod
    def pair(cls) -> tuple[ControlChannel, socket.socket]:
        """Create a channel and the socket of its other end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def fileno(self) -> int:
        """File descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message. Errors are ignored: `receive` reports a process that has ended."""
        try:
            socket.send_fds(self._socket, [msgspec.json.encode(message)], descriptors)
        except OSError as error:
            _log.debug("a process of the server cannot be reached: %s", error)

    def receive(self) -> StartServing | Stop | HangUp | Up | Unable | None:
        """Wait for the next message; None if the other end is closed."""
        try:
            data, self.descriptors, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, 8)
        except OSError:
            return None
        return self._decode(data) if data else None

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


@dataclass(slots=True)
class _Kept:
    """A supervised process."""

    name: str
    module: str
    nice: int
    process: ChildProcess | None = None
    control: ControlChannel | None = None
    is_up: bool = False
    began_s: float = 0.0
    losses: int = 0
    due_s: float | None = None
    """Monotonic time of the next start; None while it runs."""
    sockets: list[socket.socket] = field(default_factory=list)


class ServerProcesses:
    """Supervisor of an engine and `frontends` front-end processes.

    One thread calls all methods except `wake`, and lives as long as the processes. Raises CotenantError when an address
    cannot be listened on.
    """

    def __init__(self, repository: Path, settings: ServerConfig, *, frontends: int, records: bool, stale: bool) -> None:
        self.sockets = ClientSockets(settings.server)
        self.report: dict[str, Any] = {}
        """What the engine serves, as it reported; empty before it is up."""
        self._folder = tempfile.mkdtemp(prefix="cotenant-")
        self._woken, self._waking = socket.socketpair()
        self._waking.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._keeper = WorkerKeeper(self._selector)
        self._stop_s: float | None = None
        self._hangs_up = False
        path = os.path.join(self._folder, "engine")
        self._engine_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._engine_socket.bind(path)
            self._engine_socket.listen(BACKLOG)
        except BaseException:
            self._let_go()
            raise
        is_next = self.sockets.replaces
        self._start = StartServing(str(repository), settings, path, records, stale, frontends, replaces=is_next)
        engine = _Kept(ENGINE, "cotenant.serve.engine_process", 0, sockets=[self._engine_socket])
        self._all = [engine]
        for number in range(1, frontends + 1):
            made = _Kept(f"frontend-{number}", "cotenant.serve.frontend_process", FRONTEND_NICE)
            made.sockets = list(self.sockets.all.values())
            self._all.append(made)

    def run(self, on_up: Any) -> None:
        """Start all processes and supervise them until `wake` stops them. `on_up` is called once, when all are up.

        Raises CotenantError when the engine cannot serve, or a process cannot be started at first.
        """
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        try:
            for each in self._all:
                self._begin(each)
            is_reported = False
            while self._stop_s is None:
                self._turn()
                if not is_reported and all(each.is_up for each in self._all):
                    is_reported = True
                    on_up()
                    self._start = msgspec.structs.replace(self._start, replaces=False)
        except BaseException:
            self.kill()
            raise
        finally:
            self._end()

    def wake(self, stop_s: float | None = None) -> None:
        """Stop by this time of the monotonic clock; without a time, pass on SIGHUP. Safe on any thread."""
        if stop_s is None:
            self._hangs_up = True
        else:
            self._stop_s = stop_s
        try:
            self._waking.send(b"\0")
        except OSError:  # it is full: it will be woken
            pass

    def kill(self) -> None:
        """Kill all processes."""
        self._keeper.kill()
        for each in self._all:
            if each.process is not None:
                each.process.kill()

    # --- supervision ----------------------------------------------------------------------------------------------

    def _begin(self, kept: _Kept) -> None:
        control, theirs = ControlChannel.pair()
        try:
            kept.process = ChildProcess(kept.module, kept.name, theirs.fileno(), kept.nice)
        except OSError as error:
            control.close()
            raise CotenantError(f"the process {kept.name!r} cannot be started ({error.strerror})") from None
        finally:
            theirs.close()
        kept.control, kept.began_s, kept.due_s = control, time.monotonic(), None
        with contextlib.ExitStack() as until_sent:
            sockets = list(kept.sockets)
            if kept.name == ENGINE:
                if kept.losses > _MOST_LOSSES:
                    self._keeper.kill()
                    shutil.rmtree(loads_folder(self._start.path), ignore_errors=True)
                sockets.append(until_sent.enter_context(self._keeper.connect()))
            control.send(self._start, [each.fileno() for each in sockets])
        self._selector.register(control, selectors.EVENT_READ, kept)

    def _turn(self) -> None:
        """Wait for the next message, signal or restart time, and handle it."""
        due_s = min((each.due_s for each in self._all if each.due_s is not None), default=None)
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            self._take(key.data)
        self._pass_hangup()
        now_s = time.monotonic()
        for each in self._all:
            if each.due_s is not None and each.due_s <= now_s:
                try:
                    self._begin(each)
                except CotenantError as error:
                    self._pause(each, str(error))

    def _pass_hangup(self) -> None:
        if self._hangs_up and (control := self._all[0].control) is not None:
            self._hangs_up = False
            control.send(HangUp())

    def _take(self, source: Any) -> None:
        """Something can be read: for `wake`, from a process, or from the keeper of workers."""
        if source is None:
            self._woken.recv(4096)
        elif isinstance(source, _Kept):
            self._hear(source)
        else:
            source()

    def _hear(self, kept: _Kept) -> None:
        assert kept.control is not None
        match kept.control.receive():
            case Up(report):
                kept.is_up = True
                if kept.name == ENGINE:
                    self.report = report
                if kept.losses:
                    _log.info("%s is up again after %.2f s", kept.name, time.monotonic() - kept.began_s)
            case Unable(reason):
                if not self.report:
                    raise CotenantError(reason)
                _log.error("%s cannot serve: %s", kept.name, reason)
            case None:
                self._pause(kept, self._buried(kept))

    def _buried(self, kept: _Kept) -> str:
        """Close the channel of a process that has ended; returns how it ended."""
        process, control = kept.process, kept.control
        assert process is not None
        assert control is not None
        self._selector.unregister(control)
        control.close()
        if kept.name == ENGINE:
            self._keeper.disconnect()
        process.kill()
        how = process.wait()
        process.close()
        kept.process = kept.control = None
        return how

    def _pause(self, kept: _Kept, how: str) -> None:
        now_s = time.monotonic()
        if not kept.is_up and not self.report:
            raise CotenantError(f"the process {kept.name!r} of the server {how}; its log says more")
        kept.losses = 0 if kept.is_up and now_s - kept.began_s > _SETTLED_S else kept.losses
        pause_s = _PAUSES_S[min(kept.losses, len(_PAUSES_S) - 1)]
        kept.losses += 1
        kept.is_up, kept.due_s = False, now_s + pause_s
        _log.error("%s %s; another one is started%s", kept.name, how, f" in {pause_s:g} s" if pause_s else "")

    # --- the end --------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Stop the engine, which drains, and then the front-ends, which write its last answers. If another server has
        the sockets, the front-ends end first: the engine answers the requests on their connections meanwhile."""
        self._pass_hangup()
        until_s = self._stop_s or time.monotonic()
        retires = self.sockets.is_taken
        groups = self._all[:1], self._all[1:]
        for group in reversed(groups) if retires else groups:
            for each in group:
                if each.control is not None:
                    each.control.send(Stop(until_s, retires))
            while any(each.control is not None for each in group):
                left_s = until_s + _END_S - time.monotonic()
                found = self._selector.select(max(0.0, left_s))
                for key, _ in found:
                    if not isinstance(key.data, _Kept):
                        self._take(key.data)
                    elif (control := key.data.control) is not None and control.receive() is None:
                        self._buried(key.data)
                if not found and left_s <= 0:
                    for each in group:
                        if each.process is not None:
                            _log.error("%s had not ended: it is killed", each.name)
                            each.process.kill()
        self._let_go()

    def _let_go(self) -> None:
        self._keeper.close()
        self.sockets.close()
        for each in (self._engine_socket, self._woken, self._waking):
            each.close()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)
