"""HTTP/2 server connection: streams of requests, and their answers, independent of their content.

nghttp2 (by `ngh2`, imported only here) implements the protocol: frames, HPACK, flow-control windows, limits for
peers. All code runs on the server's event loop.

Received data are bounded. A stream has a window of `WINDOW_BYTES`, which reopens as its receiver releases data. A
receiver announces a larger message by `H2Stream.expect`. All of that message may arrive at once, while such messages
of the connection fit `room_bytes`; others wait. Sent data wait for the peer's windows and the socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ngh2 import (
    Configuration,
    Connection,
    ConnectionClosed,
    DataReceived,
    ErrorCode,
    NGH2Error,
    RequestReceived,
    Role,
    Setting,
    SettingsReceived,
    StreamClosed,
    TrailersReceived,
)

from cotenant.serve.frontend.open_connections import OpenConnections, readable_since
from cotenant.wire.codec import Limits

_log = logging.getLogger("cotenant.http2")

WINDOW_BYTES = 65_535
"""Receive window of a stream in bytes: the initial value of the protocol."""
_MOST_WINDOW_BYTES = 4 << 20
"""Maximum receive window of a stream with a large message: bandwidth-delay product at 1 ms and 30 Gbit/s."""
_READ_BYTES, _MANY_BYTES = 16 << 10, 256 << 10
"""Bytes of one read: hundreds of small requests; more while a large message arrives."""
_WRITE_BYTES = 256 << 10
"""Bytes framed at a time, until the socket's buffer is full."""
_RESETS = (2_000, 500)
"""Token bucket of stream resets by a client: burst, and rate per second. Clients reset a stream at each expired
deadline; a rapid-reset attack reaches tens of thousands per second."""
_IDLE_S = 300.0
"""Seconds after which a connection without streams is closed. Clients reconnect when they need to."""
_SILENT_S = 60.0
"""Seconds of silence after which a client with open streams gets a PING; it has as long again to answer."""

_LEAVE_S = 1.0
"""Seconds without streams after which a retiring connection is closed: requests that were on their way have arrived."""

Headers = Sequence[tuple[bytes, bytes]]


class Receiver(Protocol):
    """Handler of the request of a stream. All methods run on the loop and must be quick."""

    def received(self, data: bytes, is_end: bool) -> None:
        """Handle the next data of the request; `is_end`: no data follow."""

    def drained(self) -> None:
        """Called once after `H2Stream.watch`, when all sent data have left or are in the socket."""

    def gone(self) -> None:
        """Handle a reset stream or a lost connection before the answer is complete."""

    def check_timeouts(self, now_s: float) -> None:
        """Enforce time limits; called every second with the time of the loop."""

    def shut_down(self) -> None:
        """Accept no further work, as the server stops."""

    def abort(self) -> None:
        """Answer at once with an error, as the server stops now."""


class H2App(Protocol):
    """Factory of receivers for the streams of a server."""

    def opened(self, stream: H2Stream) -> Receiver | None:
        """Create the receiver of a new stream; None if it is answered already. Raises nothing."""


