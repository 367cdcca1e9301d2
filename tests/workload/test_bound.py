"""Bounds on answers in time, against linear programmes of the same relaxation and against what policies do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from cotenant.core.snapshot import DropRule
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.policies.ordered.sjf import Sjf
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Outcome, Query, Tenant
from cotenant.workload.bound import (
    TimedQuery,
    answers_alone,
    largest_least_share,
    most_answers,
    most_answers_with_shares,
    most_value,
)
from scenario import ONE_LANE, TWO_LANES, play


def by_programme(
    demands: Sequence[TimedQuery], slots: float, worth: Mapping[str, float], kept: Mapping[str, float] | None = None
) -> tuple[float, float]:
    """The largest worth, where each tenant keeps so many answers, and the largest least attainment, of flows between
    the times at which something changes."""
    times = sorted({time for each in demands for time in (each.arrival_ns, each.deadline_ns)})
    spans = [
        (number, at)
        for number, each in enumerate(demands)
        for at in range(len(times) - 1)
        if each.arrival_ns <= times[at] and times[at + 1] <= each.deadline_ns
    ]
    count, width = len(demands), len(demands) + len(spans) + 1
    served, room = np.zeros((count, width)), np.zeros((len(times) - 1, width))
    for number, each in enumerate(demands):
        served[number, number] = each.slot_ns
    for place, (number, at) in enumerate(spans):
        served[number, count + place] = -1
        room[at, count + place] = 1
    fits = [slots * (later - sooner) for sooner, later in pairwise(times)]
    limits = [(0, 1)] * count + [(0, None)] * (width - count)
    cost = np.zeros(width)
    cost[:count] = [-worth.get(each.tenant, 0.0) for each in demands]
    equal = {"A_eq": served, "b_eq": np.zeros(count), "bounds": limits}
    tenants = sorted({each.tenant for each in demands})
    answers = np.array([[each.tenant == name for each in demands] + [False] * (width - count) for name in tenants])
    keeps = [1e-9 - (kept or {}).get(name, 0.0) for name in tenants]
    most = linprog(cost, A_ub=np.vstack([room, -1.0 * answers]), b_ub=[*fits, *keeps], **equal)
    least = np.zeros((len(tenants), width))
    for row, name in enumerate(tenants):
        mine = [number for number, each in enumerate(demands) if each.tenant == name]
        least[row, mine], least[row, -1] = -1, len(mine)
    goal = np.zeros(width)
    goal[-1] = -1
    fair = linprog(goal, A_ub=np.vstack([room, least]), b_ub=[*fits, *[0] * len(tenants)], **equal)
    assert most.status == fair.status == 0
    return -float(most.fun), -float(fair.fun)


def drawn(times: Mapping[str, float], some: Sequence[tuple[str, int, int]]) -> list[TimedQuery]:
    return [TimedQuery(name, at, at + left, times[name]) for name, at, left in some]


names = st.sampled_from("abc")
queries = st.lists(st.tuples(names, st.integers(0, 30), st.integers(1, 25)), min_size=1, max_size=14)
lengths = st.fixed_dictionaries({name: st.integers(1, 12).map(float) for name in "abc"})


@settings(max_examples=150, deadline=None)
@given(lengths=lengths, some=queries, slots=st.integers(1, 3))
def test_they_are_what_linear_programmes_find(
    lengths: dict[str, float], some: list[tuple[str, int, int]], slots: int
) -> None:
    demands = drawn(lengths, some)
    weights = {"a": 1.0, "b": 3.0, "c": 0.5}
    assert most_value(demands, slots, weights) == pytest.approx(by_programme(demands, slots, weights)[0], abs=1e-6)
    most, fair = by_programme(demands, slots, dict.fromkeys("abc", 1.0))
    assert most_answers(demands, slots) == pytest.approx(most, abs=1e-6)
    assert largest_least_share(demands, slots)[0] == pytest.approx(fair, abs=1e-6)


shares = st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any)


@settings(max_examples=150, deadline=None)
@given(lengths=lengths, some=queries, slots=st.integers(1, 3), parts=shares)
def test_with_shares_they_are_what_a_linear_programme_finds(
    lengths: dict[str, float], some: list[tuple[str, int, int]], slots: int, parts: list[int]
) -> None:
    demands = drawn(lengths, some)
    share = {name: part / sum(parts) for name, part in zip("abc", parts, strict=True)}
    one = dict.fromkeys("abc", 1.0)
    alone = {
        name: by_programme(mine, slots * share[name], one)[0] if share[name] else 0.0
        for name in sorted({each.tenant for each in demands})
        for mine in [[each for each in demands if each.tenant == name]]
    }
    found, kept = most_answers_with_shares(demands, slots, share)
    assert kept.keys() == alone.keys()
    assert all(kept[name] <= alone[name] + 1e-6 for name in alone)
    assert found == pytest.approx(by_programme(demands, slots, one, kept)[0], abs=1e-5)
    assert sum(kept.values()) - 1e-6 <= found <= most_answers(demands, slots)


def test_with_many_tenants_or_queries_of_many_times_a_bound_with_shares_is_still_one_and_near() -> None:
    random = np.random.default_rng(7)
    for case in range(12):
        count = 9 if case % 2 else 3
        times = {f"t{number}": float(random.integers(1, 12)) for number in range(count)}
        demands = [
            TimedQuery(
                name,
                at := int(random.integers(0, 60)),
                at + int(random.integers(2, 40)),
                times[name] if case % 2 else float(random.integers(1, 12)),
            )
            for name in sorted(times) * (27 // count)
        ]
        found, kept = most_answers_with_shares(demands, 1, dict.fromkeys(times, 1 / count))
        exact = by_programme(demands, 1, dict.fromkeys(times, 1.0), kept)[0]
        assert exact - 1e-6 <= found <= exact * 1.05


def test_with_many_tenants_the_least_share_is_still_a_bound_and_near() -> None:
    random = np.random.default_rng(5)
    for _ in range(10):
        times = {f"t{number}": float(random.integers(1, 12)) for number in range(9)}
        demands = [
            TimedQuery(name, at := int(random.integers(0, 60)), at + int(random.integers(2, 40)), times[name])
            for name in sorted(times) * 3
        ]
        found, fair = largest_least_share(demands, 1)[0], by_programme(demands, 1, {})[1]
        assert fair - 1e-6 <= found <= fair + 0.05


def test_by_hand() -> None:
    """Of three that take 4, two are in time in 8; of one that takes 8 and one that takes 4, a part of the long one."""
    three = [TimedQuery("a", 0, 8, 4.0)] * 3
    assert most_answers(three, 1) == pytest.approx(2)
    assert most_answers(three, 2) == 3
    assert largest_least_share(three, 1) == (pytest.approx(2 / 3), ("a",))
    two = [TimedQuery("a", 0, 8, 8.0), TimedQuery("b", 0, 8, 4.0), TimedQuery("c", 20, 30, 1.0)]
    assert most_answers(two, 1) == pytest.approx(2.5)
    assert most_value(two, 1, {"a": 3.0, "b": 1.0}) == pytest.approx(3.0)
    assert largest_least_share(two, 1) == (pytest.approx(2 / 3), ("a", "b"))
    assert largest_least_share([], 1) == (1.0, ())
    half = {"a": 0.5, "b": 0.5}
    found, kept = most_answers_with_shares(two, 1, half)
    assert (found, kept) == (pytest.approx(2.5), pytest.approx({"a": 0.5, "b": 1.0, "c": 0.0}))
    one = [TimedQuery("a", at, at + 10, 4.0) for at in (0, 1, 5, 30)]
    assert [answers_alone(one, slots) for slots in (0, 0.25, 0.5, 1)] == pytest.approx([0, 1.5625, 2, 4])
    both = [TimedQuery("a", 0, 10, 4.0), TimedQuery("a", 1, 16, 4.0)]
    assert answers_alone(both, 0.5) == 2
    long = [TimedQuery("a", 0, 8, 8.0), *[TimedQuery("b", 0, 8, 1.0)] * 8]
    assert most_answers(long, 1) == pytest.approx(8)
    found, kept = most_answers_with_shares(long, 1, half)
    assert (found, kept) == (pytest.approx(4.5), pytest.approx({"a": 0.5, "b": 4.0}))
    assert most_answers_with_shares([], 1, half) == (0.0, {})


@settings(max_examples=200, deadline=None)
@given(
    some=st.lists(st.tuples(names, st.integers(0, 400)), min_size=1, max_size=30),
    kind=st.sampled_from([Edf, Sjf, Fcfs]),
    drop=st.sampled_from(list(DropRule)),
    lanes=st.sampled_from([ONE_LANE, TWO_LANES]),
)
def test_no_policy_does_better(some: list[tuple[str, int]], kind: type[Edf], drop: DropRule, lanes: object) -> None:
    tenants = {name: Tenant(name, slo, cuts=(0, 1, 2)) for name, slo in (("a", 60), ("b", 90), ("c", 150))}
    times = {"a": 20, "b": 36, "c": 50}  # Even: a half of an odd one is rounded, so that two halves take less.
    believed = TablePredictor(
        {name: LatencyTable((LatencyRow(0, 1, 1, ns),), (1.0, 1.0)) for name, ns in times.items()}
    )
    asked = [
        Query(number, name, at, at + tenants[name].slo_ns)
        for number, (name, at) in enumerate(sorted(some, key=lambda each: each[1]))
    ]
    outcomes = play(kind(lanes, drop), tenants.values(), believed, asked).outcomes  # type: ignore[arg-type]
    in_time = [query for query in asked if outcomes[query.id] is Outcome.ANSWERED]
    demands = [TimedQuery(query.tenant, query.arrival_ns, query.deadline_ns, times[query.tenant]) for query in asked]
    slots = len(lanes)  # type: ignore[arg-type]
    assert len(in_time) <= most_answers(demands, slots) + 1e-9
    least = min(
        sum(query.tenant == name for query in in_time) / sum(query.tenant == name for query in asked)
        for name in {query.tenant for query in asked}
    )
    assert least <= largest_least_share(demands, slots)[0] + 1e-9
