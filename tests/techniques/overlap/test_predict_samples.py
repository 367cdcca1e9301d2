"""Which groups are measured, and the file that keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.predictor import Member
from cotenant.errors import InvalidValueError
from cotenant.techniques.overlap.group_samples import (
    FORMAT,
    GroupSample,
    SamplesError,
    SamplesHeader,
    load_samples,
    save_samples,
)
from cotenant.techniques.overlap.measure.group_sampler import sample_groups
from cotenant.types import Tenant
from cotenant.work import Work

TENANTS = [Tenant("b", 1, cuts=(0, 2, 5)), Tenant("a", 1, cuts=(0, 1, 2, 3, 9)), Tenant("c", 1)]
SIZES = {"a": (1, 2, 4), "b": (1,), "c": (8,)}
HEADER = SamplesHeader("f00", "2026-01-01T00:00:00+00:00", "cotenant profile models --groups", {"a": "d1"})


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    lanes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    slots=st.integers(0, 4),
)
def test_groups_are_those_that_the_scheduler_can_form(seed: int, lanes: list[int], slots: int) -> None:
    groups = sample_groups(TENANTS, SIZES, lanes, 40, seed, shapes={"a": 3}, slots=slots)
    assert groups == sample_groups(TENANTS, SIZES, lanes, 40, seed, shapes={"a": 3}, slots=slots)
    assert len(groups) == 40
    cuts = {tenant.name: tenant.cuts for tenant in TENANTS}
    for group in groups:
        names = [member.work.tenant for member in group]
        assert names == sorted(set(names))
        assert 1 <= len(group) <= min(slots or len(lanes), len(lanes), 3)
        assert sum(member.size for member in group) == sum(lanes)
        assert any(member.work.end == cuts[member.work.tenant][-1] for member in group)
        for member in group:
            assert {member.work.start, member.work.end} <= set(cuts[member.work.tenant])
            assert member.work.start < member.work.end
            assert member.work.items in SIZES[member.work.tenant]
            assert 0 <= member.work.shape < (3 if member.work.tenant == "a" else 1)


def test_all_sizes_of_groups_and_whole_models_occur() -> None:
    groups = sample_groups(TENANTS, SIZES, (1, 1, 2), 600, 0)
    assert {len(group) for group in groups} == {1, 2, 3}
    assert any(member == Member(Work("a", 0, 4, 0, 9), 4) for group in groups for member in group)
    assert {member.size for group in groups for member in group if len(group) == 2} == {1, 2, 3}
    assert sample_groups(TENANTS, SIZES, (1, 1), 20, 1) != sample_groups(TENANTS, SIZES, (1, 1), 20, 2)


def test_what_cannot_be_sampled_is_said() -> None:
    with pytest.raises(InvalidValueError, match="tenants"):
        sample_groups([], SIZES, (1,), 1, 0)
    with pytest.raises(InvalidValueError, match="tenants"):
        sample_groups([TENANTS[0], TENANTS[0]], SIZES, (1,), 1, 0)
    with pytest.raises(InvalidValueError, match="lanes"):
        sample_groups(TENANTS, SIZES, (), 1, 0)
    with pytest.raises(InvalidValueError, match="batch sizes of 'c'"):
        sample_groups(TENANTS, {"a": (1,), "b": (1,)}, (1,), 1, 0)
    member = Member(Work(TENANTS[0].name, 0, 1, 0, 5), 1)
    with pytest.raises(InvalidValueError, match="at least one"):
        GroupSample((), (5,))
    with pytest.raises(InvalidValueError, match="positive latencies"):
        GroupSample((member,), (5, 0))


def test_a_tenant_is_drawn_twice_only_where_that_is_asked_for() -> None:
    def most(repeat: bool) -> int:
        groups = sample_groups(TENANTS, SIZES, (1, 1), 200, 5, repeat=repeat)
        return max(len(group) - len({member.work.tenant for member in group}) for group in groups)

    assert most(repeat=False) == 0
    assert most(repeat=True) == 1


def test_the_file_gives_back_what_was_written(tmp_path: Path) -> None:
    samples = [GroupSample(group, (3, 5, 4)) for group in sample_groups(TENANTS, SIZES, (1, 1), 30, 4)]
    path = tmp_path / ".cotenant" / "groups.jsonl"
    save_samples(path, HEADER, samples)
    assert load_samples(path) == (HEADER, samples)
    assert len(path.read_text().splitlines()) == 31
    assert samples[0].median_ns == 4.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "line 1"),
        (b"{}\n", "line 1"),
        (b'{"fingerprint":"","created":"","command":"","digests":{},"format":"cotenant-groups/9"}\n', FORMAT),
        (b'HEADER\n{"members":[],"runs_ns":[1]}\n', "line 2"),
        (b'HEADER\n{"members":[["a",0,1,0,1,1]],"runs_ns":[1]}\n{"members":\n', "line 3"),
    ],
)
def test_a_damaged_file_is_refused_with_the_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "groups.jsonl"
    header = b'{"fingerprint":"","created":"","command":"","digests":{},"format":"%s"}' % FORMAT.encode()
    path.write_bytes(content.replace(b"HEADER", header))
    with pytest.raises(SamplesError, match=said):
        load_samples(path)


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(SamplesError, match="profile --groups"):
        load_samples(tmp_path / "none.jsonl")
