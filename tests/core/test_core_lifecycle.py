"""The transition tables: what is in them leads where they say, and all else raises."""

from __future__ import annotations

from itertools import product

import pytest

from cotenant.core.lifecycle import (
    BATCH_TRANSITIONS,
    QUERY_TRANSITIONS,
    TASK_TRANSITIONS,
    BatchState,
    BatchStep,
    QueryState,
    QueryStep,
    TaskState,
    TaskStep,
    next_batch_state,
    next_query_state,
    next_task_state,
)
from cotenant.errors import ProtocolViolationError

QUERY_TABLE = {
    ("NEW", "ADMIT"): "QUEUED",
    ("NEW", "REJECT"): "ENDED",
    ("NEW", "FAIL"): "ENDED",
    ("QUEUED", "LAUNCH"): "BATCHED",
    ("QUEUED", "DROP"): "ENDED",
    ("QUEUED", "FAIL"): "ENDED",
    ("QUEUED", "CANCEL"): "ENDED",
    ("BATCHED", "RETURN"): "QUEUED",
    ("BATCHED", "FINISH"): "ENDED",
    ("BATCHED", "DROP"): "ENDED",
    ("BATCHED", "FAIL"): "ENDED",
    ("BATCHED", "CANCEL"): "ENDED",
}
BATCH_TABLE = {
    ("NEW", "LAUNCH"): "RUNNING",
    ("RUNNING", "PAUSE"): "PAUSED",
    ("RUNNING", "END"): "ENDED",
    ("RUNNING", "ABANDON"): "DOOMED",
    ("PAUSED", "LAUNCH"): "RUNNING",
    ("PAUSED", "ABANDON"): "ENDED",
    ("DOOMED", "END"): "ENDED",
}

TASK_TABLE = {
    ("NEW", "LAUNCH"): "RUNNING",
    ("NEW", "WAIT"): "WAITING",
    ("WAITING", "LAUNCH"): "RUNNING",
    ("WAITING", "CANCEL"): "ENDED",
    ("RUNNING", "EXPAND"): "EXPANDING",
    ("RUNNING", "END"): "ENDED",
    ("EXPANDING", "EXPANDED"): "RUNNING",
    ("EXPANDING", "END"): "ENDED",
}


@pytest.mark.parametrize(("state", "step"), list(product(TaskState, TaskStep)), ids=lambda value: value.name)
def test_task_steps(state: TaskState, step: TaskStep) -> None:
    expected = TASK_TABLE.get((state.name, step.name))
    if expected is None:
        with pytest.raises(ProtocolViolationError, match=f"launch 7: {step.name} cannot happen while {state.name}"):
            next_task_state(state, step, 7)
    else:
        assert next_task_state(state, step, 7) is TaskState[expected]


@pytest.mark.parametrize(("state", "step"), list(product(QueryState, QueryStep)), ids=lambda value: value.name)
def test_query_steps(state: QueryState, step: QueryStep) -> None:
    expected = QUERY_TABLE.get((state.name, step.name))
    if expected is None:
        with pytest.raises(ProtocolViolationError, match=f"query 7: {step.name} cannot happen while {state.name}"):
            next_query_state(state, step, 7)
    else:
        assert next_query_state(state, step, 7) is QueryState[expected]


@pytest.mark.parametrize(("state", "step"), list(product(BatchState, BatchStep)), ids=lambda value: value.name)
def test_batch_steps(state: BatchState, step: BatchStep) -> None:
    expected = BATCH_TABLE.get((state.name, step.name))
    if expected is None:
        with pytest.raises(ProtocolViolationError, match=f"batch 7: {step.name} cannot happen while {state.name}"):
            next_batch_state(state, step, 7)
    else:
        assert next_batch_state(state, step, 7) is BatchState[expected]


def test_every_state_has_its_row_and_the_end_is_final() -> None:
    assert set(QUERY_TRANSITIONS) == set(QueryState)
    assert set(BATCH_TRANSITIONS) == set(BatchState)
    assert set(TASK_TRANSITIONS) == set(TaskState)
    assert TASK_TRANSITIONS[TaskState.ENDED] == {}
    assert QUERY_TRANSITIONS[QueryState.ENDED] == {}
    assert BATCH_TRANSITIONS[BatchState.ENDED] == {}
