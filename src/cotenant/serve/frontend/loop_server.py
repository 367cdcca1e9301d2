"""Server of one protocol on an event loop: a listening socket and its connections."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from cotenant.errors import CotenantError
from cotenant.serve.engine.loop import ServeLoop
from cotenant.serve.frontend.admin_access import Access, access_at
from cotenant.serve.frontend.off_loop import OffLoop
from cotenant.serve.frontend.open_connections import OpenConnections
from cotenant.serve.listening import BACKLOG, listen
from cotenant.wire.api import Backend
from cotenant.wire.codec import Limits

_TIMEOUT_CHECK_S = 1.0
_CANCELLED_S = 0.3
"""Seconds that cancelled requests have to end when the server stops."""


class ServedApp(Protocol):
    """Request handler of all connections."""

    def close(self) -> None:
        """Refuse further work, without waiting for requests in progress."""


class ServedConnection(Protocol):
    """A connection as its server drives it. All methods run on the loop."""

    def check_timeouts(self, now_s: float) -> None:
        """Enforce time limits; called every second with the time of the loop."""

    def retire(self) -> None:
        """End the connection after its next answer, as another process serves new connections."""

    def shut_down(self) -> None:
        """Finish the requests in progress and accept no other."""

    def abort(self) -> None:
        """Answer the requests in progress at once with an error."""


A = TypeVar("A", bound=ServedApp)
C = TypeVar("C", bound=ServedConnection)


class LoopServer(ABC, Generic[A, C]):
    """Server on an event loop, by default its own. Subclasses define the protocol."""

    speaks = ""

    def __init__(
        self,
        backend: Backend,
        host: str,
        port: int,
        limits: Limits | None,
        loop: ServeLoop | None,
        access: Access | None,
    ) -> None:
        self._backend = backend
        self._host = host
        self._port = port
        self._limits = limits or Limits()
        self._access = access or access_at(host)
        self._is_own = loop is None
        self._loop = loop
        self._app: A | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[C] = set()
        self._opened: OpenConnections[C] | None = None
        self._timeout_task: asyncio.Task[None] | None = None

    @abstractmethod
    def _make_app(self, off_loop: OffLoop) -> A: ...

    @abstractmethod
    def _make_connections(self, app: A) -> Any: ...

    @abstractmethod
    def _make_connection(self, connections: Any) -> Any: ...

    def start(self, listening: socket.socket | None = None) -> int:
        """Listen and serve. Returns the port: a free one if the configured port is 0.

        `listening`: an open socket to use instead; the address then determines only the access.
        Raises CotenantError when the address cannot be listened on, or no thread can be started.
        """
        if self._app is not None:
            raise CotenantError(f"{self.speaks}: the server is already started")
        bound = listening or listen(self._host, self._port, self.speaks)
        port: int = bound.getsockname()[1]
        try:
            if self._loop is None:
                self._loop = ServeLoop()
                self._loop.start()
            self._app = app = self._make_app(self._loop.shared(OffLoop))
            self._loop.submit(self._listen(app, bound)).result()
        except BaseException:
            bound.close()
            if self._is_own and self._loop is not None:
                self._loop.stop()
                self._loop = None
            raise
        return port

    def retire(self, limit_s: float) -> None:
        """Stop listening, and end each connection after its next answer. Returns when no connection is left, or after
        `limit_s` seconds; `stop` follows."""
        if self._loop is not None and limit_s > 0:
            self._loop.submit(self._retire(limit_s)).result()

    def stop(self, grace_s: float = 5.0) -> None:
        """Stop listening, wait `grace_s` seconds for requests in progress, then cancel them. Safe to repeat."""
        app, loop, self._app = self._app, self._loop, None
        if app is None or loop is None:
            return
        with suppress(TimeoutError):
            loop.submit(self._end(grace_s)).result(grace_s + 2 * _CANCELLED_S)
        app.close()
        if self._is_own:
            loop.stop()
            self._loop = None

    async def _listen(self, app: A, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connections: OpenConnections[C] = self._make_connections(app)
        self._opened, self._connections = connections, connections.all
        self._server = await loop.create_server(lambda: self._make_connection(connections), sock=bound, backlog=BACKLOG)
        self._timeout_task = loop.create_task(self._check_timeouts())

    async def _check_timeouts(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TIMEOUT_CHECK_S)
            for connection in list(self._connections):
                connection.check_timeouts(loop.time())

    async def _retire(self, limit_s: float) -> None:
        if self._server is not None and self._opened is not None:
            self._server.close()
            self._opened.is_retiring = True  # for connections that are accepted and not yet made
            for connection in list(self._connections):
                connection.retire()
            await _until_empty(self._connections, limit_s)

    async def _end(self, grace_s: float) -> None:
        if self._timeout_task is not None:
            self._timeout_task.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.shut_down()
        await _until_empty(self._connections, grace_s)
        for connection in list(self._connections):
            connection.abort()
        await _until_empty(self._connections, _CANCELLED_S)


async def _until_empty(connections: set[Any], limit_s: float) -> None:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + limit_s
    while connections and loop.time() < until_s:
        await asyncio.sleep(min(0.01, limit_s))
