"""gRPC side of the gateway: forwards messages for a model to a node as bytes, and answers all other calls."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cotenant.cluster.application_backend import NO_STATISTICS, NOT_LOADED_HERE, ApplicationBackend
from cotenant.cluster.forward import Forwarder
from cotenant.cluster.gateway_http import NODE_HEADER, index_entry
from cotenant.cluster.links import GrpcReply, NodeLink
from cotenant.serve.frontend.grpc_control import OF_MODEL
from cotenant.serve.frontend.grpc_messages import encode_answer, with_deadline
from cotenant.wire.api import ServeError, Status
from cotenant.wire.codec import Limits
from cotenant.wire.codec_grpc import decode_request, encode_failure
from cotenant.wire.ending import FAILURE
from cotenant.wire.oip import HEALTH_SERVICE, MESSAGES, SERVER_METADATA, SERVICE
from cotenant.wire.skim import WireError, length_field, string_field

_log = logging.getLogger("cotenant.cluster")
_NAME, _ID = 1, 3
"""Field numbers of requests: `name` or `model_name` is always field 1; `id` of ModelInferRequest is field 3."""
_RESPONSE = 2
"""Field number of the response in ModelStreamInferResponse."""
_MAX_DETAIL_CHARS = 1000
_INTERNAL = "internal error; the gateway's log has the details"
Trailing = Sequence[tuple[str, str | bytes]]


class _StatusError(Exception):
    """Error status that a node returned for a call."""

    def __init__(self, code: Any, details: str, trailing: Trailing) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailing = trailing


class GrpcGateway:
    """grpc.aio handlers of the protocol's service and of the gRPC health service."""

    def __init__(self, forwarder: Forwarder, applications: ApplicationBackend, limits: Limits) -> None:
        self._forwarder = forwarder
        self._applications = applications
        self._limits = limits

    def handlers(self) -> tuple[Any, ...]:
        """Handlers for `grpc.aio.Server.add_generic_rpc_handlers`."""
        unary = grpc.unary_unary_rpc_method_handler
        methods = {"ModelInfer": unary(self._guarded(self._infer))}
        for name in (*OF_MODEL, "ModelStatistics"):
            methods[name] = unary(self._guarded(functools.partial(self._ask, name)))
        for name, call in self._own().items():
            methods[name] = unary(self._guarded(call))
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        check = unary(self._guarded(self._check))
        return (
            grpc.method_handlers_generic_handler(SERVICE, methods),
            grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Check": check}),
        )

    # --- models ----------------------------------------------------------------------------------------------------

    async def _infer(self, data: bytes, context: Any) -> bytes:
        name, remaining_s = _name(data), context.time_remaining()
        if name in self._applications:
            return await self._whole(data, remaining_s)
        reply = await self._forwarder.infer(name, self._call("ModelInfer", data, remaining_s))
        return self._passed(reply, context)

    async def _ask(self, method: str, data: bytes, context: Any) -> bytes:
        name = _name(data)
        if name in self._applications:
            if method not in OF_MODEL:
                raise ServeError(Status.UNIMPLEMENTED, NO_STATISTICS)
            await self._applications.prepare(name)
            answer: bytes = OF_MODEL[method](self._applications, _parsed(f"{method}Request", data)).SerializeToString()
            return answer
        reply = await self._forwarder.ask(name, self._call(method, data, context.time_remaining()))
        return self._passed(reply, context)

    async def _whole(self, data: bytes, remaining_s: float | None) -> bytes:
        """A query of an application, which is decoded here."""
        wire = with_deadline(decode_request(_parsed("ModelInferRequest", data), self._limits), remaining_s)
        result = await self._applications.infer(wire.request)
        answer: bytes = encode_answer(self._applications, wire, result).SerializeToString()
        return answer

    def _call(self, method: str, data: bytes, remaining_s: float | None) -> Callable[[NodeLink, int], Any]:
        async def attempt(link: NodeLink, spent_ns: int) -> GrpcReply:
            return await link.grpc(f"/{SERVICE}/{method}", data, remaining_s, spent_ns)

        return attempt

    def _passed(self, reply: GrpcReply, context: Any) -> bytes:
        said = ((key, value) for key, value in reply.trailing if not key.startswith("grpc-"))
        trailing = (*said, (NODE_HEADER, reply.node))
        if reply.code is not grpc.StatusCode.OK:
            raise _StatusError(reply.code, reply.details, trailing)
        context.set_trailing_metadata(trailing)
        return reply.data

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Forward each request of a stream as a separate query, perhaps to different nodes.

        A request holds a slot until its answer is written. So reading stops for a client that does not read answers.
        """
        answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        places = asyncio.Semaphore(self._limits.max_stream_in_flight)
        tasks: set[asyncio.Task[None]] = set()

        async def one(data: bytes) -> None:
            answers.put_nowait(await self._streamed(data, context.time_remaining()))

        async def read() -> None:
            try:
                async for data in requests:
                    await places.acquire()
                    task = asyncio.get_running_loop().create_task(one(data))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                while tasks:
                    await asyncio.wait(set(tasks))
            finally:
                answers.put_nowait(None)

        reader = asyncio.get_running_loop().create_task(read())
        try:
            while (answer := await answers.get()) is not None:
                yield answer
                places.release()
        finally:
            for task in (reader, *tasks):
                task.cancel()

    async def _streamed(self, data: bytes, remaining_s: float | None) -> bytes:
        try:
            name = _name(data)
            if name in self._applications:
                return length_field(_RESPONSE, await self._whole(data, remaining_s))
            reply = await self._forwarder.infer(name, self._call("ModelInfer", data, remaining_s))
            if reply.code is grpc.StatusCode.OK:
                return length_field(_RESPONSE, reply.data)
            sentence, ending = reply.details or reply.code.name, reply.ending
        except ServeError as error:
            sentence, ending = error.message, error.ending
        except Exception:
            _log.exception("a request of a gRPC stream failed in the gateway")
            sentence, ending = _INTERNAL, FAILURE
        try:
            number = string_field(data, _ID)
        except WireError:
            number = ""
        return encode_failure(number, sentence, ending)

    # --- the gateway itself ------------------------------------------------------------------------------------------

    def _own(self) -> dict[str, Callable[[bytes, Any], Any]]:
        def answer(make: Callable[[], Any]) -> Callable[[bytes, Any], Any]:
            async def call(data: bytes, context: Any) -> bytes:
                made: bytes = make().SerializeToString()
                return made

            return call

        def index() -> Any:
            models = {**self._forwarder.models, **self._applications.served}
            entries = [index_entry(name, served=served) for name, served in sorted(models.items())]
            return MESSAGES["RepositoryIndexResponse"](models=entries)

        async def refused(data: bytes, context: Any) -> bytes:
            raise ServeError(Status.UNIMPLEMENTED, NOT_LOADED_HERE)

        return {
            "ServerLive": answer(lambda: MESSAGES["ServerLiveResponse"](live=True)),
            "ServerReady": answer(lambda: MESSAGES["ServerReadyResponse"](ready=self._ready())),
            "ServerMetadata": answer(lambda: MESSAGES["ServerMetadataResponse"](**SERVER_METADATA)),
            "RepositoryIndex": answer(index),
            "RepositoryModelLoad": refused,
            "RepositoryModelUnload": refused,
        }

    def _ready(self) -> bool:
        models = self._forwarder.models
        return bool(models) and all(models.values())

    async def _check(self, data: bytes, context: Any) -> bytes:
        made: bytes = MESSAGES["HealthCheckResponse"](status=1 if self._ready() else 2).SerializeToString()
        return made

    def _guarded(self, call: Callable[[bytes, Any], Any]) -> Callable[[bytes, Any], Any]:
        async def handle(data: bytes, context: Any) -> bytes:
            try:
                answer: bytes = await call(data, context)
                return answer
            except ServeError as error:
                code, sentence = grpc.StatusCode[error.status.value[1]], error.message
                trailing: Trailing = error.ending.pairs()
            except _StatusError as error:
                code, sentence, trailing = error.code, error.details, error.trailing
            except Exception:
                _log.exception("a gRPC call failed in the gateway")
                code, sentence, trailing = grpc.StatusCode.INTERNAL, _INTERNAL, FAILURE.pairs()
            try:
                await context.abort(code, sentence[:_MAX_DETAIL_CHARS], trailing)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # the call has already ended, for example by its deadline
                _log.debug("the status of an ended gRPC call is dropped: %s", error)
            return b""  # grpc raises the recorded abort itself, and treats a second one as an error

        return handle


def _parsed(kind: str, data: bytes) -> Any:
    try:
        return MESSAGES[kind].FromString(data)
    except DecodeError:
        raise ServeError(Status.INVALID_ARGUMENT, f"the message is not a {kind}") from None


def _name(data: bytes) -> str:
    try:
        return string_field(data, _NAME)
    except WireError as error:
        raise ServeError(Status.INVALID_ARGUMENT, str(error)) from None
