"""The gRPC server."""

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
"""Streams of a connection that infer calls do not fill, so that calls beyond the limit are told of it, and health
checks and control calls are answered."""


class GrpcServer(LoopServer[GrpcApp, H2Connection]):
    """Serves a backend over gRPC on a loop, by default one of its own; constructing it does no I/O.

    `access` says whether it serves loads, by default what `access_at` says of the host.
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
        """Refuse new calls, let those in progress end for `grace_s` seconds, then cancel them. Safe to repeat.

        Streams take no further request and end with what they have taken.
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
