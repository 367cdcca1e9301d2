"""What front-end processes and the engine process of a server say to each other."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct

from cotenant.serve.directory import Directory, ShutGates
from cotenant.serve.link.arena import TensorPlace
from cotenant.types import Cause, LossCause, Outcome
from cotenant.wire.api import IndexEntry, ModelStatistics, ServeError, Status
from cotenant.wire.ending import Ending


class AskedQuery(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the engine: a query, with its inputs at a place of the front-end's arena. `ref` names it on this link."""

    ref: int
    model: str
    version: str
    inputs: TensorPlace
    outputs: tuple[str, ...] = ()
    priority: int = 0
    timeout_ns: int | None = None
    arrival_ns: int = 0


class Withdraw(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the engine: the client of a query has gone."""

    ref: int


class Replied(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the engine: an answer was handed to its connection, at this monotonic time."""

    query: int
    ended_ns: int
    at_ns: int


class Shortages(Struct, frozen=True, array_like=True, tag=True):
    """To the engine: how often resources were short since the last time, by the values of `shortages.Resource`."""

    met: dict[str, int]


class ControlCall(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the engine: a method of `Control`, with its arguments."""

    ref: int
    method: str
    words: tuple[Any, ...] = ()


class EndedQuery(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To a front-end: how a query ended, with its outputs at a place of the engine's arena."""

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
        """As it crosses the link."""
        loss = None if error.cause is UNSET else error.cause
        return cls(ref, error.status.name, error.message, error.ending.outcome, error.ending.cause, loss)

    @property
    def error(self) -> ServeError:
        """As it was raised."""
        loss = UNSET if self.loss is None else self.loss
        return ServeError(Status[self.status], self.message, Ending(self.outcome, self.cause), loss)


class Declined(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the engine: a request for a model was answered with an error, and never was a query."""

    model: str
    arrival_ns: int
    error: Failed


class CallResult(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To a front-end: what a call gives, as `RETURNS` says."""

    ref: int
    value: msgspec.Raw


class Freed(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To the writer of an arena: nothing looks into these blocks any more."""

    blocks: list[int]


ToEngine = AskedQuery | Withdraw | Replied | Declined | Shortages | ControlCall | Freed
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
"""The calls, and the types of what they give."""
