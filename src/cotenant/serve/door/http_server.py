"""The HTTP server: uvicorn with its own thread, event loop and socket."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
import time
from collections import deque
from typing import Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from cotenant.errors import CotenantError
from cotenant.serve.door.http_app import ARRIVAL, http_app
from cotenant.serve.door.http_control import error_answer
from cotenant.wire.api import Backend
from cotenant.wire.codec import Limits

_BACKLOG = 1024
_KEEP_ALIVE_S = 65
"""Longer than the 60 s of common load balancers, so that these never reuse a connection just closed."""
_CANCELLED_S = 0.3
"""Time that requests have to end once they are cancelled, when the server stops."""
_PIPELINED = 16
"""Requests of a connection that are read ahead of the one that is answered."""
_SILENT_MS_AT = 52
"""Where Linux's `tcp_info` has the milliseconds since the last data came (`tcpi_last_data_recv`)."""


def readable_since(connection: Any) -> int:
    """The monotonic time, in nanoseconds, since when the bytes just read from a TCP connection could be read.

    The kernel notes it for the last piece that came, to one of its ticks (1 to 4 ms). Where it does not tell: now.
    """
    now = time.monotonic_ns()
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SILENT_MS_AT + 4)
        silent_ms: int = struct.unpack_from("I", told, _SILENT_MS_AT)[0]
    except (AttributeError, OSError, struct.error):  # no Linux, no TCP, or the connection is gone
        return now
    return now - silent_ms * 1_000_000


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


def bounded_protocol(max_header_bytes: int) -> type[asyncio.Protocol]:
    """Make uvicorn's protocol with a limit on request line and headers, and with errors in the form of ours.

    `Upgrade` is ignored, as HTTP allows. Requests of a connection are answered in order, malformed ones too, which end
    it; a client that goes away has gone from all of them.
    """

    class BoundedProtocol(HttpToolsProtocol):
        _in_headers = True
        _header_bytes = 0
        _tail = b""
        _plain_head = b""
        """What the parser takes for a change of protocol, without that; empty where nothing else is left of it."""
        _last_words: bytes | None = None
        """Written before the connection is closed, when those in progress are answered; what still comes is ignored."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._unanswered: deque[RequestResponseCycle] = deque()
            # uvloop's stand-in for the socket takes three times as long to ask; the descriptor stays the transport's.
            self._socket = socket.socket(fileno=transport.get_extra_info("socket").fileno())

        def connection_lost(self, exc: Exception | None) -> None:
            self._socket.detach()
            for cycle in self._unanswered:  # uvicorn tells the last one alone
                self._leave(cycle)
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._in_headers = True
            super().on_message_begin()
            self.scope[ARRIVAL] = readable_since(self._socket)  # type: ignore[literal-required]

        def on_headers_complete(self) -> None:
            if self.parser.should_upgrade():
                method = self.parser.get_method()
                fields = b"".join([b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"])
                head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, self.parser.get_http_version().encode(), fields)
                self._plain_head = b"" if method == b"CONNECT" else head
                return
            super().on_headers_complete()
            self._in_headers = False
            self._header_bytes = 0
            self._unanswered.append(self.cycle)
            if len(self._unanswered) <= _PIPELINED:
                self.flow.resume_reading()  # uvicorn reads no further than the second: who left would not be noticed

        def data_received(self, data: bytes) -> None:
            if self._last_words is not None:
                return
            if self._in_headers:
                # A piece beyond the limit is fine when the headers end within the limit: the rest of it is body.
                room = max_header_bytes - self._header_bytes
                if len(data) > room and b"\r\n\r\n" not in self._tail + data[: room + 4]:
                    self._refuse(431, f"request line and headers have more than {max_header_bytes} bytes, the limit")
                    return
                self._header_bytes += len(data)
                self._tail = data[-3:]
            self._unset_keepalive_if_required()
            self._parse(memoryview(data))

        def _parse(self, rest: memoryview) -> None:
            """Parse what was received. A parser stops behind the head of a request that asks for another protocol, as
            if the body were in that one; a new parser is given the head without the wish.
            """
            while True:
                try:
                    if self._plain_head:
                        head, self._plain_head = self._plain_head, b""
                        self.parser.feed_data(head)
                    self.parser.feed_data(rest)
                    return
                except HttpParserUpgrade as stop:
                    rest = rest[stop.args[0] :]
                    self.parser = HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
                    if not self._plain_head:
                        self._refuse(405, "method CONNECT is not allowed, expected GET or POST")
                        return
                except HttpParserError:
                    self._refuse(400, "the bytes received are no valid HTTP/1.1 request")
                    return

        def on_message_complete(self) -> None:
            if self.parser.should_upgrade():
                return
            super().on_message_complete()
            self._in_headers = True
            self._header_bytes = 0

        def on_response_complete(self) -> None:
            self._unanswered.popleft()
            super().on_response_complete()
            if self._last_words is not None and not self._unanswered:
                self._close()

        def _refuse(self, status: int, message: str) -> None:
            answer = error_answer(status, message)
            body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
            self._last_words = STATUS_LINE[status] + (
                b"content-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (answer.content_type, len(body), body)
            )
            if not self._in_headers:  # it is the body of the last request that is wrong
                if self.cycle.response_started:
                    self._last_words = b""
                else:
                    self._leave(self._unanswered.pop())
                    if self.pipeline:
                        self.pipeline.popleft()
            if not self._unanswered:
                self._close()

        def _leave(self, cycle: RequestResponseCycle) -> None:
            """Tell a request that nobody waits for its answer."""
            cycle.disconnected = True
            cycle.message_event.set()

        def _close(self) -> None:
            if self._last_words and not self.transport.is_closing():
                self.transport.write(self._last_words)
            self.transport.close()

    return BoundedProtocol


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

        Raises CotenantError when the address cannot be listened on.
        """
        if self._server is not None:
            raise CotenantError("HTTP: the server has been started already")
        bound = listen(self._host, self._port, "HTTP")
        app = http_app(self._backend, self._limits)
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
