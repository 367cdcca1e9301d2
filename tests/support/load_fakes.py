"""A small server of the Open Inference Protocol that answers as a test programmes it, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import grpc
import numpy as np
from aiohttp import web

from cotenant.wire.ending import Ending
from cotenant.wire.oip import MESSAGES, SERVICE

Answer = tuple[int, str] | tuple[int, str, Ending]
"""200 for a result, and its outputs as JSON. Else the HTTP status, or the number of the gRPC status code, the text, and
the ending that is reported beside it."""


@dataclass
class FakeServer:
    """`answer(n)` decides about the n-th inference, counted from 0 over both protocols."""

    answer: Callable[[int], Awaitable[Answer]]
    config: dict[str, Any] = field(default_factory=dict)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    http_url: str = ""
    grpc_url: str = ""

    async def infer_http(self, request: web.Request) -> web.Response:
        number = len(self.bodies)
        self.bodies.append(b"")
        self.headers.append(dict(request.headers))
        self.bodies[number] = await request.read()
        status, text, *told = await self.answer(number)
        if status == 200:
            return web.json_response({"model_name": request.match_info["model"], "outputs": json.loads(text or "[]")})
        return web.json_response({"error": text}, status=status, headers=dict(told[0].pairs()) if told else None)

    async def infer_grpc(self, body: bytes, context: Any) -> bytes:
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        status, text, *told = await self.answer(number)
        if status != 200:
            context.set_trailing_metadata(told[0].pairs() if told else ())
            code = next(code for code in grpc.StatusCode if code.value[0] == status)
            await context.abort(code, text)
        made = MESSAGES["ModelInferResponse"](model_name="m")
        for output in json.loads(text or "[]"):
            made.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
            made.raw_output_contents.append(np.array(output["data"], np.float32).tobytes())
        return bytes(made.SerializeToString())

    async def metadata(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"name": request.match_info["model"], "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]}
        )

    async def configuration(self, request: web.Request) -> web.Response:
        return web.json_response({"name": request.match_info["model"], **self.config})


@asynccontextmanager
async def serving(
    answer: Callable[[int], Awaitable[Answer]],
    config: dict[str, Any] | None = None,
    metrics: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None,
) -> AsyncIterator[FakeServer]:
    fake = FakeServer(answer, config or {})
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v2/models/{model}/infer", fake.infer_http)
    app.router.add_get("/v2/models/{model}", fake.metadata)
    app.router.add_get("/v2/models/{model}/config", fake.configuration)
    if metrics is not None:
        app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.http_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                SERVICE,
                {
                    "ModelInfer": grpc.unary_unary_rpc_method_handler(fake.infer_grpc),
                    "ModelMetadata": grpc.unary_unary_rpc_method_handler(_grpc_metadata),
                    "ModelConfig": grpc.unary_unary_rpc_method_handler(_grpc_config(fake)),
                },
            )
        ]
    )
    fake.grpc_url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(None)
        await runner.cleanup()


async def _grpc_metadata(body: bytes, context: Any) -> bytes:
    message = MESSAGES["ModelMetadataResponse"](name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[-1, 3])
    return bytes(message.SerializeToString())


def _grpc_config(fake: FakeServer) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def answer(body: bytes, context: Any) -> bytes:
        message = MESSAGES["ModelConfigResponse"]()
        message.config.name = "m"
        for key, value in fake.config.get("parameters", {}).items():
            message.config.parameters[key].string_value = value["string_value"]
        return bytes(message.SerializeToString())

    return answer


async def ok(number: int) -> Answer:
    return 200, ""


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test on a loop of its own."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def scenario() -> None:
            await test(*args, **kwargs)

        asyncio.run(scenario())

    return run


class Gate:
    """Holds every answer back until `count` inferences are in: a server that stalls."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._open = asyncio.Event()

    async def __call__(self, number: int) -> Answer:
        self._missing -= 1
        if self._missing <= 0:
            self._open.set()
        await self._open.wait()
        return 200, ""


def split_body(body: bytes, headers: dict[str, str]) -> tuple[dict[str, Any], bytes]:
    length = int(headers["Inference-Header-Content-Length"])
    return json.loads(body[:length]), body[length:]
