"""Router: URL paths of the protocol to endpoint, model and version."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple
from urllib.parse import unquote

from cotenant.wire.api import ServeError, Status
from cotenant.wire.codec import bad, shown
from cotenant.wire.oip import NO_SHARED_MEMORY

_CACHED_PATHS = 1024
_CACHED_PATH_BYTES = 256


class Endpoint(Enum):
    """Endpoint of a path."""

    SERVER = auto()
    LIVE = auto()
    READY = auto()
    MODEL = auto()
    MODEL_READY = auto()
    CONFIG = auto()
    STATISTICS = auto()
    INFER = auto()
    INDEX = auto()
    LOAD = auto()
    UNLOAD = auto()
    METRICS = auto()
    PLAN = auto()


ADMIN = frozenset({Endpoint.LOAD, Endpoint.UNLOAD, Endpoint.METRICS, Endpoint.PLAN})
"""Endpoints for operators only: they change the server, or show data of all tenants."""
_POSTED = (Endpoint.INFER, Endpoint.INDEX, Endpoint.LOAD, Endpoint.UNLOAD)


class HttpRoute(NamedTuple):
    """Route of a path; `model` and `version` are empty if the path has none."""

    endpoint: Endpoint
    model: str = ""
    version: str = ""

    @property
    def method(self) -> str:
        """HTTP method of the endpoint."""
        return "POST" if self.endpoint in _POSTED else "GET"

    def takes(self, method: str) -> bool:
        """Whether the endpoint accepts a method. HEAD counts as GET; the connection omits the body."""
        return method == self.method or (method == "HEAD" and self.method == "GET")


_FIXED: dict[tuple[str, ...], Endpoint] = {
    ("v2",): Endpoint.SERVER,
    ("v2", "health", "live"): Endpoint.LIVE,
    ("v2", "health", "ready"): Endpoint.READY,
    ("v2", "models", "stats"): Endpoint.STATISTICS,
    ("v2", "repository", "index"): Endpoint.INDEX,
    ("metrics",): Endpoint.METRICS,
    ("v2", "cotenant", "plan"): Endpoint.PLAN,
}
_OF_MODEL: dict[tuple[str, ...], Endpoint] = {
    (): Endpoint.MODEL,
    ("ready",): Endpoint.MODEL_READY,
    ("config",): Endpoint.CONFIG,
    ("stats",): Endpoint.STATISTICS,
    ("infer",): Endpoint.INFER,
}
_OF_REPOSITORY: dict[tuple[str, ...], Endpoint] = {("load",): Endpoint.LOAD, ("unload",): Endpoint.UNLOAD}
_SHARED_MEMORY = ("systemsharedmemory", "cudasharedmemory", "xpusharedmemory")
_SETTINGS = ("trace", "logging")


class Router:
    """Router with a bounded cache. For one event loop, not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[bytes, HttpRoute] = {}

    def find(self, path: bytes) -> HttpRoute:
        """Find the route of a raw (percent-encoded) path.

        Raises ServeError: NOT_FOUND for an unknown path, UNIMPLEMENTED for an extension that is not served.
        """
        route = self._known.get(path)
        if route is None:
            route = parse_path(path)
            if len(path) <= _CACHED_PATH_BYTES:
                if len(self._known) >= _CACHED_PATHS:
                    self._known.clear()
                self._known[path] = route
        return route


def parse_path(path: bytes) -> HttpRoute:
    """Find the route of a path without the cache. Raises as `Router.find` does."""
    parts = path.decode("latin-1").strip("/").split("/")
    fixed = _FIXED.get(tuple(parts))
    if fixed is not None:
        return HttpRoute(fixed)
    try:
        parts = [unquote(part, errors="strict") for part in parts]
    except UnicodeDecodeError:
        raise bad("the path has a percent-encoded sequence that is not UTF-8") from None
    match parts:
        case ["v2", "models", model, "versions", version, *rest] if tuple(rest) in _OF_MODEL and model and version:
            return HttpRoute(_OF_MODEL[tuple(rest)], model, version)
        case ["v2", "models", model, *rest] if tuple(rest) in _OF_MODEL and model:
            return HttpRoute(_OF_MODEL[tuple(rest)], model)
        case ["v2", "repository", "models", model, *rest] if tuple(rest) in _OF_REPOSITORY and model:
            return HttpRoute(_OF_REPOSITORY[tuple(rest)], model)
        case ["v2", kind, *_] if kind in _SHARED_MEMORY:
            raise ServeError(Status.UNIMPLEMENTED, NO_SHARED_MEMORY)
        case ["v2", kind, *_] if kind in _SETTINGS:
            raise ServeError(Status.UNIMPLEMENTED, f"the {kind} settings extension is not supported")
        case ["v2", "models", _, *rest] if rest[-2:] == ["trace", "setting"]:
            raise ServeError(Status.UNIMPLEMENTED, "the trace settings extension is not supported")
    raise ServeError(Status.NOT_FOUND, f"path {shown('/' + '/'.join(parts))} does not exist, see GET /v2")
