"""Dynamic batching: what bounds a batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cotenant.core.actions import Launch
from cotenant.core.events import QueryArrived
from cotenant.core.snapshot import DropRule
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Query, Tenant
from cotenant.work import Machine
from scenario import CORES, MS, ONE_LANE, TWO_LANES, Recording, play, tables
from strict_engine import StrictEngine as Engine

BLOCK_NS = 5 * MS
FAR = 10_000 * MS
BLOCK = Query(0, "block", 0, FAR)
FIRST_BATCH = 1


def batches(
    tenant: Tenant, members: list[Query], others: Sequence[Tenant] = (), more: Sequence[Query] = ()
) -> Recording:
    """Launches of edf after a blocking query: a batch of n rows takes 10 ms + 1 ms for each row after the first."""
    made = tables({"b": 10 * MS}, batch_slope=0.1).tables
    made |= tables({"block": BLOCK_NS, "other": 20 * MS}).tables
    return play(
        Edf(ONE_LANE, DropRule.NONE),
        [tenant, Tenant("block", FAR), *others],
        TablePredictor(made),
        [BLOCK, *members, *more],
    )


def members(count: int, deadline_ns: int = FAR, **more: int) -> list[Query]:
    return [Query(number, "b", 1, deadline_ns, **more) for number in range(1, count + 1)]


def test_waiting_queries_are_merged_up_to_max_batch_rows() -> None:
    made = batches(Tenant("b", FAR, max_batch=3), members(7))
    assert made.order == [(0,), (1, 2, 3), (4, 5, 6), (7,)]
    assert [launch.work.items for _, launch in made.launches] == [1, 3, 3, 1]
    assert made.launches[FIRST_BATCH][1].predicted_ns == 12 * MS


def test_rows_count_not_queries() -> None:
    assert batches(Tenant("b", FAR, max_batch=4), members(4, items=2)).order == [(0,), (1, 2), (3, 4)]


def test_a_query_larger_than_max_batch_runs_alone() -> None:
    assert batches(Tenant("b", FAR, max_batch=4), members(2, items=9)).order == [(0,), (1,), (2,)]


def test_only_equal_keys_and_shapes_are_merged() -> None:
    queries = [Query(n, "b", 1, FAR, merge_key=n % 2, shape=n // 4) for n in range(1, 7)]
    assert batches(Tenant("b", FAR, max_batch=8), queries).order == [(0,), (1, 3), (2,), (4, 6), (5,)]


def test_a_batch_stays_within_the_deadline_of_its_members() -> None:
    # It starts at 5 ms: 10 ms alone, 11 with two, 12 with three rows, against 17 ms.
    tight = members(6, 17 * MS)
    assert batches(Tenant("b", FAR, max_batch=8), tight).order[FIRST_BATCH] == (1, 2, 3)


def test_a_member_with_an_earlier_deadline_than_its_head_bounds_too() -> None:
    # First come, first served: the third arrival is the most urgent and ends the batch with itself at 16 ms.
    deadlines = [FAR, FAR, 17 * MS, FAR, FAR]
    queries = [BLOCK, *[Query(n, "b", 1, at) for n, at in enumerate(deadlines, start=1)]]
    predictor = TablePredictor({**tables({"b": 10 * MS}, batch_slope=0.1).tables, **tables({"block": BLOCK_NS}).tables})
    tenants = [Tenant("b", FAR, max_batch=8), Tenant("block", FAR)]
    assert play(Fcfs(ONE_LANE, DropRule.NONE), tenants, predictor, queries).order == [(0,), (1, 2, 3), (4, 5)]


def test_a_batch_leaves_room_for_the_head_of_another_queue() -> None:
    # The other needs 20 ms and ends by 37 ms: it has to begin at 17 ms at the latest.
    other = Query(9, "other", 1, 37 * MS)
    tenant = Tenant("b", FAR, max_batch=8)
    made = batches(tenant, members(6, 36 * MS), [Tenant("other", FAR)], [other])
    # Then, at 17 ms, a batch of one already makes the other late or is late itself: the urgent one goes alone, and the
    # rest need not wait for the other, which is late now.
    assert made.order == [(0,), (1, 2, 3), (4,), (5, 6), (9,)]


def test_one_who_cannot_be_in_time_any_more_bounds_nobody() -> None:
    lost = Query(9, "other", 1, 20 * MS)
    queries = [Query(n, "b", 1, 19 * MS) for n in range(1, 5)]
    made = batches(Tenant("b", FAR, max_batch=8), queries, [Tenant("other", FAR)], [lost])
    assert made.order[FIRST_BATCH] == (1, 2, 3, 4)


def test_a_batch_leaves_room_for_a_paused_one() -> None:
    # "long" is left at 20 ms with 60 ms to go and must be back by 33 ms to end by 93 ms.
    predictor = TablePredictor(
        {
            "long": LatencyTable((LatencyRow(0, 1, 2, 80 * MS),), (1.0,) * 4),
            **tables({"b": 10 * MS}, batch_slope=0.1).tables,
        }
    )
    tenants = [Tenant("long", FAR, cuts=(0, 1, 2, 3, 4)), Tenant("b", FAR, max_batch=8)]
    queries = [Query(0, "long", 0, 93 * MS), *[Query(n, "b", 1, 92 * MS) for n in range(1, 7)]]
    made = play(Edf(ONE_LANE, DropRule.NONE, slack_share=0.0), tenants, predictor, queries)
    assert made.order[:2] == [(0,), (1, 2, 3, 4)]


@pytest.mark.parametrize(("slope_ms", "first"), [(7, (1, 2, 3, 4)), (7.3, (1, 2, 3, 4)), (7.4, (1,)), (10, (1,))])
def test_a_query_joins_where_that_costs_the_batch_little_of_its_own_time(
    slope_ms: float, first: tuple[int, ...]
) -> None:
    """7 tenths of its 10 ms, and the 0.3 ms of the launch that it saves."""
    table = LatencyTable((LatencyRow(0, 1, 2, 10 * MS), LatencyRow(0, 2, 2, round((10 + slope_ms) * MS))))
    predictor = TablePredictor({"b": table, **tables({"block": BLOCK_NS}).tables})
    tenants = [Tenant("b", FAR, max_batch=4), Tenant("block", FAR)]
    made = play(Edf(ONE_LANE, DropRule.NONE), tenants, predictor, [BLOCK, *members(4)])
    assert made.order[FIRST_BATCH] == first


def test_short_models_merge_for_the_launch_that_they_save() -> None:
    predictor = tables({"b": MS // 5}, batch_slope=1.0)
    queries = [Query(0, "b", 0, FAR), *members(4)]
    made = play(Edf(ONE_LANE, DropRule.NONE), [Tenant("b", FAR, max_batch=4)], predictor, queries)
    assert made.order == [(0,), (1, 2, 3, 4)]


@pytest.mark.parametrize(("count", "order"), [(2, [(0,), (1,)]), (3, [(0, 1), (2,)]), (6, [(0, 1, 2), (3, 4, 5)])])
def test_free_lanes_share_those_that_wait(count: int, order: list[tuple[int, ...]]) -> None:
    """All are decided on at once: batches that pay for their rows, and no lane without work beside one."""
    policy, tenant = Edf(TWO_LANES, DropRule.NONE), Tenant("b", FAR, max_batch=8)
    predictor = tables({"b": 10 * MS}, batch_slope=0.1)
    engine = Engine([tenant], policy, predictor, Machine.cpu(CORES))
    launches: list[Launch] = []
    for number in range(count):
        arrived = QueryArrived(Query(number, "b", 0, FAR), more=number < count - 1)
        launches += [action for action in engine.handle(arrived, 0) if isinstance(action, Launch)]
    assert [launch.queries for launch in launches] == order


def test_nobody_is_in_two_batches_of_one_decision() -> None:
    queries = [Query(n, "b", 0 if n < 2 else 1, FAR, merge_key=n % 3) for n in range(12)]
    predictor = tables({"b": 10 * MS}, batch_slope=0.1)
    made = play(Edf(TWO_LANES, DropRule.NONE), [Tenant("b", FAR, max_batch=3)], predictor, queries)
    launched = [number for order in made.order for number in order]
    assert sorted(launched) == list(range(12))
    assert made.order[2:4] == [(2, 5, 8), (3, 6, 9)]


def test_a_hopeless_query_joins_no_batch_where_the_rule_drops_it() -> None:
    # The batch begins at 5 ms and takes 10 ms at least; the second member has until 14 ms only.
    queries = [BLOCK, *[Query(n, "b", 1, at) for n, at in enumerate([FAR, 14 * MS + 1, FAR], start=1)]]
    predictor = TablePredictor({**tables({"b": 10 * MS}, batch_slope=0.1).tables, **tables({"block": BLOCK_NS}).tables})
    tenants = [Tenant("b", FAR, max_batch=8), Tenant("block", FAR)]
    merged = {
        drop: play(Fcfs(ONE_LANE, drop), tenants, predictor, queries).order[FIRST_BATCH]
        for drop in (DropRule.HOPELESS, DropRule.NONE)
    }
    assert merged == {DropRule.HOPELESS: (1, 3), DropRule.NONE: (1, 2, 3)}
