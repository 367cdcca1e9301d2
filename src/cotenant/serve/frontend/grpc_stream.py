"""Bidirectional gRPC stream of inferences: answers are sent as they become ready, each with the id of its request."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from msgspec import structs

from cotenant.serve.frontend.grpc_admission import GrpcAdmission, Incoming
from cotenant.serve.frontend.grpc_call import HEADERS, INTERNAL_ERROR, OK_TRAILERS, Call, Packed, parse
from cotenant.serve.frontend.grpc_frames import START_BYTES, FrameError
from cotenant.serve.frontend.grpc_messages import encode_answer
from cotenant.serve.frontend.h2_connection import H2Stream
from cotenant.serve.frontend.off_loop import OFF_LOOP_BYTES, OFF_LOOP_NS, OffLoop, writing_cost, writing_ns
from cotenant.types import ANSWERS
from cotenant.wire import codec_grpc
from cotenant.wire.api import Backend, InferResult, ServeError, Status
from cotenant.wire.codec import Limits, WireRequest, bad, size_bytes
from cotenant.wire.oip import MESSAGES

_log = logging.getLogger("cotenant.grpc")

_ModelStreamInferResponse = MESSAGES["ModelStreamInferResponse"]
_FIRST_IN_FLIGHT = 16
"""Requests accepted before the first answer of a stream, which shows the size of answers."""
_UNSENT_BYTES = 64 << 10
"""Encoded bytes that may wait for the client's window or the socket; further answers wait unencoded."""


