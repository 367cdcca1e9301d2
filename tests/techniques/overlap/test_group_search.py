"""The parts of the overlap policy's search: the batches of a queue, groups foreseen, cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.events import LaunchEnded, LookAheadDue, QueryArrived
from cotenant.core.predictor import Group
from cotenant.core.queues import TenantQueue
from cotenant.core.snapshot import Snapshot
from cotenant.predict.grouped import MOST_PREFETCHED, FittedGroups, GroupedPredictor
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.overlap.policy import group_jobs
from cotenant.techniques.overlap.policy.group_cuts import coarse, spread
from cotenant.techniques.overlap.policy.group_jobs import jobs_of, next_of, waiting_at
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.types import Query, Tenant
from cotenant.work import Machine, Share, Work
from scenario import CORES, MS, TWO_LANES
from strict_engine import StrictEngine as Engine

UNITS = 8
A = Tenant("a", 100 * MS, cuts=tuple(range(UNITS + 1)), max_batch=6, weight=1.5)
B = Tenant("b", 200 * MS, cuts=(0, UNITS), max_batch=3)
TABLES = {
    "a": LatencyTable((LatencyRow(0, 1, 2, 10 * MS), LatencyRow(0, 6, 2, 30 * MS)), (1.0,) * UNITS, 1.1),
    "b": LatencyTable((LatencyRow(0, 1, 1, 25 * MS), LatencyRow(0, 1, 2, 20 * MS)), (1.0,) * UNITS),
}


def queue_of(tenant: Tenant, queries: Sequence[Query]) -> TenantQueue:
    queue = TenantQueue(tenant)
    for each in queries:
        queue.push((each.rank, each.deadline_ns, each.id), each)
    return queue


def snapshot_of(*queues: TenantQueue) -> Snapshot:
    return Snapshot(0, {queue.tenant.name: queue for queue in queues}, [], {}, 0b11, TablePredictor(TABLES))


@given(
    deadlines=st.lists(st.integers(0, 80), min_size=1, max_size=15),
    items=st.integers(1, 3),
    begin_ms=st.integers(0, 60),
    leads=st.booleans(),
)
def test_queries_that_are_all_alike_make_the_batches_that_any_queries_would(
    deadlines: list[int], items: int, begin_ms: int, leads: bool
) -> None:
    """The quick way through a queue of equal queries against the one that looks at each of them."""
    queries = [Query(number, "a", 0, deadline * MS, items=items) for number, deadline in enumerate(deadlines)]
    snapshot, begin = snapshot_of(queue_of(A, queries)), begin_ms * MS
    predictor = TablePredictor(TABLES)
    for candidate in waiting_at(snapshot, begin, 2, True, predictor).candidates:
        value = predictor.latency_ns(Work("a", 0, items, 0, UNITS), 1) / 2 * A.weight
        quick = jobs_of(candidate, leads, begin, (2, 1), predictor)
        slow = group_jobs._mixed(candidate, leads, value, begin, (2, 1), predictor)
        assert [job._replace(value_ns=0.0) for job in quick] == [job._replace(value_ns=0.0) for job in slow]
        assert [job.value_ns for job in quick] == pytest.approx([job.value_ns for job in slow])


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 2), st.integers(0, 1)), max_size=30))
def test_a_queue_says_that_its_queries_are_alike_only_if_they_are(steps: list[tuple[bool, int, int, int]]) -> None:
    queue = TenantQueue(A)
    differed = False
    for number, (leaves, place, items, shape) in enumerate(steps):
        if leaves and queue.keys:
            at = place % len(queue.keys)
            queue.remove(queue.keys[at], queue.queries[at])
        else:
            queue.push((0, place, number), Query(number, "a", 0, place, items=items, shape=shape))
        kinds = {(each.items, each.shape) for each in queue.queries}
        differed = bool(queue.queries) and (differed or len(kinds) > 1)
        assert queue.are_alike or len(kinds) > 1 or differed or not kinds
        assert not queue.are_alike or len(kinds) <= 1


def test_a_queue_is_looked_at_from_its_first_query_that_can_be_in_time_and_then_from_the_next() -> None:
    queries = [Query(number, "a", 0, deadline * MS) for number, deadline in enumerate((5, 12, 9, 40))]
    snapshot = snapshot_of(queue_of(A, queries), queue_of(B, [Query(9, "b", 0, 21 * MS)]))
    candidates, hopeless, slack_ns = waiting_at(snapshot, 0, 2, True, TablePredictor(TABLES))
    assert [(each.tenant, each.first) for each in candidates] == [("b", 9), ("a", 1)]
    assert [drop.query for drop in hopeless] == [0, 2]
    assert slack_ns == 90 * MS
    behind = next_of(candidates[1], 0, 2, snapshot.predictor)
    assert behind is not None
    assert (behind.first, behind.at, behind.headroom_ns) == (3, 3, 30 * MS)
    assert next_of(behind, 0, 2, snapshot.predictor) is None


def test_batches_grow_as_long_as_one_more_query_is_cheaper_inside_than_by_itself() -> None:
    rows = tuple(
        LatencyRow(0, size, 1, latency * MS) for size, latency in ((1, 10), (2, 14), (3, 20), (4, 31), (5, 33))
    )
    predictor = TablePredictor({"a": LatencyTable(rows)})
    assert predictor.merged_ns("a", 0, 1, 8, 1) == (10 * MS, 14 * MS, 20 * MS)
    assert predictor.merged_ns("a", 0, 1, 2, 1) == (10 * MS, 14 * MS)
    assert predictor.merged_ns("a", 0, 2, 2, 1) == (14 * MS,), "four rows take longer than two and two"
    assert predictor.merged_ns("a", 0, 9, 0, 1)[0] == predictor.latency_ns(Work("a", 0, 9, 0, 1), 1)


@pytest.mark.parametrize("cuts", [(0, 8), (0, 3, 8), tuple(range(9)), tuple(range(0, 57, 3))])
def test_the_cuts_that_are_considered_are_few_and_even(cuts: tuple[int, ...]) -> None:
    places = coarse(cuts)
    assert set(places) <= set(cuts)
    assert (places[0], places[-1]) == (0, cuts[-1])
    assert len(places) <= 9
    for start, ways in product(places[:-1], (1, 4, 9)):
        inner = [place for place in places[1:-1] if place > start]
        chosen = list(spread(cuts, start, ways))
        assert chosen == [place for place in inner if place in chosen], "in order, and none twice"
        assert len(chosen) == min(ways, len(inner))


# --- groups foreseen -------------------------------------------------------------------------------------------


@dataclass
class Slower(FittedGroups):
    """Pairs take their longest member and a fifth of the other; counts what it is asked."""

    alone: TablePredictor = field(default_factory=lambda: TablePredictor(TABLES))
    key: str = "abc"
    quantile: float = 0.95
    asked: int = 0

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        self.asked += len(groups)
        alone = [[self.alone.latency_ns(*member) for member in group] for group in groups]
        return [max(each) + (sum(each) - max(each)) // 5 for each in alone]


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_likely_groups_are_foreseen_once_each(lanes: int, repeat: bool) -> None:
    policy = Overlap(tuple(Share((core,)) for core in range(lanes)), repeat=repeat)
    groups = list(policy.likely_groups((A, B)))
    assert len(groups) == len(set(groups))
    assert all(group == tuple(sorted(group)) for group in groups)
    assert all(sum(member.size for member in group) == lanes for group in groups)
    whole = {group for group in groups if all((member.work.start, member.work.end) == (0, UNITS) for member in group)}
    sizes = [(each.name, rows) for each in (A, B) for rows in range(1, each.max_batch + 1)]
    splits = {1: 0, 2: 1, 3: 2}[lanes]
    pairs = [(one, other) for one, other in combinations_with_replacement(sizes, 2) if repeat or one[0] != other[0]]
    twins = sum(one == other for one, other in pairs)
    expected = len(sizes) + (len(pairs) if splits == 1 else 2 * len(pairs) - twins if splits else 0)
    assert len(whole) == expected


def test_without_cuts_or_without_a_barrier_there_is_less_to_foresee() -> None:
    whole = list(Overlap(TWO_LANES, preempt=False).likely_groups((A, B)))
    assert all((member.work.start, member.work.end) == (0, UNITS) for group in whole for member in group)
    assert Overlap(TWO_LANES, barrier=False).spec.groups is None


def test_decisions_hardly_ever_ask_for_a_group_that_was_not_foreseen() -> None:
    policy, fitted = Overlap(TWO_LANES), Slower()
    predictor = GroupedPredictor(TABLES, None, fitted)
    assert sum(predictor.prefetch(policy.likely_groups((A, B)))) == fitted.asked
    foreseen, now = fitted.asked, 0
    core = Engine((A, B), policy, predictor, Machine.cpu(CORES))
    running = []
    for number in range(400):
        tenant = (A, B)[number * number % 7 % 2]
        actions = core.handle(QueryArrived(Query(number, tenant.name, now, now + tenant.slo_ns)), now)
        running += [action.id for action in actions if hasattr(action, "partition")]
        core.handle(LookAheadDue(), now)
        if number % 3 == 0 and running:
            now += 15 * MS
            ended, running = running, []
            for launch in ended:
                actions = core.handle(LaunchEnded(launch), now)
                running += [action.id for action in actions if hasattr(action, "partition")]
    assert foreseen > 100
    assert fitted.asked - foreseen < 10, "of what remains of members cut twice"


def test_no_more_is_foreseen_than_memory_holds() -> None:
    fitted = Slower()
    many = tuple(Tenant(name, 100 * MS, cuts=(0, UNITS), max_batch=400) for name in ("a", "b"))
    assert (
        sum(GroupedPredictor(TABLES, None, fitted).prefetch(Overlap(TWO_LANES).likely_groups(many))) == MOST_PREFETCHED
    )
    assert fitted.asked == MOST_PREFETCHED
    assert sum(GroupedPredictor(TABLES).prefetch(Overlap(TWO_LANES).likely_groups(many))) == 0, "nothing was fitted"
