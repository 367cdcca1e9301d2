"""One bidirectional gRPC stream of inferences: answers go out as they get ready, each with the id of its request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from msgspec import structs

from cotenant.shortages import start_thread
from cotenant.types import ANSWERS, Outcome
from cotenant.wire import codec_grpc
from cotenant.wire.api import Backend, Infer, InferResult, ServeError, Status, not_answered
from cotenant.wire.codec import Limits, WireRequest, bad, size_bytes
from cotenant.wire.ending import FAILURE, Ending
from cotenant.wire.oip import MESSAGES

_log = logging.getLogger("cotenant.grpc")

_ModelInferRequest = MESSAGES["ModelInferRequest"]
_ModelStreamInferResponse = MESSAGES["ModelStreamInferResponse"]
_INTERNAL = "internal error; the server's log has the details"
_FIRST_IN_FLIGHT = 16
"""Requests of a stream that are taken before its first answer tells how large they are."""


def encode_answer(
    backend: Infer, wire: WireRequest, result: InferResult, replied: Callable[[InferResult], None] = lambda _: None
) -> Any:
    """Make the response message of a query, and tell `replied`, see Backend, if it was answered.

    Raises ServeError when it was not, or cannot be written.
    """
    if result.outcome not in ANSWERS:
        raise not_answered(result, ready=backend.ready())
    try:
        batched = False
        if wire.wants_classes:
            batched = backend.metadata(wire.request.model, wire.request.version).max_batch_size > 0
        return codec_grpc.encode_response(wire, result, batched)
    except ServeError as error:  # it has run: it is not for a gateway to send it again
        raise ServeError(error.status, error.message, FAILURE) from None
    finally:
        replied(result)


class _Answer(NamedTuple):
    wire: WireRequest
    result: InferResult
    final_flag: bool
    nbytes: int
    """What it keeps until it is written: its request and its outputs."""


class _Refusal(NamedTuple):
    id: str
    error: ServeError
    nbytes: int


class _AllRead(NamedTuple):
    requests: int


_Item = _Answer | _Refusal | _AllRead | None


class Stream:
    """The state of one stream. A thread of its own reads requests; the thread of the call writes answers.

    Requests are taken as long as they and their answers find room: those that are finished as they are, of the others
    each answer is believed to be as large as the largest so far.
    """

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self._backend = backend
        self._limits = limits
        self._outbox: SimpleQueue[_Item] = SimpleQueue()
        self._changed = threading.Condition()
        self._taken = 0
        self._unwritten = 0
        """Requests taken whose answers have not been written."""
        self._computing = 0
        """Of these, the ones that have not ended."""
        self._kept_bytes = 0
        self._largest_bytes: int | None = None
        """Of all outputs so far; None before the first."""
        self._active: dict[int, int] = {}
        self._early: set[int] = set()
        """Requests that were answered before `submit` returned their query."""
        self._ended = False
        self._closing = False
        self._has_left = False

    def answers(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Yield serialised answers until the client has closed its side and all are out, or the call has ended.

        Raises ServeError (UNAVAILABLE) when all are out after `close`, or no thread can be had to read requests.
        """
        if not context.add_callback(self._end):
            return
        reader = threading.Thread(target=self._read, args=(requests,), name="cotenant-grpc-read", daemon=True)
        try:
            start_thread(reader, "a gRPC stream is refused")
        except RuntimeError:
            text = "the system has no thread left to read this stream; try again later"
            raise ServeError(Status.UNAVAILABLE, text, Ending(Outcome.REJECTED)) from None
        written, expected = 0, -1
        try:
            while written != expected:
                item = self._outbox.get()
                if item is None:
                    return
                if isinstance(item, _AllRead):
                    expected = item.requests
                    continue
                yield self._encode(item)
                written += 1
                with self._changed:
                    self._unwritten -= 1
                    self._kept_bytes -= item.nbytes
                    self._changed.notify()
        finally:
            self._leave()
        if self._closing:
            raise ServeError(Status.UNAVAILABLE, "the server is stopping")

    def _leave(self) -> None:
        """Nobody writes answers any more: tell of those that are there, and have those that still come told of."""
        with self._changed:
            self._has_left = True
        while not self._outbox.empty():
            self._unsent(self._outbox.get())

    def _unsent(self, item: _Item) -> None:
        if isinstance(item, _Answer) and item.result.outcome in ANSWERS:
            self._backend.replied(item.result)

    def close(self) -> None:
        """Take no further request; the stream ends when those taken are answered."""
        with self._changed:
            self._closing = True
            self._outbox.put(_AllRead(self._taken))
            self._changed.notify()

    def _end(self) -> None:
        """Release both threads and withdraw what is in progress; runs when the call ends in whatever way."""
        with self._changed:
            self._ended = True
            queries = list(self._active.values())
            self._changed.notify()
        self._outbox.put(None)
        for query in queries:
            self._backend.cancel(query)

    def _read(self, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                came_ns = time.monotonic_ns()
                number = self._enter(len(data))
                if number is None:
                    return
                self._take(number, data, came_ns)
        except Exception:
            # grpcio raises a bare Exception here when the call has ended; `_end` has then released the writer.
            if not self._ended:
                _log.debug("stream ended while reading", exc_info=True)
        self._outbox.put(_AllRead(self._taken))

    def _enter(self, nbytes: int) -> int | None:
        """Wait for room for a request of so many bytes and give its number; None when it is not to be taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._closing or self._has_room(nbytes))
            if self._ended or self._closing:
                return None
            self._taken += 1
            self._unwritten += 1
            self._computing += 1
            self._kept_bytes += nbytes
            return self._taken - 1

    def _has_room(self, nbytes: int) -> bool:
        if self._unwritten == 0:
            return True
        most = self._limits.max_stream_in_flight
        if self._largest_bytes is None:
            return self._unwritten < min(most, _FIRST_IN_FLIGHT)
        believed = self._kept_bytes + nbytes + (self._computing + 1) * self._largest_bytes
        return self._unwritten < most and believed <= self._limits.max_stream_bytes

    def _take(self, number: int, data: bytes, came_ns: int) -> None:
        """Submit one request; puts exactly one item into the outbox, now or when its query ends."""
        id_ = ""
        try:
            try:
                message = _ModelInferRequest.FromString(data)
            except DecodeError:
                raise bad("the bytes received are no ModelInferRequest message") from None
            id_ = message.id
            wire = codec_grpc.decode_request(message, self._limits)
            final_flag = codec_grpc.request_flag(message, "triton_enable_empty_final_response")
            request_bytes = len(data)

            def done(result: InferResult) -> None:
                nbytes = sum(map(size_bytes, result.outputs.values()))
                with self._changed:
                    if self._active.pop(number, None) is None:
                        self._early.add(number)
                    self._computing -= 1
                    self._kept_bytes += nbytes
                    if result.outcome in ANSWERS:
                        self._largest_bytes = max(nbytes, self._largest_bytes or 0)
                    self._changed.notify()
                    answer = _Answer(wire, result, final_flag, request_bytes + nbytes)
                    has_left = self._has_left
                    if not has_left:
                        self._outbox.put(answer)
                if has_left:
                    self._unsent(answer)

            query = self._backend.submit(structs.replace(wire.request, arrival_ns=came_ns), done)
        except ServeError as error:
            self._refuse(id_, error, len(data))
            return
        except Exception:
            _log.exception("a request of a stream failed")
            self._refuse(id_, ServeError(Status.INTERNAL, _INTERNAL), len(data))
            return
        with self._changed:
            ended = self._ended
            if number in self._early:
                self._early.remove(number)
            else:
                self._active[number] = query
        if ended:
            self._backend.cancel(query)

    def _refuse(self, id_: str, error: ServeError, nbytes: int) -> None:
        with self._changed:
            self._computing -= 1
        self._outbox.put(_Refusal(id_, error, nbytes))

    def _encode(self, item: _Answer | _Refusal) -> bytes:
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
                _log.exception("an answer of a stream could not be written")
                failure = ServeError(Status.INTERNAL, _INTERNAL)
        else:
            id_, failure, _ = item
        return codec_grpc.encode_failure(id_, failure.message, failure.ending)
