"""What the policies that select make the most of, beside bounds that no schedule can beat.

Two lanes and four tenants of equal work, with a boundary every 8 ms; what tenants could have, and what they got.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from msgspec import UNSET

from cotenant.core.snapshot import AT_ARRIVALS, WHEN_FREE, DropRule
from cotenant.policies import policy_class
from cotenant.predict.margin import SafetyMargin, Spread
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Outcome, Query, Tenant
from cotenant.workload.bound import TimedQuery, largest_least_share, most_answers, most_answers_with_shares
from scenario import MS, ONE_LANE, TWO_LANES, play, tables

MODELS = {"resnet": (78, 250), "minilm": (23, 120), "ocr": (100, 400), "vad": (7, 30)}
"""Latency and SLO in ms."""
EQUAL = dict.fromkeys(MODELS, 0.25)
PREDICTOR = TablePredictor(
    {
        name: LatencyTable((LatencyRow(0, 1, 1, ms * MS),), (1.0,) * max(1, round(ms / 8)))
        for name, (ms, _) in MODELS.items()
    }
)
TENANTS = [Tenant(name, slo * MS, cuts=tuple(range(max(1, round(ms / 8)) + 1))) for name, (ms, slo) in MODELS.items()]


def sent(loads: dict[str, float], seconds: float, seed: int = 1, begin: float = 0.0) -> list[Query]:
    """Poisson arrivals; `loads` are in lanes."""
    random, made = Random(seed), list[tuple[int, str]]()
    for name, load in loads.items():
        now = begin
        while load and (now := now + random.expovariate(load / (MODELS[name][0] / 1e3))) < seconds:
            made.append((round(now * 1e9), name))
    return [Query(at, name, now, now + MODELS[name][1] * MS) for at, (now, name) in enumerate(sorted(made))]


@pytest.mark.parametrize("policy", ["shares", "most", "fair", "weighted"])
def test_they_are_asked_at_arrivals_where_they_may_give_up(policy: str) -> None:
    for drop in DropRule:
        expected = AT_ARRIVALS if drop is DropRule.HOPELESS else WHEN_FREE
        assert policy_class(policy)(TWO_LANES, drop).spec.requests is expected


def in_time(
    policy: str, queries: list[Query], weights: dict[str, float] | None = None, rates: dict[str, float] | None = None
) -> Counter[str]:
    tenants = [
        replace(each, weight=(weights or {}).get(each.name, 1.0), rate=(rates or {}).get(each.name, UNSET))
        for each in TENANTS
    ]
    made = play(
        policy_class(policy)(TWO_LANES, DropRule.HOPELESS, preempt=True, slack_share=0.0), tenants, PREDICTOR, queries
    )
    return Counter(each.tenant for each in queries if made.outcomes[each.id] is Outcome.ANSWERED)


def alone(name: str, queries: list[Query]) -> int:
    """Answers in time on one lane of its own that is as fast as a quarter of both."""
    ms, slo = MODELS[name]
    slow = TablePredictor({name: LatencyTable((LatencyRow(0, 1, 1, 2 * ms * MS),), (1.0,))})
    made = play(policy_class("edf")((TWO_LANES[0],)), [Tenant(name, slo * MS)], slow, queries)
    return sum(outcome is Outcome.ANSWERED for outcome in made.outcomes.values())


def timed(queries: list[Query]) -> list[TimedQuery]:
    return [TimedQuery(each.tenant, each.arrival_ns, each.deadline_ns, MODELS[each.tenant][0] * MS) for each in queries]


@cache
def crowd(load: float) -> list[Query]:
    return sent(dict.fromkeys(MODELS, load / 2), 12)


@pytest.mark.parametrize("load", [1.2, 3.0])
def test_most_comes_close_to_the_bound_and_is_never_below_the_shortest_job_first(load: float) -> None:
    queries = crowd(load)
    found = in_time("most", queries).total()
    assert found >= 0.97 * most_answers(timed(queries), 2)
    assert found >= in_time("sjf", queries).total()


@pytest.mark.parametrize("load", [1.2, 2.0])
def test_the_worst_off_under_fair_gets_nearly_what_he_can(load: float) -> None:
    queries = crowd(load)
    asked, found = Counter(each.tenant for each in queries), in_time("fair", queries)
    least = min(found[name] / asked[name] for name in asked)
    assert least >= 0.85 * largest_least_share(timed(queries), 2)[0]
    alone = in_time("edf", queries)
    assert least > 1.2 * min(alone[name] / asked[name] for name in asked)


@pytest.mark.parametrize("load", [1.2, 2.0])
def test_under_shares_everybody_gets_nearly_what_he_could_have_alone(load: float) -> None:
    queries = crowd(load)
    most, floors = most_answers_with_shares(timed(queries), 2, EQUAL)
    found = in_time("shares", queries)
    assert found.total() >= 0.88 * most
    assert all(found[name] >= 0.85 * floors[name] for name in floors)


@pytest.mark.parametrize("bully", ["vad", "resnet"])
def test_who_keeps_to_his_share_has_what_he_could_have_alone_on_it_whatever_another_sends(bully: str) -> None:
    others = {name: 0.25 for name in MODELS if name != bully}
    loud = sent({**others, bully: 6.0}, 10)
    found = in_time("shares", loud)
    for name in others:
        mine = [each for each in loud if each.tenant == name]
        assert found[name] >= alone(name, mine) - 0.04 * len(mine) - 1, name


def test_a_rate_is_kept_even_where_it_takes_more_than_the_share() -> None:
    queries = sent({**dict.fromkeys(MODELS, 1.5), "resnet": 0.9}, 12)
    asked = Counter(each.tenant for each in queries)["resnet"]
    found = {rate: in_time("shares", queries, rates={"resnet": rate} if rate else {}) for rate in (0.0, 18.0)}
    assert found[0.0]["resnet"] < 0.75 * asked
    assert found[18.0]["resnet"] > 0.92 * asked
    assert found[18.0].total() > 0.8 * found[0.0].total()


def test_what_others_leave_is_used() -> None:
    queries = sent({"resnet": 1.9}, 20)
    assert in_time("shares", queries).total() >= 0.95 * in_time("edf", queries).total()


def test_a_newcomer_has_his_share_at_once() -> None:
    old = sent({"vad": 2.0, "minilm": 2.0}, 6)
    new = sent({"resnet": 0.4}, 6, seed=5, begin=3.0)
    both = [(each.arrival_ns, each.tenant, each.deadline_ns) for each in (*old, *new)]
    queries = [Query(at, name, now, deadline) for at, (now, name, deadline) in enumerate(sorted(both))]
    assert in_time("shares", queries)["resnet"] >= 0.85 * len(new)


def test_weight_says_whose_answers_count() -> None:
    queries = crowd(2.0)
    even, heavy = in_time("weighted", queries), in_time("weighted", queries, {"ocr": 1000.0})
    assert heavy["ocr"] > 2.5 * even["ocr"]


def test_who_is_given_up_hears_it_at_once_and_for_whom() -> None:
    tenants = [Tenant("ocr", 400 * MS, cuts=(0, 1)), Tenant("vad", 30 * MS)]
    predictor = TablePredictor(
        {"ocr": LatencyTable((LatencyRow(0, 1, 1, 100 * MS),), (1.0,)), "vad": PREDICTOR.tables["vad"]}
    )
    queries = [Query(number, "ocr", 0, 400 * MS) for number in range(9)]
    made = play(policy_class("most")(TWO_LANES), tenants, predictor, queries)
    [gone] = [number for number, outcome in made.outcomes.items() if outcome is not Outcome.ANSWERED]
    assert made.outcomes[gone] in (Outcome.DROPPED, Outcome.REJECTED)
    assert made.ended_ns[gone] == 0
    assert "shed: 100.0 ms of work" in made.reasons[gone]


def test_what_is_within_a_share_goes_while_its_answer_is_sure() -> None:
    """On half of the lane `mine` ends at 80 ms, just in time behind the second of `theirs`, which is beyond their half
    and has the earlier deadline. It may take a third more of what its SLO leaves, and has to be in time even so."""
    exact = tables({"mine": 40 * MS, "theirs": 20 * MS})
    wary = exact.with_margin(SafetyMargin({"mine": Spread(1.75, 40 * MS)}))
    tenants = [Tenant("mine", 95 * MS), Tenant("theirs", 60 * MS)]
    queries = [Query(0, "theirs", 0, 60 * MS), Query(1, "theirs", 0, 60 * MS), Query(2, "mine", 0, 95 * MS)]
    order = [
        [each.work.tenant for _, each in play(policy_class("shares")(ONE_LANE), tenants, predictor, queries).launches]
        for predictor in (exact, wary)
    ]
    assert order == [["theirs", "theirs", "mine"], ["theirs", "mine"]]


@pytest.mark.parametrize(("left_ms", "is_told_at_once"), [(50, True), (3, False)])
def test_who_comes_just_before_a_launch_ends_is_decided_on_then(left_ms: int, is_told_at_once: bool) -> None:
    predictor, come = tables({"long": 100 * MS, "short": 40 * MS}), (100 - left_ms) * MS
    tenants = [Tenant("long", 1000 * MS), Tenant("short", 110 * MS)]
    queries = [Query(0, "long", 0, 1000 * MS), *[Query(at, "short", come, come + 110 * MS) for at in (1, 2, 3)]]
    made = play(policy_class("most")(ONE_LANE), tenants, predictor, queries)
    gone = [made.ended_ns[each] for each, outcome in made.outcomes.items() if outcome is not Outcome.ANSWERED]
    assert gone
    assert all(ended == (come if is_told_at_once else 100 * MS) for ended in gone)
