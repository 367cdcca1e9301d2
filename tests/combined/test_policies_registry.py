"""From names and options to policies: of this package and of others, and what is derived from measurements."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from cotenant.config import load_server_config
from cotenant.core.snapshot import DropRule
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.policies import policy_names
from cotenant.policies import registry as policies
from cotenant.policies.facts import LayoutFacts, PairLatency
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.registry import make_policy, options_of, policy_class, rebuild_policy, register, resolve_options
from cotenant.techniques.overlap.policy.barrier import needs_barrier, reserved_ns
from cotenant.techniques.overlap.policy.headroom_control import GPU_ENQUEUE_MS
from cotenant.types import Query, Tenant
from cotenant.work import Share
from scenario import CORES, MS, ONE_LANE, TWO_LANES, play, tables

FOREIGN = """
from dataclasses import dataclass
from typing import ClassVar
from cotenant.policies.ordered.fcfs import Fcfs

@dataclass(frozen=True, slots=True)
class Patient(Fcfs):
    name: ClassVar[str] = "patient"
"""


@dataclass(frozen=True, slots=True)
class Own(Edf):
    """A policy of a user: an option of its own, and one that it derives."""

    level: Annotated[int, Meta(ge=1, le=3)] = 1

    name: ClassVar[str] = "own"

    @classmethod
    def resolve(cls, options: dict[str, object], facts: LayoutFacts) -> dict[str, object]:
        return {"level": len(facts.lanes), **options}


@pytest.fixture
def known() -> Iterator[None]:
    before = dict(policies._KNOWN)
    yield
    policies._KNOWN.clear()
    policies._KNOWN.update(before)


@pytest.mark.usefixtures("known")
def test_a_policy_that_joins_is_made_resolved_served_and_replayed(tmp_path: Path) -> None:
    register(Own)
    register(Own)
    assert "level" in options_of(Own)
    options = resolve_options("own", {}, LayoutFacts(TWO_LANES))
    assert options == {"level": 2}
    assert resolve_options("own", {"level": 3}, LayoutFacts(TWO_LANES)) == {"level": 3}
    policy = make_policy("own", options, TWO_LANES)
    assert policy == Own(TWO_LANES, level=2)
    lanes = [{"cores": list(lane.cores), "device": lane.device} for lane in TWO_LANES]
    assert rebuild_policy("own", {"lanes": lanes, "drop": "hopeless", "level": 2}) == policy
    (tmp_path / "cotenant.toml").write_text("[policy]\nname = 'own'\nlevel = 4\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"policy.level: Expected `int` <= 3"):
        load_server_config(tmp_path / "cotenant.toml")
    answered = play(policy, [Tenant("a", 100 * MS)], tables({"a": 10 * MS}), [Query(0, "a", 0, 100 * MS, 0)])
    assert len(answered.outcomes) == 1


@pytest.mark.usefixtures("known")
def test_a_package_joins_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patient_policy.py").write_text(FOREIGN, encoding="utf-8")
    info = tmp_path / "patient-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: patient\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[cotenant.policies]\npatient = patient_policy:Patient\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert make_policy("patient", {"drop": "none"}, ONE_LANE).drop is DropRule.NONE
    finally:
        sys.modules.pop("patient_policy", None)


@pytest.mark.usefixtures("known")
def test_a_name_is_of_one_policy() -> None:
    @dataclass(frozen=True, slots=True)
    class Other(Edf):
        pass

    with pytest.raises(InvalidValueError, match="name is 'edf', expected one that no other policy has"):
        register(Other)
    assert policy_class("edf") is Edf


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_says_all_that_the_protocol_asks(name: str) -> None:
    policy = make_policy(name, {}, TWO_LANES)
    assert policy.spec.lanes == TWO_LANES
    assert {core for share in policy.spec.shares for core in share.cores} == set(CORES[:2])
    assert {type(policy.spec.grouped), type(policy.spec.preempt), type(policy.spec.tail_aware)} == {bool}
    assert policy.spec.drop is DropRule.HOPELESS


# --- the barrier -------------------------------------------------------------------------------------------------

latencies = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 100 * MS), min_size=1)


def pairs_of(alone: dict[str, int], slowdown: dict[tuple[str, str], int]) -> dict[tuple[str, str], PairLatency]:
    """Slowdowns in per cent."""
    return {
        (a, b): PairLatency((alone[a], alone[b]), max(alone[a], alone[b]) * slowdown.get((a, b), 100) // 100)
        for a, b in combinations_with_replacement(sorted(alone), 2)
    }


@given(latencies, st.integers(100, 300))
def test_where_all_partners_are_alike_nothing_is_gained_by_knowing_them(alone: dict[str, int], percent: int) -> None:
    every = dict.fromkeys(combinations_with_replacement(sorted(alone), 2), percent)
    pairs = {names: pair for names, pair in pairs_of(alone, every).items() if max(pair.alone_ns) * percent % 100 == 0}
    assert not needs_barrier(LayoutFacts(TWO_LANES, pairs))


@given(latencies, st.data())
def test_what_is_reserved_is_counted_by_hand(alone: dict[str, int], data: st.DataObject) -> None:
    names = list(combinations_with_replacement(sorted(alone), 2))
    pairs = pairs_of(alone, {pair: data.draw(st.integers(80, 400)) for pair in names})
    together, apart = reserved_ns(pairs)
    by_hand = 0.0
    for (a, b), pair in pairs.items():
        for name, own in zip((a, b), pair.alone_ns, strict=True):
            worst = max([1.0, *[each.slowdown for both, each in pairs.items() if name in both]])
            by_hand += own * worst
    assert together == sum(2 * pair.together_ns for pair in pairs.values())
    assert apart == pytest.approx(by_hand, rel=1e-9, abs=1)


def test_one_bad_neighbour_makes_knowing_the_partner_worth_a_barrier() -> None:
    alone = {"hog": 10 * MS, "mild": 10 * MS}
    assert needs_barrier(LayoutFacts(TWO_LANES, pairs_of(alone, {("hog", "hog"): 300, ("hog", "mild"): 120})))
    assert not needs_barrier(LayoutFacts(ONE_LANE, pairs_of(alone, {("hog", "hog"): 300, ("hog", "mild"): 120})))
    assert not needs_barrier(LayoutFacts(TWO_LANES))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_groups_are_enqueued_on_a_gpu_alone_where_there_are_groups(device: str) -> None:
    lanes = tuple(Share((core,), device) for core in range(2))
    bad = LayoutFacts(lanes, pairs_of({"hog": 10, "mild": 10}, {("hog", "hog"): 300, ("hog", "mild"): 120}))
    on_gpu = {"enqueue_ms": GPU_ENQUEUE_MS} if device != "cpu" else {}
    assert resolve_options("overlap", {}, bad) == {"barrier": True} | on_gpu
    assert resolve_options("overlap", {}, LayoutFacts(lanes)) == {"barrier": False}, "nothing was measured"
    assert resolve_options("overlap", {"barrier": True}, LayoutFacts(lanes)) == {"barrier": True} | on_gpu
    for said in (0.0, 3.0):
        assert resolve_options("overlap", {"enqueue_ms": said}, bad) == {"barrier": True, "enqueue_ms": said}
