"""The literal transition tables: what may happen to a query, a batch and a strand, and where it leads.

A pair that is not in a table is a bug in a driver, an executor or a policy, and raises ProtocolViolationError.
"""

from __future__ import annotations

from enum import IntEnum, auto

from cotenant.errors import ProtocolViolationError


class QueryState(IntEnum):
    """Where a query is."""

    NEW = auto()
    QUEUED = auto()
    BATCHED = auto()
    ENDED = auto()


class QueryStep(IntEnum):
    """What happens to a query."""

    ADMIT = auto()
    REJECT = auto()
    LAUNCH = auto()
    RETURN = auto()
    """Its batch is gone without its fault: it waits again, to be run anew."""
    FINISH = auto()
    DROP = auto()
    FAIL = auto()
    CANCEL = auto()


class BatchState(IntEnum):
    """Where a batch is."""

    NEW = auto()
    RUNNING = auto()
    """Strands of it run, or wait for others."""
    PAUSED = auto()
    DOOMED = auto()
    """Still running, though nobody waits for it any more."""
    ENDED = auto()


class BatchStep(IntEnum):
    """What happens to a batch."""

    LAUNCH = auto()
    PAUSE = auto()
    END = auto()
    ABANDON = auto()


class StrandState(IntEnum):
    """Where a strand is: what one launch runs of a batch."""

    NEW = auto()
    WAITING = auto()
    """It is decided and has its slots, and starts when the launches before it have ended."""
    RUNNING = auto()
    GROWING = auto()
    """It runs, and has been given slots that it has not taken in yet."""
    ENDED = auto()


class StrandStep(IntEnum):
    """What happens to a strand."""

    LAUNCH = auto()
    WAIT = auto()
    CANCEL = auto()
    """Nobody waits for its batch any more, or that cannot go on: it never runs."""
    GROW = auto()
    GREW = auto()
    END = auto()


QUERY_TRANSITIONS: dict[QueryState, dict[QueryStep, QueryState]] = {
    QueryState.NEW: {
        QueryStep.ADMIT: QueryState.QUEUED,
        QueryStep.REJECT: QueryState.ENDED,
        QueryStep.FAIL: QueryState.ENDED,
    },
    QueryState.QUEUED: {
        QueryStep.LAUNCH: QueryState.BATCHED,
        QueryStep.DROP: QueryState.ENDED,
        QueryStep.FAIL: QueryState.ENDED,
        QueryStep.CANCEL: QueryState.ENDED,
    },
    QueryState.BATCHED: {
        QueryStep.RETURN: QueryState.QUEUED,
        QueryStep.FINISH: QueryState.ENDED,
        QueryStep.DROP: QueryState.ENDED,
        QueryStep.FAIL: QueryState.ENDED,
        QueryStep.CANCEL: QueryState.ENDED,
    },
    QueryState.ENDED: {},
}

BATCH_TRANSITIONS: dict[BatchState, dict[BatchStep, BatchState]] = {
    BatchState.NEW: {BatchStep.LAUNCH: BatchState.RUNNING},
    BatchState.RUNNING: {
        BatchStep.PAUSE: BatchState.PAUSED,
        BatchStep.END: BatchState.ENDED,
        BatchStep.ABANDON: BatchState.DOOMED,
    },
    BatchState.PAUSED: {
        BatchStep.LAUNCH: BatchState.RUNNING,
        BatchStep.ABANDON: BatchState.ENDED,
    },
    BatchState.DOOMED: {BatchStep.END: BatchState.ENDED},
    BatchState.ENDED: {},
}


STRAND_TRANSITIONS: dict[StrandState, dict[StrandStep, StrandState]] = {
    StrandState.NEW: {StrandStep.LAUNCH: StrandState.RUNNING, StrandStep.WAIT: StrandState.WAITING},
    StrandState.WAITING: {StrandStep.LAUNCH: StrandState.RUNNING, StrandStep.CANCEL: StrandState.ENDED},
    StrandState.RUNNING: {StrandStep.GROW: StrandState.GROWING, StrandStep.END: StrandState.ENDED},
    StrandState.GROWING: {StrandStep.GREW: StrandState.RUNNING, StrandStep.END: StrandState.ENDED},
    StrandState.ENDED: {},
}


def next_query_state(state: QueryState, step: QueryStep, query: int) -> QueryState:
    """Look the step up in the table. Raises ProtocolViolationError when it is not there."""
    try:
        return QUERY_TRANSITIONS[state][step]
    except KeyError:
        raise ProtocolViolationError(f"query {query}: {step.name} cannot happen while {state.name}") from None


def next_batch_state(state: BatchState, step: BatchStep, batch: int) -> BatchState:
    """Look the step up in the table. Raises ProtocolViolationError when it is not there."""
    try:
        return BATCH_TRANSITIONS[state][step]
    except KeyError:
        raise ProtocolViolationError(f"batch {batch}: {step.name} cannot happen while {state.name}") from None


def next_strand_state(state: StrandState, step: StrandStep, launch: int) -> StrandState:
    """Look the step up in the table. Raises ProtocolViolationError when it is not there."""
    try:
        return STRAND_TRANSITIONS[state][step]
    except KeyError:
        raise ProtocolViolationError(f"launch {launch}: {step.name} cannot happen while {state.name}") from None
