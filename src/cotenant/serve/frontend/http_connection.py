"""HTTP/1.1 server connection: parses requests one at a time, and writes their answers.

A connection has no scheduling state. It reads one whole request and waits for its answer before it parses the next.
Pipelined bytes are buffered up to a limit, then the socket is not read. All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from typing_extensions import override

from cotenant.serve.frontend.body_rooms import BodyRooms
from cotenant.serve.frontend.http_chunks import ChunkedBody
from cotenant.serve.frontend.http_head import CHUNKED, BadRequestError, Head, HeadParser
from cotenant.serve.frontend.open_connections import OpenConnections, readable_since
from cotenant.serve.frontend.pending_bytes import Held
from cotenant.wire.api import ServeError
from cotenant.wire.codec import Limits
from cotenant.wire.codec_http import BodyChunk

READ_BYTES = 64 << 10
"""Maximum bytes of one read, except for bodies of declared length, which are read into their final memory."""
_AHEAD_BYTES = 64 << 10
"""Buffered bytes after the request in progress at which reading pauses."""
_AT_A_TIME = 16
"""Requests of one connection handled in a loop iteration, before other connections are served."""
_IGNORED_BYTES = 64 << 10
"""Bytes of a refused body that are read before the answer, so that the connection can stay open."""
_MALFORMED = (400, 413)
"""Statuses that count as a malformed request."""
_LINGER_S, _LINGER_BYTES = 2.0, 4 << 20
"""Seconds and bytes for which input is ignored after the last answer. If unread bytes remained at the close, the
system would send a reset, and the client could lose the answer."""
_IDLE_S = 65.0
"""Idle time-out in seconds; above the 60 s of common load balancers, so they never reuse a closed connection."""
_BYTES_PER_S = 1024
"""Minimum rate of a request part in bytes per second, once it exceeds the time limit of this part."""
_JOIN_UP_TO_BYTES = 64 << 10
"""Size up to which an answer is joined into one write; joining larger ones costs more than a second write."""
_END_OF_HEAD = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINE = {each.value: b"HTTP/1.1 %d %b\r\n" % (each, each.phrase.encode()) for each in HTTPStatus}
_STATUS_LINE[499] = b"HTTP/1.1 499 Client Closed Request\r\n"


class Answer(NamedTuple):
    """Complete HTTP response. `fields`: further header lines as bytes, each with its line end."""

    status: int
    content_type: bytes
    body: bytes | list[BodyChunk]
    fields: bytes = b""


class App(Protocol):
    """Request handler. All methods run on the event loop and must be quick."""

    def begun(self, head: Head, arrival_ns: int) -> Answer | Held | None:
        """Decide on a request with a body by its head; `arrival_ns`: when its first byte was readable. Returns an
        answer to refuse the body. Otherwise the body is read, and counted by the returned Held, if any."""

    def no_room(self, head: Head, arrival_ns: int, error: ServeError) -> Answer:
        """Build the answer to a request with a chunked body for which there is no room."""

    def request(self, exchange: Exchange) -> None:
        """Handle a request; `Exchange.answer` answers it, now or later. Raises nothing."""

    def stopping(self) -> Answer:
        """Build the answer to a request in progress when the server stops."""

    def malformed(self, status: int, message: str) -> Answer:
        """Build the answer to invalid bytes."""


class Exchange:
    """A request and its answer. `arrival_ns`: monotonic time when its first byte was readable.

    `on_gone` is called once if the client disconnects or the server stops before the answer. `is_over`: the request is
    answered, or its client has disconnected. `held` counts its bytes, if they are counted.
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
        """Send the answer; further calls are ignored."""
        if not self.is_over:
            self.is_over, self.on_gone = True, None
            self._release_held()
            self._answered(self, answer)

    def abandon(self) -> None:
        """Handle a client that has disconnected."""
        if not self.is_over:
            self.is_over = True
            self._release_held()
            gone, self.on_gone = self.on_gone, None
            if gone is not None:
                gone()

    def _release_held(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            held.release()


class Connections(OpenConnections["HttpConnection"]):
    """Open HTTP connections of a server, with a shared head cache and read buffers."""

    def __init__(self, app: App, limits: Limits) -> None:
        super().__init__(limits)
        self.app = app
        self.heads = HeadParser()
        self.rooms = BodyRooms()
        self.scratch = memoryview(bytearray(READ_BYTES))


class HttpConnection(asyncio.BufferedProtocol):
    """One HTTP connection, of `others`."""

    def __init__(self, others: Connections) -> None:
        self._others = others
        self._app = others.app
        self._limits = others.limits
        self._address = ""
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._descriptor = -1
        self._data = b""
        """Received bytes that are not parsed."""
        self._searched = 0
        """Prefix length of `_data` without an end of head."""
        self._head: Head | None = None
        """Head of the current request, until it is answered."""
        self._body: memoryview | None = None
        """Memory of a body of declared length."""
        self._filled = 0
        """Received bytes of `_body`, or counted bytes of `_chunks`."""
        self._chunks: ChunkedBody | None = None
        self._held: Held | None = None
        """Counter of the bytes of the body that is being read."""
        self._declined: Answer | None = None
        """Answer to a refused request of which the body is being read."""
        self._exchange: Exchange | None = None
        """The request in progress."""
        self._began_ns = 0
        """When the first byte of the current request was readable. ns; 0 before it."""
        self._since_s = self._loop.time()
        """Start of the current phase (idle, head, body). Loop time in seconds."""
        self._unsent = 0
        """Unsent bytes of answers at the last check of time limits."""
        self._is_direct = False
        """The last read went into `_body`."""
        self._is_advancing = self._is_soon = self._is_held = self._is_slow = False
        self._is_stopping = False
        self._is_over = False
        """The last answer is written; further input is ignored."""
        self._left_bytes = _LINGER_BYTES
        self._malformed = 0
        """Number of malformed requests so far."""

    # --- asyncio --------------------------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self._descriptor = transport.get_extra_info("socket").fileno()
        if too_many := self._others.open(self, self._address):
            self._write(self._app.malformed(503, too_many), is_last=True)

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._others.close(self, self._address)
        self._is_over = True
        self._data, self._body, self._chunks = b"", None, None
        self._release_held()
        if self._exchange is not None:
            self._exchange.abandon()

    def eof_received(self) -> None:
        """Close the connection: a half-closed client is indistinguishable from one that died."""

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        body = self._body
        self._is_direct = body is not None and self._filled < len(body)
        return body[self._filled :] if body is not None and self._is_direct else self._others.scratch

    @override
    def buffer_updated(self, count: int) -> None:
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
        """Pause answering until the client has read."""
        self._is_slow = True

    @override
    def resume_writing(self) -> None:
        self._is_slow = False
        self._advance()

    # --- requests -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the time of a request at its first byte."""
        self._began_ns = readable_since(self._descriptor)
        self._since_s = self._loop.time()

    def _advance(self) -> None:
        """Hand over complete requests, one at a time."""
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
            self._answer_malformed(partial(self._write, self._app.malformed(error.status, error.message), is_last=True))
            return
        except ServeError as error:
            assert self._head is not None
            self._write(self._app.no_room(self._head, self._began_ns, error), is_last=True)
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
        """Parse further; return whether a request is complete. Raises BadRequestError, and ServeError without room."""
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
        if data[:1] in (b"\r", b"\n"):  # line ends before a request are ignored (RFC 9112, section 2.2)
            stripped = data.lstrip(b"\r\n")
            if len(data) - len(stripped) > self._limits.max_header_bytes:
                raise self._too_long()
            if not stripped:
                return False
            data, self._data, self._searched = stripped, stripped, 0
        end = data.find(_END_OF_HEAD, self._searched)
        if end < 0:
            if data and not data[:1].isalpha():
                raise BadRequestError(400, "the received bytes are not a valid HTTP/1.1 request")
            if len(data) > self._limits.max_header_bytes:
                raise self._too_long()
            self._searched = max(0, len(data) - len(_END_OF_HEAD) + 1)
            return False
        end += len(_END_OF_HEAD)
        if end > self._limits.max_header_bytes:
            raise self._too_long()
        head = self._others.heads.parse(data[:end] if end < len(data) else data)
        if not self._began_ns:  # it was pipelined
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
                self._write(begun, is_last=True)  # the client chooses whether the body follows
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

    def _release_held(self) -> None:
        """Release the counted bytes of the body."""
        held, self._held = self._held, None
        if held is not None:
            held.release()

    # --- answers --------------------------------------------------------------------------------------------------

    def _answered(self, exchange: Exchange, answer: Answer) -> None:
        exchange.body = b""
        if answer.status in _MALFORMED:
            self._answer_malformed(partial(self._finish, answer))
        else:
            self._finish(answer)

    def _answer_malformed(self, answer: Callable[[], None]) -> None:
        """Answer a malformed request, with a delay if the client has sent many of them."""
        self._malformed += 1
        delay_s = self._others.malformed_delay_s(self._address, self._loop.time())
        if delay_s:
            self._loop.call_later(delay_s, lambda: None if self._transport.is_closing() else answer())
        else:
            answer()

    def _finish(self, answer: Answer) -> None:
        """Write the answer to the request in progress, and continue with the next request."""
        self._exchange = None
        if self._is_over:
            return
        is_last = self._others.has_too_many_malformed(self._malformed)
        self._write(answer, is_last=is_last or (self._others.is_retiring and not self._data))
        if self._is_over:
            return
        if self._is_held:
            self._is_held = False
            self._transport.resume_reading()
        if self._data:
            self._advance()

    def _write(self, answer: Answer, *, is_last: bool = False) -> None:
        """Write an answer. Then the next request may begin, or the connection ends."""
        head, self._head, self._declined = self._head, None, None
        self._release_held()
        self._body, self._chunks, self._filled, self._began_ns = None, None, 0, 0
        self._since_s = self._loop.time()
        is_last = is_last or self._is_stopping or head is None or not head.keeps
        chunks = answer.body if isinstance(answer.body, list) else [answer.body]
        length = sum([len(chunk) for chunk in chunks])
        lines = b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
            _STATUS_LINE[answer.status],
            answer.content_type,
            length,
            answer.fields,
            b"connection: close\r\n" if is_last else b"connection: keep-alive\r\n" if head and head.is_old else b"",
        )
        if head is not None and head.method == "HEAD":
            chunks = []
        if length <= _JOIN_UP_TO_BYTES:
            self._transport.write(b"".join((lines, *chunks)))
        else:
            self._transport.writelines((lines, *chunks))
        if is_last:
            self._end()

    def _end(self) -> None:
        """Shut down the sending side; close when the client closes, or after _LINGER_S."""
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

    def check_timeouts(self, now_s: float) -> None:
        """Enforce time limits; called every second."""
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
            self._write(self._app.malformed(408, f"the {what} was not complete within {limit_s:g} s"), is_last=True)

    def retire(self) -> None:
        """End the connection after its next answer: `_finish` looks at `is_retiring`."""

    def shut_down(self) -> None:
        """Finish the request in progress and accept no other."""
        self._is_stopping = True
        if self._exchange is None and not self._transport.get_write_buffer_size():
            self._transport.close()
        elif self._exchange is None:
            self._end()

    def abort(self) -> None:
        """Answer the request in progress at once with an error."""
        exchange = self._exchange
        if exchange is None or exchange.is_over:
            self._transport.abort()
            return
        gone, exchange.on_gone = exchange.on_gone, None
        exchange.answer(self._app.stopping())
        if gone is not None:
            gone()
