"""Front-ends of a server by its settings: HTTP, gRPC, and HTTP for administration if it has a port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from cotenant.config import ServerSection
from cotenant.serve.engine.loop import ServeLoop
from cotenant.serve.frontend.admin_access import Access, access_at, is_local
from cotenant.serve.frontend.grpc_server import GrpcServer
from cotenant.serve.frontend.http_server import HttpServer
from cotenant.wire.api import Backend
from cotenant.wire.codec import Limits

_LEAST_GRACE_S = 0.7
"""Minimum seconds that clients have to read their answers when the server stops."""


def front_ends(
    backend: Backend, section: ServerSection, loop: ServeLoop, processes: int = 1
) -> dict[str, HttpServer | GrpcServer]:
    """Create the protocol servers of a backend on a loop, by the name of their port setting. The limits of connections
    and bodies are divided by `processes`, the number of front-end processes."""
    usual = Limits()
    limits = replace(
        usual,
        max_body_bytes=int(section.max_body_mib * (1 << 20)),
        max_connections=-(-usual.max_connections // processes),
        max_pending_bytes=-(-usual.max_pending_bytes // processes),
    )
    access = access_at(section.host) if section.admin_port is None else Access.CLOSED
    found: dict[str, HttpServer | GrpcServer] = {
        "http_port": HttpServer(backend, section.host, section.http_port, limits, loop, access),
        "grpc_port": GrpcServer(backend, section.host, section.grpc_port, limits, loop, access),
    }
    if section.admin_port is not None:
        host = section.admin_host or section.host
        open_to = Access.LOCAL if is_local(host) else Access.OPEN
        found["admin_port"] = HttpServer(backend, host, section.admin_port, limits, loop, open_to)
    return found


def retire_front_ends(servers: Iterable[HttpServer | GrpcServer], until_s: float) -> None:
    """Let all servers accept no further connections, as another process does, and end each connection after its next
    answer. Returns when none is left, or when half of the time until `until_s` of the monotonic clock has passed."""
    _on_threads([partial(each.retire, (until_s - time.monotonic()) / 2) for each in servers])


def stop_front_ends(servers: Iterable[HttpServer | GrpcServer], until_s: float) -> None:
    """Stop all servers. Clients may read answers until `until_s` of the monotonic clock, at least _LEAST_GRACE_S."""
    grace_s = max(_LEAST_GRACE_S, until_s - time.monotonic())
    _on_threads([partial(each.stop, grace_s) for each in servers])


def _on_threads(calls: Iterable[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=each, daemon=True) for each in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
