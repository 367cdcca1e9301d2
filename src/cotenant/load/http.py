"""Minimal HTTP/1.1 client: sends prepared requests on a pool of keep-alive connections.

General clients need several times the processor time for a request, which a server on the same machine would lack.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from cotenant.load.errors import LoadError


class HttpAnswer(NamedTuple):
    """A response; names of headers are lower-case."""

    status: int
    body: bytes
    headers: Mapping[bytes, bytes]


class HttpPool:
    """Pool of connections to one server. `request` opens one if none is idle, and keeps it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise LoadError(f"HTTP address is {url!r}, expected one like http://localhost:8000")
        self.url = url
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._netloc = parts.netloc.rpartition("@")[2]
        self._base = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    def prepare(self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> bytes:
        """Bytes of a request. `path` starts with a slash and is quoted."""
        lines = [f"{method} {self._base}{path} HTTP/1.1", f"Host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body or method != "GET":
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    async def request(self, message: bytes, timeout_s: float) -> HttpAnswer:
        """Send a prepared request once, and wait for the whole response.

        A kept connection that the server has closed is not used. Raises TimeoutError after `timeout_s`, and OSError
        (ConnectionError) if no connection can be opened or it breaks after data was sent.
        """
        async with asyncio.timeout(timeout_s):
            while self._idle:
                connection = self._idle.pop()
                if connection.is_quiet():
                    return await self._exchange(connection, message)
                connection.abort()
            return await self._exchange(await self._connect(), message)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._forget), self._host, self._port, ssl=self._tls
        )
        self._open.add(connection)
        return connection

    async def _exchange(self, connection: _Connection, message: bytes) -> HttpAnswer:
        try:
            answer = await connection.exchange(message)
        except BaseException:
            connection.abort()  # its response may still come, and must not reach another query
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.abort()
        return answer

    def _forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close every connection."""
        self._idle.clear()
        for connection in list(self._open):
            connection.abort()


class _Connection(asyncio.Protocol):
    """A connection with one exchange at a time. The parser calls the methods `on_*`."""

    def __init__(self, lost: Callable[[_Connection], None]) -> None:
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._body: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._poll = select.poll()
        self.reusable = False

    def is_quiet(self) -> bool:
        """Whether it is open and has received nothing since the last response, neither bytes nor a close."""
        return self._transport is not None and not self._transport.is_closing() and not self._poll.poll(0)

    async def exchange(self, message: bytes) -> HttpAnswer:
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._answer = asyncio.get_running_loop().create_future()
        self._body = []
        self._headers = {}
        self.reusable = False
        self._transport.write(message)
        return await self._answer

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # transports of uvloop do not inherit from it
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the server's answer is not HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost(self)
        reason = f" ({exc})" if exc else ""
        self._fail(ConnectionResetError(f"the server closed the connection{reason}"))

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # an interim response
            return
        self.reusable = bool(self._parser.should_keep_alive())
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(HttpAnswer(self._parser.get_status_code(), b"".join(self._body), self._headers))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
