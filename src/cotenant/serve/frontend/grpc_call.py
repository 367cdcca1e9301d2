"""gRPC call on an HTTP/2 stream: messages, deadline and status."""

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
"""Allowance in bytes for names, shapes and parameters, beyond the body limit for tensors."""
_MAX_DETAIL_CHARS = 1000
"""Maximum length of an error message: it travels in trailing metadata, of which clients accept 8 KiB."""
_BYTES_PER_S = 1024
"""Minimum rate of a message in bytes per second, once it exceeds the time limit."""
_JOIN_UP_TO_BYTES = 64 << 10
"""Size up to which a message is joined with its prefix; joining larger ones costs more than a second write."""
Packed = bytes | bytearray
"""Message as received, possibly compressed."""
_ENCODINGS = (b"gzip", b"deflate")
HEADERS: Headers = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity,deflate,gzip"),
)
OK_TRAILERS: Headers = ((b"grpc-status", b"0"),)


class Call:
    """Base class of calls. Implements Receiver; a subclass handles messages in `take`."""

    def __init__(self, stream: H2Stream, fields: Mapping[bytes, bytes], limits: Limits) -> None:
        self.stream = stream
        self.fields = fields
        self.limits = limits
        self.encoding = fields.get(b"grpc-encoding", b"identity")
        timeout = fields.get(b"grpc-timeout")
        self.timeout_s = None if timeout is None else read_timeout_s(timeout)
        self.is_over = False
        """The call is answered, or the client has disconnected."""
        self.has_begun = False
        """Response headers are sent."""
        self.on_finish: Callable[[], None] | None = None
        """Called once when the call is over."""
        self._reader = MessageReader(limits.max_body_bytes + MESSAGE_SLACK_BYTES)
        self._is_expecting = False
        self._deadline_s = self._since_s = 0.0
        """Deadline of the call and start of the current message, in loop time; 0 before the first check."""

    # --- Receiver -------------------------------------------------------------------------------------------------

    def received(self, data: bytes, is_end: bool) -> None:
        """Read messages from the data and pass them to `take`."""
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
        """Do nothing, unless a subclass waits for sent answers."""

    def gone(self) -> None:
        """Finish a call that the client has cancelled."""
        if not self.is_over:
            self.finish()

    def check_timeouts(self, now_s: float) -> None:
        """End the call at its deadline, or if its message arrives too slowly."""
        if not self._deadline_s and self.timeout_s is not None:
            self._deadline_s = now_s + self.timeout_s
        if self._deadline_s and now_s > self._deadline_s:
            self.fail(DEADLINE_EXCEEDED, "the deadline of the call has passed")
        elif not self.is_waiting():
            self._since_s = 0.0
        elif not self._since_s:
            self._since_s = now_s
        elif now_s - self._since_s > self.limits.max_body_s + self._reader.came / _BYTES_PER_S:
            self.fail(DEADLINE_EXCEEDED, f"the message was not complete within {self.limits.max_body_s:g} s")

    def shut_down(self) -> None:
        """Do nothing: a call in progress continues. Streams override this."""

    def abort(self) -> None:
        """Fail the call: the server is stopping."""
        if not self.is_over:
            self.fail_with(ServeError(Status.UNAVAILABLE, "the server is stopping", FAILURE))

    # --- for subclasses -------------------------------------------------------------------------------------------

    @abstractmethod
    def take(self, messages: list[tuple[bool, Packed]], is_end: bool) -> None:
        """Handle messages, the end, or a part of a message. A raised error becomes the status of the call."""

    def coming(self, is_packed: bool, start: bytes, nbytes: int) -> None:
        """Handle the first bytes of an incomplete message of `nbytes`. A raised error becomes the status."""

    @abstractmethod
    def withdraw(self) -> None:
        """Cancel the queries of a call that is over."""

    def is_waiting(self) -> bool:
        """Whether a message is incomplete."""
        return not self._reader.is_between

    def finish(self) -> None:
        """Mark the call as over and cancel its queries."""
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
        """Send the response message and end the call; further calls are ignored."""
        if not self.is_over:
            self.finish()
            self.stream.respond(HEADERS)
            self.send(data)
            self.stream.end(OK_TRAILERS)

    def fail(self, code: int, message: str, pairs: Iterable[tuple[str, str]] = ()) -> None:
        """End the call with an error status; further calls are ignored."""
        if self.is_over:
            return
        self.finish()
        sentence = (message or "the request failed without a reason")[:_MAX_DETAIL_CHARS]
        fields = status_fields(code, sentence)
        fields += [(key.encode(), value.encode()) for key, value in pairs]
        end = partial(self.stream.end, fields) if self.has_begun else partial(self.stream.refuse, (*HEADERS, *fields))
        if code == CODES["INVALID_ARGUMENT"]:
            self.stream.answer_malformed(end)
        else:
            end()

    def fail_with(self, error: BaseException, pairs: Iterable[tuple[str, str]] = ()) -> None:
        """End the call with the status of an error; an unexpected error is logged."""
        match error:
            case ServeError():
                self.fail(CODES[error.status.value[1]], error.message, (*pairs, *error.ending.pairs()))
            case FrameError():
                self.fail(error.code, error.message, (*pairs, *FAILURE.pairs()))
            case _:
                _log.error("gRPC call %s failed", self.fields[b":path"].decode("latin-1"), exc_info=error)
                self.fail(INTERNAL, INTERNAL_ERROR, (*pairs, *FAILURE.pairs()))


def unpacking(encoding: bytes, data: Packed, limits: Limits) -> Steps[bytes]:
    """Decompress a message in steps, as `codec_http.inflating` does. Raises FrameError and ServeError."""
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
    """Parse a protobuf message. Raises ServeError (INVALID_ARGUMENT)."""
    try:
        return MESSAGES[kind].FromString(data)
    except DecodeError:
        raise bad(f"the received bytes are not a {kind} message") from None


def is_slow(message: Any, nbytes: int) -> bool:
    """Whether decoding a ModelInferRequest takes long: typed contents and raw BYTES tensors do."""
    if nbytes < OFF_LOOP_BYTES:
        return False
    return not message.raw_input_contents or any(tensor.datatype == "BYTES" for tensor in message.inputs)
