"""Sockets that listen for clients."""

from __future__ import annotations

import socket

from cotenant.errors import CotenantError

BACKLOG = 1024


def listen(host: str, port: int, what: str) -> socket.socket:
    """Bind a TCP socket (no SO_REUSEPORT: another server finds the port taken); port 0 takes a free one.

    Raises CotenantError that names the address and how to choose another.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise CotenantError(f"{what}: host {host!r}, port {port} is no address to listen on: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise CotenantError(
            f"{what}: cannot listen on {host} port {port}: {error.strerror}; stop what uses the port or choose another "
            "one (0 takes any free one)"
        ) from error
    return bound
