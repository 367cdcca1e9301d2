"""Batches from their first launch to their end, each change by the table of states."""

from __future__ import annotations

import pytest

from cotenant.core.batches import BegunBatches
from cotenant.core.lifecycle import BatchState
from cotenant.errors import ProtocolViolationError
from cotenant.types import Query, Tenant
from cotenant.work import Share

TENANT = Tenant("a", 100, cuts=(0, 2, 4), max_batch=4)
ONE = Share((0,))


def queries(count: int = 2) -> list[Query]:
    return [Query(number, "a", 0, 100 - number) for number in range(count)]


def test_a_batch_pauses_goes_on_and_ends() -> None:
    batches = BegunBatches()
    batch = batches.begin(TENANT, queries())
    assert (batch.id, batch.deadline_ns, batches.known) == (0, 99, {0: batch})
    batches.launch(batch, 2)
    batches.launch(batch, 1)
    assert (batch.state, batch.open, batch.until) == (BatchState.RUNNING, 2, 2)
    batch.open = 0
    batches.pause(batch, ONE)
    assert (batch.next_unit, batch.share, batches.paused) == (2, ONE, [batch])
    batches.launch(batch, 4)
    assert (batches.paused, batch.until) == ([], 4)
    batches.end(batch)
    assert batches.known == {}
    assert batches.begin(TENANT, queries()).id == 1


def test_a_batch_that_all_have_left_ends_with_its_launches_or_at_once_where_it_pauses() -> None:
    batches = BegunBatches()
    runs, pauses = batches.begin(TENANT, queries()), batches.begin(TENANT, queries())
    for batch in (runs, pauses):
        batches.launch(batch, 2)
    batches.pause(pauses, ONE)
    for batch in (runs, pauses):
        batches.abandon(batch)
    assert (runs.state, pauses.state) == (BatchState.DOOMED, BatchState.ENDED)
    assert (batches.known, batches.paused, runs.queries) == ({0: runs}, [], [])
    with pytest.raises(ProtocolViolationError, match="batch 0: PAUSE cannot happen while DOOMED"):
        batches.pause(runs, ONE)
