"""gRPC server of a backend."""

from __future__ import annotations

from cotenant.serve.engine.loop import ServeLoop
from cotenant.serve.frontend.admin_access import Access
from cotenant.serve.frontend.grpc_app import GrpcApp
from cotenant.serve.frontend.grpc_call import MESSAGE_SLACK_BYTES
from cotenant.serve.frontend.h2_connection import H2Connection, H2Connections
from cotenant.serve.frontend.loop_server import LoopServer
from cotenant.serve.frontend.off_loop import OffLoop
from cotenant.wire.api import Backend
from cotenant.wire.codec import Limits

_RESERVED_STREAMS = 64
"""HTTP/2 streams of a connection above the limit of infer calls. They serve health checks and control calls, and
refuse further infer calls with a status."""


class GrpcServer(LoopServer[GrpcApp, H2Connection]):
    """gRPC server of a backend on an event loop, by default its own. The constructor does no I/O.

    `access`: access to loads, by default `access_at(host)`.
    """

    speaks = "gRPC"

    def __init__(
        self,
        backend: Backend,
        host: str = "127.0.0.1",
        port: int = 8001,
        limits: Limits | None = None,
        loop: ServeLoop | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(backend, host, port, limits, loop, access)

    def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new calls, wait `grace_s` seconds for calls in progress, then cancel them. Safe to repeat.

        Streams accept no further request, and end when the accepted ones are answered.
        """
        if self._app is not None:
            self._app.loads.close()
        super().stop(grace_s)

    def _make_app(self, off_loop: OffLoop) -> GrpcApp:
        return GrpcApp(self._backend, self._limits, self._access, off_loop)

    def _make_connections(self, app: GrpcApp) -> H2Connections:
        streams = self._limits.max_concurrent_rpcs + _RESERVED_STREAMS
        return H2Connections(app, self._limits, streams, self._limits.max_body_bytes + MESSAGE_SLACK_BYTES)

    def _make_connection(self, connections: H2Connections) -> H2Connection:
        return H2Connection(connections)
