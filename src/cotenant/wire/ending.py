"""How a query ended, as its client is told beside the answer: the keys, and writing and reading them.

They are headers of HTTP and trailing metadata of gRPC. Where a message cannot have those, as in a stream, they are
parameters of the response. Servers that do not speak cotenant's dialect send none: their status stands in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cotenant.types import ANSWERS, Cause, Outcome

OUTCOME_KEY = "x-cotenant-outcome"
"""Names an `Outcome`."""
CAUSE_KEY = "x-cotenant-cause"
"""Names a `Cause`, where there is one."""

_BY_HTTP = {429: Outcome.REJECTED, 499: Outcome.CANCELLED, 503: Outcome.REJECTED}
_BY_GRPC = {
    "CANCELLED": Outcome.CANCELLED,
    "RESOURCE_EXHAUSTED": Outcome.REJECTED,
    "UNAVAILABLE": Outcome.REJECTED,
}
"""What a status alone says of a query without a result; all others are failures."""


class Ending(NamedTuple):
    """How a query ended."""

    outcome: Outcome
    cause: Cause | None = None

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Keys and values for the wire."""
        outcome = (OUTCOME_KEY, self.outcome.value)
        return (outcome,) if self.cause is None else (outcome, (CAUSE_KEY, self.cause.value))


FAILURE = Ending(Outcome.FAILED)


def read_ending(told: Mapping[str, str]) -> Ending | None:
    """Take an ending from headers, metadata or parameters by their lower-case names; None where there is none.

    A word that this version does not know counts as not said.
    """
    try:
        outcome = Outcome(told.get(OUTCOME_KEY, ""))
    except ValueError:
        return None
    return Ending(outcome, Cause.UNSERVED if told.get(CAUSE_KEY) == Cause.UNSERVED else None)


def http_ending(status: int, headers: Mapping[str, str]) -> Ending:
    """How a query without a result ended: as the server says, else by the status."""
    return _no_answer(headers) or Ending(_BY_HTTP.get(status, Outcome.FAILED))


def grpc_ending(code: str, trailing: Mapping[str, str]) -> Ending:
    """How a query without a result ended: as the server says, else by the name of the status."""
    return _no_answer(trailing) or Ending(_BY_GRPC.get(code, Outcome.FAILED))


def _no_answer(told: Mapping[str, str]) -> Ending | None:
    ending = read_ending(told)
    return None if ending is None or ending.outcome in ANSWERS else ending
