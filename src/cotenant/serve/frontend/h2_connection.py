"""HTTP/2 of one connection: bytes to streams of requests, and answers to bytes.

The protocol itself (frames, HPACK, windows, limits of what a peer may do) is nghttp2's, by `ngh2`; this module alone
names it. It knows nothing of what the streams carry. Everything runs on the event loop of its server.

Received data are bounded: a stream gets a window of `WINDOW_BYTES`, which opens as its receiver releases data. A
receiver that knows of a larger message says so by `H2Stream.expect`, and gets it at once as long as all such messages
of the connection stay within `room_bytes`; the others wait for these. Sent data wait for the peer's windows, and for
the socket.
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
"""Data of a stream that may come before its receiver has released any: the protocol's own first value."""
_MOST_WINDOW_BYTES = 4 << 20
"""The same of a stream whose message is taken as it comes: what is on the way at 1 ms and 30 Gbit/s."""
_READ_BYTES, _MANY_BYTES = 16 << 10, 256 << 10
"""What one read takes: hundreds of small requests at most, and more where a large message is coming."""
_WRITE_BYTES = 256 << 10
"""What is framed at a time; the socket's buffer says whether more is."""
_RESETS = (2_000, 500)
"""Streams that a client may reset at once, and in a second. Clients reset for each deadline that passes; one that opens
and resets as fast as it can reaches tens of thousands."""
_IDLE_S = 300.0
"""A connection without streams is ended after this time. Clients connect again when they need to."""
_SILENT_S = 60.0
"""A client with open streams that has sent nothing for so long is asked for a sign of life, and has as long for it."""

Headers = Sequence[tuple[bytes, bytes]]


class Receiver(Protocol):
    """What takes the request of a stream and answers it. All methods are called on the loop, and must be quick."""

    def received(self, data: bytes, is_end: bool) -> None:
        """The next data of the request; with `is_end` nothing follows."""

    def drained(self) -> None:
        """All that was sent has left, or the socket has it; called where `H2Stream.watch` has asked for it."""

    def gone(self) -> None:
        """The client has reset the stream, or the connection is lost, before the answer was complete."""

    def look(self, now_s: float) -> None:
        """End what takes too long: called now and then, with the time of the loop."""

    def shut_down(self) -> None:
        """The server stops: take no further work."""

    def give_up(self) -> None:
        """The server stops now: answer without waiting for anything."""


class H2App(Protocol):
    """What gets the requests of a server."""

    def opened(self, stream: H2Stream) -> Receiver | None:
        """A request has begun. None where it is answered already. Raises nothing."""


class H2Stream:
    """One request and its answer. Once the client has gone, all that is said to it is dropped."""

    __slots__ = (
        *("_connection", "_expected", "_held", "_is_taking", "_unsent", "_unsent_s", "arrival_ns", "headers", "id"),
        *("has_ended", "is_over", "is_received", "receiver"),
    )

    def __init__(self, connection: H2Connection, number: int, headers: Headers) -> None:
        self._connection = connection
        self.id = number
        self.headers = headers
        self.arrival_ns = connection.arrived_ns()
        """The monotonic time when the first byte of the request could be read."""
        self.receiver: Receiver | None = None
        self.is_received = False
        """The client has sent all."""
        self.has_ended = False
        """The answer is complete, but for what has not left yet."""
        self.is_over = False
        """The stream is closed."""
        self._held = 0
        """Bytes received that are not released."""
        self._expected = 0
        self._is_taking = False
        self._unsent = 0
        self._unsent_s = 0.0

    # --- the request ----------------------------------------------------------------------------------------------

    def arrived_ns(self) -> int:
        """The monotonic time when the data in hand could be read."""
        return self._connection.arrived_ns()

    def release(self) -> None:
        """All data received are taken: as many may come again."""
        if self._held:
            self._connection.release(self)

    def expect(self, nbytes: int) -> None:
        """A message of so many bytes is coming: let all of it come, as soon as there is room, without `release`."""
        self._expected = nbytes
        self._connection.expect(self)

    def settle(self) -> None:
        """The message that was expected is there, or is not wanted."""
        if self._expected:
            self._connection.settle(self)

    # --- the answer -----------------------------------------------------------------------------------------------

    def respond(self, headers: Headers) -> None:
        """Begin the answer."""
        self._say(self._connection.h2.send_response, headers)

    def send(self, data: bytes) -> None:
        """Go on with the answer."""
        self._say(self._connection.h2.send_data, data)

    def end(self, trailers: Headers) -> None:
        """End the answer."""
        self._say(self._connection.h2.send_trailers, trailers)
        self._connection.ended(self)

    def refuse(self, headers: Headers) -> None:
        """Give an answer of headers alone."""
        self._say(self._connection.h2.send_response, headers, end_stream=True)
        self._connection.ended(self)

    def reset(self) -> None:
        """End the stream without a whole answer; its receiver hears that it is gone."""
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
        """Bytes of the answer that have not left."""
        return 0 if self.is_over or self._connection.is_over else self._connection.h2.queued_body_size(self.id)

    def blame(self, answer: Callable[[], None]) -> None:
        """The request is malformed: have it answered, later where the client has sent many of those."""
        self._connection.blame(answer)

    def watch(self) -> None:
        """Call `Receiver.drained` once, when `unsent` is 0."""
        self._connection.watched.add(self)

    def is_stuck(self, now_s: float, limit_s: float) -> bool:
        """Whether nothing of the answer has left for so long."""
        unsent, before = self.unsent(), self._unsent
        self._unsent = unsent
        if unsent == 0 or unsent != before:
            self._unsent_s = now_s
        return now_s - self._unsent_s > limit_s


