"""The gRPC front-end: `inference.GRPCInferenceService` and `grpc.health.v1.Health`.

Built on grpcio's synchronous server: a call is decoded, submitted and encoded in a thread of its own, which costs less
than half of what grpc.aio takes for the same. Messages are parsed here and not by grpcio, so that a malformed one is
the client's INVALID_ARGUMENT and not an INTERNAL error with a traceback.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from msgspec import structs

from cotenant.errors import CotenantError
from cotenant.serve.frontend.admin_access import CLOSED, Access, access_at
from cotenant.serve.frontend.call_threads import CallThreads, Slots
from cotenant.serve.frontend.grpc_control import CONTROL, LOADS, health
from cotenant.serve.frontend.grpc_stream import Stream, encode_answer
from cotenant.serve.frontend.load_line import LoadLine
from cotenant.types import Outcome
from cotenant.wire import codec_grpc
from cotenant.wire.api import Backend, Control, InferRequest, InferResult, ServeError, Status
from cotenant.wire.codec import Limits, WireRequest, less_spent
from cotenant.wire.ending import Ending
from cotenant.wire.oip import HEALTH_SERVICE, MESSAGES, NO_SHARED_MEMORY, QUERY_KEY, SERVICE, SPENT_KEY

_log = logging.getLogger("cotenant.grpc")

_RESERVED_THREADS = 16
"""Threads that infer calls cannot take, so that health checks and control calls are answered under overload."""
_LOAD_THREADS = 32
"""Threads for calls that wait for a load; further ones are refused."""
_CANCELLED_S = 0.3
"""Time that calls have to end once they are cancelled, when the server stops."""
_FIRST_THREADS = 4
"""Threads that start with the server: calls are answered, one after the other, where the system gives no further."""
_DAY_S = 86_400.0
"""A deadline beyond a day is no time-out that anyone meant."""
_MESSAGE_SLACK_BYTES = 1 << 20
"""Room for names, shapes and parameters beside tensors that fill the body limit."""
_MAX_DETAIL_CHARS = 1000
"""Error details travel in trailing metadata, of which clients accept 8 KiB."""
_UNSERVED = {
    **{
        f"{kind}SharedMemory{action}": NO_SHARED_MEMORY
        for kind in ("System", "Cuda")
        for action in ("Status", "Register", "Unregister")
    },
    "TraceSetting": "the trace settings extension is not supported",
    "LogSettings": "the logging settings extension is not supported",
}


class GrpcServer:
    """Serves a backend over gRPC from threads of its own; constructing it does no I/O. `access`: see HttpServer."""

    def __init__(
        self,
        backend: Backend,
        host: str = "127.0.0.1",
        port: int = 8001,
        limits: Limits | None = None,
        access: Access | None = None,
    ) -> None:
        self._backend = backend
        self._access = access or access_at(host)
        self._host = host
        self._port = port
        self._limits = limits or Limits()
        self._server: Any = None
        self._threads: CallThreads | None = None
        self._slots = Slots(self._limits.max_concurrent_rpcs)
        self._streams: dict[Stream, None] = {}
        self._load_slots = Slots(_LOAD_THREADS)
        self._loads = LoadLine(backend, "cotenant-grpc-loads")

    def start(self) -> int:
        """Listen and serve; return the port, which is a free one where 0 was asked for.

        Raises CotenantError when the address cannot be listened on, or no thread can be started.
        """
        if self._server is not None:
            raise CotenantError("gRPC: the server has been started already")
        limits = self._limits
        # Every infer call holds a thread until its answer is there, so the number of threads bounds the number of
        # queries that can wait. They are made on demand and, asleep, cost little but address space.
        threads = CallThreads(limits.max_concurrent_rpcs + _LOAD_THREADS + _RESERVED_THREADS, "cotenant-grpc")
        threads.start(_FIRST_THREADS)
        server = grpc.server(
            threads,
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limits.max_body_bytes + _MESSAGE_SLACK_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", limits.max_header_bytes),
                ("grpc.absolute_max_metadata_size", 2 * limits.max_header_bytes),
            ),
            # Calls beyond the slots are refused with a sentence by their handlers; this bounds the queue before them.
            maximum_concurrent_rpcs=2 * (limits.max_concurrent_rpcs + _LOAD_THREADS + _RESERVED_THREADS),
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, self._handlers()),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, self._health_handlers()),
            )
        )
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            port = server.add_insecure_port(f"{host}:{self._port}")
        except RuntimeError:
            port = 0
        if port == 0:
            threads.shutdown()
            raise CotenantError(
                f"gRPC: cannot listen on {self._host} port {self._port}; stop what uses the port or choose another one "
                "(0 takes any free one)"
            )
        self._threads = threads
        server.start()
        self._server = server
        return int(port)

    def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new calls, let those in progress end for `grace_s` seconds, then cancel them. Safe to repeat.

        Streams take no further request and end with what they have taken.
        """
        self._loads.close()
        if self._server is not None:
            stopped = self._server.stop(grace_s)
            for stream in list(self._streams):
                stream.close()
            stopped.wait(grace_s + _CANCELLED_S)
        if self._threads is not None:
            self._threads.shutdown()

    def _handlers(self) -> dict[str, Any]:
        handlers = {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self._guarded("ModelInferRequest", self._infer)),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        for method, call in CONTROL.items():
            handlers[method] = grpc.unary_unary_rpc_method_handler(
                self._guarded(f"{method}Request", functools.partial(self._control, call))
            )
        for method, change in LOADS.items():
            handlers[method] = grpc.unary_unary_rpc_method_handler(
                self._guarded(f"{method}Request", functools.partial(self._load, change))
            )
        for method, sentence in _UNSERVED.items():
            handlers[method] = grpc.unary_unary_rpc_method_handler(_refusing(sentence))
        return handlers

    def _health_handlers(self) -> dict[str, Any]:
        check = self._guarded("HealthCheckRequest", functools.partial(self._control, health))
        watch = _refusing("Watch is not supported, call Check")
        return {
            "Check": grpc.unary_unary_rpc_method_handler(check),
            "Watch": grpc.unary_stream_rpc_method_handler(watch),
        }

    def _guarded(self, request_name: str, call: Callable[[Any, Any], Any]) -> Callable[[bytes, Any], bytes]:
        """Wrap a call with parsing, serialising and the translation of errors into statuses."""
        parse = MESSAGES[request_name].FromString

        def handle(data: bytes, context: Any) -> bytes:
            try:
                try:
                    message = parse(data)
                except DecodeError:
                    text = f"the bytes received are no {request_name} message"
                    raise ServeError(Status.INVALID_ARGUMENT, text) from None
                answer: bytes = call(message, context).SerializeToString()
                return answer
            except ServeError as error:
                failure = error
            except Exception:
                _log.exception("%s failed", request_name)
                failure = ServeError(Status.INTERNAL, "internal error; the server's log has the details")
            _abort(context, failure)

        return handle

    def _control(self, call: Callable[[Control, Any], Any], message: Any, context: Any) -> Any:
        return call(self._backend, message)

    def _load(self, change: Callable[[LoadLine, Any], Any], message: Any, context: Any) -> Any:
        if self._access is Access.CLOSED:
            raise ServeError(Status.FORBIDDEN, CLOSED)
        if not self._load_slots.take():
            text = f"{_LOAD_THREADS} gRPC calls wait for loads already, the limit; try again when some have ended"
            raise ServeError(Status.UNAVAILABLE, text)
        try:
            return change(self._loads, message)
        finally:
            self._load_slots.give_back()

    def _infer(self, message: Any, context: Any) -> Any:
        if not self._slots.take():
            raise self._overload()
        try:
            came_ns = self._came_ns()
            wire = codec_grpc.decode_request(message, self._limits)
            if wire.request.timeout_ns is None:
                remaining_s = context.time_remaining()
                spent_s = (time.monotonic_ns() - came_ns) / 1e9
                wire = with_deadline(wire, None if remaining_s is None else remaining_s + spent_s)
            else:
                wire = less_spent(wire, str(dict(context.invocation_metadata()).get(SPENT_KEY, "")))
            result = self._wait(structs.replace(wire.request, arrival_ns=came_ns), context)
            try:
                return encode_answer(self._backend, wire, result, self._backend.replied)
            except ServeError:
                # Answers carry these as parameters; trailing metadata for each would cost much more.
                context.set_trailing_metadata(((QUERY_KEY, str(result.query)),))
                raise
        finally:
            self._slots.give_back()

    def _came_ns(self) -> int:
        """When the library handed over the call that runs on this thread: it does not tell when bytes came."""
        return (self._threads.came_ns() if self._threads is not None else 0) or time.monotonic_ns()

    def _overload(self) -> ServeError:
        return ServeError(
            Status.UNAVAILABLE,
            f"{self._limits.max_concurrent_rpcs} gRPC calls are in progress, the limit; try again later",
            Ending(Outcome.REJECTED),
        )

    def _wait(self, request: InferRequest, context: Any) -> InferResult:
        answers: SimpleQueue[InferResult | None] = SimpleQueue()
        query = self._backend.submit(request, answers.put)
        # The callback runs when the call ends in whatever way: by a cancel, a passed deadline, a lost connection or our
        # own answer. The thread is released at once, even where the backend cannot withdraw the query any more.
        if not context.add_callback(lambda: answers.put(None)):
            answers.put(None)
        result = answers.get()
        if result is None:
            self._backend.cancel(query)
            raise ServeError(Status.CANCELLED, "the client cancelled the call or its deadline has passed")
        return result

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if not self._slots.take():
            _abort(context, self._overload())
        stream = Stream(self._backend, self._limits)
        self._streams[stream] = None
        try:
            yield from stream.answers(requests, context)
        except ServeError as error:
            _abort(context, error)
        finally:
            del self._streams[stream]
            self._slots.give_back()


def with_deadline(wire: WireRequest, remaining_s: float | None) -> WireRequest:
    """Take the deadline of the call as the time-out of the query."""
    if remaining_s is None or remaining_s > _DAY_S:
        return wire
    request = structs.replace(wire.request, timeout_ns=max(1, int(remaining_s * 1e9)))
    return structs.replace(wire, request=request)


def _refusing(sentence: str) -> Callable[[bytes, Any], Any]:
    def handle(_: bytes, context: Any) -> Any:
        _abort(context, ServeError(Status.UNIMPLEMENTED, sentence))

    return handle


def _abort(context: Any, error: ServeError) -> NoReturn:
    message = error.message or "the request failed without a reason"
    context.set_trailing_metadata((*(context.trailing_metadata() or ()), *error.ending.pairs()))
    context.abort(grpc.StatusCode[error.status.value[1]], message[:_MAX_DETAIL_CHARS])
    raise AssertionError("context.abort always raises")
