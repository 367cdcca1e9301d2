"""Gateway: one HTTP and one gRPC address for the whole cluster, on an event loop in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cotenant.cluster.forward import Forwarder
from cotenant.cluster.types import Address, ClusterError, Counts, GatewayReport, RoutingTable

T = TypeVar("T")
_MESSAGE_SLACK_BYTES = 1 << 20
_CALL_S = 30.0


class Gateway:
    """Gateway of a cluster. All methods are thread-safe; the constructor does no I/O."""

    def __init__(self, max_body_bytes: int = 64 << 20) -> None:
        self._max_body_bytes = max_body_bytes
        self._status = b""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._forwarder: Any = None
        self._applications: Any = None
        self._stops: list[Callable[[], Coroutine[Any, Any, Any]]] = []

    def start(
        self,
        host: str = "127.0.0.1",
        http_port: int = 8000,
        grpc_port: int = 8001,
        table: RoutingTable | None = None,
        status: bytes = b"",
    ) -> Address:
        """Start listening; returns the address with the actual ports. Raises ClusterError.

        Queries are refused without a routing `table`, and requests for the status without a `status`.
        """
        import uvloop

        loop = uvloop.new_event_loop()
        self._loop, self._status = loop, status
        self._thread = threading.Thread(target=self._run, args=(loop,), name="cotenant-gateway", daemon=True)
        self._thread.start()
        return self._call(self._start(host, http_port, grpc_port, table))

    def set_table(self, table: RoutingTable, lost: tuple[str, ...] = ()) -> None:
        """Set the routing table, as `Forwarder.set_table`. Returns when it is in use."""

        async def do() -> None:
            self._forwarder.set_table(table, lost)

        self._call(do())

    def set_status(self, status: bytes) -> None:
        """Set the JSON body for GET /v2/cotenant/cluster."""
        self._status = status

    def report(self) -> GatewayReport:
        """Counts and suspected nodes, as `Forwarder.report`."""

        async def do() -> GatewayReport:
            report: GatewayReport = self._forwarder.report()
            return report

        return self._call(do())

    def stop(self, grace_s: float = 5.0) -> None:
        """Stop listening, wait `grace_s` seconds for outstanding queries, and close all links. Safe to repeat."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return

        async def end() -> None:
            await asyncio.gather(*(stop() for stop in self._stops))
            if self._applications is not None:
                await self._applications.close()
            if self._forwarder is not None:
                await self._forwarder.close()

        try:
            asyncio.run_coroutine_threadsafe(end(), loop).result(grace_s + 10.0)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(5.0)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise ClusterError("the gateway is not started")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)

    async def _start(self, host: str, http_port: int, grpc_port: int, table: RoutingTable | None) -> Address:
        import grpc
        from aiohttp import web

        from cotenant.cluster.application_backend import ApplicationBackend
        from cotenant.cluster.gateway_grpc import GrpcGateway
        from cotenant.cluster.gateway_http import http_app
        from cotenant.cluster.links import NodeLink
        from cotenant.errors import CotenantError
        from cotenant.serve.listening import listen
        from cotenant.wire.codec import Limits

        forwarder = Forwarder(NodeLink)
        self._forwarder = forwarder
        if table is not None:
            forwarder.set_table(table)
        limits = Limits(max_body_bytes=self._max_body_bytes)
        self._applications = applications = ApplicationBackend(forwarder)
        try:
            bound = listen(host, http_port, "gateway, HTTP")
        except CotenantError as error:
            raise ClusterError(str(error)) from None
        app = http_app(forwarder, applications, lambda: self._status, lambda: metrics_page(forwarder.counts), limits)
        runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, access_log=None)
        await runner.setup()
        await web.SockSite(runner, bound, backlog=1024).start()
        self._stops.append(runner.cleanup)
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", self._max_body_bytes + _MESSAGE_SLACK_BYTES),
                ("grpc.max_send_message_length", -1),
            )
        )
        server.add_generic_rpc_handlers(GrpcGateway(forwarder, applications, limits).handlers())
        try:
            port = server.add_insecure_port(f"[{host}]:{grpc_port}" if ":" in host else f"{host}:{grpc_port}")
        except RuntimeError:
            port = 0
        if port == 0:
            raise ClusterError(f"gateway, gRPC: cannot listen on {host} port {grpc_port}; choose another port")
        await server.start()
        self._stops.append(lambda: server.stop(5.0))
        return Address(host, bound.getsockname()[1], port)


def metrics_page(counts: dict[str, Counts]) -> bytes:
    """Queries by tenant and outcome in the Prometheus text format."""
    from prometheus_client import CollectorRegistry, Counter, generate_latest

    registry = CollectorRegistry()
    offered = Counter("cotenant_gateway_offered", "Received queries.", labelnames=("tenant",), registry=registry)
    queries = Counter(
        "cotenant_gateway_queries", "Queries by outcome.", labelnames=("tenant", "outcome"), registry=registry
    )
    retries = Counter(
        "cotenant_gateway_retries", "Attempts after the first.", labelnames=("tenant",), registry=registry
    )
    repeats = Counter(
        "cotenant_gateway_repeats",
        "Attempts after an attempt that may have run the query.",
        labelnames=("tenant",),
        registry=registry,
    )
    for tenant, each in sorted(counts.items()):
        for outcome in ("in_time", "late", "refused", "failed", "cancelled"):
            queries.labels(tenant, outcome).inc(getattr(each, outcome))
        offered.labels(tenant).inc(each.offered)
        retries.labels(tenant).inc(each.retried)
        repeats.labels(tenant).inc(each.repeated)
    page: bytes = generate_latest(registry)
    return page
