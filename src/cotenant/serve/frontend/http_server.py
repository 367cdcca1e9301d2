"""HTTP server of a backend."""

from __future__ import annotations

from cotenant.serve.engine.loop import ServeLoop
from cotenant.serve.frontend.admin_access import Access
from cotenant.serve.frontend.http_app import HttpApp, http_app
from cotenant.serve.frontend.http_connection import Connections, HttpConnection
from cotenant.serve.frontend.loop_server import LoopServer
from cotenant.serve.frontend.off_loop import OffLoop
from cotenant.wire.api import Backend
from cotenant.wire.codec import Limits


class HttpServer(LoopServer[HttpApp, HttpConnection]):
    """HTTP server of a backend on an event loop, by default its own. The constructor does no I/O.

    `access`: access to the administration endpoints, by default `access_at(host)`.
    """

    speaks = "HTTP"

    def __init__(
        self,
        backend: Backend,
        host: str = "127.0.0.1",
        port: int = 8000,
        limits: Limits | None = None,
        loop: ServeLoop | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(backend, host, port, limits, loop, access)

    def _make_app(self, off_loop: OffLoop) -> HttpApp:
        return http_app(self._backend, self._limits, self._access, off_loop)

    def _make_connections(self, app: HttpApp) -> Connections:
        return Connections(app, self._limits)

    def _make_connection(self, connections: Connections) -> HttpConnection:
        return HttpConnection(connections)
