"""The main program of a front-end process: it speaks HTTP and gRPC with clients, and passes queries to the engine."""

from __future__ import annotations

import socket

from cotenant.serve.child import run_child
from cotenant.serve.processes import Control, Start, Stop, Up


def _serve(control: Control, start: Start, listening: list[socket.socket]) -> None:
    from cotenant.serve.engine.loop import ServeLoop
    from cotenant.serve.frontend.front_ends import front_ends, stop_front_ends
    from cotenant.serve.link.remote_backend import RemoteBackend

    loop = ServeLoop()
    loop.start()
    backend = RemoteBackend(start.path, on_open=lambda: control.send(Up()))
    servers = front_ends(backend, start.settings.server, loop, start.frontends)
    for server, bound in zip(servers.values(), listening, strict=True):
        server.start(bound)
    loop.submit(backend.keep())
    while (message := control.receive()) is not None:
        if isinstance(message, Stop):
            stop_front_ends(servers.values(), message.until_s)
            return


if __name__ == "__main__":
    run_child(_serve)
