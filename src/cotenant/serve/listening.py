"""Listening TCP sockets."""

from __future__ import annotations

import socket

from cotenant.errors import CotenantError

BACKLOG = 1024


def listen(host: str, port: int, what: str) -> socket.socket:
    """Bind a listening TCP socket; port 0 takes a free one. Without SO_REUSEPORT, so a second server fails to bind.

    `what` names the protocol in messages. Raises CotenantError that names the address and the remedy.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise CotenantError(f"{what}: cannot listen on host {host!r}, port {port}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise CotenantError(
            f"{what}: cannot listen on {host} port {port}: {error.strerror}; stop the process that uses the "
            "port, or choose another port (0 takes any free one)"
        ) from error
    return bound
