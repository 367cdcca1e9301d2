"""The HTTP front-end as a raw ASGI application: no framework, few awaits.

The application holds no scheduling state: it decodes, submits, waits for the one answer and encodes. It never blocks
its event loop: whatever can take long (control calls, large bodies, compression) runs in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import Future
from typing import Any

from msgspec import structs

from cotenant.serve.frontend.call_threads import LoopThreads
from cotenant.serve.frontend.http_control import CONTROL, JSON_TYPE, LOADS, Answer, error_answer, json_answer
from cotenant.serve.frontend.http_pending import PendingReplies, Receive
from cotenant.serve.frontend.http_routes import Endpoint, HttpRoute, Router
from cotenant.serve.frontend.load_line import LoadLine
from cotenant.types import ANSWERS
from cotenant.wire import codec_http
from cotenant.wire.api import Backend, Infer, InferResult, ServeError, Status, not_answered
from cotenant.wire.codec import Limits, WireRequest, less_spent, shown, size_bytes
from cotenant.wire.ending import FAILURE, Ending
from cotenant.wire.oip import QUERY_KEY, SPENT_KEY

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_log = logging.getLogger("cotenant.http")

ARRIVAL = "cotenant.arrival_ns"
"""The key of a scope that tells when the first byte of its request could be read, in monotonic nanoseconds."""
_OCTETS = b"application/octet-stream"
_QUERY_HEADER = QUERY_KEY.encode()
_SPENT_HEADER = SPENT_KEY.encode()
_OFF_LOOP_BYTES = 128 << 10
"""Bodies from this size on are decoded and checked in a thread: 128 KiB of JSON take about a millisecond."""
_OFF_LOOP_NS = 1_000_000
"""Answers that take so long to be written are written in a thread; handing over costs some tenth of it."""
_NUMBER_NS, _ITEM_NS, _SCAN_NS, _COMPRESS_NS = 80, 400, 10, 40
"""Of a number as text, a class or an element of BYTES, a number to choose classes from, and of a byte to compress:
measured on a core of 2.6 GHz."""
_COMPRESS_FROM_BYTES = 1 << 10
_JOIN_UP_TO_BYTES = 64 << 10
"""Answers up to this size go out in one write; joining larger ones costs more than another write."""
_PROMPT = frozenset({Endpoint.SERVER, Endpoint.LIVE, Endpoint.READY, Endpoint.MODEL_READY})
"""Control calls that are answered on the event loop, so that probes never queue behind a model that is being loaded."""
_CONTROL_THREADS = 8
_CODEC_THREADS = 2


class _DisconnectedError(Exception):
    """The client went away before its request was complete."""


def http_app(backend: Backend, limits: Limits) -> HttpApp:
    """Make the ASGI application that serves `backend` to clients of the Open Inference Protocol v2."""
    control = {endpoint: functools.partial(call, backend) for endpoint, call in CONTROL.items()}
    return HttpApp(backend, limits, control, backend.replied, LoadLine(backend, "cotenant-http-loads"))


class HttpApp:
    """An ASGI application with two small pools of threads and a line of loads, which `close` lets go.

    `control` answers every other endpoint that it is asked for; `replied`: see Backend.
    """

    def __init__(
        self,
        backend: Infer,
        limits: Limits,
        control: Mapping[Endpoint, Callable[[HttpRoute, bytes], Answer]],
        replied: Callable[[InferResult], None] = lambda _: None,
        loads: LoadLine | None = None,
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._calls = control
        self._replied = replied
        self._router = Router()
        self._pending: PendingReplies | None = None
        self._loads = loads
        self._control_threads = LoopThreads(_CONTROL_THREADS, "cotenant-http-control")
        self._codec_threads = LoopThreads(_CODEC_THREADS, "cotenant-http-codec")

    def close(self) -> None:
        """Let the idle threads end; requests in progress are not waited for."""
        if self._loads is not None:
            self._loads.close()
        self._control_threads.shutdown()
        self._codec_threads.shutdown()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        close = False
        extra: Headers = []
        try:
            route = self._router.find(scope["raw_path"])
            if not route.takes(scope["method"]):
                message = f"method {shown(scope['method'])} is not allowed here, expected {route.method}"
                answer = error_answer(405, message)
            elif route.endpoint is Endpoint.INFER:
                answer, extra = await self._infer(route, scope["headers"], receive, scope.get(ARRIVAL, 0))
            else:
                answer = await self._control(route, scope["headers"], receive)
        except ServeError as error:
            answer = error_answer(error.status.value[0], error.message)
            extra = _told(error.ending)
            close = error.status is Status.TOO_LARGE
        except _DisconnectedError:
            return
        except asyncio.CancelledError:
            # uvicorn cancels what is still in progress when the grace of a stop is over.
            answer, extra = error_answer(503, "the server is stopping"), _told(FAILURE)
        except Exception:
            _log.exception("%s %r failed", scope["method"], scope["raw_path"])
            answer, extra = error_answer(500, "internal error; the server's log has the details"), _told(FAILURE)
        pieces = answer.body if isinstance(answer.body, list) else [answer.body]
        if len(pieces) > 1 and sum([len(piece) for piece in pieces]) <= _JOIN_UP_TO_BYTES:
            pieces = [b"".join(pieces)]
        length = sum([len(piece) for piece in pieces])
        headers = [(b"content-type", answer.content_type), (b"content-length", b"%d" % length), *extra]
        if answer.status >= 400 and _may_leave_body(scope["headers"], is_cut=close):
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        for piece in pieces[:-1]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": pieces[-1]})

    async def _control(self, route: HttpRoute, headers: Headers, receive: Receive) -> Answer:
        if route.endpoint in _PROMPT:
            return self._calls[route.endpoint](route, b"")
        body = b""
        if route.method == "POST":
            for name, value in headers:
                if name == b"content-length":
                    self._check_length(value)
            body = await self._read(receive)
        loop = asyncio.get_running_loop()
        if route.endpoint in LOADS and self._loads is not None:
            put = functools.partial(LOADS[route.endpoint], self._loads, route, body)
            waiting: Future[None] = await loop.run_in_executor(self._control_threads, put)
            await asyncio.shield(asyncio.wrap_future(waiting))  # others may wait for the same load
            return json_answer(200, {})
        return await loop.run_in_executor(self._control_threads, self._calls[route.endpoint], route, body)

    def _check_length(self, value: bytes) -> None:
        if not value.isdigit() or len(value) > 18 or int(value) > self._limits.max_body_bytes:
            raise ServeError(
                Status.TOO_LARGE,
                f"the body has {shown(value.decode('latin-1'))} bytes, expected at most {self._limits.max_body_bytes}",
            )

    async def _read(self, receive: Receive) -> bytes:
        message = await receive()
        if message["type"] != "http.request":
            raise _DisconnectedError
        body: bytes = message.get("body", b"")
        size = len(body)
        chunks = [body]
        while message.get("more_body") and size <= self._limits.max_body_bytes:
            message = await receive()
            if message["type"] != "http.request":
                raise _DisconnectedError
            chunk = message.get("body", b"")
            size += len(chunk)
            chunks.append(chunk)
        if size > self._limits.max_body_bytes:
            raise ServeError(Status.TOO_LARGE, f"the body has more than {self._limits.max_body_bytes} bytes, the limit")
        return body if len(chunks) == 1 else b"".join(chunks)

    async def _infer(
        self, route: HttpRoute, headers: Headers, receive: Receive, arrival_ns: int
    ) -> tuple[Answer, Headers]:
        header_length: int | None = None
        content_encoding = accept = b""
        spent_us = ""
        for name, value in headers:
            if name == b"content-length":
                self._check_length(value)
            elif name == b"inference-header-content-length":
                header_length = codec_http.read_header_length(value)
            elif name == b"content-encoding":
                content_encoding = value.strip().lower()
            elif name == b"accept-encoding":
                accept = _single_encoding(value)
            elif name == _SPENT_HEADER:
                spent_us = value.decode("latin-1")
        body = await self._read(receive)
        loop = asyncio.get_running_loop()
        compressed = content_encoding not in (b"", b"identity")
        json_length = header_length or len(body)
        is_long = (
            compressed
            or json_length >= _OFF_LOOP_BYTES
            or (len(body) >= _OFF_LOOP_BYTES and _has_bytes(body, json_length))
        )
        wires: list[WireRequest] = []

        def submit(done: Callable[[InferResult], None]) -> int:
            wire = self._decode(route, body, header_length, content_encoding if compressed else b"")
            wires.append(less_spent(wire, spent_us) if spent_us else wire)
            return self._backend.submit(structs.replace(wires[0].request, arrival_ns=arrival_ns), done)

        result = await self._pending_of(loop).result(submit, receive, self._codec_threads if is_long else None)
        wire = wires[0]
        number = (_QUERY_HEADER, b"%d" % result.query)
        if result.outcome not in ANSWERS:
            end = not_answered(result, ready=self._backend.ready())
            return error_answer(end.status.value[0], end.message), [number, *_told(end.ending)]
        try:
            batched = wire.wants_classes and self._backend.metadata(route.model, route.version).max_batch_size > 0
            if _writing_ns(wire, result, accept) >= _OFF_LOOP_NS:
                arguments = (wire, result, batched, accept)
                answer, described = await loop.run_in_executor(self._codec_threads, _encode, *arguments)
            else:
                answer, described = _encode(wire, result, batched, accept)
        except ServeError as error:  # it has run: it is not for a gateway to send it again
            return error_answer(error.status.value[0], error.message), [number, *_told(FAILURE)]
        finally:
            self._replied(result)  # what follows waits for the client's socket alone
        return answer, [number, *_told(Ending(result.outcome)), *described]

    def _decode(self, route: HttpRoute, body: bytes, header_length: int | None, encoding: bytes) -> WireRequest:
        if encoding:
            body = codec_http.decompress(encoding, body, self._limits)
        if header_length == 0:
            metadata = self._backend.metadata(route.model, route.version)
            return codec_http.decode_raw_request(metadata, route.version, body, self._limits)
        return codec_http.decode_request(route.model, route.version, body, header_length, self._limits)

    def _pending_of(self, loop: asyncio.AbstractEventLoop) -> PendingReplies:
        if self._pending is None or self._pending.loop is not loop:
            self._pending = PendingReplies(loop, self._backend.cancel)
        return self._pending


@functools.cache
def _told(ending: Ending) -> Headers:
    return [(name.encode(), value.encode()) for name, value in ending.pairs()]


def _encode(wire: WireRequest, result: InferResult, batched: bool, accept: bytes) -> tuple[Answer, Headers]:
    body, json_length = codec_http.encode_response(wire, result, batched)
    headers: Headers = []
    if json_length is not None:
        headers.append((b"inference-header-content-length", b"%d" % json_length))
    if accept and sum([len(piece) for piece in body]) >= _COMPRESS_FROM_BYTES:
        body = [codec_http.compress(accept, b"".join(body))]
        headers.append((b"content-encoding", accept))
    return Answer(200, JSON_TYPE if json_length is None else _OCTETS, body), headers


def _has_bytes(body: bytes, json_length: int) -> bool:
    """Return whether a request may hold a BYTES tensor, which is taken apart and checked element by element."""
    return body.find(b"BYTES", 0, json_length) >= 0


def _writing_ns(wire: WireRequest, result: InferResult, accept: bytes) -> int:
    """Return roughly how long an answer takes to be written, in nanoseconds. Raw tensors are views and take none."""
    total = 0
    for name, array in result.outputs.items():
        output = next((output for output in wire.requested if output.name == name), None)
        is_binary, classes = (output.binary, output.classes) if output else (wire.binary_default, 0)
        if classes:
            rows = array.shape[0] if array.ndim else 1
            total += _SCAN_NS * array.size + _ITEM_NS * min(array.size, classes * rows)
        elif array.dtype.kind in "OSU":
            total += _ITEM_NS * array.size
            if total < _OFF_LOOP_NS:
                total += size_bytes(array)
        elif not is_binary:
            total += _NUMBER_NS * array.size
        if accept:
            total += _COMPRESS_NS * array.nbytes
    return total


def _single_encoding(value: bytes) -> bytes:
    """Return gzip or deflate where a client asks for exactly that.

    Lists such as `gzip, deflate, br` are what HTTP libraries send unasked; they are answered uncompressed, because
    compression takes the processor time that the tenants share.
    """
    name = value.strip().lower()
    return name if name in (b"gzip", b"deflate") else b""


def _may_leave_body(headers: Headers, *, is_cut: bool) -> bool:
    """Whether what follows a refused request may be its body: in chunks that were not read to their end, or, where the
    client waits to be told to go on, at the client's choice."""
    return any(
        (is_cut and name == b"transfer-encoding") or (name == b"expect" and value.lower() == b"100-continue")
        for name, value in headers
    )
