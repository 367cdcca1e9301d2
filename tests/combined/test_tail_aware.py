"""Tail-aware policies: the safety margin, how it is learnt, and the order of queries that it decides."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant import trace
from cotenant.cli.options import settings_of
from cotenant.core.actions import Launch
from cotenant.core.events import LaunchEnded, PredictorChanged, QueryArrived
from cotenant.core.queues import TenantQueue
from cotenant.core.snapshot import Decision, Snapshot
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.policies import policy_names
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.registry import make_policy, rebuild_policy
from cotenant.predict.margin import NO_MARGIN, SafetyMargin, Spread
from cotenant.predict.online import OnlineModel, UpperEstimate
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share, Work
from cotenant.world.simulated import TableWorld
from scenario import CORES, MS, ONE_LANE, TWO_LANES, play, tables

MARGIN = SafetyMargin({"a": Spread(1.5, 10 * MS)}, 2 * MS)
TAIL_AWARE = Edf(ONE_LANE)
TABLES = {"a": 10 * MS, "b": 4 * MS}
PREDICTOR = tables(TABLES, batch_slope=0.5).with_margin(MARGIN)
SLO = 100 * MS
TENANTS = {name: Tenant(name, SLO, max_batch=4) for name in TABLES}
TABLE = LatencyTable((LatencyRow(0, 1, 1, 10 * MS),))


# --- the margin ---------------------------------------------------------------------------------------------------


def test_a_launch_is_sure_within_its_spread_and_the_time_of_the_answer() -> None:
    assert MARGIN.upper_ns("a", 10 * MS, SLO) == 17 * MS
    assert MARGIN.upper_ns("a", 2 * MS, SLO) == 5 * MS
    assert MARGIN.upper_ns("unknown", 10 * MS, SLO) == 12 * MS
    assert NO_MARGIN.upper_ns("a", 10 * MS, SLO) == 10 * MS


def test_what_many_launches_are_late_by_grows_with_the_root_of_their_number() -> None:
    assert MARGIN.upper_ns("a", 4 * 10 * MS, 10 * SLO) == (40 + 2 * 5 + 2) * MS
    rng = np.random.default_rng(0)
    launches = 10 * MS * rng.normal(1.0, 0.2, (4000, 16))
    spread = Spread(float(np.quantile(launches[:, 0], 0.95)) / (10 * MS), 10 * MS)
    sure = SafetyMargin({"a": spread}).upper_ns("a", 16 * 10 * MS, 10 * SLO)
    assert 0.93 < np.mean(launches.sum(axis=1) <= sure) <= 1.0


@given(
    st.floats(1, 8),
    st.integers(1, 10**9),
    st.integers(0, 10**9),
    st.integers(1, 10**10),
    st.integers(1, 10**10),
    st.integers(1, 10**11),
)
def test_no_margin_shortens_and_longer_work_is_never_sure_sooner(
    factor: float, launch: int, reply: int, one: int, other: int, slo: int
) -> None:
    margin = SafetyMargin({"a": Spread(factor, launch)}, reply)
    short, long = sorted((one, other))
    room = max(0, slo - short) // 3
    assert short + min(reply, room) <= margin.upper_ns("a", short, slo) <= margin.upper_ns("a", long, slo) + 1
    assert margin.upper_ns("a", short, slo) <= short + room


def test_who_has_little_room_is_not_doubtful_from_the_start() -> None:
    """With all of the margin work of 10 ms would take 17: more than an SLO of 16 ms, so that it never were sure."""
    assert MARGIN.upper_ns("a", 10 * MS, 16 * MS) == 12 * MS
    assert MARGIN.upper_ns("a", 10 * MS, 9 * MS) == 10 * MS
    tenants = [Tenant("a", 16 * MS), Tenant("b", 60 * MS)]
    queries = [Query(0, "a", 0, 16 * MS), Query(1, "b", 0, 60 * MS)]
    made = play(TAIL_AWARE, tenants, PREDICTOR, queries)
    assert [launch.work.tenant for _, launch in made.launches] == ["a", "b"]


@pytest.mark.parametrize("factor", [0.9, float("inf"), float("nan")])
def test_values_out_of_range_are_named(factor: float) -> None:
    with pytest.raises(InvalidValueError, match="spread: factor is"):
        Spread(factor, 1)
    with pytest.raises(InvalidValueError, match="spread: launch_ns is 0"):
        Spread(1.0, 0)
    with pytest.raises(InvalidValueError, match="safety margin: reply_ns is -1"):
        SafetyMargin({}, -1)


def test_other_factors_keep_the_margin_and_another_margin_what_is_known() -> None:
    assert PREDICTOR.scaled({"a": 2.0}).margin is MARGIN
    assert PREDICTOR.scaled({"a": 2.0}).upper_ns("a", 10 * MS, SLO) == 17 * MS
    other = PREDICTOR.with_margin(NO_MARGIN)
    assert (other.upper_ns("a", MS, SLO), PREDICTOR.upper_ns("a", MS, SLO)) == (MS, round(3.5 * MS))
    assert other.latency_ns(Work("a", 0, 1, 0, 1), 2) == 10 * MS


# --- decisions ----------------------------------------------------------------------------------------------------


def decide(policy: Edf | Overlap, queries: list[Query], predictor: TablePredictor = PREDICTOR) -> Decision:
    """At time 0, with all cores free."""
    queues = {name: TenantQueue(tenant) for name, tenant in TENANTS.items()}
    for query in queries:
        queues[query.tenant].push(policy.queue_key(query, TENANTS[query.tenant], predictor), query)
    return policy.decide(Snapshot(0, queues, [], {}, 0b11, predictor), None)


def started(decision: Decision) -> list[tuple[int, ...]]:
    return [tuple(query.id for query in start.queries) for start in decision.starts]


def test_the_sure_one_goes_before_the_doubtful_one_which_goes_before_none() -> None:
    doubtful, sure = Query(0, "a", 0, 16 * MS), Query(1, "a", 0, 17 * MS, merge_key=1)
    assert started(decide(TAIL_AWARE, [doubtful, sure])) == [(1,)]
    assert started(decide(replace(TAIL_AWARE, tail_aware=False), [doubtful, sure])) == [(0,)]
    alone = decide(TAIL_AWARE, [doubtful])
    assert (started(alone), alone.drops) == ([(0,)], ())
    assert started(decide(TAIL_AWARE, [doubtful, sure], PREDICTOR.with_margin(NO_MARGIN))) == [(0,)]


def test_a_second_lane_takes_the_doubtful_one() -> None:
    queries = [Query(0, "a", 0, 16 * MS), Query(1, "a", 0, 17 * MS, merge_key=1)]
    assert started(decide(replace(TAIL_AWARE, lanes=TWO_LANES), queries)) == [(1,), (0,)]


def test_of_doubtful_ones_the_most_urgent_goes_first_and_hopeless_ones_are_given_up() -> None:
    queries = [Query(0, "a", 0, 9 * MS), *(Query(n, "a", 0, (10 + n) * MS, merge_key=n) for n in range(1, 5))]
    decision = decide(TAIL_AWARE, queries)
    assert started(decision) == [(1,)]
    assert [drop.query for drop in decision.drops] == [0]


def test_a_batch_grows_only_as_far_as_it_is_sure() -> None:
    # Batches of 1, 2, 3 are predicted to take 10, 15, 20 ms, and are sure within 17, 23.1, 29.1.
    queries = [Query(n, "a", 0, 24 * MS) for n in range(3)]
    assert started(decide(TAIL_AWARE, queries)) == [(0, 1)]
    assert started(decide(replace(TAIL_AWARE, tail_aware=False), queries)) == [(0, 1, 2)]


def test_where_too_many_are_doubtful_the_first_of_them_is_served() -> None:
    queries = [*(Query(n, "a", 0, 16 * MS, merge_key=n) for n in range(40)), Query(99, "a", 0, 50 * MS, merge_key=99)]
    assert started(decide(TAIL_AWARE, queries)) == [(0,)]


@settings(deadline=None)
@given(
    deadlines=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 60)), max_size=12),
    lanes=st.sampled_from([ONE_LANE, TWO_LANES]),
)
def test_no_lane_stays_idle_and_nobody_else_is_dropped(
    deadlines: list[tuple[str, int]], lanes: tuple[Share, ...]
) -> None:
    queries = [Query(n, name, 0, limit * MS, merge_key=n) for n, (name, limit) in enumerate(deadlines)]
    tail_aware = decide(replace(TAIL_AWARE, lanes=lanes), queries)
    plain = decide(Edf(lanes, tail_aware=False), queries)
    assert len(tail_aware.starts) == len(plain.starts)
    hopeless = {query.id for query in queries if TABLES[query.tenant] > query.deadline_ns}
    assert {drop.query for drop in tail_aware.drops} <= hopeless
    taken = {query for start in started(tail_aware) for query in start}
    assert not taken & hopeless
    waiting = [query for query in queries if query.id not in taken | hopeless]
    for query in queries:
        if query.id in taken and PREDICTOR.upper_ns(query.tenant, TABLES[query.tenant], SLO) > query.deadline_ns:
            assert all(PREDICTOR.upper_ns(each.tenant, TABLES[each.tenant], SLO) > each.deadline_ns for each in waiting)


def test_overlap_without_a_barrier_is_tail_aware_edf() -> None:
    queries = [Query(number, "ab"[number % 2], number * 3 * MS, number * 3 * MS + 25 * MS) for number in range(60)]
    made = [
        play(policy, TENANTS.values(), PREDICTOR, queries)
        for policy in (Overlap(TWO_LANES, barrier=False), Edf(TWO_LANES), Edf(TWO_LANES, tail_aware=False))
    ]
    assert made[0].launches == made[1].launches
    assert made[0].outcomes == made[1].outcomes
    assert made[0].launches != made[2].launches, "the margin decides something here"


@pytest.mark.parametrize("seed", range(3))
def test_under_overload_far_more_are_in_time_where_latencies_spread(seed: int) -> None:
    """Twice as much is asked for as can be done; latencies deviate by 30 %."""
    tenant, noise = Tenant("a", 60 * MS), 0.3
    spread = Spread(float(np.exp(1.645 * noise)), 10 * MS)
    predictor = tables({"a": 10 * MS}).with_margin(SafetyMargin({"a": spread}))
    queries = [Query(number, "a", number * 5 * MS, number * 5 * MS + 60 * MS) for number in range(600)]
    counts = {}
    for policy in (Edf(ONE_LANE, tail_aware=False), TAIL_AWARE):
        made = play(policy, [tenant], predictor, queries, TableWorld(predictor, noise=noise, seed=seed))
        counts[policy.tail_aware] = Counter(made.outcomes.values())
    assert counts[True][Outcome.ANSWERED] > 1.2 * counts[False][Outcome.ANSWERED]
    assert counts[True][Outcome.LATE] < 0.1 * counts[True][Outcome.ANSWERED]


# --- learning it --------------------------------------------------------------------------------------------------


def test_the_spread_covers_the_share_that_it_was_made_for() -> None:
    rng = np.random.default_rng(1)
    upper_estimate = UpperEstimate(0.95)
    for _ in range(2000):
        upper_estimate.launched("a", 10 * MS, round(10 * MS * float(rng.lognormal(0.0, 0.3))))
    spread = upper_estimate.margin().spreads["a"]
    later = rng.lognormal(0.0, 0.3, 4000)
    assert 0.9 < np.mean(later <= spread.factor) < 0.99
    assert spread.launch_ns == pytest.approx(10 * MS, rel=0.01)
    upper_estimate.forget("a")
    assert upper_estimate.margin().spreads == {}


def test_launches_as_predicted_or_quicker_need_no_spread() -> None:
    upper_estimate = UpperEstimate(0.95)
    for _ in range(100):
        upper_estimate.launched("a", 10 * MS, 9 * MS)
    assert upper_estimate.margin() is upper_estimate.margin()
    assert upper_estimate.margin() == NO_MARGIN


def test_answers_that_leave_late_are_counted_on_both_ways() -> None:
    upper_estimate = UpperEstimate(0.95)
    for _ in range(800):
        upper_estimate.replied(4 * MS)
    assert upper_estimate.margin().reply_ns == pytest.approx(8 * MS, rel=0.3)
    for _ in range(4000):
        upper_estimate.replied(MS // 10)
    assert upper_estimate.margin().reply_ns == pytest.approx(MS // 5, rel=0.4)


def test_beliefs_take_the_margin_from_launches_and_keep_it_when_a_model_comes() -> None:
    beliefs = OnlineModel(2, tail_aware=True)
    beliefs.add("a", TABLE)
    changes = 0
    for number in range(600):
        begin, took = number * 100 * MS, (30 if number % 5 == 0 else 10) * MS
        predicted = beliefs.predictor.latency_ns(Work("a", 0, 1, 0, 1), 1)
        launch = Launch(number, number, (number,), Work("a", 0, 1, 0, 1), True, Share((0,)), predicted)
        beliefs(begin, QueryArrived(Query(number, "a", begin, begin)), [launch], None)
        changes += isinstance(beliefs(begin + took, LaunchEnded(number), [], None), PredictorChanged)
    spread = beliefs.predictor.margin.spreads["a"]
    predicted = beliefs.predictor.latency_ns(Work("a", 0, 1, 0, 1), 1)
    assert predicted * spread.factor >= 0.9 * 30 * MS
    assert changes < 90, "small changes are not worth a new predictor"
    beliefs.add("b", TABLE)
    assert beliefs.predictor.margin.spreads == {"a": spread}
    beliefs.add("a", TABLE)
    assert beliefs.predictor.margin.spreads == {}, "another model under the name starts anew"


# --- around it ----------------------------------------------------------------------------------------------------


def test_a_trace_holds_the_margin_and_its_replay_decides_the_same(tmp_path: Path) -> None:
    policy = Edf(TWO_LANES)
    queries = [Query(number, "ab"[number % 2], number * 3 * MS, number * 3 * MS + 25 * MS) for number in range(60)]
    file = io.BytesIO()
    log = trace.TraceWriter(
        file, trace.header(policy, PREDICTOR, list(TENANTS.values()), Machine.cpu(CORES), created="")
    )
    play(policy, TENANTS.values(), PREDICTOR, queries, log=log)
    log(10**12, PredictorChanged(PREDICTOR.with_margin(SafetyMargin({}, MS))), [])
    log.flush()
    (tmp_path / "log").write_bytes(file.getvalue())
    head, records = trace.read(tmp_path / "log")
    assert head.margin == MARGIN
    lines = [line for _, line in trace.replay(head, records, rebuild_policy)]
    assert lines == file.getvalue().splitlines()[1:]
    assert b'"margin":{"spreads":{},"reply_ns":1000000}' in lines[-1]


NEVER = {"duty_cycle", "model_wise", "layer_wise", "fixed_blocks", "prema", "layer_block", "slack_blocks"}
"""Policies that plan for a part of the time that is left, or for a round; some are known to benchmarks alone."""
PLAIN = {"fcfs", "sjf", "clockwork"}
"""Orders that others are compared with; `clockwork` is known once a benchmark that has it is imported."""


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_but_those_with_a_plan_can_be_tail_aware(tmp_path: Path, name: str) -> None:
    if name in NEVER:
        assert not make_policy(name, {}, TWO_LANES).spec.tail_aware
        with pytest.raises(ConfigError, match=f"'{name}' has no such option"):
            make_policy(name, {"tail_aware": True}, TWO_LANES)
        return
    made = [make_policy(name, options, TWO_LANES) for options in ({}, {"tail_aware": True}, {"tail_aware": False})]
    assert [policy.spec.tail_aware for policy in made] == [name not in PLAIN, True, False]
    (tmp_path / "cotenant.toml").write_text("[policy]\ntail_aware = true\n", encoding="utf-8")
    assert settings_of(tmp_path, {"policy.name": name}).policy.options["tail_aware"] is True
    assert (
        settings_of(tmp_path, {"policy.name": name, "policy.tail_aware": False}).policy.options["tail_aware"] is False
    )
