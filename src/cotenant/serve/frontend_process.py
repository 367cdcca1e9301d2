"""The main program of a front-end process: it speaks HTTP and gRPC with clients, and passes queries to the engine."""

from __future__ import annotations

import select
import socket
import threading
import time

from cotenant.serve.child import run_child
from cotenant.serve.processes import ControlChannel, StartServing, Stop, Up

_LINK_S = 2.0
"""Seconds that new connections wait for the link to the engine. Afterwards queries are refused: no engine."""
_LOOK_S = 0.02


def _serve(control: ControlChannel, start: StartServing, listening: list[socket.socket]) -> None:
    from cotenant.serve.engine.loop import ServeLoop
    from cotenant.serve.frontend.front_ends import front_ends, retire_front_ends, stop_front_ends
    from cotenant.serve.link.remote_backend import RemoteBackend

    loop = ServeLoop()
    loop.start()
    is_open = threading.Event()

    def on_open() -> None:
        is_open.set()
        control.send(Up())

    backend = RemoteBackend(start.path, on_open)
    servers = front_ends(backend, start.settings.server, loop, start.frontends)
    loop.submit(backend.keep())
    end_s = float("inf") if start.replaces else time.monotonic() + _LINK_S
    while not (is_open.wait(_LOOK_S) or select.select([control], [], [], 0)[0] or time.monotonic() > end_s):
        pass  # a connection accepted before the link is open would be refused; another front-end may answer it
    for server, bound in zip(servers.values(), listening, strict=True):
        server.start(bound)
    while (message := control.receive()) is not None:
        if isinstance(message, Stop):
            if message.retires:
                retire_front_ends(servers.values(), message.until_s)
            stop_front_ends(servers.values(), message.until_s)
            return


if __name__ == "__main__":
    run_child(_serve)