class H2Connections(OpenConnections["H2Connection"]):
    """The open connections of a server, with room to read into.

    `streams`: how many requests a connection may have at a time. `room_bytes`: of the large messages on their way.
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
    """One connection, of `others`."""

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
        """Streams whose answers are complete while their requests are not."""
        self._large: deque[H2Stream] = deque()
        """Streams whose messages wait for room."""
        self._room = others.room_bytes
        self._taking = 0
        """Streams whose messages have room."""
        self._arrived_ns = self._malformed = 0
        now_s = self._loop.time()
        self._heard_s = self._used_s = self._sent_s = now_s
        self._unsent = 0
        self._is_greeted = self._is_asked = False
        self._is_busy = self._is_soon = self._is_full = self._is_stopping = False
        self._is_ended = self.is_over = False
        """nghttp2 has nothing more to say; the transport is closed, or will be."""

    # --- asyncio --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Take the transport, and greet the client; one connection too many is told so and closed."""
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

    def connection_lost(self, error: Exception | None) -> None:
        """The client has gone: all its streams are over."""
        self.is_over = True
        self._others.close(self, self._address)
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            self._lose(stream)
        self.watched.clear()
        self._unfinished.clear()
        self._large.clear()

    def eof_received(self) -> None:
        """A client that closes its side has gone, as one that died would look the same."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Room to read into, little where small requests come."""
        return self._others.scratch if self._taking else self._others.scratch[:_READ_BYTES]

    def buffer_updated(self, count: int) -> None:
        """Parse what was read, have it answered, and send what is ready."""
        if self.is_over:
            return
        self._arrived_ns = 0
        self._heard_s, self._is_asked = self._loop.time(), False
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
        """The socket takes no more: frames stay with nghttp2."""
        self._is_full = True

    def resume_writing(self) -> None:
        """The socket takes more."""
        self._is_full = False
        self._flush()

    # --- what comes -----------------------------------------------------------------------------------------------

    def arrived_ns(self) -> int:
        """The monotonic time when what was read last could be read."""
        if not self._arrived_ns:
            self._arrived_ns = readable_since(self._descriptor)
        return self._arrived_ns

    def _handle(self) -> None:
        """Tell the receivers what has come."""
        events = self.h2.events()
        closed = [event.stream_id for event in events if isinstance(event, StreamClosed)]
        for number in closed:  # first: nothing can be said on them any more
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
            _log.exception("data of a stream could not be taken")
            stream.reset()

    def _lose(self, stream: H2Stream) -> None:
        """A stream is closed, in whatever way."""
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
        """Open the window of a stream by what it has held."""
        held, stream._held = stream._held, 0
        self._acknowledge(stream.id, held)
        self.touch()

    def expect(self, stream: H2Stream) -> None:
        """Put a stream in line for the room of its large message."""
        self._large.append(stream)
        self._take()

    def settle(self, stream: H2Stream) -> None:
        """Give the room of a large message to the next ones in line."""
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
        """Let those large messages come for which there is room, in the order in which they began; one always."""
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

    # --- what goes ------------------------------------------------------------------------------------------------

    def ended(self, stream: H2Stream) -> None:
        """The answer of a stream is complete: what of its request still comes is not wanted."""
        if stream.is_over:
            return
        stream.has_ended = True
        stream.release()
        stream.settle()
        if not stream.is_received:
            self._unfinished.add(stream)
        self.touch()

    def touch(self) -> None:
        """Something is to be sent."""
        if not self._is_busy and not self._is_soon:
            self._is_soon = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what can be sent, and tell of it."""
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
                self._handle()  # streams that this has closed
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
        """Tell of answers that have left, and reset streams that are answered; whether there is more to send."""
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
        """Whether the end of an answer has left: as its data, it waits for a window."""
        return self.h2.remote_window_size > 0 and self.h2.stream_remote_window_size(stream.id) > 0

    def end_by(self, error: NGH2Error) -> None:
        """The client has broken the protocol, or asked too much: tell it where that can be, and close."""
        if self.is_over:
            return
        self.is_over = True
        _log.debug("the connection of %s ends: %s", self._address, error)
        try:
            self._transport.write(self.h2.data_to_send())
        except NGH2Error:  # nothing can be said any more
            pass
        self._transport.close()

    def blame(self, answer: Callable[[], None]) -> None:
        """A request was malformed: have it answered, and end a connection with too many of those."""
        self._malformed += 1
        delay_s = self._others.blame(self._address, self._loop.time())
        if delay_s:
            self._loop.call_later(delay_s, answer)
        else:
            answer()
        if self._others.is_hopeless(self._malformed):
            self.shut_down()

    # --- time and the end -----------------------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """End what takes too long: called now and then."""
        limits = self._limits
        unsent, before = self._transport.get_write_buffer_size(), self._unsent
        self._unsent = unsent
        if unsent == 0 or unsent != before:
            self._sent_s = now_s
        if (
            now_s - self._sent_s > limits.max_unread_s
            or (not self._is_greeted and now_s - self._used_s > limits.max_head_s)
            or (self._is_asked and now_s - self._heard_s > 2 * _SILENT_S)
        ):
            self._transport.abort()
            return
        if self.is_over:
            return
        if not self._streams:
            if now_s - self._used_s > _IDLE_S:
                self.shut_down()
            return
        if now_s - self._heard_s > _SILENT_S and not self._is_asked:
            self._is_asked = True
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
                stream.receiver.look(now_s)

    def shut_down(self) -> None:
        """Answer the requests in progress, and no other."""
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

    def give_up(self) -> None:
        """Answer the requests in progress now, without waiting for what they asked for."""
        if self.is_over:
            return
        for stream in list(self._streams.values()):
            if stream.receiver is not None and not stream.has_ended:
                stream.receiver.give_up()
        self._flush()
        self.is_over = True
        self._transport.close()