class H2Stream:
    """A request and its answer. After the client has disconnected, sends are ignored."""

    __slots__ = (
        *("_connection", "_expected", "_held", "_is_taking", "_unsent", "_unsent_s", "arrival_ns", "headers", "id"),
        *("has_ended", "is_over", "is_received", "receiver"),
    )

    def __init__(self, connection: H2Connection, number: int, headers: Headers) -> None:
        self._connection = connection
        self.id = number
        self.headers = headers
        self.arrival_ns = connection.arrived_ns()
        """Monotonic time in ns when the first byte of the request was readable."""
        self.receiver: Receiver | None = None
        self.is_received = False
        """The request is complete."""
        self.has_ended = False
        """The answer is complete, but perhaps not sent."""
        self.is_over = False
        """The stream is closed."""
        self._held = 0
        """Received bytes that are not released."""
        self._expected = 0
        self._is_taking = False
        self._unsent = 0
        self._unsent_s = 0.0

    # --- the request ----------------------------------------------------------------------------------------------

    def arrived_ns(self) -> int:
        """Monotonic time in ns when the current data became readable."""
        return self._connection.arrived_ns()

    def release(self) -> None:
        """Acknowledge all received data, which reopens the window."""
        if self._held:
            self._connection.release(self)

    def expect(self, nbytes: int) -> None:
        """Announce a message of `nbytes`: all of it may arrive without `release`, as soon as there is room."""
        self._expected = nbytes
        self._connection.expect(self)

    def settle(self) -> None:
        """End `expect`: the message is complete or refused."""
        if self._expected:
            self._connection.settle(self)

    # --- the answer -----------------------------------------------------------------------------------------------

    def respond(self, headers: Headers) -> None:
        """Send the response headers."""
        self._say(self._connection.h2.send_response, headers)

    def send(self, data: bytes) -> None:
        """Send data of the answer."""
        self._say(self._connection.h2.send_data, data)

    def end(self, trailers: Headers) -> None:
        """End the answer with trailers."""
        self._say(self._connection.h2.send_trailers, trailers)
        self._connection.ended(self)

    def refuse(self, headers: Headers) -> None:
        """Send an answer of headers only."""
        self._say(self._connection.h2.send_response, headers, end_stream=True)
        self._connection.ended(self)

    def reset(self) -> None:
        """Reset the stream without a complete answer; its receiver gets `gone`."""
        self._say(self._connection.h2.reset_stream, ErrorCode.INTERNAL_ERROR)
        self.is_over = True

    def _say(self, act: Callable[..., None], what: object, **how: bool) -> None:
        if self.is_over:
            return
        try:
            act(self.id, what, **how)
        except NGH2Error as error:
            self._connection.end_by(error)
        else:
            self._connection.touch()

    def unsent(self) -> int:
        """Unsent bytes of the answer."""
        return 0 if self.is_over or self._connection.is_over else self._connection.h2.queued_body_size(self.id)

    def answer_malformed(self, answer: Callable[[], None]) -> None:
        """Answer a malformed request, with a delay if the client has sent many of them."""
        self._connection.answer_malformed(answer)

    def watch(self) -> None:
        """Call `Receiver.drained` once when `unsent` is 0."""
        self._connection.watched.add(self)

    def is_stuck(self, now_s: float, limit_s: float) -> bool:
        """Whether no byte of the answer was sent for `limit_s` seconds."""
        unsent, before = self.unsent(), self._unsent
        self._unsent = unsent
        if unsent == 0 or unsent != before:
            self._unsent_s = now_s
        return now_s - self._unsent_s > limit_s


class H2Connections(OpenConnections["H2Connection"]):
    """Open HTTP/2 connections of a server, with a shared read buffer.

    `streams`: maximum concurrent requests of a connection. `room_bytes`: budget of a connection for large messages.
    """

    def __init__(self, app: H2App, limits: Limits, streams: int, room_bytes: int) -> None:
        super().__init__(limits)
        self.app = app
        self.streams = streams
        self.room_bytes = room_bytes
        self.scratch = memoryview(bytearray(_MANY_BYTES))
        self.configuration = Configuration(
            auto_window_update=False,
            stream_reset_rate_limit=_RESETS,
            max_inbound_header_list_size=2 * limits.max_header_bytes,
        )
        self.settings = {
            Setting.MAX_CONCURRENT_STREAMS: streams,
            Setting.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
        }


