"""HTTP/1.1 of one connection: bytes to requests, one after the other, and answers to bytes.

A connection holds no scheduling state. It reads one request whole, has it answered, and only then looks at the next:
what a client sends ahead stays bytes, and beyond some of them the socket is not read. Everything runs on the event
loop of its server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from cotenant.serve.frontend.body_rooms import BodyRooms
from cotenant.serve.frontend.http_chunks import ChunkedBody
from cotenant.serve.frontend.http_head import CHUNKED, BadRequestError, Head, HeadParser
from cotenant.serve.frontend.open_connections import OpenConnections, readable_since
from cotenant.serve.frontend.pending_bytes import Held
from cotenant.wire.api import ServeError
from cotenant.wire.codec import Limits

READ_BYTES = 64 << 10
"""What one read of a socket takes at most, but for bodies of declared length, which are read where they stay."""
_AHEAD_BYTES = 64 << 10
"""Bytes behind the request in progress from which on the socket is not read."""
_AT_A_TIME = 16
"""Requests of a connection that are answered at once before others have their turn."""
_IGNORED_BYTES = 64 << 10
"""Of a body that is not wanted so much is read, before the answer, and the connection stays open."""
_MALFORMED = (400, 413)
"""Answers that blame the client for what it has sent."""
_LINGER_S, _LINGER_BYTES = 2.0, 4 << 20
"""How long, and how much, the server reads and ignores after the last answer of a connection. The system answers unread
bytes with a reset, and the client's side then drops answers that it has not read."""
_IDLE_S = 65.0
"""Longer than the 60 s of common load balancers, so that these never reuse a connection just closed."""
_BYTES_PER_S = 1024
"""A request that has been coming for longer than the limit of its part has to come at least so fast."""
_JOIN_UP_TO_BYTES = 64 << 10
"""Answers up to this size go out in one write; joining larger ones costs more than another write."""
_END_OF_HEAD = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINE = {each.value: b"HTTP/1.1 %d %b\r\n" % (each, each.phrase.encode()) for each in HTTPStatus}
_STATUS_LINE[499] = b"HTTP/1.1 499 Client Closed Request\r\n"

Piece = bytes | memoryview


class Answer(NamedTuple):
    """A complete answer. `fields` are further headers as bytes, each with its end of line."""

    status: int
    content_type: bytes
    body: bytes | list[Piece]
    fields: bytes = b""


class App(Protocol):
    """What answers requests. All methods are called on the event loop, and must be quick."""

    def begun(self, head: Head, arrival_ns: int) -> Answer | Held | None:
        """The head of a request with a body has come, whose first byte could be read at `arrival_ns`: the answer where
        the body is not wanted. Else it is to be read, and counted where there is something to count it by."""

    def crowded(self, head: Head, arrival_ns: int, error: ServeError) -> Answer:
        """The answer to a request for whose body, which comes in chunks, there is no room."""

    def request(self, exchange: Exchange) -> None:
        """Answer a request by `Exchange.answer`, now or later. Raises nothing."""

    def stopping(self) -> Answer:
        """The answer to a request that the end of the server leaves unanswered."""

    def malformed(self, status: int, message: str) -> Answer:
        """The answer to bytes that are no request."""


