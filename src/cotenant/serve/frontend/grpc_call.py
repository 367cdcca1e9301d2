"""One call of gRPC as a receiver of a stream of HTTP/2: its messages, its deadline, its status."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from cotenant.serve.frontend.call_threads import Steps
from cotenant.serve.frontend.grpc_frames import (
    CODES,
    DEADLINE_EXCEEDED,
    INTERNAL,
    PREFIX_BYTES,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
    FrameError,
    MessageReader,
    prefix_of,
    read_timeout_s,
    status_fields,
)
from cotenant.serve.frontend.h2_connection import WINDOW_BYTES, H2Stream, Headers
from cotenant.serve.frontend.off_loop import OFF_LOOP_BYTES
from cotenant.wire import codec_http
from cotenant.wire.api import ServeError, Status
from cotenant.wire.codec import Limits, bad
from cotenant.wire.ending import FAILURE
from cotenant.wire.oip import MESSAGES

_log = logging.getLogger("cotenant.grpc")

INTERNAL_ERROR = "internal error; the server's log has the details"
MESSAGE_SLACK_BYTES = 1 << 20
"""Room for names, shapes and parameters beside tensors that fill the body limit."""
_MAX_DETAIL_CHARS = 1000
"""Error details travel in trailing metadata, of which clients accept 8 KiB."""
_BYTES_PER_S = 1024
"""A message that has been coming for longer than the limit has to come at least so fast."""
_JOIN_UP_TO_BYTES = 64 << 10
"""Messages up to this size are joined with their prefix; for larger ones that costs more than a second piece."""
Packed = bytes | bytearray
"""A message as it came."""
_ENCODINGS = (b"gzip", b"deflate")
HEADERS: Headers = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity,deflate,gzip"),
)
OK_TRAILERS: Headers = ((b"grpc-status", b"0"),)


class Call:
    """A call. Implements Receiver; subclasses take its messages by `take`."""

    def __init__(self, stream: H2Stream, fields: Mapping[bytes, bytes], limits: Limits) -> None:
        self.stream = stream
        self.fields = fields
        self.limits = limits
        self.encoding = fields.get(b"grpc-encoding", b"identity")
        timeout = fields.get(b"grpc-timeout")
        self.timeout_s = None if timeout is None else read_timeout_s(timeout)
        self.is_over = False
        """Answered, or the client has gone."""
        self.has_begun = False
        """Response headers are sent."""
        self.on_finish: Callable[[], None] | None = None
        """Called once when the call is over, in whatever way."""
        self._reader = MessageReader(limits.max_body_bytes + MESSAGE_SLACK_BYTES)
        self._is_expecting = False
        self._deadline_s = self._since_s = 0.0
        """By the clock of the loop, from when it was looked at first; 0 before that."""

    # --- Receiver -------------------------------------------------------------------------------------------------

    def received(self, data: bytes, is_end: bool) -> None:
        """Take the messages from the data."""
        if self.is_over:
            return
        reader = self._reader
        try:
            found = reader.feed(data) if data else []
        except FrameError as error:
            self.fail_with(error)
            return
        if found:
            self._since_s = 0.0
            if self._is_expecting:
                self._is_expecting = False
                self.stream.settle()
        length = reader.length + PREFIX_BYTES
        if length > WINDOW_BYTES and not self._is_expecting:
            self._is_expecting = True
            self.stream.expect(length)
        try:
            self.take(found, is_end)
            if reader.length and not self.is_over:
                self.coming(*reader.start, reader.length)
        except Exception as error:
            self.fail_with(error)

    def drained(self) -> None:
        """Do nothing: only some calls wait until their answers have left."""

    def gone(self) -> None:
        """The client wants no answer any more."""
        if not self.is_over:
            self.finish()

    def look(self, now_s: float) -> None:
        """End the call at its deadline, or when its message takes too long to come."""
        if not self._deadline_s and self.timeout_s is not None:
            self._deadline_s = now_s + self.timeout_s
        if self._deadline_s and now_s > self._deadline_s:
            self.fail(DEADLINE_EXCEEDED, "the deadline of the call has passed")
        elif not self.is_waiting():
            self._since_s = 0.0
        elif not self._since_s:
            self._since_s = now_s
        elif now_s - self._since_s > self.limits.max_body_s + self._reader.came / _BYTES_PER_S:
            self.fail(DEADLINE_EXCEEDED, f"the message has not come within {self.limits.max_body_s:g} s")

    def shut_down(self) -> None:
        """Do nothing: a call in progress goes on, but for a stream."""

    def give_up(self) -> None:
        """Answer that the server is stopping."""
        if not self.is_over:
            self.fail_with(ServeError(Status.UNAVAILABLE, "the server is stopping", FAILURE))

    # --- for subclasses -------------------------------------------------------------------------------------------

    @abstractmethod
    def take(self, messages: list[tuple[bool, Packed]], is_end: bool) -> None:
        """Messages have come, or the end, or a part of a message. What is raised is the status of the call."""

    def coming(self, is_packed: bool, start: bytes, nbytes: int) -> None:
        """A part of a message of `nbytes` has come, with these bytes at its start. What is raised is the status of the
        call."""

    @abstractmethod
    def withdraw(self) -> None:
        """Cancel what is in progress, as the call is over."""

    def is_waiting(self) -> bool:
        """Whether the call waits for the rest of a message."""
        return not self._reader.is_between

    def finish(self) -> None:
        """The call is over: cancel what is in progress."""
        self.is_over = True
        self.withdraw()
        on_finish, self.on_finish = self.on_finish, None
        if on_finish is not None:
            on_finish()

    def send(self, data: bytes) -> None:
        """Send a message."""
        if len(data) <= _JOIN_UP_TO_BYTES:
            self.stream.send(prefix_of(data) + data)
        else:
            self.stream.send(prefix_of(data))
            self.stream.send(data)

    def answer(self, data: bytes) -> None:
        """Send the only message, the first time."""
        if not self.is_over:
            self.finish()
            self.stream.respond(HEADERS)
            self.send(data)
            self.stream.end(OK_TRAILERS)

    def fail(self, code: int, message: str, pairs: Iterable[tuple[str, str]] = ()) -> None:
        """End the call with a status, the first time."""
        if self.is_over:
            return
        self.finish()
        sentence = (message or "the request failed without a reason")[:_MAX_DETAIL_CHARS]
        fields = status_fields(code, sentence)
        fields += [(key.encode(), value.encode()) for key, value in pairs]
        end = partial(self.stream.end, fields) if self.has_begun else partial(self.stream.refuse, (*HEADERS, *fields))
        if code == CODES["INVALID_ARGUMENT"]:
            self.stream.blame(end)
        else:
            end()

    def fail_with(self, error: BaseException, pairs: Iterable[tuple[str, str]] = ()) -> None:
        """End the call with the status of an error; one that is not foreseen goes to the log."""
        match error:
            case ServeError():
                self.fail(CODES[error.status.value[1]], error.message, (*pairs, *error.ending.pairs()))
            case FrameError():
                self.fail(error.code, error.message, (*pairs, *FAILURE.pairs()))
            case _:
                _log.error("%s failed", self.fields[b":path"].decode("latin-1"), exc_info=error)
                self.fail(INTERNAL, INTERNAL_ERROR, (*pairs, *FAILURE.pairs()))


def unpacking(encoding: bytes, data: Packed, limits: Limits) -> Steps[bytes]:
    """Undo the compression of a message in steps, as `codec_http.inflating` does. Raises FrameError and ServeError."""
    if encoding not in _ENCODINGS:
        text = f"messages compressed by {encoding.decode('latin-1')!r} are not supported, expected gzip or deflate"
        raise FrameError(UNIMPLEMENTED, text)
    try:
        body = yield from codec_http.inflating(encoding, memoryview(data), limits)
    except ServeError as error:
        if error.status is Status.TOO_LARGE:
            raise FrameError(RESOURCE_EXHAUSTED, error.message) from None
        raise
    return bytes(body)


def parse(kind: str, data: Packed) -> Any:
    """Make a message of its bytes. Raises ServeError."""
    try:
        return MESSAGES[kind].FromString(data)
    except DecodeError:
        raise bad(f"the bytes received are no {kind} message") from None


def is_slow(message: Any, nbytes: int) -> bool:
    """Whether a ModelInferRequest takes long to decode: raw tensors do not, but for BYTES, whose elements are many."""
    if nbytes < OFF_LOOP_BYTES:
        return False
    return not message.raw_input_contents or any(tensor.datatype == "BYTES" for tensor in message.inputs)
