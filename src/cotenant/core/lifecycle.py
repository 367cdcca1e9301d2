"""State machines of queries, batches, tasks and the engine, as literal transition tables.

A pair that is not in a table is a bug of a driver, an executor or a policy, and raises ProtocolViolationError.
"""

from __future__ import annotations

from enum import IntEnum, auto

from cotenant.errors import ProtocolViolationError


class QueryState(IntEnum):
    """State of a query."""

    NEW = auto()
    QUEUED = auto()
    BATCHED = auto()
    ENDED = auto()


class QueryStep(IntEnum):
    """Transition of a query."""

    ADMIT = auto()
    REJECT = auto()
    LAUNCH = auto()
    RETURN = auto()
    """Its batch cannot continue: the query waits again and will run from the start."""
    FINISH = auto()
    DROP = auto()
    FAIL = auto()
    CANCEL = auto()


class BatchState(IntEnum):
    """State of a batch."""

    NEW = auto()
    RUNNING = auto()
    """Its tasks run, or wait for other launches."""
    PAUSED = auto()
    DOOMED = auto()
    """Still running, but without live queries."""
    ENDED = auto()


class BatchStep(IntEnum):
    """Transition of a batch."""

    LAUNCH = auto()
    PAUSE = auto()
    END = auto()
    ABANDON = auto()


class TaskState(IntEnum):
    """State of a task: the part of a batch that one launch runs."""

    NEW = auto()
    WAITING = auto()
    """Decided, with slots; it starts when the launches before it have ended."""
    RUNNING = auto()
    EXPANDING = auto()
    """It runs, and has been given slots that it does not use yet."""
    ENDED = auto()


class TaskStep(IntEnum):
    """Transition of a task."""

    LAUNCH = auto()
    WAIT = auto()
    CANCEL = auto()
    """Its batch has no live query, or cannot continue: the task never runs."""
    EXPAND = auto()
    EXPANDED = auto()
    END = auto()


class ServiceState(IntEnum):
    """Whether an engine admits queries."""

    OPEN = auto()
    DRAINING = auto()
    """It admits stages of live application queries only."""


class ServiceStep(IntEnum):
    """Transition of an engine's service."""

    DRAIN = auto()


class LookState(IntEnum):
    """Whether a LookAheadDue is expected."""

    IDLE = auto()
    SENT = auto()
    """A LookAhead is on its way."""


class LookStep(IntEnum):
    """Transition of a LookAhead."""

    SEND = auto()
    COME = auto()


class NextState(IntEnum):
    """Whether a next group waits for the running one."""

    OPEN = auto()
    """None: the policy may choose one."""
    BOOKED = auto()
    """A group waits for the running launches: the policy is not called."""


class NextStep(IntEnum):
    """Observation of the engine about the next group."""

    WAITS = auto()
    """Launches wait."""
    IS_CLEAR = auto()
    """No launch waits: all run, or their queries have ended."""


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
