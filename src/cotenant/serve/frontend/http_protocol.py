"""HTTP/1.1 of one connection: uvicorn's protocol, with limits, with answers in order, and with a proper end."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from cotenant.serve.frontend.http_app import ARRIVAL
from cotenant.serve.frontend.http_control import error_answer

_PIPELINED = 16
"""Requests of a connection that are parsed and not answered yet; what the client has sent beyond stays bytes."""
_SLICES = 16
"""Heads, bodies and chunks that are parsed of one connection before others have their turn."""
_CHUNK_BYTES = 20
"""What the frame of a chunk may take: sixteen digits and two ends of lines. Further bytes count as header."""
_LINGER_S, _LINGER_BYTES = 2.0, 4 << 20
"""How long, and how much, the server reads and ignores after the last answer of a connection. The system answers unread
bytes with a reset, and the client's side then drops answers that it has not read."""
_BLANK_LINE = b"\n\r\n"
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


def bounded_protocol(max_header_bytes: int) -> type[asyncio.Protocol]:
    """Make uvicorn's protocol with a limit on all that is no body, and with errors in the form of ours.

    The limit is for the request line and headers of a request, and again for the extensions of its chunks and its
    trailers, which are not kept. `Upgrade` is ignored, as HTTP allows. Requests of a connection are answered in order,
    malformed ones too, which end it. A client that goes away, or closes its side alone, has gone from all of them.
    """

    class BoundedProtocol(HttpToolsProtocol):
        _in_headers = True
        _unparsed = b""
        _at = 0
        """Where in the bytes above the parser stands."""
        _body_left = 0
        """Bytes to come of a body of declared length; 0 for one in chunks."""
        _counted_bytes = 0
        """Of this request, what counts against the limit."""
        _tail = b""
        """The last two bytes that were parsed outside of bodies of declared length."""
        _left_bytes = _LINGER_BYTES
        """What is still read after the last answer."""
        _is_stopping = False
        _is_scheduled = False
        """The loop has been asked to parse on."""
        _plain_head = b""
        """What the parser takes for a change of protocol, without that; empty where nothing else is left of it."""
        _last_words: bytes | None = None
        """Written before the connection is closed, when those in progress are answered; what still comes is ignored."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.flow = self._flow = _HeldFlow(transport)
            self._lasting = _LastingTransport(transport, self._end)
            self._unanswered: deque[RequestResponseCycle] = deque()
            # uvloop's stand-in for the socket takes three times as long to ask; the descriptor stays the transport's.
            self._socket = socket.socket(fileno=transport.get_extra_info("socket").fileno())

        def connection_lost(self, exc: Exception | None) -> None:
            self._socket.detach()
            self._unparsed = b""
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
            self._counted_bytes = 0
            self._body_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
            self._unanswered.append(self.cycle)
            self.cycle.transport = self._lasting  # type: ignore[assignment]
            self.flow.resume_reading()  # uvicorn reads no further than the second, and would notice no leaving client

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_headers:
                super().on_header(name, value)

        def on_chunk_header(self) -> None:
            self._counted_bytes -= _CHUNK_BYTES

        def on_body(self, body: bytes) -> None:
            if not self._body_left:
                self._counted_bytes -= len(body)
            super().on_body(body)

        def data_received(self, data: bytes) -> None:
            if self._lasting.is_over:
                self._left_bytes -= len(data)
                if self._left_bytes < 0:
                    self.transport.close()
                return
            if self._last_words is not None:
                return
            self._unset_keepalive_if_required()
            self._unparsed, self._at = self._unparsed[self._at :] + data, 0
            if not self._is_scheduled:
                self._parse_some()

        def _parse_some(self) -> None:
            """Parse slices, each of which ends a head or a body at most, until enough requests wait for answers."""
            self._is_scheduled = False
            for _ in range(_SLICES):
                if self._last_words is not None or self._lasting.is_over or self.transport.is_closing():
                    self._unparsed, self._at = b"", 0
                if self._at == len(self._unparsed) or self._is_full():
                    break
                self._parse_slice()
            was_held, self._flow.is_held = self._flow.is_held, self._at < len(self._unparsed)
            if not self._flow.is_held:
                self._unparsed, self._at = b"", 0
                if was_held:
                    self.flow.resume_reading()
                return
            self.flow.pause_reading()
            if not self._is_full():
                self._parse_soon()

        def _is_full(self) -> bool:
            """Whether the next request has to wait for answers."""
            return self._in_headers and len(self._unanswered) >= _PIPELINED

        def _parse_soon(self) -> None:
            if not self._is_scheduled:
                self._is_scheduled = True
                self.loop.call_soon(self._parse_some)

        def _parse_slice(self) -> None:
            at, end = self._at, len(self._unparsed)
            if self._body_left:
                end = min(end, at + self._body_left)
                self._parse(memoryview(self._unparsed)[at:end])
                self._body_left -= end - at
            else:
                end = self._end_of_slice(at)
                self._counted_bytes += end - at
                if self._in_headers and self._counted_bytes > max_header_bytes:
                    self._refuse(431, f"request line and headers have more than {max_header_bytes} bytes, the limit")
                    return
                self._tail = (self._tail + self._unparsed[max(at, end - 2) : end])[-2:]
                self._parse(memoryview(self._unparsed)[at:end])
                self._counted_bytes = max(0, self._counted_bytes)
                self._are_chunks_within()
            self._at = end

        def _are_chunks_within(self) -> bool:
            """Refuse a body in chunks that has more beside it than the limit."""
            if self._counted_bytes > max_header_bytes and not self._in_headers and self._last_words is None:
                text = f"chunk extensions and trailers have more than {max_header_bytes} bytes, the limit"
                self._refuse(431, text)
            return self._last_words is None

        def _end_of_slice(self, at: int) -> int:
            """Where the next blank line ends, as heads and bodies in chunks do; all that there is where none is."""
            joint = (self._tail + self._unparsed[at : at + 2]).find(_BLANK_LINE)
            if joint >= 0:
                return at + joint + len(_BLANK_LINE) - len(self._tail)
            found = self._unparsed.find(_BLANK_LINE, at)
            return len(self._unparsed) if found < 0 else found + len(_BLANK_LINE)

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
            if self.parser.should_upgrade() or not self._are_chunks_within():
                return
            super().on_message_complete()
            self._in_headers = True
            self._counted_bytes = 0

        def on_response_complete(self) -> None:
            self._unanswered.popleft()
            if self._lasting.is_over:
                for cycle in self._unanswered:
                    self._leave(cycle)
                return
            super().on_response_complete()
            if self._last_words is not None:
                if not self._unanswered:
                    self._close()
            elif self._flow.is_held:
                self._unset_keepalive_if_required()
                self._parse_soon()

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
            """Tell a request that its client has gone."""
            cycle.disconnected = True
            cycle.message_event.set()

        def _close(self) -> None:
            if self._last_words and not self.transport.is_closing():
                self.transport.write(self._last_words)
            self._end()

        def _end(self) -> None:
            """Close our side, and the connection when the client has closed its own, or shortly after."""
            if self._is_stopping or self.transport.is_closing() or not self.transport.can_write_eof():
                self.transport.close()
            elif not self._lasting.is_over:
                self.transport.write_eof()
                self.loop.call_later(_LINGER_S, self.transport.close)
            self._lasting.is_over = True
            self._flow.is_held = False
            self._flow.resume_reading()

        def shutdown(self) -> None:
            self._is_stopping = True
            if self._lasting.is_over:
                self.transport.close()
            else:
                super().shutdown()

    return BoundedProtocol


class _LastingTransport:
    """A connection as its requests have it: to close it is for the protocol, and nothing is written after that."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self._close = close
        self.is_over = False

    def write(self, data: bytes) -> None:
        if not self.is_over:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self.is_over or self._transport.is_closing()

    def close(self) -> None:
        self._close()


class _HeldFlow(FlowControl):
    """Reads nothing more while bytes wait to be parsed, whoever asks for it."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()
