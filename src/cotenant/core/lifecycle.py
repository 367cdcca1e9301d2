"""The literal transition tables: what may happen to a query, a batch, a task and an engine, and where it leads.

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
    """Tasks of it run, or wait for other launches."""
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


class TaskState(IntEnum):
    """State of a task: the part of a batch that one launch runs."""

    NEW = auto()
    WAITING = auto()
    """It is decided and has its slots, and starts when the launches before it have ended."""
    RUNNING = auto()
    EXPANDING = auto()
    """It runs, and has been given slots that it has not taken in yet."""
    ENDED = auto()


class TaskStep(IntEnum):
    """What happens to a task."""

    LAUNCH = auto()
    WAIT = auto()
    CANCEL = auto()
    """Nobody waits for its batch any more, or that cannot go on: it never runs."""
    EXPAND = auto()
    EXPANDED = auto()
    END = auto()


class ServiceState(IntEnum):
    """Whether an engine takes queries."""

    OPEN = auto()
    DRAINING = auto()
    """Only stages of queries that are inside come in."""


class ServiceStep(IntEnum):
    """What happens to the service of an engine."""

    DRAIN = auto()


class LookState(IntEnum):
    """Whether a LookAheadDue has to come."""

    IDLE = auto()
    SENT = auto()
    """A LookAhead is on its way."""


class LookStep(IntEnum):
    """What happens to a LookAhead."""

    SEND = auto()
    COME = auto()


class NextState(IntEnum):
    """What stands behind the group that runs."""

    OPEN = auto()
    """Nothing that has started: the policy may choose anew."""
    BOOKED = auto()
    """A group that waits for the launches under way: the policy is not asked."""


class NextStep(IntEnum):
    """What an engine finds behind the group that runs."""

    WAITS = auto()
    """Launches that wait."""
    IS_CLEAR = auto()
    """None: they run by now, or all of their queries have left."""


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


TASK_TRANSITIONS: dict[TaskState, dict[TaskStep, TaskState]] = {
    TaskState.NEW: {TaskStep.LAUNCH: TaskState.RUNNING, TaskStep.WAIT: TaskState.WAITING},
    TaskState.WAITING: {TaskStep.LAUNCH: TaskState.RUNNING, TaskStep.CANCEL: TaskState.ENDED},
    TaskState.RUNNING: {TaskStep.EXPAND: TaskState.EXPANDING, TaskStep.END: TaskState.ENDED},
    TaskState.EXPANDING: {TaskStep.EXPANDED: TaskState.RUNNING, TaskStep.END: TaskState.ENDED},
    TaskState.ENDED: {},
}

SERVICE_TRANSITIONS: dict[ServiceState, dict[ServiceStep, ServiceState]] = {
    ServiceState.OPEN: {ServiceStep.DRAIN: ServiceState.DRAINING},
    ServiceState.DRAINING: {ServiceStep.DRAIN: ServiceState.DRAINING},
}

LOOK_TRANSITIONS: dict[LookState, dict[LookStep, LookState]] = {
    LookState.IDLE: {LookStep.SEND: LookState.SENT, LookStep.COME: LookState.IDLE},
    LookState.SENT: {LookStep.COME: LookState.IDLE},
}

NEXT_TRANSITIONS: dict[NextState, dict[NextStep, NextState]] = {
    NextState.OPEN: {NextStep.WAITS: NextState.BOOKED, NextStep.IS_CLEAR: NextState.OPEN},
    NextState.BOOKED: {NextStep.WAITS: NextState.BOOKED, NextStep.IS_CLEAR: NextState.OPEN},
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


def next_task_state(state: TaskState, step: TaskStep, launch: int) -> TaskState:
    """Look the step up in the table. Raises ProtocolViolationError when it is not there."""
    try:
        return TASK_TRANSITIONS[state][step]
    except KeyError:
        raise ProtocolViolationError(f"launch {launch}: {step.name} cannot happen while {state.name}") from None
