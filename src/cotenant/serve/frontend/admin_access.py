"""Access control for loads and metrics, by listening address and by the headers Host and Origin.

A web page can make a browser send requests to a server on the user's machine. It uses the address (cross-site request
forgery), or a name of the site that resolves to it (DNS rebinding). A page cannot set these two headers.
"""

from __future__ import annotations

from enum import Enum, auto
from ipaddress import ip_address

from cotenant.serve.frontend.http_head import Headers


class Access(Enum):
    """Access of an address to the endpoints of `http_routes.ADMIN`."""

    CLOSED = auto()
    """No access."""
    LOCAL = auto()
    """Full access for requests to a name of this machine."""
    OPEN = auto()
    """Full access for requests to any name; a network policy must protect the address."""


CLOSED = "metrics, plan, load and unload are not served at this address; start the server with --admin-port"


def access_at(host: str) -> Access:
    """Default access of an address: LOCAL for a loopback address, else CLOSED."""
    return Access.LOCAL if is_local(host) else Access.CLOSED


def is_local(host: str) -> bool:
    """Whether a host (without port) is localhost or a loopback address."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def admin_refusal(access: Access, headers: Headers) -> str:
    """Why an administration request is refused, or "". A request that another site's page may have sent is refused."""
    if access is Access.CLOSED:
        return CLOSED
    host = origin = b""
    for name, value in headers:
        if name == b"host":
            host = value
        elif name == b"origin":
            origin = value
    if origin and origin.partition(b"://")[2] != host:
        return "the request comes from a page of another site (header 'Origin'); use a client that is not a web page"
    if access is Access.LOCAL and host and not is_local(_without_port(host.decode("latin-1"))):
        return "the header 'Host' names another machine, expected localhost or a loopback address"
    return ""


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