class Codec(Protocol):
    """Front-end as a stream uses it."""

    @property
    def off_loop(self) -> OffLoop:
        """Thread pools of the loop."""

    @property
    def admission(self) -> GrpcAdmission:
        """Admission control of requests."""

    def unpacked(
        self,
        call: Call,
        incoming: Incoming,
        is_packed: bool,
        data: Packed,
        then: Callable[[Packed], None],
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Decompress a message in a thread, then call `then` on the loop."""

    def decode(
        self,
        call: Call,
        incoming: Incoming,
        message: Any,
        nbytes: int,
        then: Callable[[WireRequest], None],
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Decode a request, at once or in a thread, then call `then` on the loop."""


class _Request(NamedTuple):
    is_packed: bool
    data: Packed
    incoming: Incoming


class _Answer(NamedTuple):
    wire: WireRequest
    result: InferResult
    final_flag: bool
    nbytes: int
    """Bytes that it keeps until it is written: request and outputs."""


class _Refusal(NamedTuple):
    id: str
    error: ServeError
    nbytes: int


class StreamCall(Call):
    """State of one stream, with flow control by bytes.

    A request is accepted if `kept + request + (computing + 1) * largest <= max_stream_bytes`. `kept`: bytes of
    accepted requests and finished answers; `largest`: the largest answer so far. Data of other requests are not
    acknowledged, so the client stops sending.
    """

    def __init__(
        self, codec: Codec, backend: Backend, stream: H2Stream, fields: Mapping[bytes, bytes], limits: Limits
    ) -> None:
        super().__init__(stream, fields, limits)
        self._codec = codec
        self._backend = backend
        self._incoming: Incoming | None = None
        """Incomplete request."""
        self._waiting: deque[_Request] = deque()
        """Received requests that are not accepted yet."""
        self._outbox: deque[_Answer | _Refusal] = deque()
        self._leaving: list[int] = []
        """Kept bytes of answers that are written and not sent yet."""
        self._taken = 0
        self._unwritten = 0
        """Accepted requests with an answer that is not sent yet."""
        self._computing = 0
        """Accepted requests that have not ended."""
        self._kept_bytes = 0
        self._largest_bytes: int | None = None
        """Largest answer so far; None before the first."""
        self._active: dict[int, int] = {}
        """Query numbers by request number, for queries in progress."""
        self._early: set[int] = set()
        """Requests answered before `submit` returned their query number."""
        self._is_whole = False
        """The client has sent all of its requests."""
        self._is_closing = self._is_encoding = self._is_advancing = False

    def begin(self) -> None:
        """Send the response headers."""
        self.has_begun = True
        self.stream.respond(HEADERS)

    # --- Call -----------------------------------------------------------------------------------------------------

    def take(self, messages: list[tuple[bool, Packed]], is_end: bool) -> None:
        """Queue the requests until there is room."""
        self._is_whole = self._is_whole or is_end
        if messages and not self._is_closing:
            came_ns = self.stream.arrived_ns()
            first, self._incoming = self._incoming, None
            for is_packed, data in messages:
                self._waiting.append(_Request(is_packed, data, first or Incoming(came_ns)))
                first = None
        self._advance()

    def coming(self, is_packed: bool, start: bytes, nbytes: int) -> None:
        """Count the message, as its length is known."""
        if self._incoming is None:
            self._incoming = Incoming(self.stream.arrived_ns())
            self._codec.admission.count(self._incoming, nbytes)

    def is_waiting(self) -> bool:
        """Whether the stream waits for the rest of a request."""
        return not self._waiting and super().is_waiting()

    def drained(self) -> None:
        """Free the room of sent answers, and continue."""
        self._unwritten -= len(self._leaving)
        self._kept_bytes -= sum(self._leaving)
        self._leaving.clear()
        self._advance()

    def shut_down(self) -> None:
        """Accept no further request; the stream ends when the accepted ones are answered."""
        self._is_closing = True
        self._forget_waiting()
        self._advance()

    def withdraw(self) -> None:
        """Cancel queries in progress, and report answers that are never written."""
        for query in list(self._active.values()):
            self._backend.cancel(query)
        while self._outbox:
            self._unsent(self._outbox.popleft())
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        """Drop received requests that are not accepted yet."""
        for request in self._waiting:
            request.incoming.release()
        self._waiting.clear()
        if self._incoming is not None:
            self._incoming.release()

    # --- requests -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Accept requests with room, write ready answers, and end the stream when it is complete."""
        if self._is_advancing or self.is_over:
            return
        self._is_advancing = True
        try:
            self._write()
            while self._waiting and self._has_room(len(self._waiting[0].data)):
                self._enter(self._waiting.popleft())
                self._write()
            if not self._waiting:
                self.stream.release()
        finally:
            self._is_advancing = False
        if self.is_over or self._computing or self._outbox or self._is_encoding or self._waiting:
            return
        if self._is_closing:
            self.fail_with(ServeError(Status.UNAVAILABLE, "the server is stopping"))
        elif self._is_whole:
            self.finish()
            self.stream.end(OK_TRAILERS)

    def _has_room(self, nbytes: int) -> bool:
        if self._unwritten == 0:
            return True
        most = self.limits.max_stream_in_flight
        if self._largest_bytes is None:
            return self._unwritten < min(most, _FIRST_IN_FLIGHT)
        believed = self._kept_bytes + nbytes + (self._computing + 1) * self._largest_bytes
        return self._unwritten < most and believed <= self.limits.max_stream_bytes

    def _enter(self, request: _Request) -> None:
        """Accept a request; it puts exactly one item into the outbox, now or when its query ends."""
        is_packed, data, incoming = request
        number, nbytes = self._taken, len(data)
        self._taken += 1
        self._unwritten += 1
        self._computing += 1
        self._kept_bytes += nbytes
        id_ = ""

        def parsed(data: Packed) -> None:
            nonlocal id_
            message = parse("ModelInferRequest", data)
            id_ = message.id
            self._codec.admission.admit(incoming, message.model_name, message.model_version)
            self._codec.decode(self, incoming, message, len(data), partial(decoded, message), refuse)

        def decoded(message: Any, wire: WireRequest) -> None:
            final_flag = codec_grpc.request_flag(message, "triton_enable_empty_final_response")
            self._submit(number, nbytes, wire, final_flag, incoming)

        def refuse(error: BaseException) -> None:
            incoming.release()
            self._refuse(id_, nbytes, error)

        try:
            if incoming.held is None:
                self._codec.admission.count(incoming, nbytes)
            if is_packed or nbytes >= OFF_LOOP_BYTES:
                encoding = self.encoding if is_packed else None
                self._codec.admission.start(incoming, encoding, bytes(data[:START_BYTES]))
            self._codec.unpacked(self, incoming, is_packed, data, parsed, refuse)
        except Exception as error:
            refuse(error)

    def _submit(self, number: int, nbytes: int, wire: WireRequest, final_flag: bool, incoming: Incoming) -> None:
        if self.is_over:
            incoming.release()
            return
        put = self._codec.off_loop.inbox.put

        def done(result: InferResult) -> None:
            put(lambda: ended(result))

        def ended(result: InferResult) -> None:
            incoming.release()
            self._ended(number, nbytes, wire, final_flag, result)

        query = self._backend.submit(structs.replace(wire.request, arrival_ns=incoming.arrival_ns), done)
        if number in self._early:
            self._early.remove(number)
        else:
            self._active[number] = query

    def _ended(self, number: int, nbytes: int, wire: WireRequest, final_flag: bool, result: InferResult) -> None:
        """Put the answer of an ended query into the outbox."""
        if self._active.pop(number, None) is None:
            self._early.add(number)
        out_bytes = sum(map(size_bytes, result.outputs.values()))
        answer = _Answer(wire, result, final_flag, nbytes + out_bytes)
        self._computing -= 1
        self._kept_bytes += out_bytes
        if result.outcome in ANSWERS:
            self._largest_bytes = max(out_bytes, self._largest_bytes or 0)
        if self.is_over:
            self._unsent(answer)
        else:
            self._outbox.append(answer)
            self._advance()

    def _refuse(self, id_: str, nbytes: int, error: BaseException) -> None:
        """Put the refusal of a request into the outbox."""
        if isinstance(error, FrameError):
            error = bad(error.message)
        elif not isinstance(error, ServeError):
            _log.error("a request of a gRPC stream failed", exc_info=error)
            error = ServeError(Status.INTERNAL, INTERNAL_ERROR)
        self._computing -= 1
        self._outbox.append(_Refusal(id_, error, nbytes))
        if error.status is Status.INVALID_ARGUMENT:
            self.stream.answer_malformed(self._advance)
        else:
            self._advance()

    # --- answers --------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Write ready answers while the client reads them."""
        while self._outbox and not self._is_encoding and self.stream.unsent() < _UNSENT_BYTES:
            item = self._outbox.popleft()
            if isinstance(item, _Answer) and (took_ns := writing_ns(item.wire, item.result)) >= OFF_LOOP_NS:
                self._is_encoding = True
                model, encode = item.wire.request.model, partial(self._encode, item)
                encoded = partial(self._encoded, item.nbytes)
                self._codec.off_loop.convert(model, writing_cost(took_ns), encode, encoded, self.fail_with)
            else:
                self._send(item.nbytes, self._encode(item))

    def _encoded(self, nbytes: int, data: bytes) -> None:
        """Send an answer that a thread has encoded."""
        self._is_encoding = False
        if not self.is_over:
            self._send(nbytes, data)
            self._advance()

    def _send(self, nbytes: int, data: bytes) -> None:
        self._leaving.append(nbytes)
        self.send(data)
        self.stream.watch()

    def _unsent(self, item: _Answer | _Refusal) -> None:
        """Report an answer that is never written."""
        if isinstance(item, _Answer) and item.result.outcome in ANSWERS:
            self._backend.replied(item.result)

    def _encode(self, item: _Answer | _Refusal) -> bytes:
        """Encode an answer, on any thread. Raises nothing."""
        if isinstance(item, _Answer):
            id_ = item.wire.request.id
            try:
                response = _ModelStreamInferResponse(
                    infer_response=encode_answer(self._backend, item.wire, item.result, self._backend.replied)
                )
                if item.final_flag:
                    response.infer_response.parameters["triton_final_response"].bool_param = True
                data: bytes = response.SerializeToString()
                return data
            except ServeError as error:
                failure = error
            except Exception:
                _log.exception("model %r: an answer of a stream could not be encoded", item.wire.request.model)
                failure = ServeError(Status.INTERNAL, INTERNAL_ERROR)
        else:
            id_, failure, _ = item
        return codec_grpc.encode_failure(id_, failure.message, failure.ending)
