"""Which measured groups are near another one, against all ways to pair their members off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.predictor import Group, Member
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.overlap.group_samples import GroupSample
from cotenant.techniques.overlap.predict.measured import MeasuredGroups
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_features import MemberFeatures, TenantFacts
from cotenant.techniques.overlap.predict.overlap_file import OverlapFileError, read_overlap, save_overlap
from cotenant.techniques.overlap.predict.overlap_fit import FitSettings, fit_overlap
from cotenant.work import Work

MS = 1_000_000
TINY = FitSettings(width=4, steps=5, hidden_steps=1)
FACTS = tuple(
    TenantFacts(name, LatencyTable(tuple(LatencyRow(0, rows, 1, rows * MS) for rows in (1, 8)), (1.0,) * 8))
    for name in "ab"
)
"""A row takes a millisecond, and each of the eight units an eighth of it."""
FEATURES = MemberFeatures(FACTS, MS)


def member(tenant: str, items: int, start: int = 0, end: int = 8, size: int = 1) -> Member:
    return Member(Work(tenant, 0, items, start, end), size)


def fitted(groups: Sequence[Group]) -> OverlapPredictor:
    samples = [GroupSample(group, (MS, MS)) for group in groups]
    return fit_overlap(samples, FACTS, settings=TINY)


SMALL = fitted([(member("a", 1), member("b", 2))] * 10)


def knowing(measured: MeasuredGroups) -> OverlapPredictor:
    return OverlapPredictor(replace(SMALL.model, measured=measured))


@st.composite
def members(draw: st.DrawFn) -> Member:
    start = draw(st.integers(0, 7))
    end = draw(st.integers(start + 1, 8))
    return member(draw(st.sampled_from("ab")), draw(st.integers(1, 4)), start, end, draw(st.integers(1, 2)))


groups_ = st.lists(members(), min_size=1, max_size=4).map(tuple)


def are_near(one: Member, other: Member) -> bool:
    times = FEATURES.solo_ns(one) / FEATURES.solo_ns(other)
    units = set(range(one.work.start, one.work.end)) & set(range(other.work.start, other.work.end))
    return one.work.tenant == other.work.tenant and one.size == other.size and 0.5 <= times <= 2 and bool(units)


@given(measured=st.lists(groups_, min_size=1, max_size=12), group=groups_)
def test_near_ones_are_those_whose_members_can_be_paired_off(measured: list[Group], group: Group) -> None:
    known = MeasuredGroups.of(measured, "ab", FEATURES)
    oracle = [
        len(other) == len(group) and any(all(map(are_near, group, order)) for order in permutations(other, len(group)))
        for other in measured
    ]
    predictor = knowing(known)
    assert predictor.near(group) == predictor.near(group[::-1]) == sum(oracle)
    assert all(predictor.near(each) >= 1 for each in measured), "a measured group is near itself"
    assert known.sizes == {len(each) for each in measured}
    left = known.without([1])
    assert left.sizes == {len(each) for each in measured if all(one.work.tenant != "a" for one in each)}
    b_alone = (member("b", 1),)
    assert knowing(left).near(b_alone) == predictor.near(b_alone)


def test_what_is_near() -> None:
    measured = [(member("a", 2), member("b", 4)), (member("a", 2, 0, 4), member("b", 4))] * 5
    predictor = fitted(measured)
    assert predictor.near((member("b", 4), member("a", 2))) == 10, "half of the units take half as long"
    assert predictor.near((member("a", 4), member("b", 4))) == 5, "a quarter is too little"
    assert predictor.near((member("a", 2, 4, 8), member("b", 4))) == 5, "no units in common with the first half"
    assert predictor.near((member("a", 2), member("b", 4, size=2))) == 0, "on another share"
    assert predictor.near((member("a", 2), member("a", 4))) == 0
    assert predictor.near((member("a", 2), member("b", 4), member("b", 4))) == 0
    changed = predictor.with_unseen([FACTS[1]])
    assert changed.near((member("a", 2), member("b", 4))) == 0, "what was measured of another model says nothing"
    assert changed.model.measured.sizes == frozenset()


def test_what_was_measured_is_kept_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "overlap.npz"
    save_overlap(path, SMALL)
    again = read_overlap(path)
    assert again.key == SMALL.key
    assert again.model.measured.sizes == {2}
    assert again.near((member("a", 1), member("b", 2))) == 10
    damaged = knowing(MeasuredGroups(SMALL.model.measured.lengths[1:], SMALL.model.measured.members))
    assert damaged.key != SMALL.key
    save_overlap(path, damaged)
    with pytest.raises(OverlapFileError, match="expected 18 rows"):
        read_overlap(path)
