"""Access to loads and metrics: an address says whether it serves them, and to requests from where.

A page of any site can have a browser send requests to a server on the reader's own machine, by its address, or by a
name of the site's that is made to stand for that address. Both are told by headers that pages cannot choose.
"""

from __future__ import annotations

from enum import Enum, auto
from ipaddress import ip_address

from cotenant.serve.frontend.http_head import Headers


class Access(Enum):
    """What an address serves of `http_routes.ADMIN`."""

    CLOSED = auto()
    """Nothing."""
    LOCAL = auto()
    """All of it, to requests for a name of this machine."""
    OPEN = auto()
    """All of it, whatever name a request is for: what can reach the address is for a network policy to say."""


CLOSED = "metrics, plan, load and unload are not served at this address: start the server with --admin-port for them"


def access_at(host: str) -> Access:
    """What an address serves where nothing else is said: all of it to this machine, nothing to others."""
    return Access.LOCAL if is_local(host) else Access.CLOSED


def is_local(host: str) -> bool:
    """Whether a host, without a port, is a name of this machine alone."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def barred(access: Access, headers: Headers) -> str:
    """Why a request of the administration is refused, or "". Where a page of another site may have sent it, it is."""
    if access is Access.CLOSED:
        return CLOSED
    host = origin = b""
    for name, value in headers:
        if name == b"host":
            host = value
        elif name == b"origin":
            origin = value
    if origin and origin.partition(b"://")[2] != host:
        return "the request comes from a page of another site (header 'Origin'), which may not administer this server"
    if access is Access.LOCAL and host and not is_local(_without_port(host.decode("latin-1"))):
        return "the header 'Host' names another machine, expected localhost or a loopback address"
    return ""


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
