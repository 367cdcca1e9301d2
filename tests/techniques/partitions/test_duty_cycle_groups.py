"""Groups of slots: who starts together on which cores, what is left of a group, and what becomes of the promise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.actions import Launch, Respond, group_of
from cotenant.core.events import LaunchEnded, PolicyChanged, QueryArrived
from cotenant.core.predictor import Group, Member
from cotenant.core.snapshot import DropRule
from cotenant.errors import InvalidValueError
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.partitions.policy.duty_cycle import DutyCycle
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Round, Share, Slot
from cotenant.world.groups import GroupWorld
from parity import COUNT, served, simulated, workload
from scenario import MS, ONE_LANE, TWO_LANES, Recording, play
from strict_engine import StrictEngine as Engine

LONG = 10_000 * MS
FIRST, SECOND = Share((0,)), Share((1,))


class Slowed(TablePredictor):
    """Members of a group slow each other down: it takes as long as the longest and a share of all others."""

    share = 0.25

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        made = []
        for group in groups:
            alone = sorted(self.latency_ns(work, size) for work, size in group)
            made.append(alone[-1] + round(self.share * sum(alone[:-1])))
        return made


def costs(**models: tuple[int, int]) -> Slowed:
    """Latency of a batch in ms on one core: a fixed part and one for each row; three quarters of it on two."""
    return Slowed(
        {
            name: LatencyTable(
                tuple(
                    LatencyRow(0, rows, cores, round((fixed + row * rows) * share * MS))
                    for rows in (1, 64)
                    for cores, share in ((1, 1.0), (2, 0.75))
                )
            )
            for name, (fixed, row) in models.items()
        }
    )


def together(*given: tuple[str, int], size: int = 1, number: int = 1) -> tuple[Slot, ...]:
    return tuple(Slot(name, batch, 10.0, number, size) for name, batch in given)


def tenant(name: str, slo_ms: int = 10_000, max_batch: int = 64) -> Tenant:
    return Tenant(name, slo_ms * MS, max_batch=max_batch)


def coming(*arrivals: tuple[str, float], slo_ms: float = 10_000) -> list[Query]:
    return [
        Query(number, name, round(at * MS), round(at * MS) + round(slo_ms * MS))
        for number, (name, at) in enumerate(sorted(arrivals, key=lambda each: each[1]))
    ]


def told(made: Recording) -> list[list[tuple[str, int, tuple[int, ...]]]]:
    """Tenant, rows and cores of the launches of each turn."""
    return [
        [(launch.work.tenant, launch.work.items, launch.share.cores) for _, launch in turn]
        for _, turn in groupby(made.launches, lambda each: group_of(each[1]))
    ]


def run(policy: DutyCycle, tenants: Sequence[Tenant], believed: Slowed, queries: Sequence[Query]) -> Recording:
    return play(policy, tenants, believed, queries, GroupWorld(believed))


def at_once(policy: DutyCycle, queries: Sequence[Query]) -> list[Launch]:
    """What starts when queries come to an idle machine at one instant."""
    core = Engine(ABC, policy, AB, Machine.cpu((0, 1)))
    actions = [core.handle(QueryArrived(query, more=query is not queries[-1]), 0) for query in queries]
    return [each for each in actions[-1] if isinstance(each, Launch)]


AB = costs(a=(4, 4), b=(8, 8), c=(2, 2))
ABC = [tenant(name) for name in "abc"]
PAIR = Round(100 * MS, (*together(("a", 2), ("b", 2)), Slot("c", 1, 10.0)))


def test_members_start_together_on_their_parts_and_the_next_step_waits_for_all() -> None:
    queries = coming(("c", 0), *[("a", 0)] * 3, *[("b", 0)] * 2, ("c", 1))
    made = run(DutyCycle(ONE_LANE, rounds=(PAIR,)), ABC, AB, queries)
    assert told(made) == [
        [("c", 1, (0, 1))],
        [("a", 2, (0,)), ("b", 2, (1,))],
        [("c", 1, (0, 1))],
        [("a", 1, (0, 1))],  # alone: all of the lane is quicker
    ]
    (_, first), (at, a), (_, b), (then, _) = made.launches[:4]
    assert a.predicted_ns == b.predicted_ns == 27 * MS  # 24, and a quarter of 12
    assert (group_of(first), group_of(a), group_of(b)) == (0, 1, 1)
    assert then - at == 27 * MS
    assert made.ended_ns[1] == made.ended_ns[4] == then


def test_who_is_not_there_leaves_his_part_and_nobody_waits_for_him() -> None:
    trio = Round(100 * MS, together(("a", 1), ("b", 1), ("c", 1)))
    policy = DutyCycle((Share((0, 1, 2)),), rounds=(trio,))
    core = Engine(ABC, policy, AB, Machine.cpu((0, 1, 2)))
    started: list[Launch] = []
    for query in coming(("a", 0), ("a", 0.1), ("c", 0.1)):
        started += [each for each in core.handle(QueryArrived(query), query.arrival_ns) if isinstance(each, Launch)]
    assert [(each.work.tenant, each.share.cores) for each in started] == [("a", (0, 1, 2))]
    ended = [each for each in core.handle(LaunchEnded(0), 6 * MS) if isinstance(each, Launch)]
    assert [(each.work.tenant, each.share.cores) for each in ended] == [("a", (0,)), ("c", (2,))]
    assert {group_of(each) for each in ended} == {1}
    actions = [*core.handle(LaunchEnded(1), 12 * MS), *core.handle(QueryArrived(Query(9, "b", 13 * MS, LONG)), 13 * MS)]
    assert not [each for each in actions if isinstance(each, Launch)]  # until the last one has ended
    last = [each for each in core.handle(LaunchEnded(2), 14 * MS) if isinstance(each, Launch)]
    assert [(each.work.tenant, each.share.cores) for each in last] == [("b", (0, 1, 2))]


def test_who_is_alone_keeps_to_his_part_where_more_cores_are_slower() -> None:
    slow = Slowed({name: LatencyTable((LatencyRow(0, 1, 1, 4 * MS), LatencyRow(0, 1, 2, 9 * MS))) for name in "ab"})
    policy = DutyCycle(ONE_LANE, rounds=(Round(100 * MS, together(("a", 1), ("b", 1))),))
    made = run(policy, [tenant("a", max_batch=1), tenant("b", max_batch=1)], slow, coming(("b", 0)))
    assert told(made) == [[("b", 1, (1,))]]
    assert made.launches[0][1].predicted_ns == 4 * MS


def test_partitions_have_groups_of_their_own_at_one_instant() -> None:
    wide = Share((0, 1)), Share((2, 3))
    rounds = (Round(100 * MS, together(("a", 2), ("b", 2))), Round(100 * MS, (Slot("c", 4, 1.0),)))
    policy = DutyCycle(wide, rounds=rounds, backfill=False)
    assert set(policy.spec.shares) == {*wide, FIRST, SECOND}
    assert policy.spec.groups is policy
    core = Engine(ABC, policy, AB, Machine.cpu((0, 1, 2, 3)))
    queries = coming(("a", 0), ("b", 0), ("c", 0))
    actions = [core.handle(QueryArrived(query, more=query.id < 2), 0) for query in queries]
    started = [each for each in actions[-1] if isinstance(each, Launch)]
    assert [(each.work.tenant, group_of(each)) for each in started] == [("a", 0), ("b", 0), ("c", 2)]


def test_a_member_who_would_make_another_late_stays_out_and_comes_first_the_next_time() -> None:
    tight = [tenant("a", slo_ms=14), tenant("b", slo_ms=400)]
    policy = DutyCycle(ONE_LANE, rounds=(Round(100 * MS, together(("a", 1), ("b", 1))),))
    # together 16 + 8 / 4 ms; a has 14
    queries = [Query(0, "a", 0, 14 * MS), Query(1, "b", 0, 400 * MS)]
    core = Engine(tight, policy, AB, Machine.cpu((0, 1)))
    core.handle(QueryArrived(queries[0], more=True), 0)
    [alone] = [each for each in core.handle(QueryArrived(queries[1]), 0) if isinstance(each, Launch)]
    assert (alone.work.tenant, alone.share.cores, alone.predicted_ns) == ("a", (0, 1), 6 * MS)
    [after] = [each for each in core.handle(LaunchEnded(0), 6 * MS) if isinstance(each, Launch)]
    assert after.work.tenant == "b"


def test_queries_join_a_group_as_long_as_nobody_is_late() -> None:
    policy = DutyCycle(ONE_LANE, rounds=(Round(100 * MS, together(("a", 4), ("b", 4))),))
    # a: 4 + 4 n, b: 8 + 8 n; three rows of b and four of a take 37 ms, four of b 45: b's fourth stays behind
    queries = [*(Query(n, "a", 0, LONG) for n in range(4)), *(Query(4 + n, "b", 0, 40 * MS) for n in range(4))]
    started = at_once(policy, queries)
    assert [(each.work.tenant, each.work.items, each.share) for each in started] == [("a", 4, FIRST), ("b", 3, SECOND)]
    assert started[0].predicted_ns == 37 * MS
    late = at_once(DutyCycle(ONE_LANE, DropRule.NONE, rounds=policy.rounds), queries)
    assert [(each.work.items, each.predicted_ns) for each in late] == [(4, 45 * MS), (4, 45 * MS)]


def test_a_head_gives_way_when_more_wait_than_the_groups_batch_takes() -> None:
    policy = DutyCycle(ONE_LANE, rounds=(Round(100 * MS, together(("a", 2), ("b", 1))),))
    queries = [Query(0, "a", 0, 17 * MS), *(Query(n, "a", 0, LONG) for n in (1, 2, 3)), Query(4, "b", 0, LONG)]
    core = Engine(ABC, policy, AB, Machine.cpu((0, 1)))
    actions = [core.handle(QueryArrived(query, more=query.id < 4), 0) for query in queries][-1]
    # the group takes 16 + 12 / 4 ms
    [dropped] = [each for each in actions if not isinstance(each, Launch) and getattr(each, "query", None) == 0]
    assert "the group with its batch of 2 rows takes 19.0 ms, and more wait" in dropped.reason  # type: ignore[union-attr]
    assert [each.queries for each in actions if isinstance(each, Launch)] == [(1, 2), (4,)]


def test_what_no_share_can_end_in_time_is_dropped_and_hides_nobody() -> None:
    policy = DutyCycle(ONE_LANE, rounds=(Round(100 * MS, together(("a", 2), ("b", 1))),))
    tenants = [tenant("a", slo_ms=60), tenant("b", slo_ms=60)]
    queries = [Query(0, "b", 0, 60 * MS), Query(1, "a", 1 * MS, 13 * MS), Query(2, "b", 1 * MS, 61 * MS)]
    made = run(policy, tenants, AB, queries)
    assert made.outcomes[1] is Outcome.DROPPED
    assert "hopeless: 6.0 ms of work left, 1.0 ms to the deadline" in made.reasons[1]
    assert {made.outcomes[number] for number in (0, 2)} == {Outcome.ANSWERED}


def test_guests_count_on_the_groups_of_a_round() -> None:
    policy = DutyCycle(ONE_LANE, rounds=(Round(100 * MS, together(("a", 1), ("b", 1))),))
    believed = costs(a=(4, 4), b=(8, 8), short=(0, 16), long=(0, 18))
    tenants = [tenant("a", slo_ms=30), tenant("b", slo_ms=40), tenant("short"), tenant("long")]
    made = run(policy, tenants, believed, coming(("short", 0), ("long", 0)))
    assert told(made) == [[("short", 1, (0, 1))]]  # 30 ms less the 18 of the group; 12 and 13.5 ms on two cores
    assert "rounds leave 12.0 ms for backfill" in made.reasons[1]


def test_a_batch_that_was_stopped_by_another_policy_goes_on_alone_before_its_group() -> None:
    cut = Tenant("a", LONG, (0, 1, 2), max_batch=2)
    believed = Slowed(
        {
            "a": LatencyTable((LatencyRow(0, 1, 1, 20 * MS), LatencyRow(0, 1, 2, 20 * MS)), (1.0, 1.0)),
            "b": LatencyTable((LatencyRow(0, 1, 1, 4 * MS),)),
        }
    )
    before = Edf(ONE_LANE, slack_share=0.0, preempt=True)
    core = Engine([cut, tenant("b", max_batch=1)], before, believed, Machine.cpu((0, 1)))
    core.handle(QueryArrived(Query(0, "a", 0, LONG)), 0)
    rounds = (Round(100 * MS, together(("a", 1), ("b", 1))),)
    core.handle(PolicyChanged(DutyCycle(ONE_LANE, rounds=rounds)), 1)
    core.handle(QueryArrived(Query(1, "b", 1, LONG)), 1)
    core.handle(QueryArrived(Query(2, "a", 1, LONG)), 1)
    started = [
        [each for each in core.handle(LaunchEnded(number), number + 10 * MS) if isinstance(each, Launch)]
        for number in (0, 1)
    ]
    assert [(each.work.tenant, each.work.start, each.share.cores) for each in started[0]] == [("a", 1, (0, 1))]
    assert [(each.queries, each.share.cores) for each in started[1]] == [((2,), (0,)), ((1,), (1,))]


def test_likely_groups_are_those_that_decisions_ask_for() -> None:
    trio = Round(100 * MS, (*together(("a", 2), ("b", 1), ("c", 3)), Slot("a", 4, 1.0)))
    policy = DutyCycle((Share((0, 1, 2)),), rounds=(trio,))
    likely = [*policy.likely_groups([tenant("a", max_batch=1), tenant("b"), tenant("c", max_batch=2)])]
    assert len(set(likely)) == len(likely) == 2 + 1 + 2 + 2
    assert {len(group) for group in likely} == {2, 3}
    asked: set[Group] = set()

    class Asked(Slowed):
        def group_ns(self, groups: Sequence[Group]) -> list[int]:
            asked.update(groups)
            return super().group_ns(groups)

    rng = Random(4)
    tenants = [tenant("a", max_batch=1), tenant("b"), tenant("c", max_batch=2)]
    arrivals = coming(*[(rng.choice("abc"), rng.uniform(0, 200)) for _ in range(60)], slo_ms=80)
    core = Engine(tenants, policy, Asked(AB.tables), Machine.cpu((0, 1, 2)))
    running: list[int] = []
    for query in arrivals:
        running += [each.id for each in core.handle(QueryArrived(query), query.arrival_ns) if isinstance(each, Launch)]
        while running and rng.random() < 0.4:
            actions = core.handle(LaunchEnded(running.pop(0)), query.arrival_ns)
            running += [each.id for each in actions if isinstance(each, Launch)]
    assert asked
    assert asked <= set(likely)
    assert not [*DutyCycle(ONE_LANE).likely_groups(tenants)]


@pytest.mark.parametrize(
    ("lane", "slots"), [(ONE_LANE, together(("a", 1), ("b", 1), ("c", 1))), (ONE_LANE, together(("a", 1), size=3))]
)
def test_a_group_that_does_not_fit_into_its_lane_is_refused(lane: tuple[Share, ...], slots: tuple[Slot, ...]) -> None:
    with pytest.raises(InvalidValueError, match="members of groups that fit into their lane"):
        DutyCycle(lane, rounds=(Round(100, slots),))


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[str, int, int, int, int]], int]:
    """Slots of one lane (tenant, batch, fixed ms, ms a row, group), and ms of the duty cycle that stay free."""
    made: list[tuple[str, int, int, int, int]] = []
    for number in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 2))):
            name = f"t{len(made)}"
            batch, fixed, row = draw(st.integers(1, 4)), draw(st.integers(0, 5)), draw(st.integers(1, 5))
            made.append((name, batch, fixed, row, number + 1))
    return made, draw(st.integers(0, 20))


def round_of(made: Sequence[tuple[str, int, int, int, int]], duty_ns: int) -> Round:
    counts = {number: len([each for each in made if each[4] == number]) for *_, number in made}
    return Round(
        duty_ns,
        tuple(
            Slot(name, batch, 1.0, number, 1) if counts[number] > 1 else Slot(name, batch, 1.0)
            for name, batch, _, _, number in made
        ),
    )


def busy_ns(made: Sequence[tuple[str, int, int, int, int]], believed: Slowed, tenants: dict[str, Tenant]) -> list[int]:
    """What each step takes with whole batches."""
    took = []
    for _, step in groupby(made, lambda each: each[4]):
        members = [*step]
        size = 1 if len(members) > 1 else 2
        group = tuple(Member(tenants[name].work(0, batch), size) for name, batch, *_ in members)
        took.append(believed.group_ns([group])[0])
    return took


def arrivals(made: Sequence[tuple[str, int, int, int, int]], window_ns: int, seed: int) -> list[tuple[int, str]]:
    """As many rows of each tenant as its batch takes in every window of that length, and never more."""
    rng = Random(seed)
    times = []
    for name, batch, *_ in made:
        last: list[int] = []
        now = rng.randrange(window_ns)
        for _ in range(20):
            if len(last) >= batch:
                now = max(now, last[-batch] + window_ns)
            times.append((now, name))
            last.append(now)
            now += rng.choice((0, 0, rng.randrange(window_ns), 2 * window_ns))
    return sorted(times)


@given(plan=plans(), seed=st.integers(0, 10**6), drop=st.sampled_from(DropRule))
def test_under_the_planned_load_all_are_in_time_and_nobody_waits_longer_than_a_duty_cycle(
    plan: tuple[list[tuple[str, int, int, int, int]], int], seed: int, drop: DropRule
) -> None:
    made, free = plan
    believed = costs(**{name: (fixed, row) for name, _, fixed, row, _ in made})
    tenants = {name: tenant(name) for name, *_ in made}
    took = busy_ns(made, believed, tenants)
    duty = free * MS + sum(took)
    slo = duty + max(took)
    tenants = {name: Tenant(name, slo, max_batch=64) for name in tenants}
    policy = DutyCycle(ONE_LANE, drop, rounds=(round_of(made, duty),))
    queries = [Query(number, name, at, at + slo) for number, (at, name) in enumerate(arrivals(made, duty, seed))]
    seen = play(policy, tenants.values(), believed, queries, GroupWorld(believed))
    assert set(seen.outcomes.values()) == {Outcome.ANSWERED}
    arrived = {query.id: query.arrival_ns for query in queries}
    batches = {name: batch for name, batch, *_ in made}
    for at, launch in seen.launches:
        assert launch.work.items <= batches[launch.work.tenant]
        assert all(at - arrived[query] <= duty for query in launch.queries)


@given(
    batches=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    waiting=st.lists(st.lists(st.integers(5, 60), max_size=4), min_size=3, max_size=3),
    rows=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=3, max_size=3),
)
def test_all_of_a_group_are_in_time_and_nobody_else_could_have_joined(
    batches: list[int], waiting: list[list[int]], rows: list[tuple[int, int]]
) -> None:
    """Every query that waits on is tried in the group that was started: somebody would be late."""
    believed = costs(**dict(zip("abc", rows, strict=True)))
    slots, lane = together(*zip("abc", batches, strict=True)), Share((0, 1, 2))
    core = Engine(ABC, DutyCycle((lane,), rounds=(Round(100 * MS, slots),)), believed, Machine.cpu((0, 1, 2)))
    queries = [
        Query(100 * at + number, name, 0, left * MS)
        for at, name in enumerate("abc")
        for number, left in enumerate(sorted(waiting[at]))
    ]
    actions: list[object] = []
    for query in queries:
        actions += core.handle(QueryArrived(query, more=query is not queries[-1]), 0)
    started = {each.work.tenant: each for each in actions if isinstance(each, Launch)}
    deadline = {query.id: query.deadline_ns for query in queries}
    dropped = {each.query for each in actions if isinstance(each, Respond)}
    running = {query for launch in started.values() for query in launch.queries}
    assert all(launch.predicted_ns <= deadline[query] for launch in started.values() for query in launch.queries)
    assert started or dropped == set(deadline)
    has = {name: len(started[name].queries) if name in started else 0 for name in "abc"}
    if len(started) == 1:
        [(name, alone)] = started.items()
        if dropped or alone.share.size < lane.size:
            return
        has[name], running = 1, {min(set(deadline) - dropped, key=lambda number: (deadline[number], number))}
        assert running <= set(alone.queries)  # the most urgent head is the one that stays
    for query in queries:
        counts = has | {query.tenant: has[query.tenant] + 1}
        is_free = query.id not in running | dropped and counts[query.tenant] <= batches["abc".index(query.tenant)]
        if is_free and (len(started) > 1 or query.tenant not in started):
            group = tuple(Member(each.work(0, counts[each.name]), 1) for each in ABC if counts[each.name])
            limit = min([deadline[number] for number in running | {query.id}])
            assert believed.group_ns([group])[0] > limit, f"{query.id} could have joined"


@pytest.mark.parametrize("drop", list(DropRule))
@pytest.mark.parametrize("backfill", [False, True])
def test_simulator_and_server_run_groups_alike(drop: DropRule, backfill: bool) -> None:
    slots = (Slot("batchy", 3, 60.0, 1, 1), Slot("urgent", 1, 20.0, 1, 1), Slot("batchy", 2, 30.0))
    policy = DutyCycle(ONE_LANE, drop, rounds=(Round(60 * MS, slots),), backfill=backfill)
    for number, world in enumerate(({}, {"noise": 0.3, "seed": 5}, {"failure_rate": 0.1, "seed": 6})):
        queries = workload(seed=number, gap_ns=8 * MS)
        lines, outcomes = simulated(policy, queries, **world)
        assert served(policy, queries, **world) == (lines, outcomes)
        assert sorted(query for query, _, _ in outcomes) == list(range(COUNT))


def test_two_lanes_with_nothing_planned_have_no_groups() -> None:
    policy = DutyCycle(TWO_LANES)
    assert policy.spec.groups is None
    assert policy.spec.shares == TWO_LANES
    assert not partial(DutyCycle, TWO_LANES)().spec.grouped
