"""The HTTP server: uvicorn with its own thread, event loop and socket."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

import uvicorn

from cotenant.errors import CotenantError
from cotenant.serve.frontend.http_app import http_app
from cotenant.serve.frontend.http_protocol import bounded_protocol
from cotenant.wire.api import Backend
from cotenant.wire.codec import Limits

_BACKLOG = 1024
_KEEP_ALIVE_S = 65
"""Longer than the 60 s of common load balancers, so that these never reuse a connection just closed."""
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


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.up.set()


class HttpServer:
    """Serves a backend over HTTP from a thread of its own; constructing it does no I/O."""

    def __init__(
        self, backend: Backend, host: str = "127.0.0.1", port: int = 8000, limits: Limits | None = None
    ) -> None:
        self._backend = backend
        self._host = host
        self._port = port
        self._limits = limits or Limits()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen and serve; return the port, which is a free one where 0 was asked for.

        Raises CotenantError when the address cannot be listened on, or no thread can be started.
        """
        if self._server is not None:
            raise CotenantError("HTTP: the server has been started already")
        bound = listen(self._host, self._port, "HTTP")
        try:
            app = http_app(self._backend, self._limits)
        except CotenantError:
            bound.close()
            raise
        config = uvicorn.Config(
            app,
            http=bounded_protocol(self._limits.max_header_bytes),
            loop="auto",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        server = _Server(config)
        failure: list[BaseException] = []

        def serve() -> None:
            try:
                server.run(sockets=[bound])
            except BaseException as error:
                failure.append(error)
                raise
            finally:
                app.close()
                bound.close()
                server.up.set()

        self._thread = threading.Thread(target=serve, name="cotenant-http", daemon=True)
        self._thread.start()
        server.up.wait()
        if failure:
            raise CotenantError(f"HTTP: the server did not start: {failure[0]!r}") from failure[0]
        self._server = server
        port: int = bound.getsockname()[1]
        return port

    def stop(self, grace_s: float = 5.0) -> None:
        """Stop listening, let requests in progress end for `grace_s` seconds, then cancel them. Safe to repeat."""
        server, thread = self._server, self._thread
        if server is None or thread is None or not thread.is_alive():
            return
        settings: Any = server.config
        settings.timeout_graceful_shutdown = grace_s
        server.should_exit = True
        thread.join(grace_s + _CANCELLED_S)
        if thread.is_alive():
            server.force_exit = True
            thread.join(_CANCELLED_S)
