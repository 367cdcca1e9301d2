"""Directory of served names as plain data. Front-ends look names up in it without a call to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from msgspec import Struct

from cotenant.core.admission import Gate
from cotenant.types import LossCause, Outcome
from cotenant.wire.api import ModelMetadata, ServeError, Status
from cotenant.wire.ending import Ending

T_co = TypeVar("T_co", covariant=True)


class Named(Protocol[T_co]):
    """State of a name: served, or the reason why not."""

    @property
    def fronts(self) -> Mapping[str, T_co]:
        """Served versions by version; the default version is also under ""."""

    @property
    def unserved(self) -> Mapping[str, str]:
        """Reasons why other versions are not served, by version."""

    @property
    def reason(self) -> str:
        """Why the name is not served; empty where it is."""


def look_up(named: Named[T_co] | None, name: str, version: str, *, are_known: bool) -> T_co:
    """Find the served version of a name. `named` is None for an unknown name; `are_known`: the names of the repository
    are known, which they are as soon as the server begins to load models.

    Raises ServeError: NOT_FOUND for an unknown name or version, UNAVAILABLE with the reason for one not served.
    """
    if named is None or not named.fronts:
        if named is None and not are_known:
            raise ServeError(Status.UNAVAILABLE, f"model {name!r}: the server is starting or stopping; try again later")
        if named is not None:
            raise ServeError(Status.UNAVAILABLE, f"model {name!r} is not served: {named.reason}")
        raise ServeError(Status.NOT_FOUND, f"model {name!r} is unknown; 'v2/repository/index' lists the models")
    served = named.fronts.get(version)
    if served is None and (reason := named.unserved.get(version)):
        raise ServeError(Status.UNAVAILABLE, f"model {name!r} version {version} is not served: {reason}")
    if served is None:
        known = ", ".join(each for each in named.fronts if each)
        raise ServeError(Status.NOT_FOUND, f"model {name!r} has no version {version!r}; it has {known}")
    return served


def refusal_of(tenant: str, gate: Gate, now_ns: int) -> ServeError | None:
    """Error of a request at a shut gate (full queue, rate limit, drain); None if it depends on the query."""
    refused = gate.refusal(tenant, now_ns)
    if refused is None:
        return None
    if gate.is_draining:
        return ServeError(Status.UNAVAILABLE, refused.reason)
    status = Status.TOO_MANY if refused.cause is LossCause.RATE_LIMIT else Status.UNAVAILABLE
    return ServeError(status, refused.reason, Ending(Outcome.REJECTED), refused.cause)


class Front(Struct, frozen=True, array_like=True):
    """A served version of a model, or a served application. `problem`: why it is not ready, or empty.

    `tenant` owns its queries and their gate; empty for an application.
    """

    metadata: ModelMetadata
    problem: str = ""
    tenant: str = ""


class NameState(Struct, frozen=True, array_like=True):
    """State of a name, as the engine publishes it."""

    fronts: dict[str, Front] = {}
    unserved: dict[str, str] = {}
    reason: str = ""


class ShutGates(Struct, frozen=True, array_like=True, tag=True):
    """Shut gates by tenant."""

    gates: dict[str, Gate] = {}


class Directory(Struct, frozen=True, array_like=True, tag=True):
    """All names of a server. `is_open`: all models are loaded; `are_known`: as for `look_up`."""

    is_open: bool = False
    names: dict[str, NameState] = {}
    are_known: bool = False

    def find(self, name: str, version: str) -> Front:
        """Find the served version of a name. Raises ServeError as `look_up` does."""
        return look_up(self.names.get(name), name, version, are_known=self.are_known)

    def is_ready(self, name: str, version: str) -> bool:
        """Whether a model accepts queries. Raises ServeError (NOT_FOUND) for an unknown name."""
        try:
            return not self.find(name, version).problem
        except ServeError as error:
            if error.status is Status.UNAVAILABLE:
                return False
            raise
