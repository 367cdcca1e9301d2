"""What is served under which name, as plain data: front-ends look names up in it without asking the engine."""

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
    """What is known of a name. `fronts` serve it, by version; the default one is there under "", too."""

    @property
    def fronts(self) -> Mapping[str, T_co]:
        """What serves the name."""

    @property
    def unserved(self) -> Mapping[str, str]:
        """Reasons, by version."""

    @property
    def reason(self) -> str:
        """Empty where something serves the name."""


def look_up(named: Named[T_co] | None, name: str, version: str, *, is_open: bool) -> T_co:
    """What serves a name, None for an unknown one. `is_open`: queries are accepted.

    Raises ServeError: NOT_FOUND for what is unknown, UNAVAILABLE with the reason.
    """
    if named is None or not named.fronts:
        if not is_open:
            raise ServeError(Status.UNAVAILABLE, f"model {name!r}: the server is starting or shutting down")
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
    """The error of a request whose tenant's gate is shut; None where it depends on the query."""
    refused = gate.refusal(tenant, now_ns)
    if refused is None:
        return None
    if gate.is_draining:
        return ServeError(Status.UNAVAILABLE, refused.reason)
    status = Status.TOO_MANY if refused.cause is LossCause.RATE_LIMIT else Status.UNAVAILABLE
    return ServeError(status, refused.reason, Ending(Outcome.REJECTED), refused.cause)


class Front(Struct, frozen=True, array_like=True):
    """A version of a model, or an application, that is served. `problem` says why it is not ready, or is empty.

    `tenant` is the owner of its queries, whose gate may be shut; empty for an application.
    """

    metadata: ModelMetadata
    problem: str = ""
    tenant: str = ""


class NameState(Struct, frozen=True, array_like=True):
    """What is known of a name."""

    fronts: dict[str, Front] = {}
    unserved: dict[str, str] = {}
    reason: str = ""


class ShutGates(Struct, frozen=True, array_like=True, tag=True):
    """The gates that are shut, by tenant."""

    gates: dict[str, Gate] = {}


class Directory(Struct, frozen=True, array_like=True, tag=True):
    """All names of a server. Without `is_open` it accepts no queries."""

    is_open: bool = False
    names: dict[str, NameState] = {}

    def find(self, name: str, version: str) -> Front:
        """What serves a name. Raises as `look_up` does."""
        return look_up(self.names.get(name), name, version, is_open=self.is_open)

    def is_ready(self, name: str, version: str) -> bool:
        """Whether a model takes queries. Raises ServeError (NOT_FOUND) for an unknown one."""
        try:
            return not self.find(name, version).problem
        except ServeError as error:
            if error.status is Status.UNAVAILABLE:
                return False
            raise
