"""Ending of a query (outcome and cause) as key-value pairs of the protocol: encoding and decoding.

The pairs are headers in HTTP and trailing metadata in gRPC. In a gRPC stream they are parameters of the response.
Other servers do not send them; then the ending follows from the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cotenant.types import ANSWERS, Cause, Outcome

OUTCOME_KEY = "x-cotenant-outcome"
"""Key of the `Outcome`."""
CAUSE_KEY = "x-cotenant-cause"
"""Key of the `Cause`, if any."""

_BY_HTTP = {429: Outcome.REJECTED, 499: Outcome.CANCELLED, 503: Outcome.REJECTED}
_BY_GRPC = {
    "CANCELLED": Outcome.CANCELLED,
    "RESOURCE_EXHAUSTED": Outcome.REJECTED,
    "UNAVAILABLE": Outcome.REJECTED,
}
"""Outcome by status for servers without these keys; every other status means FAILED."""


class Ending(NamedTuple):
    """Outcome and cause of an ended query."""

    outcome: Outcome
    cause: Cause | None = None

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Key-value pairs for the wire."""
        outcome = (OUTCOME_KEY, self.outcome.value)
        return (outcome,) if self.cause is None else (outcome, (CAUSE_KEY, self.cause.value))


FAILURE = Ending(Outcome.FAILED)


def read_ending(fields: Mapping[str, str]) -> Ending | None:
    """Read an ending from headers, metadata or parameters with lower-case names; None if absent.

    Unknown values count as absent.
    """
    try:
        outcome = Outcome(fields.get(OUTCOME_KEY, ""))
    except ValueError:
        return None
    return Ending(outcome, Cause.UNSERVED if fields.get(CAUSE_KEY) == Cause.UNSERVED else None)


def http_ending(status: int, headers: Mapping[str, str]) -> Ending:
    """Ending of a query without a result, from the HTTP headers or else from the status."""
    return _no_answer(headers) or Ending(_BY_HTTP.get(status, Outcome.FAILED))


def grpc_ending(code: str, trailing: Mapping[str, str]) -> Ending:
    """Ending of a query without a result, from the trailing metadata or else from the status name."""
    return _no_answer(trailing) or Ending(_BY_GRPC.get(code, Outcome.FAILED))


def _no_answer(fields: Mapping[str, str]) -> Ending | None:
    ending = read_ending(fields)
    return None if ending is None or ending.outcome in ANSWERS else ending
