"""HTTP front-end: converts requests of the protocol to queries of a backend, and results to answers.

It has no scheduling state: it decodes, submits, receives one outcome per query and encodes. It never blocks its event
loop: slow work (control calls, large bodies, compression) runs in a thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from msgspec import structs
from typing_extensions import override

from cotenant.serve.frontend.admin_access import Access, admin_refusal
from cotenant.serve.frontend.http_connection import Answer, App, Exchange
from cotenant.serve.frontend.http_control import CONTROL, JSON_TYPE, LOADS, error_answer, json_answer
from cotenant.serve.frontend.http_head import TENSORS_AT, Head
from cotenant.serve.frontend.http_routes import ADMIN, Endpoint, HttpRoute, Router
from cotenant.serve.frontend.load_line import LoadLine
from cotenant.serve.frontend.off_loop import OFF_LOOP_BYTES, OFF_LOOP_NS, OffLoop, writing_cost, writing_ns
from cotenant.serve.frontend.pending_bytes import COUNTED_FROM_BYTES, Held
from cotenant.types import ANSWERS
from cotenant.wire import codec_http
from cotenant.wire.api import Backend, Infer, InferResult, ServeError, Status, not_answered
from cotenant.wire.codec import Limits, WireRequest, less_spent, shown
from cotenant.wire.ending import FAILURE, Ending
from cotenant.wire.oip import QUERY_KEY, SPENT_KEY

_log = logging.getLogger("cotenant.http")

_OCTETS = b"application/octet-stream"
_QUERY_LINE = b"%b: %%d\r\n" % QUERY_KEY.encode()
_SPENT_HEADER = SPENT_KEY.encode()
RETRY_AFTER = b"retry-after: 1\r\n"
"""Header of answers refused for load. Seconds."""
_COMPRESS_FROM_BYTES = 1 << 10
_PROMPT = frozenset({Endpoint.SERVER, Endpoint.LIVE, Endpoint.READY, Endpoint.MODEL_READY})
"""Control calls answered on the event loop, so that probes never queue behind a load."""


def http_app(backend: Backend, limits: Limits, access: Access, off_loop: OffLoop) -> HttpApp:
    """Create the HTTP front-end of a backend for the Open Inference Protocol v2."""
    control = {endpoint: partial(call, backend) for endpoint, call in CONTROL.items()}
    loads = LoadLine(backend, "cotenant-http-loads")
    return HttpApp(backend, limits, control, off_loop, backend.replied, loads, access)


class HttpApp(App):
    """Request handler of HTTP connections, with the threads of its loop and a queue of loads. `control`: handlers of
    all endpoints except inference. `replied`: called when an answer has been encoded."""

    def __init__(
        self,
        backend: Infer,
        limits: Limits,
        control: Mapping[Endpoint, Callable[[HttpRoute, bytes], Answer]],
        off_loop: OffLoop,
        replied: Callable[[InferResult], None] = lambda _: None,
        loads: LoadLine | None = None,
        access: Access = Access.LOCAL,
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._calls = control
        self._replied = replied
        self._router = Router()
        self._head: Head | None = None
        """Last routed head; its route is `_found`."""
        self._found = HttpRoute(Endpoint.SERVER)
        self._off_loop = off_loop
        self._loads = loads
        self._access = access

    def close(self) -> None:
        """Refuse further loads, without waiting for requests in progress."""
        if self._loads is not None:
            self._loads.close()

    # --- App ------------------------------------------------------------------------------------------------------

    @override
    def begun(self, head: Head, arrival_ns: int) -> Answer | Held | None:
        try:
            route = self._route(head)
        except ServeError as error:
            return _refused(error)
        except _WrongMethodError as error:
            return error_answer(405, str(error))
        is_query = route.endpoint is Endpoint.INFER
        refused = self._backend.refusal(route.model, route.version) if is_query else None
        if refused is None and 0 <= head.length < COUNTED_FROM_BYTES:
            return None
        try:
            if refused is not None:
                raise refused
            model = route.model if is_query else ""
            return self._off_loop.pending.hold(model, max(0, head.length), self._limits.pending_bytes)
        except ServeError as error:
            return self._decline(route, arrival_ns, error)

    @override
    def no_room(self, head: Head, arrival_ns: int, error: ServeError) -> Answer:
        return self._decline(self._route(head), arrival_ns, error)

    def _decline(self, route: HttpRoute, arrival_ns: int, error: ServeError) -> Answer:
        """Report a request that is refused before it becomes a query, and build its answer."""
        self._backend.refused(route.model, arrival_ns, error)
        return _refused(error)

    @override
    def request(self, exchange: Exchange) -> None:
        try:
            route = self._route(exchange.head)
            if route.endpoint is Endpoint.INFER:
                self._infer(exchange, route)
            else:
                self._control(exchange, route)
        except Exception as error:
            self._fail(exchange, error)

    @override
    def stopping(self) -> Answer:
        return error_answer(503, "the server is stopping", _ending_fields(FAILURE))

    @override
    def malformed(self, status: int, message: str) -> Answer:
        return error_answer(status, message, RETRY_AFTER if status == 503 else b"")

    # --- infer ----------------------------------------------------------------------------------------------------

    def _route(self, head: Head) -> HttpRoute:
        if head is self._head:  # the parser returns the same object for the same bytes
            return self._found
        route = self._router.find(head.path)
        if not route.takes(head.method):
            raise _WrongMethodError(f"method {shown(head.method)} is not allowed here, expected {route.method}")
        self._head, self._found = head, route
        return route

    def _infer(self, exchange: Exchange, route: HttpRoute) -> None:
        header_length: int | None = None
        content_encoding = accept = b""
        spent_us = ""
        for name, value in exchange.head.headers:
            if name == TENSORS_AT:
                header_length = codec_http.read_header_length(value)
            elif name == b"content-encoding":
                content_encoding = value.strip().lower()
            elif name == b"accept-encoding":
                accept = _single_encoding(value)
            elif name == _SPENT_HEADER:
                spent_us = value.decode("latin-1")
        submit = partial(self._submit, exchange, route, header_length, accept, spent_us)
        if content_encoding in (b"", b"identity"):
            self._submit_somewhere(exchange, route.model, exchange.body, header_length, submit)
            return
        steps = codec_http.inflating(content_encoding, exchange.body, self._limits)

        def inflated(body: memoryview) -> None:
            self._count_inflated(exchange, route, len(body))
            self._submit_somewhere(exchange, route.model, body, header_length, submit)

        self._off_loop.inflate(route.model, steps, inflated, partial(self._fail, exchange), exchange.held)

    def _count_inflated(self, exchange: Exchange, route: HttpRoute, nbytes: int) -> None:
        """Count the bytes of a decompressed body. Raises ServeError if there is no room."""
        try:
            if exchange.held is not None:
                exchange.held.grow(nbytes)
            elif not exchange.is_over:
                exchange.held = self._off_loop.pending.hold(route.model, nbytes, self._limits.pending_bytes)
        except ServeError as error:
            self._backend.refused(route.model, exchange.arrival_ns, error)
            raise

    def _submit_somewhere(
        self,
        exchange: Exchange,
        model: str,
        body: bytes | memoryview,
        header_length: int | None,
        submit: Callable[[bytes | memoryview], int],
    ) -> None:
        """Decode and submit on the loop, or in a thread if decoding takes long."""
        json_length = header_length or len(body)
        if json_length >= OFF_LOOP_BYTES or (len(body) >= OFF_LOOP_BYTES and _has_bytes(body, json_length)):
            then, failed = partial(self._submitted_late, exchange), partial(self._fail, exchange)
            self._off_loop.convert(model, len(body), partial(submit, body), then, failed, exchange.held)
        else:
            query = submit(body)
            if not exchange.is_over:
                exchange.on_gone = partial(self._backend.cancel, query)

    def _submit(
        self,
        exchange: Exchange,
        route: HttpRoute,
        header_length: int | None,
        accept: bytes,
        spent_us: str,
        body: bytes | memoryview,
    ) -> int:
        """Decode a request and submit its query; returns its number. Runs on any thread."""
        wire = self._decode(route, body, header_length)
        if spent_us:
            wire = less_spent(wire, spent_us)
        put = self._off_loop.inbox.put

        def done(result: InferResult) -> None:
            put(lambda: self._ended(exchange, route, wire, accept, result))

        return self._backend.submit(structs.replace(wire.request, arrival_ns=exchange.arrival_ns), done)

    def _submitted_late(self, exchange: Exchange, query: int) -> None:
        """Handle a submission from a thread: the client may have disconnected meanwhile."""
        if exchange.is_over:
            self._backend.cancel(query)
        else:
            exchange.on_gone = partial(self._backend.cancel, query)

    def _decode(self, route: HttpRoute, body: bytes | memoryview, header_length: int | None) -> WireRequest:
        if header_length == 0:
            metadata = self._backend.metadata(route.model, route.version)
            return codec_http.decode_raw_request(metadata, route.version, body, self._limits)
        return codec_http.decode_request(route.model, route.version, body, header_length, self._limits)

    def _ended(
        self, exchange: Exchange, route: HttpRoute, wire: WireRequest, accept: bytes, result: InferResult
    ) -> None:
        """Answer an ended query."""
        try:
            if result.refusal is not None:
                self._fail(exchange, result.refusal)
                return
            number = _QUERY_LINE % result.query
            if result.outcome not in ANSWERS:
                end = not_answered(result, ready=self._backend.ready())
                exchange.answer(_refused(end, number))
                return
            batched = wire.wants_classes and self._backend.metadata(route.model, route.version).max_batch_size > 0
            if exchange.is_over or (took_ns := writing_ns(wire, result, accept)) < OFF_LOOP_NS:
                self._encode(exchange, wire, result, batched, accept)
            else:
                encode = partial(self._encode, exchange, wire, result, batched, accept)
                cost, failed = writing_cost(took_ns), partial(self._fail, exchange)
                self._off_loop.convert(route.model, cost, encode, lambda _: None, failed)
        except Exception as error:
            self._fail(exchange, error)

    def _encode(self, exchange: Exchange, wire: WireRequest, result: InferResult, batched: bool, accept: bytes) -> None:
        """Encode the answer of a query; runs on any thread."""
        number = _QUERY_LINE % result.query
        try:
            answer = _encoded(wire, result, batched, accept, number)
        except ServeError as error:  # the query has run: a gateway must not retry it
            answer = error_answer(error.status.value[0], error.message, number + _ending_fields(FAILURE))
        finally:
            self._replied(result)  # only the client's socket can delay it from here
        self._off_loop.inbox.put(partial(exchange.answer, answer))

    # --- control --------------------------------------------------------------------------------------------------

    def _control(self, exchange: Exchange, route: HttpRoute) -> None:
        endpoint, body = route.endpoint, bytes(exchange.body)
        if endpoint in ADMIN and (why := admin_refusal(self._access, exchange.head.headers)):
            raise ServeError(Status.FORBIDDEN, why)
        if endpoint in _PROMPT:
            exchange.answer(self._calls[endpoint](route, b""))
        elif endpoint in LOADS and self._loads is not None:
            put = partial(LOADS[endpoint], self._loads, route, body)
            self._off_loop.control(put, partial(self._wait_for_load, exchange), partial(self._fail, exchange))
        else:
            call = partial(self._calls[endpoint], route, body)
            self._off_loop.control(call, exchange.answer, partial(self._fail, exchange))

    def _wait_for_load(self, exchange: Exchange, load: Future[None]) -> None:
        done = json_answer(200, {})
        self._off_loop.inbox.when_done(load, lambda _: exchange.answer(done), partial(self._fail, exchange))

    # --- errors ---------------------------------------------------------------------------------------------------

    def _fail(self, exchange: Exchange, error: BaseException) -> None:
        """Answer a request with an error."""
        match error:
            case ServeError():
                exchange.answer(_refused(error))
            case _WrongMethodError():
                exchange.answer(error_answer(405, str(error)))
            case _:
                _log.error("HTTP request %s %r failed", exchange.head.method, exchange.head.path, exc_info=error)
                text = "internal error; the server's log has the details"
                exchange.answer(error_answer(500, text, _ending_fields(FAILURE)))


class _WrongMethodError(Exception):
    """The endpoint does not accept the HTTP method."""


def _refused(error: ServeError, fields: bytes = b"") -> Answer:
    fields += _ending_fields(error.ending)
    if error.is_for_load:
        fields += RETRY_AFTER
    return error_answer(error.status.value[0], error.message, fields)


@functools.cache
def _ending_fields(ending: Ending) -> bytes:
    return b"".join([f"{name}: {value}\r\n".encode() for name, value in ending.pairs()])


def _encoded(wire: WireRequest, result: InferResult, batched: bool, accept: bytes, fields: bytes) -> Answer:
    body, json_length = codec_http.encode_response(wire, result, batched)
    fields += _ending_fields(Ending(result.outcome))
    if json_length is not None:
        fields += b"inference-header-content-length: %d\r\n" % json_length
    if accept and sum([len(chunk) for chunk in body]) >= _COMPRESS_FROM_BYTES:
        body = [codec_http.compress(accept, b"".join(body))]
        fields += b"content-encoding: %b\r\n" % accept
    return Answer(200, JSON_TYPE if json_length is None else _OCTETS, body, fields)


def _has_bytes(body: bytes | memoryview, json_length: int) -> bool:
    """Return whether a request may have a BYTES tensor, which is decoded element by element."""
    return bytes(body[:json_length]).find(b"BYTES") >= 0


def _single_encoding(value: bytes) -> bytes:
    """Return gzip or deflate if a client requests exactly one of them.

    HTTP libraries send lists such as `gzip, deflate, br` by default. Those are answered uncompressed: compression
    would take processor time from the tenants.
    """
    name = value.strip().lower()
    return name if name in (b"gzip", b"deflate") else b""
