"""What is believed of groups of numbers of members that were never measured: between their parts and one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.predictor import Group, Member
from cotenant.errors import InvalidValueError
from cotenant.predict.grouped import GroupedPredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.overlap.group_samples import GroupSample
from cotenant.techniques.overlap.measure.group_sampler import sample_groups
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_features import MemberFeatures, TenantFacts
from cotenant.techniques.overlap.predict.overlap_fit import FitSettings, fit_overlap
from cotenant.techniques.overlap.predict.overlap_net import Monotone
from cotenant.types import Tenant
from cotenant.work import Work

MS = 1_000_000
WHOLE_MS = {"a": 3, "b": 7, "c": 12, "d": 5}
FACTS = tuple(
    TenantFacts(
        name,
        LatencyTable(tuple(LatencyRow(0, rows, 1, whole * MS * (1 + rows) // 2) for rows in (1, 4)), (1.0,) * 4),
    )
    for name, whole in WHOLE_MS.items()
)
FEATURES = MemberFeatures(FACTS, MS)
SLOWER = 1.2
"""Two that take as long as each other take longer together than in turn."""


def world_ns(group: Group) -> int:
    alone = sorted(map(FEATURES.solo_ns, group))
    return round(alone[-1] + SLOWER * sum(alone[:-1]))


@cache
def fitted(sizes: frozenset[int], monotone: Monotone = Monotone.ALL) -> OverlapPredictor:
    """To groups of these numbers of members of three of the four tenants."""
    tenants = [Tenant(name, MS, cuts=(0, 1, 2, 3, 4), max_batch=4) for name in "abc"]
    drawn = sample_groups(tenants, dict.fromkeys("abc", (1, 2, 4)), (1,) * max(sizes), 600, 1, repeat=True)
    random = Random(2)
    samples = [
        GroupSample(group, tuple(round(world_ns(group) * random.uniform(0.95, 1.1)) for _ in range(3)))
        for group in (tuple(member._replace(size=1) for member in each) for each in drawn)
        if len(group) in sizes
    ]
    return fit_overlap(samples, FACTS, settings=FitSettings(width=8, steps=300, hidden_steps=50, monotone=monotone))


def astray(predictor: OverlapPredictor, by: float) -> OverlapPredictor:
    """What the network says is off by a factor of e to the power of `by`."""
    weights = {**predictor.model.weights, "b5": predictor.model.weights["b5"] + np.float32(by)}
    return OverlapPredictor(replace(predictor.model, weights=weights), predictor.quantile, predictor.factor)


@st.composite
def members(draw: st.DrawFn) -> Member:
    start = draw(st.integers(0, 3))
    return Member(
        Work(draw(st.sampled_from("abcd")), 0, draw(st.integers(1, 4)), start, draw(st.integers(start + 1, 4))), 1
    )


def groups_of(least: int, most: int) -> st.SearchStrategy[Group]:
    return st.lists(members(), min_size=least, max_size=most).map(tuple)


def oracle(predictor: OverlapPredictor, group: Group) -> tuple[int, int]:
    """Every part, asked for on its own."""
    alone = []
    for member in group:
        is_measured = 1 in predictor.sizes and predictor.is_seen(member.work.tenant)
        alone.append(predictor.group_ns([(member,)])[0] if is_measured else predictor.latency_ns(*member))
    parts = [part for size in predictor.sizes - {1} if size < len(group) for part in combinations(group, size)]
    least = max([*alone, *(predictor.group_ns([part])[0] for part in parts)])
    return least, max(least, sum(alone))


@pytest.mark.parametrize("sizes", [{1, 2}, {2}, {1, 3}])
@pytest.mark.parametrize("monotone", [Monotone.ALL, Monotone.NOTHING])
@settings(max_examples=15, deadline=None)
@given(group=groups_of(1, 5), by=st.sampled_from([-9.0, -1.0, 0.0, 1.0, 9.0]), quantile=st.sampled_from([0.5, 0.95]))
def test_a_number_of_members_that_was_never_measured_is_bounded_by_what_was(
    sizes: set[int], monotone: Monotone, group: Group, by: float, quantile: float
) -> None:
    predictor = astray(fitted(frozenset(sizes), monotone).at(quantile), by)
    ((least, most),) = predictor.bounds_ns([group])
    expected = oracle(predictor, group)
    assert abs(least - expected[0]) <= 1
    assert abs(most - expected[1]) <= len(group)
    (believed,) = predictor.group_ns([group])
    (network,) = predictor._fitted_ns([group], [len(group)], len(group))
    if len(group) in sizes:
        assert believed == network
    else:
        assert believed == min(max(network, least), most)


@settings(max_examples=20, deadline=None)
@given(groups=st.lists(groups_of(1, 4), min_size=1, max_size=6), times=st.sampled_from([1, 8]))
def test_many_at_once_are_bounded_like_each_alone(groups: list[Group], times: int) -> None:
    predictor = fitted(frozenset({1, 2})).at(0.9)
    together = predictor.group_ns(groups * times)
    alone = [predictor.group_ns([group])[0] for group in groups]
    assert all(abs(a - b) <= 1 for a, b in zip(together, alone * times, strict=True))


def test_parts_that_are_slower_together_than_in_turn_raise_the_upper_bound() -> None:
    predictor = fitted(frozenset({1, 2}))
    pair = (Member(Work("c", 0, 4, 0, 4), 1),) * 2
    with_little = (*pair, Member(Work("a", 0, 1, 3, 4), 1))
    ((least, most),) = predictor.bounds_ns([with_little])
    in_turn = sum(predictor.group_ns([(member,)])[0] for member in with_little)
    assert predictor.group_ns([pair])[0] == least == most == predictor.group_ns([with_little])[0] > in_turn


def test_what_was_measured_of_a_changed_model_is_gone() -> None:
    predictor = fitted(frozenset({1, 2})).with_unseen([facts for facts in FACTS if facts.name in "abc"])
    assert predictor.sizes == frozenset()
    pair = (Member(Work("a", 0, 1, 0, 4), 1), Member(Work("b", 0, 1, 0, 4), 1))
    assert predictor.bounds_ns([pair]) == [(7 * MS, 10 * MS)]
    assert 7 * MS <= predictor.group_ns([pair])[0] <= 10 * MS
    assert predictor.group_ns([pair[:1]]) == [3 * MS], "alone as in the profile"


def test_large_groups_are_bounded_by_the_parts_of_their_longest_members() -> None:
    predictor = fitted(frozenset({1, 2}))
    group = tuple(Member(Work("abc"[at % 3], 0, 1 + at % 4, at % 3, 4), 1) for at in range(40))
    ((least, most),) = predictor.bounds_ns([group])
    longest = sorted(group, key=lambda member: -predictor.group_ns([(member,)])[0])[:8]
    assert least == max(predictor.group_ns(list(combinations(longest, 2))))
    assert most == pytest.approx(sum(predictor.group_ns([(member,)])[0] for member in group), abs=40)
    with pytest.raises(InvalidValueError, match="at least one member"):
        predictor.bounds_ns([()])
    assert predictor.bounds_ns([]) == []


def test_beliefs_say_which_numbers_of_members_were_not_measured_and_what_such_groups_take_at_most() -> None:
    fit = fitted(frozenset({1, 2})).at(0.95)
    predictor = GroupedPredictor({each.name: each.table for each in FACTS}, None, fit, 1.25)
    assert predictor.unmeasured(2) == frozenset()
    assert predictor.unmeasured(4) == {3, 4}
    single, pair, triple = (tuple(Member(Work(name, 0, 1, 0, 4), 1) for name in names) for names in ("a", "ab", "abc"))
    asked = [pair, triple, single]
    bounds = [(round(1.25 * least), round(1.25 * most)) for least, most in fit.bounds_ns(asked)]
    believed = predictor.group_ns(asked)
    assert bounds[1][0] <= believed[1] <= bounds[1][1]
    assert bounds[1][0] < bounds[1][1]
    for _ in range(2):
        assert predictor.longest_ns(asked) == [believed[0], bounds[1][1], believed[2]]
    assert predictor.longest_ns([pair]) == predictor.group_ns([pair])
    assert predictor.longest_ns([]) == []
    without = GroupedPredictor(predictor.tables)
    assert without.unmeasured(4) == frozenset(), "an assumption, for every number alike"
    assert without.longest_ns([triple]) == without.group_ns([triple])
