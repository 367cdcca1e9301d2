"""Rounds of planned batches: whose turn it is, what a turn takes, who is a guest, and what becomes of the promise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.actions import Launch
from cotenant.core.events import LaunchEnded, QueryArrived
from cotenant.core.snapshot import DropRule
from cotenant.errors import InvalidValueError
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.partitions.policy.duty_cycle import DutyCycle
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Round, Share, Slot
from parity import COUNT, served, simulated, workload
from scenario import MS, ONE_LANE, TWO_LANES, Recording, play
from strict_engine import StrictEngine as Engine

LONG = 10_000 * MS


def slots(*given: tuple[str, int], duty_ms: int = 100) -> Round:
    return Round(duty_ms * MS, tuple(Slot(name, batch, 10.0) for name, batch in given))


def linear(**models: tuple[int, int]) -> TablePredictor:
    """Latency of a batch in ms: a fixed part and one for each row, whatever the lane."""
    return TablePredictor(
        {
            name: LatencyTable(
                tuple(LatencyRow(0, rows, cores, (fixed + row * rows) * MS) for rows in (1, 64) for cores in (1, 2))
            )
            for name, (fixed, row) in models.items()
        }
    )


def tenant(name: str, slo_ms: int = 10_000, max_batch: int = 64, cuts: tuple[int, ...] = (0, 1)) -> Tenant:
    return Tenant(name, slo_ms * MS, max_batch=max_batch, cuts=cuts)


def coming(*arrivals: tuple[str, float], slo_ms: int = 10_000, items: int = 1) -> list[Query]:
    return [
        Query(number, name, round(at * MS), round(at * MS) + slo_ms * MS, items=items)
        for number, (name, at) in enumerate(sorted(arrivals, key=lambda each: each[1]))
    ]


def told(made: Recording) -> list[tuple[str, int]]:
    return [(launch.work.tenant, launch.work.items) for _, launch in made.launches]


AB = linear(a=(1, 1), b=(1, 1), c=(1, 1))


def test_turns_go_round_in_the_planned_order_with_planned_batches() -> None:
    queries = coming(*[("a", 0)] * 7, *[("b", 0)] * 3, *[("c", 0)] * 1)
    policy = DutyCycle(ONE_LANE, rounds=(slots(("b", 2), ("a", 3), ("c", 4)),))
    made = play(policy, [tenant(name) for name in "abc"], AB, queries)
    # the first comes to an idle lane; then in the order of the round, empty slots passed over
    assert told(made) == [("a", 1), ("c", 1), ("b", 2), ("a", 3), ("b", 1), ("a", 3)]


def test_nobody_waits_for_a_batch_to_fill() -> None:
    made = play(
        DutyCycle(ONE_LANE, rounds=(slots(("a", 8), duty_ms=1000),)), [tenant("a")], AB, coming(("a", 0), ("a", 5))
    )
    assert [at for at, _ in made.launches] == [0, 5 * MS]


def test_no_tenant_has_two_turns_while_another_slot_waits() -> None:
    queries = coming(*[("a", 0)] * 9, ("b", 1))
    made = play(DutyCycle(ONE_LANE, rounds=(slots(("a", 2), ("b", 1)),)), [tenant("a"), tenant("b")], AB, queries)
    assert told(made)[:3] == [("a", 1), ("b", 1), ("a", 2)]


def test_a_query_of_more_rows_than_the_batch_has_a_turn_of_its_own() -> None:
    queries = coming(("a", 0), ("a", 1), ("b", 1), items=3)
    made = play(DutyCycle(ONE_LANE, rounds=(slots(("a", 2), ("b", 2)),)), [tenant("a"), tenant("b")], AB, queries)
    assert told(made) == [("a", 3), ("b", 3), ("a", 3)]


def test_batches_keep_to_what_the_model_merges() -> None:
    queries = coming(*[("a", 0)] * 5)
    made = play(DutyCycle(ONE_LANE, rounds=(slots(("a", 4)),)), [tenant("a", max_batch=2)], AB, queries)
    assert told(made) == [("a", 1), ("a", 2), ("a", 2)]


def test_slots_of_one_tenant_share_its_rows_as_planned() -> None:
    rounds = (
        Round(100 * MS, (Slot("a", 1, 30.0), Slot("b", 1, 1.0))),
        Round(100 * MS, (Slot("a", 1, 10.0),)),
    )
    queries = coming(*[("a", 5 * number) for number in range(40)])  # both lanes are free whenever one comes
    made = play(DutyCycle(TWO_LANES, rounds=rounds), [tenant("a"), tenant("b")], AB, queries)
    rows = [sum(launch.share == lane for _, launch in made.launches) for lane in TWO_LANES]
    assert rows == [30, 10]
    burst = play(DutyCycle(TWO_LANES, rounds=rounds), [tenant("a"), tenant("b")], AB, coming(*[("a", 0)] * 8))
    assert [launch.share for _, launch in burst.launches[:2]] == list(TWO_LANES)  # a free lane waits for nobody


def test_who_is_not_in_the_plan_gets_the_cores_and_the_time_that_it_leaves() -> None:
    tenants = [tenant("a", slo_ms=20), tenant("c")]
    queries = coming(("a", 0), *[("c", 0)] * 4, ("a", 1), slo_ms=20)
    in_the_way = play(DutyCycle(ONE_LANE, rounds=(slots(("a", 2)),)), tenants, AB, queries)
    assert [name for name, _ in told(in_the_way)] == ["a", "a", "c"]
    beside = play(DutyCycle(TWO_LANES, rounds=(slots(("a", 2)), Round())), tenants, AB, queries)
    assert {launch.share for _, launch in beside.launches if launch.work.tenant == "c"} == {TWO_LANES[1]}


def test_a_guest_takes_no_longer_than_the_lanes_tightest_slo_leaves() -> None:
    costs = linear(a=(0, 4), c=(0, 30), d=(0, 5))
    tenants = [tenant("a", slo_ms=40), tenant("c"), tenant("d")]
    queries = coming(("c", 0), ("c", 1), ("d", 2))
    made = play(DutyCycle(ONE_LANE, rounds=(slots(("a", 2)),)), tenants, costs, queries)
    assert told(made) == [("c", 1), ("c", 1), ("d", 1)]  # 40 - 8 ms are left: one row of c, and not two together
    tight = play(DutyCycle(ONE_LANE, rounds=(slots(("a", 3)),)), tenants, costs, queries)
    assert told(tight) == [("d", 1)]
    assert [tight.outcomes[number] for number in (0, 1)] == [Outcome.DROPPED] * 2
    expected = "tenant 'c' is not in the plan: the rounds leave 28.0 ms for backfill, too short for this query"
    assert tight.reasons[0] == expected
    half = play(DutyCycle(ONE_LANE, rounds=(slots(("a", 2)),), slack_share=0.5), tenants, costs, queries)
    assert told(half) == [("d", 1)]


def test_with_preempt_a_long_guest_comes_in_segments_and_a_slot_goes_between() -> None:
    costs = TablePredictor(
        {
            "a": LatencyTable((LatencyRow(0, 1, 2, 4 * MS),)),
            "c": LatencyTable((LatencyRow(0, 1, 2, 60 * MS),), (1.0, 1.0, 1.0)),
        }
    )
    tenants = [tenant("a", slo_ms=30, max_batch=1), tenant("c", max_batch=1, cuts=(0, 1, 2, 3))]
    queries = [*coming(("c", 0)), Query(1, "a", 5 * MS, 35 * MS)]
    made = play(DutyCycle(ONE_LANE, preempt=True, rounds=(slots(("a", 1)),)), tenants, costs, queries)
    assert [(launch.work.tenant, launch.work.end) for _, launch in made.launches] == [
        ("c", 1),
        ("a", 1),
        ("c", 2),
        ("c", 3),
    ]
    assert set(made.outcomes.values()) == {Outcome.ANSWERED}


def test_lanes_lend_their_spare_time_to_slots_of_other_lanes_unless_told_otherwise() -> None:
    rounds = (slots(("a", 1)), slots(("b", 1)))
    tenants = [tenant("a"), tenant("b")]
    for backfill, lanes in ((True, list(TWO_LANES)), (False, [TWO_LANES[0]] * 2)):
        made = play(DutyCycle(TWO_LANES, rounds=rounds, backfill=backfill), tenants, AB, coming(("a", 0), ("a", 0)))
        assert [launch.share for _, launch in made.launches] == lanes
        many = play(DutyCycle(TWO_LANES, rounds=rounds, backfill=backfill), tenants, AB, coming(*[("a", 0)] * 9))
        assert {launch.work.items for _, launch in many.launches} == {1}  # batches are those of the plan everywhere


def test_what_is_hopeless_goes_and_a_batch_is_not_made_late_by_its_head() -> None:
    costs = linear(a=(0, 10))
    policy = DutyCycle(ONE_LANE, rounds=(slots(("a", 4)),))
    # at 10 ms a head with 35 ms left would be late in a batch of four, which takes 40, and five wait behind it
    queries = coming(*[("a", 0)] * 2, *[("a", 9)] * 5, slo_ms=45)
    made = play(policy, [tenant("a", slo_ms=45)], costs, queries)
    assert made.outcomes[1] is Outcome.DROPPED
    assert "and more wait" in made.reasons[1]
    few = play(policy, [tenant("a", slo_ms=45)], costs, coming(*[("a", 0)] * 2, *[("a", 9)] * 3, slo_ms=45))
    assert told(few)[:2] == [("a", 1), ("a", 3)]  # nobody behind them: a smaller batch saves the head
    late = play(DutyCycle(ONE_LANE, DropRule.NONE, rounds=(slots(("a", 4)),)), [tenant("a", slo_ms=45)], costs, queries)
    assert told(late) == [("a", 1), ("a", 4), ("a", 2)]
    assert Outcome.LATE in late.outcomes.values()


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[str, int, int, int]], int]:
    """Slots of one lane (tenant, batch, fixed ms, ms a row), and ms of the duty cycle that stay free."""
    count = draw(st.integers(1, 4))
    made = [
        (f"t{number}", draw(st.integers(1, 6)), draw(st.integers(0, 5)), draw(st.integers(1, 5)))
        for number in range(count)
    ]
    return made, draw(st.integers(0, 20))


def arrivals(made: Sequence[tuple[str, int, int, int]], window_ns: int, seed: int) -> list[Query]:
    """As many rows of each tenant as its batch takes in every window of that length, and never more; SLO one window."""
    rng = Random(seed)
    times = []
    for name, batch, _, _ in made:
        last: list[int] = []
        now = rng.randrange(window_ns)
        for _ in range(30):
            if len(last) >= batch:
                now = max(now, last[-batch] + window_ns)
            times.append((now, name))
            last.append(now)
            now += rng.choice((0, 0, rng.randrange(window_ns), 2 * window_ns))
    return [Query(number, name, at, at + LONG) for number, (at, name) in enumerate(sorted(times))]


@given(plan=plans(), seed=st.integers(0, 10**6))
def test_under_the_planned_load_nobody_waits_longer_than_a_duty_cycle(
    plan: tuple[list[tuple[str, int, int, int]], int], seed: int
) -> None:
    made, free = plan
    duty = (free + sum(fixed + row * batch for _, batch, fixed, row in made)) * MS
    batches = {name: batch for name, batch, _, _ in made}
    costs = linear(**{name: (fixed, row) for name, _, fixed, row in made})
    policy = DutyCycle(ONE_LANE, rounds=(Round(duty, tuple(Slot(n, b, 1.0) for n, b, _, _ in made)),))
    queries = arrivals(made, duty, seed)
    arrived = {query.id: query.arrival_ns for query in queries}
    seen = play(policy, [tenant(name) for name in batches], costs, queries)
    assert set(seen.outcomes.values()) == {Outcome.ANSWERED}
    for at, launch in seen.launches:
        assert launch.work.items <= batches[launch.work.tenant]
        assert all(at - arrived[query] <= duty for query in launch.queries)


@given(plan=plans(), seed=st.integers(0, 10**6), guests=st.lists(st.integers(1, 400), max_size=8))
def test_guests_cost_no_slot_its_slo(
    plan: tuple[list[tuple[str, int, int, int]], int], seed: int, guests: list[int]
) -> None:
    made, free = plan
    takes = [fixed + row * batch for _, batch, fixed, row in made]
    slo = 1 + free + sum(takes) + max(takes)
    tenants = [tenant(name, slo_ms=slo) for name, *_ in made]
    costs = linear(guest=(3, 2), **{name: (fixed, row) for name, _, fixed, row in made})
    policy = DutyCycle(ONE_LANE, rounds=(Round(slo * MS, tuple(Slot(n, b, 1.0) for n, b, _, _ in made)),))
    planned = [Query(q.id, q.tenant, q.arrival_ns, q.arrival_ns + slo * MS) for q in arrivals(made, slo * MS, seed)]
    strangers = [Query(1000 + n, "guest", at * MS, at * MS + LONG) for n, at in enumerate(sorted(guests))]
    seen = play(policy, [*tenants, tenant("guest")], costs, [*planned, *strangers])
    assert {seen.outcomes[query.id] for query in planned} == {Outcome.ANSWERED}


@pytest.mark.parametrize("drop", list(DropRule))
@pytest.mark.parametrize("preempt", [False, True])
def test_simulator_and_server_run_a_plan_alike(drop: DropRule, preempt: bool) -> None:
    rounds = (
        Round(60 * MS, (Slot("batchy", 3, 60.0), Slot("urgent", 1, 20.0))),
        Round(50 * MS, (Slot("batchy", 2, 30.0),)),
    )
    for backfill in (False, True):
        policy = DutyCycle(TWO_LANES, drop, preempt, 0.5, rounds, backfill)
        for number, world in enumerate(({}, {"noise": 0.3, "seed": 5}, {"failure_rate": 0.1, "seed": 6})):
            queries = workload(seed=number, gap_ns=8 * MS)
            lines, outcomes = simulated(policy, queries, **world)
            assert served(policy, queries, **world) == (lines, outcomes)
            assert sorted(query for query, _, _ in outcomes) == list(range(COUNT))
            assert any(b'"tenant":"wide"' in line and b'"Launch"' in line for line in lines) or not preempt


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (partial(DutyCycle, ()), "lanes"),
        (partial(DutyCycle, ONE_LANE, "hopeless"), "drop"),
        (partial(DutyCycle, ONE_LANE, slack_share=1.5), "slack_share"),
        (partial(DutyCycle, ONE_LANE, rounds=(Round(), Round())), "rounds"),
        (partial(Slot, "a", 0, 1.0), "batch"),
        (partial(Slot, "a", 1, float("inf")), "rate_per_s"),
        (partial(Round, 0, (Slot("a", 1, 1.0),)), "duty_ns"),
    ],
)
def test_values_out_of_range_are_named(make: partial[object], named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        make()


def test_lanes_of_several_cores_are_predicted_as_such() -> None:
    costs = TablePredictor({"a": LatencyTable((LatencyRow(0, 1, 1, 20 * MS), LatencyRow(0, 1, 2, 12 * MS)))})
    made = play(DutyCycle((Share((0, 1)),), rounds=(slots(("a", 1)),)), [tenant("a")], costs, coming(("a", 0)))
    assert made.launches[0][1].predicted_ns == 12 * MS


@pytest.mark.parametrize("planned", [True, False], ids=["slot", "guest"])
def test_a_lane_that_is_too_slow_for_a_query_leaves_it_to_another(planned: bool) -> None:
    wide, narrow = Share((0, 1)), Share((2,))
    costs = TablePredictor({"a": LatencyTable((LatencyRow(0, 1, 1, 40 * MS), LatencyRow(0, 1, 2, 20 * MS)))})
    made = slots(("a", 1))
    policy = DutyCycle((narrow, wide), rounds=(made if planned else Round(), made))
    core = Engine([tenant("a", slo_ms=45, max_batch=1)], policy, costs, Machine.cpu((0, 1, 2)))
    first, second, third = coming(("a", 0), ("a", 1), ("a", 2), slo_ms=45)
    launched = []
    for query in (first, second, third):
        actions = core.handle(QueryArrived(query), query.arrival_ns)
        launched += [(each.queries, each.share) for each in actions if isinstance(each, Launch)]
    assert sorted(launched) == sorted([((0,), narrow), ((1,), wide)] if planned else [((0,), wide), ((1,), narrow)])
    actions = core.handle(LaunchEnded(0 if not planned else 1), 21 * MS)  # the wide lane is free: 26 ms are left
    [launch] = [each for each in actions if isinstance(each, Launch)]
    assert (launch.queries, launch.share) == ((2,), wide)
    actions = core.handle(LaunchEnded(1 if not planned else 0), 41 * MS)
    late = Query(3, "a", 42 * MS, 62 * MS)
    assert not [each for each in core.handle(QueryArrived(late), 42 * MS) if isinstance(each, Launch)]
    assert core.waiting("a") == 1  # the narrow lane is free, and too slow; it would be dropped if it were hopeless


@pytest.mark.parametrize("drop", DropRule)
@pytest.mark.parametrize("planned", [True, False], ids=["lent", "stranger"])
def test_a_guest_that_fits_into_no_free_lane_hides_nobody_behind_it(planned: bool, drop: DropRule) -> None:
    """Five rows fit only into the lane that is busy, one row also into the one that is idle."""
    costs = linear(a=(1, 1), b=(50, 0), c=(0, 10))
    wide = slots(("b", 1), ("c", 5)) if planned else slots(("b", 1))
    policy = DutyCycle(TWO_LANES, drop, rounds=(slots(("a", 2)), wide))
    core = Engine([tenant("a", slo_ms=33), tenant("b"), tenant("c")], policy, costs, Machine.cpu((0, 1)))
    large, small = Query(1, "c", 0, LONG, items=5), Query(2, "c", 0, LONG + 1)
    launched = []
    for query in (Query(0, "b", 0, LONG), large, small):
        actions = core.handle(QueryArrived(query), 0)
        launched += [(each.queries, each.share) for each in actions if isinstance(each, Launch)]
    assert launched == [((0,), TWO_LANES[1]), ((2,), TWO_LANES[0])]
    actions = core.handle(LaunchEnded(0), 50 * MS)
    assert [(each.queries, each.share) for each in actions if isinstance(each, Launch)] == [((1,), TWO_LANES[1])]


def test_a_head_makes_way_even_where_the_next_is_as_tight() -> None:
    """Two rows take 30 ms, and neither of the first two of three that wait has so long: the first is given up."""
    costs = linear(a=(10, 10), b=(25, 0))
    policy = DutyCycle(ONE_LANE, rounds=(slots(("b", 1), ("a", 2)),))
    queries = coming(("b", 0), ("a", 0.1), ("a", 0.2), ("a", 0.3), slo_ms=50)
    made = play(policy, [tenant("a", slo_ms=50), tenant("b", slo_ms=50)], costs, queries)
    assert told(made)[:2] == [("b", 1), ("a", 1)]
    assert made.outcomes[1] is Outcome.DROPPED
    assert "the batch of 2 rows takes 30.0 ms, and more wait" in made.reasons[1]
    assert made.outcomes[2] is Outcome.ANSWERED
