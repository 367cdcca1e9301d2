"""The HTTP server: a thread with an event loop, a socket, and the connections that come to it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cotenant.errors import CotenantError
from cotenant.serve.frontend.http_app import http_app
from cotenant.serve.frontend.http_connection import READ_BYTES, App, HttpConnection
from cotenant.serve.frontend.http_head import HeadParser
from cotenant.wire.api import Backend
from cotenant.wire.codec import Limits

_BACKLOG = 1024
_LOOK_EVERY_S = 1.0
_CANCELLED_S = 0.3
"""Time that requests have to end once they are cancelled, when the server stops."""


def listen(host: str, port: int, what: str) -> socket.socket:
    """Bind a TCP socket for one process alone (no SO_REUSEPORT); port 0 takes a free one.

    Raises CotenantError that names the address and how to choose another.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise CotenantError(f"{what}: host {host!r}, port {port} is no address to listen on: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise CotenantError(
            f"{what}: cannot listen on {host} port {port}: {error.strerror}; stop what uses the port or choose another "
            "one (0 takes any free one)"
        ) from error
    return bound


class HttpServer:
    """Serves a backend over HTTP from a thread of its own; constructing it does no I/O."""

    def __init__(
        self, backend: Backend, host: str = "127.0.0.1", port: int = 8000, limits: Limits | None = None
    ) -> None:
        self._backend = backend
        self._host = host
        self._port = port
        self._limits = limits or Limits()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._grace_s = 0.0
        self._stop: asyncio.Event | None = None

    def start(self) -> int:
        """Listen and serve; return the port, which is a free one where 0 was asked for.

        Raises CotenantError when the address cannot be listened on, or no thread can be started.
        """
        if self._thread is not None:
            raise CotenantError("HTTP: the server has been started already")
        bound = listen(self._host, self._port, "HTTP")
        try:
            app = http_app(self._backend, self._limits)
        except CotenantError:
            bound.close()
            raise
        is_up = threading.Event()
        failure: list[BaseException] = []

        def serve() -> None:
            try:
                with asyncio.Runner(loop_factory=_new_loop) as runner:
                    self._loop = runner.get_loop()
                    runner.run(self._serve(app, bound, is_up.set))
            except BaseException as error:
                failure.append(error)
                raise
            finally:
                app.close()
                bound.close()
                is_up.set()

        thread = threading.Thread(target=serve, name="cotenant-http", daemon=True)
        thread.start()
        is_up.wait()
        if failure:
            raise CotenantError(f"HTTP: the server did not start: {failure[0]!r}") from failure[0]
        self._thread = thread
        port: int = bound.getsockname()[1]
        return port

    def stop(self, grace_s: float = 5.0) -> None:
        """Stop listening, let requests in progress end for `grace_s` seconds, then cancel them. Safe to repeat."""
        loop, thread, stop = self._loop, self._thread, self._stop
        if loop is None or thread is None or stop is None or not thread.is_alive():
            return
        self._grace_s = grace_s
        with suppress(RuntimeError):  # it has ended meanwhile
            loop.call_soon_threadsafe(stop.set)
        thread.join(grace_s + 2 * _CANCELLED_S)

    async def _serve(self, app: App, bound: socket.socket, told: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        connections: set[HttpConnection] = set()
        heads, scratch = HeadParser(), memoryview(bytearray(READ_BYTES))
        server = await loop.create_server(
            lambda: HttpConnection(app, self._limits, heads, scratch, connections), sock=bound, backlog=_BACKLOG
        )
        told()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _LOOK_EVERY_S)
                break
            now_s = loop.time()
            for connection in list(connections):
                connection.look(now_s)
        server.close()
        for connection in list(connections):
            connection.shut_down()
        await _until_empty(connections, self._grace_s)
        for connection in list(connections):
            connection.give_up()
        await _until_empty(connections, _CANCELLED_S)


async def _until_empty(connections: set[Any], limit_s: float) -> None:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + limit_s
    while connections and loop.time() < until_s:
        await asyncio.sleep(min(0.01, limit_s))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # as on Windows
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
