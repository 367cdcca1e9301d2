"""Many lanes, and lanes of different sizes: nobody is started twice, refused or given up where one of them would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.actions import Launch, Respond
from cotenant.core.admission import most_cores
from cotenant.core.batches import Batch
from cotenant.core.decisions import fault_of
from cotenant.core.events import LaunchEnded, QueryArrived
from cotenant.core.launches import Launches
from cotenant.core.lifecycle import QueryState
from cotenant.core.queues import Live, TenantQueue
from cotenant.core.snapshot import Decision, DropRule, Policy, Snapshot
from cotenant.policies import policy_class, policy_names
from cotenant.policies.decision_context import MOST_AT_ONCE
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.registry import options_of
from cotenant.predict.margin import SafetyMargin, Spread
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.layer_blocks.policy.block_policy import BlockPolicy
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share, Work
from looked import Looked
from scenario import MS, TWO_LANES
from strict_engine import StrictEngine as Engine

NARROW, WIDE = Share((0,)), Share((1, 2))
MODEL = LatencyTable((LatencyRow(0, 1, 1, 20 * MS), LatencyRow(0, 1, 2, 10 * MS)), (1.0,))
PREDICTOR = TablePredictor({"a": MODEL, "b": MODEL})


def all_policies(lanes: tuple[Share, ...], **options: Any) -> list[Policy]:
    """Every policy over these lanes, those that can be tail-aware both ways, and overlap with a barrier and without.

    Blocks get any number of lanes, which have to be of one size.
    """
    made: list[Policy] = []
    for kind in map(policy_class, policy_names()):
        known = options_of(kind)
        given = {option: value for option, value in options.items() if option in known}
        if issubclass(kind, BlockPolicy) and len({lane.size for lane in lanes}) > 1:
            continue
        wishes = [{"tail_aware": wish} for wish in (False, True)] if "tail_aware" in known else [{}]
        made += [kind(lanes, **wish, **given) for wish in wishes]
    return [*made, *[replace(policy, barrier=False) for policy in made if isinstance(policy, Overlap)]]


def ids(policy: Policy) -> str:
    return f"{policy.name}{'-tail-aware' if policy.spec.tail_aware else ''}{'-grouped' if policy.spec.grouped else ''}"


@pytest.mark.parametrize("policy", all_policies(TWO_LANES) + all_policies((NARROW, WIDE)), ids=ids)
def test_who_fits_into_the_most_that_a_policy_gives_is_let_in_and_served(policy: Policy) -> None:
    most = most_cores(policy.spec)
    assert most == max(share.size for share in policy.spec.shares)
    needed = PREDICTOR.latency_ns(Work("a", 0, 1, 0, 1), most)
    engine = Engine([Tenant("a", needed)], policy, PREDICTOR, Machine.cpu((0, 1, 2)))
    [launch] = [each for each in engine.handle(QueryArrived(Query(0, "a", 0, needed)), 0) if isinstance(each, Launch)]
    assert launch.share.size == most
    assert engine.handle(LaunchEnded(launch.id), needed) == [Respond(0, Outcome.ANSWERED)]
    [refused] = engine.handle(QueryArrived(Query(1, "a", needed, 2 * needed - 1)), needed)
    assert isinstance(refused, Respond)
    assert refused.outcome is Outcome.REJECTED


# --- lanes of different sizes -----------------------------------------------------------------------------------


def decide(policy: Policy, tenants: list[Tenant], queries: list[Query], predictor: TablePredictor) -> Decision:
    """At time 0 with all cores free; checked as the engine checks it."""
    queues = {tenant.name: TenantQueue(tenant) for tenant in tenants}
    live: dict[int, Live] = {}
    for query in queries:
        queue = queues[query.tenant]
        key = policy.queue_key(query, queue.tenant, predictor)
        queue.push(key, query)
        live[query.id] = Live(query, key, QueryState.QUEUED)
    free = 0
    for lane in policy.spec.lanes:
        free |= lane.mask
    weights_differ = len({tenant.weight for tenant in tenants}) > 1
    decision = policy.decide(Snapshot(0, queues, [], {}, free, predictor, weights_differ), None)
    assert (
        fault_of(
            decision,
            live,
            {},
            queues,
            Launches(free),
            {each.device: each for each in Machine.holding(policy.spec.lanes).devices},
        )
        is None
    )
    return decision


def started(decision: Decision) -> list[tuple[int, ...]]:
    return [tuple(query.id for query in start.queries) for start in decision.starts]


LANES = [(NARROW, WIDE), (WIDE, NARROW), (NARROW, Share((1,)), Share((2, 3)))]
MIXED = [policy for lanes in LANES for policy in all_policies(lanes) if not policy.spec.grouped]


@pytest.mark.parametrize("policy", MIXED, ids=ids)
def test_what_is_too_slow_in_one_lane_is_left_to_another_and_hides_nobody(policy: Policy) -> None:
    """The first two need the wide lane, the others do not."""
    limits = [14, 15, 60, 61, 62]
    queries = [Query(n, "a", 0, limit * MS, merge_key=n) for n, limit in enumerate(limits)]
    decision = decide(policy, [Tenant("a", 100 * MS)], queries, PREDICTOR)
    assert len(decision.starts) == len(policy.spec.lanes)
    by_size = {start.share.size: start.queries[0].id for start in decision.starts}
    assert by_size[2] == 0
    assert by_size[1] > 1
    dropped = {drop.query for drop in decision.drops}
    assert dropped <= {1}, "behind the first it is late in every lane, and policies that look ahead say so"


@pytest.mark.parametrize("policy", MIXED, ids=ids)
def test_a_query_is_hopeless_when_no_lane_is_quick_enough(policy: Policy) -> None:
    queries = [Query(0, "a", 0, 9 * MS), Query(1, "b", 0, 10 * MS)]
    decision = decide(policy, [Tenant("a", 100 * MS), Tenant("b", 100 * MS)], queries, PREDICTOR)
    assert [drop.query for drop in decision.drops] == [0]
    assert "10.0 ms of work left, 9.0 ms to the deadline" in decision.drops[0].reason
    assert started(decision) == [(1,)]


@pytest.mark.parametrize("lanes", LANES[:2], ids=str)
def test_a_paused_batch_is_hopeless_when_no_lane_is_quick_enough(lanes: tuple[Share, ...]) -> None:
    cut = Tenant("a", 100 * MS, cuts=(0, 1, 2))
    predictor = TablePredictor({"a": LatencyTable(MODEL.rows, (1.0, 1.0))})
    batches = []
    for number, limit in enumerate((4, 6, 20)):
        batch = Batch(number, cut, [Query(number, "a", 0, limit * MS)])
        batch.next_unit = 1
        batches.append(batch)
    decision = Edf(lanes).decide(Snapshot(0, {"a": TenantQueue(cut)}, batches, {}, 0b111, predictor), None)
    assert [drop.query for drop in decision.drops] == [0]
    assert {start.share: start.batch for start in decision.starts} == {WIDE: 1, NARROW: 2}


# --- many lanes -------------------------------------------------------------------------------------------------

MARGIN = SafetyMargin({"a": Spread(1.5, 10 * MS), "b": Spread(1.2, 20 * MS)}, MS)
EVEN = TablePredictor(
    {
        "a": LatencyTable((LatencyRow(0, 1, 1, 10 * MS), LatencyRow(0, 2, 1, 14 * MS)), (1.0,)),
        "b": LatencyTable((LatencyRow(0, 1, 1, 20 * MS), LatencyRow(0, 1, 2, 12 * MS)), (1.0,)),
    }
).with_margin(MARGIN)
FORTY = tuple(Share((number,)) for number in range(40))
UNEVEN = tuple(Share((2 * n, 2 * n + 1) if n % 2 else (2 * n,)) for n in range(40))


MANY = {
    lanes: {ids(each): each for each in all_policies(lanes) if not isinstance(each, BlockPolicy)}
    for lanes in (FORTY, UNEVEN)
}
"""Blocks get several lanes, and some wait for them: see test_block_decisions."""


@pytest.mark.parametrize("lanes", MANY, ids=["even", "uneven"])
@pytest.mark.parametrize("policy", MANY[FORTY])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    waiting=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(5, 30), st.integers(0, 2)), min_size=30, max_size=120
    ),
    drop=st.sampled_from(DropRule),
    weight=st.sampled_from([1.0, 3.0]),
    max_batch=st.sampled_from([1, 8]),
)
def test_with_many_free_lanes_nobody_is_started_twice_and_no_lane_stays_idle(
    policy: str,
    lanes: tuple[Share, ...],
    waiting: list[tuple[str, int, int]],
    drop: DropRule,
    weight: float,
    max_batch: int,
) -> None:
    """Nearly all are doubtful: their deadlines are within the margin."""
    made = replace(MANY[lanes][policy], drop=drop)
    tenants = [Tenant("a", 30 * MS, max_batch=max_batch), Tenant("b", 30 * MS, max_batch=max_batch, weight=weight)]
    queries = [Query(n, name, 0, limit * MS, merge_key=key) for n, (name, limit, key) in enumerate(waiting)]
    decision = decide(made, tenants, queries, EVEN)
    if made.spec.grouped:
        return
    gone = {query for start in started(decision) for query in start} | {drop.query for drop in decision.drops}
    busy = {start.share for start in decision.starts}
    for size in {lane.size for lane in lanes if lane not in busy}:
        for query in queries:
            if query.id not in gone:
                assert drop is DropRule.HOPELESS
                assert EVEN.latency_ns(Work(query.tenant, 0, 1, 0, 1), size) > query.deadline_ns


@pytest.mark.parametrize("lanes", [1, 2, 40])
def test_doubtful_queries_keep_their_order_however_many_there_are(lanes: int) -> None:
    """None may overtake another, as a head or as a member of a batch; overdue ones are merged like any others."""
    policy = Edf(FORTY[:lanes], DropRule.NONE, tail_aware=True)
    queries = [Query(n, "a", 0, (5 + n // 20) * MS) for n in range(100)]
    decision = decide(policy, [Tenant("a", 30 * MS, max_batch=8)], queries, EVEN)
    served = [query for start in started(decision) for query in start]
    assert served == list(range(len(served)))
    assert len(served) == min(100, 8 * lanes)


# --- many queries -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1.0, 3.0], ids=["even", "weighted"])
@pytest.mark.parametrize("policy", all_policies(TWO_LANES), ids=ids)
def test_a_decision_over_many_queries_that_are_given_up_looks_at_each_a_few_times(
    policy: Policy, weight: float
) -> None:
    count = 3000
    tenants = [Tenant("a", 30 * MS, max_queue=count), Tenant("b", 30 * MS, weight=weight)]
    queues = {tenant.name: TenantQueue(tenant) for tenant in tenants}
    waiting = queues["a"].queries = Looked()
    for number in range(count):
        query = Query(number, "a", 0, 9 * MS if number < count - 1 else 20 * MS)
        queues["a"].push(policy.queue_key(query, tenants[0], EVEN), query)
    for number in range(count, count + 6):  # more than the lanes can do in time: someone stands back
        query = Query(number, "b", 0, 25 * MS)
        queues["b"].push(policy.queue_key(query, tenants[1], EVEN), query)
    waiting.looks, memory, given_up = 0, None, 0
    for _ in range(count // MOST_AT_ONCE + 1):  # what one decision leaves is for the next
        decision = policy.decide(Snapshot(0, queues, [], {}, 0b11, EVEN, weight != 1.0), memory)
        looks, memory = waiting.looks, decision.memory
        gone = {drop.query for drop in decision.drops if drop.query < count - 1}
        given_up += len(gone)
        for key, query in list(zip(queues["a"].keys, queues["a"].queries, strict=True)):
            if key[-1] in gone:
                queues["a"].remove(key, query)
        waiting.looks = looks
    assert given_up == count - 1
    assert decision.starts
    assert waiting.looks < 12 * count