class H2Connection(asyncio.BufferedProtocol):
    """One HTTP/2 connection, of `others`."""

    def __init__(self, others: H2Connections) -> None:
        self._others = others
        self._limits = others.limits
        self.h2 = Connection(Role.SERVER, others.configuration)
        self.h2.initiate_connection(others.settings)
        self.h2.set_local_window_size(WINDOW_BYTES * (1 + others.streams) + others.room_bytes)
        self.watched: set[H2Stream] = set()
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._descriptor = -1
        self._address = ""
        self._streams: dict[int, H2Stream] = {}
        self._unfinished: set[H2Stream] = set()
        """Streams with a complete answer and an incomplete request."""
        self._large: deque[H2Stream] = deque()
        """Streams with a large message that waits for room."""
        self._room = others.room_bytes
        self._taking = 0
        """Number of streams with a large message that has room."""
        self._arrived_ns = self._malformed = 0
        now_s = self._loop.time()
        self._heard_s = self._used_s = self._sent_s = now_s
        self._unsent = 0
        self._is_greeted = self._is_ping_sent = False
        self._is_busy = self._is_soon = self._is_full = self._is_stopping = False
        self._is_ended = self.is_over = False
        """`_is_ended`: nghttp2 has ended the connection. `is_over`: the transport is closed or closing."""

    # --- asyncio --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Send the settings; a connection above the limit gets GOAWAY with the reason and is closed."""
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self._descriptor = transport.get_extra_info("socket").fileno()
        too_many = self._others.open(self, self._address)
        if too_many:
            self.h2.send_goaway(ErrorCode.ENHANCE_YOUR_CALM, debug_data=too_many.encode())
        self._flush()
        if too_many:
            self.is_over = True
            transport.close()
        elif self._others.is_retiring:
            self.retire()

    def connection_lost(self, error: Exception | None) -> None:
        """End all streams of a lost connection."""
        self.is_over = True
        self._others.close(self, self._address)
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            self._lose(stream)
        self.watched.clear()
        self._unfinished.clear()
        self._large.clear()

    def eof_received(self) -> None:
        """Close the connection: a half-closed client is indistinguishable from one that died."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the read buffer; a small part of it unless a large message arrives."""
        return self._others.scratch if self._taking else self._others.scratch[:_READ_BYTES]

    def buffer_updated(self, count: int) -> None:
        """Parse the received bytes, handle them, and send ready data."""
        if self.is_over:
            return
        self._arrived_ns = 0
        self._heard_s, self._is_ping_sent = self._loop.time(), False
        try:
            self.h2.receive_data(self._others.scratch[:count])
        except NGH2Error as error:
            self.end_by(error)
            return
        self._is_busy = True
        try:
            self._handle()
        finally:
            self._is_busy = False
        self._flush()

    def pause_writing(self) -> None:
        """Keep frames in nghttp2 while the socket is full."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Continue sending."""
        self._is_full = False
        self._flush()

    # --- receiving ------------------------------------------------------------------------------------------------

    def arrived_ns(self) -> int:
        """Monotonic time in ns when the last received bytes became readable."""
        if not self._arrived_ns:
            self._arrived_ns = readable_since(self._descriptor)
        return self._arrived_ns

    def _handle(self) -> None:
        """Pass events of nghttp2 to the receivers."""
        events = self.h2.events()
        closed = [event.stream_id for event in events if isinstance(event, StreamClosed)]
        for number in closed:  # first, as they cannot send any more
            stream = self._streams.pop(number, None)
            if stream is not None:
                self._lose(stream)
        for event in events:
            if isinstance(event, DataReceived):
                self._data(event.stream_id, event.data, event.end_stream)
            elif isinstance(event, RequestReceived):
                if event.stream_id not in closed:
                    self._open(event.stream_id, event.headers, event.end_stream)
            elif isinstance(event, TrailersReceived):
                self._data(event.stream_id, b"", True)
            elif isinstance(event, SettingsReceived):
                self._is_greeted = True
            elif isinstance(event, ConnectionClosed):
                self._is_ended = True

    def _open(self, number: int, headers: Headers, is_end: bool) -> None:
        stream = self._streams[number] = H2Stream(self, number, headers)
        stream.is_received = is_end
        stream.receiver = receiver = self._others.app.opened(stream)
        if is_end and receiver is not None:
            self._receive(stream, receiver, b"")

    def _data(self, number: int, data: bytes, is_end: bool) -> None:
        stream = self._streams.get(number)
        if stream is None or stream.has_ended:
            self._acknowledge(number, len(data))
            if stream is not None:
                stream.is_received = stream.is_received or is_end
            return
        stream.is_received = stream.is_received or is_end
        if stream._is_taking:
            self._acknowledge(number, len(data))
        else:
            stream._held += len(data)
        if stream.receiver is not None:
            self._receive(stream, stream.receiver, data)

    def _receive(self, stream: H2Stream, receiver: Receiver, data: bytes) -> None:
        try:
            receiver.received(data, stream.is_received)
        except Exception:
            _log.exception("a stream of %s is reset: its data could not be handled", self._address)
            stream.reset()

    def _lose(self, stream: H2Stream) -> None:
        """Handle a closed stream."""
        stream.is_over = True
        self._unfinished.discard(stream)
        self.watched.discard(stream)
        if not self.is_over:
            stream.release()
            stream.settle()
            if not self._streams:
                self._used_s = self._loop.time()
        receiver, stream.receiver = stream.receiver, None
        if receiver is not None and not stream.has_ended:
            receiver.gone()

    def release(self, stream: H2Stream) -> None:
        """Reopen the window of a stream by its held bytes."""
        held, stream._held = stream._held, 0
        self._acknowledge(stream.id, held)
        self.touch()

    def expect(self, stream: H2Stream) -> None:
        """Queue a stream for the room of its large message."""
        self._large.append(stream)
        self._take()

    def settle(self, stream: H2Stream) -> None:
        """Free the room of a large message for the next streams in the queue."""
        expected, stream._expected = stream._expected, 0
        if not stream._is_taking:
            self._large.remove(stream)
            return
        stream._is_taking = False
        self._taking -= 1
        self._room += expected
        if not stream.is_over and not stream.is_received:
            self._set_window(stream, WINDOW_BYTES)
        self._take()

    def _take(self) -> None:
        """Admit queued large messages that fit the room, first come first served; at least one."""
        while self._large and (not self._taking or self._large[0]._expected <= self._room):
            stream = self._large.popleft()
            self._room -= stream._expected
            self._taking += 1
            stream._is_taking = True
            self._set_window(stream, max(WINDOW_BYTES, min(stream._expected, _MOST_WINDOW_BYTES)))
            stream.release()
            self.touch()

    def _acknowledge(self, number: int, nbytes: int) -> None:
        if nbytes and not self.is_over:
            try:
                self.h2.acknowledge_received_data(nbytes, number)
            except NGH2Error as error:
                self.end_by(error)

    def _set_window(self, stream: H2Stream, size: int) -> None:
        if not self.is_over:
            try:
                self.h2.set_local_window_size(size, stream_id=stream.id)
            except NGH2Error as error:
                self.end_by(error)

    # --- sending --------------------------------------------------------------------------------------------------

    def ended(self, stream: H2Stream) -> None:
        """Handle a complete answer: further data of the request are discarded."""
        if stream.is_over:
            return
        stream.has_ended = True
        stream.release()
        stream.settle()
        if not stream.is_received:
            self._unfinished.add(stream)
        self.touch()

    def touch(self) -> None:
        """Schedule sending."""
        if not self._is_busy and not self._is_soon:
            self._is_soon = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send framed data while the socket accepts them, and notify receivers."""
        self._is_soon = False
        if self.is_over or self._is_busy:
            return
        h2 = self.h2
        self._is_busy = True
        try:
            while not self.is_over:
                while not self._is_full:
                    data = h2.data_to_send(_WRITE_BYTES)
                    if data:
                        self._transport.write(data)
                    if len(data) < _WRITE_BYTES:
                        break
                self._handle()  # streams closed by sending
                if not self._go_on():
                    break
            if self._is_ended and not self.is_over:
                self.is_over = True
                self._transport.close()
        except NGH2Error as error:
            self.end_by(error)
        finally:
            self._is_busy = False

    def _go_on(self) -> bool:
        """Notify receivers of sent answers, and reset answered streams. Returns whether there is more to send."""
        h2, goes_on = self.h2, False
        for stream in [each for each in self.watched if not h2.queued_body_size(each.id)]:
            self.watched.discard(stream)
            if stream.receiver is not None:
                stream.receiver.drained()
                goes_on = True
        for stream in list(self._unfinished):
            if not self._is_full and not h2.queued_body_size(stream.id) and self._has_window(stream):
                self._unfinished.discard(stream)
                h2.reset_stream(stream.id, ErrorCode.NO_ERROR)
                goes_on = True
        return goes_on

    def _has_window(self, stream: H2Stream) -> bool:
        """Whether the end of an answer could be sent: like data, it waits for a window."""
        return self.h2.remote_window_size > 0 and self.h2.stream_remote_window_size(stream.id) > 0

    def end_by(self, error: NGH2Error) -> None:
        """Close the connection after a protocol violation or an exceeded limit, with the reason if possible."""
        if self.is_over:
            return
        self.is_over = True
        _log.debug("the connection of %s ends: %s", self._address, error)
        try:
            self._transport.write(self.h2.data_to_send())
        except NGH2Error:  # no frame can be sent any more
            pass
        self._transport.close()

    def answer_malformed(self, answer: Callable[[], None]) -> None:
        """Answer a malformed request, and close a connection with too many of them."""
        self._malformed += 1
        delay_s = self._others.malformed_delay_s(self._address, self._loop.time())
        if delay_s:
            self._loop.call_later(delay_s, answer)
        else:
            answer()
        if self._others.has_too_many_malformed(self._malformed):
            self.shut_down()

    # --- time and the end -----------------------------------------------------------------------------------------

    def check_timeouts(self, now_s: float) -> None:
        """Enforce time limits; called every second."""
        limits = self._limits
        unsent, before = self._transport.get_write_buffer_size(), self._unsent
        self._unsent = unsent
        if unsent == 0 or unsent != before:
            self._sent_s = now_s
        if (
            now_s - self._sent_s > limits.max_unread_s
            or (not self._is_greeted and now_s - self._used_s > limits.max_head_s)
            or (self._is_ping_sent and now_s - self._heard_s > 2 * _SILENT_S)
        ):
            self._transport.abort()
            return
        if self.is_over:
            return
        if not self._streams:
            if now_s - self._used_s > (_LEAVE_S if self._others.is_retiring else _IDLE_S):
                self.shut_down()
            return
        if now_s - self._heard_s > _SILENT_S and not self._is_ping_sent:
            self._is_ping_sent = True
            try:
                self.h2.ping()
            except NGH2Error as error:
                self.end_by(error)
                return
            self.touch()
        for stream in list(self._streams.values()):
            if stream.is_stuck(now_s, limits.max_unread_s):
                stream.reset()
            elif stream.receiver is not None and not stream.has_ended:
                stream.receiver.check_timeouts(now_s)

    def retire(self) -> None:
        """Let the client open further streams on another connection; streams that arrive meanwhile are answered."""
        if self.is_over or self._is_stopping:
            return
        self._used_s = max(self._used_s, self._loop.time())
        try:
            self.h2.send_shutdown_notice()
        except NGH2Error as error:
            self.end_by(error)
        self._flush()

    def shut_down(self) -> None:
        """Finish the requests in progress and accept no other."""
        if self.is_over or self._is_stopping:
            return
        self._is_stopping = True
        for stream in list(self._streams.values()):
            if stream.receiver is not None and not stream.has_ended:
                stream.receiver.shut_down()
        try:
            self.h2.send_goaway()
        except NGH2Error as error:
            self.end_by(error)
        self._flush()

    def abort(self) -> None:
        """Answer the requests in progress at once with an error."""
        if self.is_over:
            return
        for stream in list(self._streams.values()):
            if stream.receiver is not None and not stream.has_ended:
                stream.receiver.abort()
        self._flush()
        self.is_over = True
        self._transport.close()
