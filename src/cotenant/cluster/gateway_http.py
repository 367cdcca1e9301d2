"""HTTP side of the gateway: forwards requests for a model to a node unchanged, and answers all other requests."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec
from aiohttp import web

from cotenant.cluster.application_backend import NO_STATISTICS, NOT_LOADED_HERE, ApplicationBackend
from cotenant.cluster.forward import Forwarder
from cotenant.cluster.links import Headers, HttpReply, NodeLink
from cotenant.serve.frontend.http_app import HttpApp
from cotenant.serve.frontend.http_connection import Answer, Exchange
from cotenant.serve.frontend.http_control import OF_MODEL
from cotenant.serve.frontend.http_head import Head
from cotenant.serve.frontend.http_routes import Endpoint, Router
from cotenant.serve.frontend.off_loop import OffLoop
from cotenant.wire.api import ServeError, Status
from cotenant.wire.codec import Limits
from cotenant.wire.ending import FAILURE, Ending
from cotenant.wire.oip import SERVER_METADATA, SPENT_KEY

NODE_HEADER = "x-cotenant-node"
"""Header with the node of an answer; query numbers refer to the trace of this node."""
_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}
    | {"content-length", "date", "server", "expect", SPENT_KEY}
)
_log = logging.getLogger("cotenant.cluster")


def http_app(
    forwarder: Forwarder,
    applications: ApplicationBackend,
    status: Callable[[], bytes],
    metrics: Callable[[], bytes],
    limits: Limits,
) -> web.Application:
    """Create the web application. `status`: JSON of GET /v2/cotenant/cluster; `metrics`: page for Prometheus."""
    handlers = _Handlers(forwarder, applications, status, metrics, limits)
    app = web.Application(client_max_size=limits.max_body_bytes)
    app.router.add_get("/v2/cotenant/cluster", handlers.cluster)
    app.router.add_route("*", "/{path:.*}", handlers.any)
    app.on_cleanup.append(handlers.close)
    return app


class _Handlers:
    def __init__(
        self,
        forwarder: Forwarder,
        applications: ApplicationBackend,
        status: Callable[[], bytes],
        metrics: Callable[[], bytes],
        limits: Limits,
    ) -> None:
        self._forwarder = forwarder
        self._applications = applications
        described = {endpoint: functools.partial(call, applications) for endpoint, call in OF_MODEL.items()}
        self._off_loop = OffLoop()
        self._front_end = HttpApp(applications, limits, described, self._off_loop)
        self._status = status
        self._metrics = metrics
        self._router = Router()

    async def close(self, _: web.Application) -> None:
        """End the threads."""
        self._front_end.close()
        self._off_loop.close()

    async def cluster(self, request: web.Request) -> web.Response:
        """Answer the status of the cluster."""
        status = self._status()
        if not status:
            return _error(503, "the gateway is starting and has no status of the cluster yet; try again later")
        return web.Response(body=status, content_type="application/json")

    async def any(self, request: web.Request) -> web.Response:
        """Answer or forward a request for a path of the protocol."""
        try:
            return await self._answer(request)
        except ServeError as error:
            return _error(error.status.value[0], error.message, error.ending)
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body has more than {request.app._client_max_size} bytes, the limit", FAILURE)
        except web.HTTPException:
            raise
        except Exception:
            _log.exception("HTTP request %s %s failed in the gateway", request.method, request.path)
            return _error(500, "internal error; the gateway's log has the details", FAILURE)

    async def _answer(self, request: web.Request) -> web.Response:
        raw_path = request.raw_path.partition("?")[0]
        route = self._router.find(raw_path.encode("latin-1"))
        if request.method != route.method:
            return _error(405, f"method {request.method!r} is not allowed here, expected {route.method}")
        endpoint = route.endpoint
        if route.model in self._applications and (endpoint is Endpoint.INFER or endpoint in OF_MODEL):
            prepare = self._applications.admit if endpoint is Endpoint.INFER else self._applications.prepare
            await prepare(route.model)
            return await _through(self._front_end, request, raw_path)
        if endpoint is Endpoint.INFER:
            body = await request.read()
            call = functools.partial(_exchange, request.method, raw_path, _kept(request.headers.items()), body)
            return _passed(await self._forwarder.infer(route.model, call))
        if route.model in self._applications and endpoint is Endpoint.STATISTICS:
            raise ServeError(Status.UNIMPLEMENTED, NO_STATISTICS)
        if endpoint in OF_MODEL or (endpoint is Endpoint.STATISTICS and route.model):
            call = functools.partial(_exchange, request.method, raw_path, _kept(request.headers.items()), b"")
            return _passed(await self._forwarder.ask(route.model, call))
        return self._own(endpoint)

    def _own(self, endpoint: Endpoint) -> web.Response:
        models = {**self._forwarder.models, **self._applications.served}
        if endpoint is Endpoint.SERVER:
            return _json(200, SERVER_METADATA)
        if endpoint is Endpoint.LIVE:
            return _json(200, {"live": True})
        if endpoint is Endpoint.READY:
            ready = bool(models) and all(models.values())
            return _json(200, {"ready": True}) if ready else _error(503, "not every model of the plan has a node")
        if endpoint is Endpoint.METRICS:
            return web.Response(body=self._metrics(), headers={"content-type": "text/plain; version=0.0.4"})
        if endpoint is Endpoint.INDEX:
            return _json(200, [index_entry(name, served=served) for name, served in sorted(models.items())])
        if endpoint is Endpoint.STATISTICS:
            raise ServeError(Status.UNIMPLEMENTED, "the gateway keeps no statistics of its own: name one model")
        raise ServeError(Status.UNIMPLEMENTED, NOT_LOADED_HERE)


async def _through(front_end: HttpApp, request: web.Request, raw_path: str) -> web.Response:
    """Answer a request by a server's front-end; a disconnected client cancels the handler."""
    body = await request.read()
    headers = tuple((name.lower(), value) for name, value in request.raw_headers)
    head = Head(request.method, raw_path.encode("latin-1"), headers, len(body), keeps=True, expects=False, is_old=False)
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    exchange = Exchange(head, body, 0, lambda _, answer: answered.set_result(answer))
    front_end.request(exchange)
    try:
        answer = await answered
    except asyncio.CancelledError:
        exchange.abandon()
        raise
    lines = [line.partition(": ") for line in answer.fields.decode("latin-1").splitlines()]
    content = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
    fields = {name: value for name, _, value in lines} | {"content-type": answer.content_type.decode()}
    return web.Response(status=answer.status, body=content, headers=fields)


async def _exchange(
    method: str, raw_path: str, headers: Headers, body: bytes, link: NodeLink, spent_ns: int
) -> HttpReply:
    return await link.http(method, raw_path, headers, body, spent_ns)


def index_entry(name: str, *, served: bool) -> dict[str, str]:
    """Line of the repository index."""
    state = ("READY", "") if served else ("UNAVAILABLE", "no node serves it")
    return {"name": name, "version": "", "state": state[0], "reason": state[1]}


def _kept(headers: Iterable[tuple[str, str]]) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in _HOP]


def _passed(reply: HttpReply) -> web.Response:
    return web.Response(
        status=reply.status, body=reply.body, headers=[*_kept(reply.headers), (NODE_HEADER, reply.node)]
    )


def _json(status: int, value: object, headers: Mapping[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _error(status: int, sentence: str, ending: Ending | None = None) -> web.Response:
    return _json(status, {"error": sentence}, dict(ending.pairs()) if ending else None)
