"""gRPC front-end: serves `inference.GRPCInferenceService` and `grpc.health.v1.Health` for a backend.

It has no scheduling state: it decodes, submits, receives one outcome per query and encodes. It never blocks its event
loop: slow work (control calls, compression, typed contents) runs in a thread. It parses messages itself, so a
malformed message gets INVALID_ARGUMENT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import structs

from cotenant.serve.frontend.admin_access import CLOSED, Access
from cotenant.serve.frontend.grpc_admission import GrpcAdmission, Incoming
from cotenant.serve.frontend.grpc_call import HEADERS, Call, Packed, is_slow, parse, unpacking
from cotenant.serve.frontend.grpc_control import CONTROL, LOADS, PROMPT, health
from cotenant.serve.frontend.grpc_frames import RESOURCE_EXHAUSTED, START_BYTES, UNIMPLEMENTED, status_fields
from cotenant.serve.frontend.grpc_health import WATCH, WatchCall
from cotenant.serve.frontend.grpc_messages import encode_answer, with_deadline
from cotenant.serve.frontend.grpc_reflection import REFLECTION, ReflectionCall
from cotenant.serve.frontend.grpc_stream import StreamCall
from cotenant.serve.frontend.h2_connection import H2Stream, Receiver
from cotenant.serve.frontend.load_line import LoadLine
from cotenant.serve.frontend.off_loop import OFF_LOOP_BYTES, OFF_LOOP_NS, OffLoop, writing_cost, writing_ns
from cotenant.serve.frontend.pending_bytes import COUNTED_FROM_BYTES
from cotenant.types import ANSWERS, Outcome
from cotenant.wire import codec_grpc
from cotenant.wire.api import Backend, Control, InferResult, ServeError, Status, not_answered
from cotenant.wire.codec import Limits, WireRequest, bad, less_spent, shown
from cotenant.wire.ending import Ending
from cotenant.wire.oip import HEALTH_SERVICE, MESSAGES, NO_SHARED_MEMORY, QUERY_KEY, SERVICE, SPENT_KEY

Method = Callable[["UnaryCall", Packed], None]

_MOST_LOADS = 32
"""Maximum number of calls that wait for a load; further ones are refused."""
_SPENT_HEADER = SPENT_KEY.encode()
_INFER = f"/{SERVICE}/ModelInfer".encode()
_STREAM = f"/{SERVICE}/ModelStreamInfer".encode()
_UNSERVED = {
    **{
        f"/{SERVICE}/{kind}SharedMemory{action}": NO_SHARED_MEMORY
        for kind in ("System", "Cuda")
        for action in ("Status", "Register", "Unregister")
    },
    f"/{SERVICE}/TraceSetting": "the trace settings extension is not supported",
    f"/{SERVICE}/LogSettings": "the logging settings extension is not supported",
}


class GrpcApp:
    """Handler of gRPC calls, with the threads of its loop and a queue of loads. Implements H2App."""

    def __init__(self, backend: Backend, limits: Limits, access: Access, off_loop: OffLoop) -> None:
        self._backend = backend
        self._limits = limits
        self._access = access
        self.off_loop = off_loop
        self.admission = GrpcAdmission(backend, limits, off_loop.pending)
        self._in_progress = 0
        self._loading = 0
        self.loads = LoadLine(backend, "cotenant-grpc-loads")
        self._methods = self._control_methods()

    def close(self) -> None:
        """Refuse further loads, without waiting for calls in progress."""
        self.loads.close()

    # --- H2App ----------------------------------------------------------------------------------------------------

    def opened(self, stream: H2Stream) -> Receiver | None:
        """Create the call of a new stream by its method; None if it is refused."""
        fields = dict(stream.headers)
        if fields[b":method"] != b"POST" or not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            stream.refuse(((b":status", b"415"),))
            return None
        path = fields[b":path"]
        method = self._methods.get(path)
        if sum(map(len, fields)) + sum(map(len, fields.values())) > self._limits.max_header_bytes:
            text = f"the metadata has more than {self._limits.max_header_bytes} bytes, the limit"
            stream.refuse((*HEADERS, *status_fields(RESOURCE_EXHAUSTED, text)))
        elif method is not None:
            return UnaryCall(self, method, stream, fields, self._limits)
        elif path == _INFER:
            return InferCall(self, stream, fields, self._limits)
        elif path == _STREAM:
            return self._stream(stream, fields)
        elif path == WATCH:
            return WatchCall(self._backend, stream, fields, self._limits)
        elif path in REFLECTION:
            return ReflectionCall(stream, fields, self._limits)
        else:
            name = path.decode("latin-1")
            sentence = _UNSERVED.get(name, f"method {shown(name)} is not served by this server")
            stream.refuse((*HEADERS, *status_fields(UNIMPLEMENTED, sentence)))
        return None

    # --- infer ----------------------------------------------------------------------------------------------------

    def infer(self, call: UnaryCall, data: Packed) -> None:
        """Handle the message of an infer call that holds a slot."""
        message = parse("ModelInferRequest", data)
        self.admission.admit(call.incoming, message.model_name, message.model_version)
        self.decode(call, call.incoming, message, len(data), partial(self._submit, call))

    def take_slot(self, call: Call) -> None:
        """Count a call until it is over. Raises ServeError (UNAVAILABLE) above the limit."""
        if self._in_progress >= self._limits.max_concurrent_rpcs:
            text = f"{self._limits.max_concurrent_rpcs} gRPC calls are in progress, the limit; try again later"
            raise ServeError(Status.UNAVAILABLE, text, Ending(Outcome.REJECTED))
        self._in_progress += 1
        call.on_finish = self._give_back

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
        if not is_packed:
            then(data)
            return

        def inflated(made: Packed) -> None:
            if call.is_over:
                incoming.release()
                return
            self.admission.count(incoming, len(made))
            then(made)

        steps = unpacking(call.encoding, data, self._limits)
        self.off_loop.inflate(incoming.model, steps, inflated, failed or call.fail_with, incoming.held)

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
        if is_slow(message, nbytes):
            work = partial(codec_grpc.decode_request, message, self._limits)
            self.off_loop.convert(incoming.model, nbytes, work, then, failed or call.fail_with, incoming.held)
        else:
            then(codec_grpc.decode_request(message, self._limits))

    def _submit(self, call: UnaryCall, wire: WireRequest) -> None:
        if call.is_over:
            return
        if wire.request.timeout_ns is None:
            wire = with_deadline(wire, call.timeout_s)
        elif _SPENT_HEADER in call.fields:
            wire = less_spent(wire, call.fields[_SPENT_HEADER].decode("latin-1"))
        put = self.off_loop.inbox.put

        def done(result: InferResult) -> None:
            put(lambda: self._ended(call, wire, result))

        query = self._backend.submit(structs.replace(wire.request, arrival_ns=call.stream.arrival_ns), done)
        if not call.is_over:
            call.on_gone = partial(self._backend.cancel, query)

    def _ended(self, call: UnaryCall, wire: WireRequest, result: InferResult) -> None:
        """Answer an ended query."""
        number = () if result.refusal else ((QUERY_KEY, str(result.query)),)
        call.on_gone = None
        if result.outcome not in ANSWERS:
            call.fail_with(not_answered(result, ready=self._backend.ready()), number)
        elif call.is_over:
            self._backend.replied(result)
        else:
            encode = partial(encode_answer, self._backend, wire, result, self._backend.replied)
            failed = partial(call.fail_with, pairs=number)
            if (took_ns := writing_ns(wire, result)) >= OFF_LOOP_NS:
                model, work = wire.request.model, lambda: encode().SerializeToString()
                self.off_loop.convert(model, writing_cost(took_ns), work, call.answer, failed)
                return
            try:
                call.answer(encode().SerializeToString())
            except Exception as error:
                failed(error)

    def _give_back(self) -> None:
        self._in_progress -= 1

    def _stream(self, stream: H2Stream, fields: Mapping[bytes, bytes]) -> Receiver | None:
        call = StreamCall(self, self._backend, stream, fields, self._limits)
        try:
            self.take_slot(call)
        except ServeError as error:
            call.fail_with(error)
            return None
        call.begin()
        return call

    # --- control --------------------------------------------------------------------------------------------------

    def _control_methods(self) -> dict[bytes, Method]:
        methods: dict[bytes, Method] = {
            f"/{SERVICE}/{name}".encode(): partial(self._control, name in PROMPT, f"{name}Request", answer)
            for name, answer in CONTROL.items()
        }
        for name in LOADS:
            methods[f"/{SERVICE}/{name}".encode()] = partial(self._load, name)
        check = partial(self._control, True, "HealthCheckRequest", health)
        return methods | {f"/{HEALTH_SERVICE}/Check".encode(): check}

    def _control(
        self, is_prompt: bool, kind: str, answer: Callable[[Control, Any], Any], call: UnaryCall, data: Packed
    ) -> None:
        def work() -> bytes:
            made: bytes = answer(self._backend, parse(kind, data)).SerializeToString()
            return made

        if is_prompt:
            call.answer(work())
        else:
            self.off_loop.control(work, call.answer, call.fail_with)

    def _load(self, name: str, call: UnaryCall, data: Packed) -> None:
        if self._access is Access.CLOSED:
            raise ServeError(Status.FORBIDDEN, CLOSED)
        if self._loading >= _MOST_LOADS:
            text = f"{_MOST_LOADS} gRPC calls wait for loads already, the limit; try again later"
            raise ServeError(Status.UNAVAILABLE, text)
        future = LOADS[name](self.loads, parse(f"{name}Request", data))
        self._loading += 1
        call.on_finish = self._loaded
        answer: bytes = MESSAGES[f"{name}Response"]().SerializeToString()
        self.off_loop.inbox.when_done(future, lambda _: call.answer(answer), call.fail_with)

    def _loaded(self) -> None:
        self._loading -= 1


class UnaryCall(Call):
    """Call with one request and one answer."""

    def __init__(
        self, app: GrpcApp, method: Method, stream: H2Stream, fields: Mapping[bytes, bytes], limits: Limits
    ) -> None:
        super().__init__(stream, fields, limits)
        self.on_gone: Callable[[], None] | None = None
        """Called once if the call ends before its answer; cancels its query."""
        self.incoming = Incoming(stream.arrival_ns)
        self._app = app
        self._method = method
        self._is_taken = False

    def take(self, messages: list[tuple[bool, Packed]], is_end: bool) -> None:
        """Start with the only message."""
        if self._is_taken:
            if messages:
                raise bad("the call has a second message, expected one")
        elif messages:
            self._is_taken = True
            self.stream.release()
            self.begin(*messages[0])
        elif is_end:
            raise bad("the call has no message, expected one")

    def coming(self, is_packed: bool, start: bytes, nbytes: int) -> None:
        """Count the message, as its length is known."""
        if self.incoming.held is None:
            self._app.admission.count(self.incoming, nbytes)

    def begin(self, is_packed: bool, data: Packed) -> None:
        """Count, decompress and handle the complete message."""
        if self.incoming.held is None and len(data) >= COUNTED_FROM_BYTES:
            self._app.admission.count(self.incoming, len(data))
        self._app.unpacked(self, self.incoming, is_packed, data, partial(self._method, self))

    def is_waiting(self) -> bool:
        """Whether the message is missing or incomplete."""
        return not self._is_taken

    def withdraw(self) -> None:
        """Cancel the query and release the counted bytes."""
        self.incoming.release()
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()


class InferCall(UnaryCall):
    """Call of one inference; the first bytes of its message may already cause a refusal."""

    def __init__(self, app: GrpcApp, stream: H2Stream, fields: Mapping[bytes, bytes], limits: Limits) -> None:
        super().__init__(app, app.infer, stream, fields, limits)

    def coming(self, is_packed: bool, start: bytes, nbytes: int) -> None:
        """Count the message and find its model."""
        super().coming(is_packed, start, nbytes)
        self._app.admission.start(self.incoming, self.encoding if is_packed else None, start)

    def begin(self, is_packed: bool, data: Packed) -> None:
        """Handle the complete message; a large one is admitted by its first bytes, before it is parsed."""
        self._app.take_slot(self)
        if is_packed or len(data) >= OFF_LOOP_BYTES:
            encoding = self.encoding if is_packed else None
            self._app.admission.start(self.incoming, encoding, bytes(data[:START_BYTES]))
        super().begin(is_packed, data)
