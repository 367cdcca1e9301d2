"""Messages between front-end processes and the engine process of a server."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct

from cotenant.serve.directory import Directory, ShutGates
from cotenant.serve.link.arena import TensorPlace
from cotenant.types import Cause, LossCause, Outcome
from cotenant.wire.api import IndexEntry, ModelStatistics, ServeError, Status
from cotenant.wire.ending import Ending


class QueryRequest(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the engine: a query with its inputs in the front-end's arena. `ref` identifies it on this link."""

    ref: int
    model: str
    version: str
    inputs: TensorPlace
    outputs: tuple[str, ...] = ()
    priority: int = 0
    timeout_ns: int | None = None
    arrival_ns: int = 0


class Withdraw(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the engine: the client withdrew a query."""

    ref: int


class Replied(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the engine: an answer was passed to its connection at this monotonic time."""

    query: int
    ended_ns: int
    at_ns: int


class Shortages(Struct, frozen=True, array_like=True, tag=True):
    """To the engine: new resource shortages since the last message, by value of `shortages.Resource`."""

    met: dict[str, int]


class ControlCall(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the engine: a call of a method of `Control`."""

    ref: int
    method: str
    words: tuple[Any, ...] = ()


class EndedQuery(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To a front-end: the outcome of a query, with its outputs in the engine's arena."""

    ref: int
    outcome: Outcome
    query: int
    version: str
    outputs: TensorPlace
    reason: str = ""
    status: str = ""
    ended_ns: int = 0


class Failed(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To a front-end: a query or a call was refused."""

    ref: int
    status: str
    message: str
    outcome: Outcome
    cause: Cause | None = None
    loss: LossCause | None = None

    @classmethod
    def of(cls, ref: int, error: ServeError) -> Failed:
        """Message form of an error."""
        loss = None if error.cause is UNSET else error.cause
        return cls(ref, error.status.name, error.message, error.ending.outcome, error.ending.cause, loss)

    @property
    def error(self) -> ServeError:
        """Error that the other side raised."""
        loss = UNSET if self.loss is None else self.loss
        return ServeError(Status[self.status], self.message, Ending(self.outcome, self.cause), loss)


class Declined(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the engine: a request was refused at the front-end and never became a query."""

    model: str
    arrival_ns: int
    error: Failed


class CallResult(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To a front-end: the result of a call, of the type in `RETURNS`."""

    ref: int
    value: msgspec.Raw


class Freed(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the writer of an arena: these blocks are free."""

    blocks: list[int]


ToEngine = QueryRequest | Withdraw | Replied | Declined | Shortages | ControlCall | Freed
ToFrontend = EndedQuery | Failed | CallResult | Freed | Directory | ShutGates
RETURNS: dict[str, Any] = {
    "config": dict[str, Any],
    "statistics": tuple[ModelStatistics, ...],
    "index": tuple[IndexEntry, ...],
    "load": None,
    "unload": None,
    "metrics": bytes,
    "plan": dict[str, Any],
}
"""Result types by method."""