class Exchange:
    """One request and its one answer. `arrival_ns` is the monotonic time when its first byte could be read.

    `on_gone` is called once if the client goes away, or the server ends, before the answer. `is_over`: the request has
    been answered, or its client has gone. `held` counts its bytes, if they are counted.
    """

    __slots__ = ("_answered", "arrival_ns", "body", "head", "held", "is_over", "on_gone")

    def __init__(
        self,
        head: Head,
        body: bytes | memoryview,
        arrival_ns: int,
        answered: Callable[[Exchange, Answer], None],
        held: Held | None = None,
    ) -> None:
        self.head = head
        self.held = held
        self.body = body
        self.arrival_ns = arrival_ns
        self.is_over = False
        self.on_gone: Callable[[], None] | None = None
        self._answered = answered

    def answer(self, answer: Answer) -> None:
        """Send the answer, the first time."""
        if not self.is_over:
            self.is_over, self.on_gone = True, None
            self._let_go()
            self._answered(self, answer)

    def abandon(self) -> None:
        """The client has gone."""
        if not self.is_over:
            self.is_over = True
            self._let_go()
            gone, self.on_gone = self.on_gone, None
            if gone is not None:
                gone()

    def _let_go(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            held.let_go()


class Connections(OpenConnections["HttpConnection"]):
    """The open connections of a server, with the heads that were seen and room to read into."""

    def __init__(self, app: App, limits: Limits) -> None:
        super().__init__(limits)
        self.app = app
        self.heads = HeadParser()
        self.rooms = BodyRooms()
        self.scratch = memoryview(bytearray(READ_BYTES))


class HttpConnection(asyncio.BufferedProtocol):
    """One connection, of `others`."""

    def __init__(self, others: Connections) -> None:
        self._others = others
        self._app = others.app
        self._limits = others.limits
        self._address = ""
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._descriptor = -1
        self._data = b""
        """What has come and is not parsed."""
        self._searched = 0
        """Bytes of it in which no head ends."""
        self._head: Head | None = None
        """Of the request whose body comes, or whose answer is to come."""
        self._body: memoryview | None = None
        """A body of declared length, of which `_filled` bytes have come. Of one in chunks so many are counted."""
        self._filled = 0
        self._chunks: ChunkedBody | None = None
        self._held: Held | None = None
        """Counts the bytes of the body that comes."""
        self._declined: Answer | None = None
        """The answer to the request whose body comes, and is not wanted."""
        self._exchange: Exchange | None = None
        """The request in progress."""
        self._began_ns = 0
        """When the first byte of the present request could be read; 0 before it."""
        self._since_s = self._loop.time()
        """When the present part (idle, head, body) began."""
        self._unsent = 0
        """Bytes of answers that the client had not taken when that was looked at last."""
        self._is_direct = False
        """The last read went to where the body stays."""
        self._is_advancing = self._is_soon = self._is_held = self._is_slow = False
        self._is_stopping = False
        self._is_over = False
        """The last answer is written: what still comes is ignored."""
        self._left_bytes = _LINGER_BYTES
        self._malformed = 0
        """Requests so far that were malformed."""

    # --- asyncio --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """See asyncio."""
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self._descriptor = transport.get_extra_info("socket").fileno()
        if too_many := self._others.open(self, self._address):
            self._write(self._app.malformed(503, too_many), is_last=True)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self._others.close(self, self._address)
        self._is_over = True
        self._data, self._body, self._chunks = b"", None, None
        self._let_go()
        if self._exchange is not None:
            self._exchange.abandon()

    def eof_received(self) -> None:
        """See asyncio: a client that closes its side has gone, as one that died would look the same."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        body = self._body
        self._is_direct = body is not None and self._filled < len(body)
        return body[self._filled :] if body is not None and self._is_direct else self._others.scratch

    def buffer_updated(self, count: int) -> None:
        """See asyncio."""
        if self._is_over:
            self._left_bytes -= count
            if self._left_bytes < 0:
                self._transport.close()
            return
        if self._is_direct:
            self._filled += count
        else:
            if not self._began_ns and self._exchange is None:
                self._begin()
            data = bytes(self._others.scratch[:count])
            self._data = self._data + data if self._data else data
        if self._exchange is None:
            self._advance()
        elif len(self._data) > _AHEAD_BYTES and not self._is_held:
            self._is_held = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """See asyncio: nothing more is answered before the client has read."""
        self._is_slow = True

    def resume_writing(self) -> None:
        """See asyncio."""
        self._is_slow = False
        self._advance()

    # --- requests -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first byte of a request has come."""
        self._began_ns = readable_since(self._descriptor)
        self._since_s = self._loop.time()

    def _advance(self) -> None:
        """Have all answered whose bytes have come, one at a time."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            for _ in range(_AT_A_TIME):
                if self._exchange is not None or self._is_over or self._is_slow or not self._is_whole():
                    return
                self._hand_over()
        except BadRequestError as error:
            self._is_over = True
            self._blame(partial(self._write, self._app.malformed(error.status, error.message), is_last=True))
            return
        except ServeError as error:
            assert self._head is not None
            self._write(self._app.crowded(self._head, self._began_ns, error), is_last=True)
            return
        finally:
            self._is_advancing = False
        if not self._is_soon:
            self._is_soon = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_soon = False
        self._advance()

    def _is_whole(self) -> bool:
        """Parse on; whether a request has come whole. Raises BadRequestError, and ServeError where it has no room."""
        if self._head is None and not self._is_head_whole():
            return False
        if self._body is not None:
            return self._filled == len(self._body)
        if self._chunks is not None:
            at = self._chunks.feed(self._data, 0)
            self._data = self._data[at:]
            uncounted = len(self._chunks.body) - self._filled
            if uncounted >= _IGNORED_BYTES and self._held is not None:
                self._filled += uncounted
                self._held.grow(uncounted)
            return self._chunks.is_complete
        return True

    def _is_head_whole(self) -> bool:
        data = self._data
        if data[:1] in (b"\r", b"\n"):  # ends of lines before a request are ignored (RFC 9112, section 2.2)
            stripped = data.lstrip(b"\r\n")
            if len(data) - len(stripped) > self._limits.max_header_bytes:
                raise self._too_long()
            if not stripped:
                return False
            data, self._data, self._searched = stripped, stripped, 0
        end = data.find(_END_OF_HEAD, self._searched)
        if end < 0:
            if data and not data[:1].isalpha():
                raise BadRequestError(400, "the bytes received are no valid HTTP/1.1 request")
            if len(data) > self._limits.max_header_bytes:
                raise self._too_long()
            self._searched = max(0, len(data) - len(_END_OF_HEAD) + 1)
            return False
        end += len(_END_OF_HEAD)
        if end > self._limits.max_header_bytes:
            raise self._too_long()
        head = self._others.heads.parse(data[:end] if end < len(data) else data)
        if not self._began_ns:  # it came behind another one
            self._begin()
        self._data, self._searched = data[end:], 0
        self._head = head
        if head.length:
            self._since_s = self._loop.time()
            self._want_body(head)
        return not self._is_over

    def _want_body(self, head: Head) -> None:
        if head.length > self._limits.max_body_bytes:
            text = f"the body has {head.length} bytes, expected at most {self._limits.max_body_bytes}"
            raise BadRequestError(413, text)
        begun = self._app.begun(head, self._began_ns)
        if isinstance(begun, Answer):
            if head.expects or not 0 <= head.length - len(self._data) <= _IGNORED_BYTES:
                self._write(begun, is_last=True)  # where the client waits, what follows may be the body, at its choice
                return
            self._declined = begun
        else:
            self._held = begun
        if head.length == CHUNKED:
            self._chunks = ChunkedBody(self._limits.max_body_bytes, self._limits.max_header_bytes)
        else:
            self._body = self._others.rooms.room(head.length, head.tensors_at)
            self._filled = min(len(self._data), head.length)
            self._body[: self._filled] = memoryview(self._data)[: self._filled]
            self._data = self._data[self._filled :]
        if head.expects and not self._data and not self._filled:
            self._transport.write(_CONTINUE)

    def _too_long(self) -> BadRequestError:
        return BadRequestError(
            431, f"request line and headers have more than {self._limits.max_header_bytes} bytes, the limit"
        )

    def _hand_over(self) -> None:
        assert self._head is not None
        body: bytes | memoryview = b""
        if self._body is not None:
            body, self._body, self._filled = self._body.toreadonly(), None, 0
        elif self._chunks is not None:
            body, self._chunks = memoryview(self._chunks.body).toreadonly(), None
        if self._declined is not None:
            self._write(self._declined)
            return
        held, self._held = self._held, None
        exchange = self._exchange = Exchange(self._head, body, self._began_ns, self._answered, held)
        self._app.request(exchange)

    def _let_go(self) -> None:
        """Count the bytes of the body that came no more."""
        held, self._held = self._held, None
        if held is not None:
            held.let_go()

    # --- answers --------------------------------------------------------------------------------------------------

    def _answered(self, exchange: Exchange, answer: Answer) -> None:
        exchange.body = b""
        if answer.status in _MALFORMED:
            self._blame(partial(self._finish, answer))
        else:
            self._finish(answer)

    def _blame(self, answer: Callable[[], None]) -> None:
        """A request was malformed: answer it, later where the client has sent many of those."""
        self._malformed += 1
        delay_s = self._others.blame(self._address, self._loop.time())
        if delay_s:
            self._loop.call_later(delay_s, lambda: None if self._transport.is_closing() else answer())
        else:
            answer()

    def _finish(self, answer: Answer) -> None:
        """Write the answer to the request in progress, and go on."""
        self._exchange = None
        if self._is_over:
            return
        self._write(answer, is_last=self._others.is_hopeless(self._malformed))
        if self._is_over:
            return
        if self._is_held:
            self._is_held = False
            self._transport.resume_reading()
        if self._data:
            self._advance()

    def _write(self, answer: Answer, *, is_last: bool = False) -> None:
        """Write an answer. The next request may begin then, or the connection ends."""
        head, self._head, self._declined = self._head, None, None
        self._let_go()
        self._body, self._chunks, self._filled, self._began_ns = None, None, 0, 0
        self._since_s = self._loop.time()
        is_last = is_last or self._is_stopping or head is None or not head.keeps
        pieces = answer.body if isinstance(answer.body, list) else [answer.body]
        length = sum([len(piece) for piece in pieces])
        lines = b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
            _STATUS_LINE[answer.status],
            answer.content_type,
            length,
            answer.fields,
            b"connection: close\r\n" if is_last else b"connection: keep-alive\r\n" if head and head.is_old else b"",
        )
        if head is not None and head.method == "HEAD":
            pieces = []
        if length <= _JOIN_UP_TO_BYTES:
            self._transport.write(b"".join((lines, *pieces)))
        else:
            self._transport.writelines((lines, *pieces))
        if is_last:
            self._end()

    def _end(self) -> None:
        """Close our side, and the connection when the client has closed its own, or shortly after."""
        self._is_over = True
        self._data = b""
        transport = self._transport
        if self._is_stopping or transport.is_closing() or not transport.can_write_eof():
            transport.close()
            return
        transport.write_eof()
        if self._is_held:
            self._is_held = False
            transport.resume_reading()
        self._loop.call_later(_LINGER_S, transport.close)

    # --- time and the end -----------------------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """End what takes too long: called now and then."""
        unsent, before = self._transport.get_write_buffer_size(), self._unsent
        self._unsent = unsent
        if unsent:
            if unsent != before:
                self._since_s = now_s
            elif now_s - self._since_s > self._limits.max_unread_s:
                self._transport.abort()
            return
        if self._is_over or self._exchange is not None:
            return
        taken_s, came = now_s - self._since_s, 0
        if self._head is not None:
            what, limit_s = "body", self._limits.max_body_s
            came = self._filled if self._body is not None else len(self._chunks.body) if self._chunks else 0
        elif self._data:
            what, limit_s = "head of the request", self._limits.max_head_s
        else:
            if taken_s > _IDLE_S:
                self._transport.close()
            return
        if taken_s > limit_s + came / _BYTES_PER_S:
            self._write(self._app.malformed(408, f"the {what} has not come within {limit_s:g} s"), is_last=True)

    def shut_down(self) -> None:
        """Answer the request in progress, and no other."""
        self._is_stopping = True
        if self._exchange is None and not self._transport.get_write_buffer_size():
            self._transport.close()
        elif self._exchange is None:
            self._end()

    def give_up(self) -> None:
        """Answer the request in progress now, without waiting for what it asked for."""
        exchange = self._exchange
        if exchange is None or exchange.is_over:
            self._transport.abort()
            return
        gone, exchange.on_gone = exchange.on_gone, None
        exchange.answer(self._app.stopping())
        if gone is not None:
            gone()
