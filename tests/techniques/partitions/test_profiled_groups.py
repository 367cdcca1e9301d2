"""What plans are told of groups that were measured in a repository, and the plans that come of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.core.predictor import Group, Member
from cotenant.profiles.profile_file import Profile, load_profile
from cotenant.repository import overlap_path, profile_path
from cotenant.techniques.overlap.group_samples import GroupSample
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_features import TenantFacts
from cotenant.techniques.overlap.predict.overlap_file import save_overlap
from cotenant.techniques.overlap.predict.overlap_fit import FitSettings, fit_overlap
from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.profiled_groups import ProfiledGroups, read_groups
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.sources import basis_of, read_profile_costs
from cotenant.techniques.partitions.plan.types import DeviceType, Load, Plan
from cotenant.work import Work
from profile_files import write_profile
from repositories import scaled, write_model

MS = 1_000_000
NAMES = ("a", "b", "c")
CPU = DeviceType("cpu", ((2,),), 1 << 40)


def times() -> dict[str, dict[int, dict[int, int]]]:
    """Two cores are hardly quicker than one."""
    return {name: {1: {1: 10 * MS, 2: 20 * MS}, 2: {1: 9 * MS, 2: 18 * MS}} for name in NAMES}


def group(*members: tuple[str, int], size: int = 1) -> Group:
    return tuple(Member(Work(name, 0, rows, 0, 1), size) for name, rows in members)


def fitted(profile: Profile) -> OverlapPredictor:
    """Pairs of a and b in any batches take what the longer one takes alone, and a tenth; c was in no group."""
    facts = [TenantFacts(name, model.table("p50")) for name, model in sorted(profile.models.items())]
    samples = []
    for mine in (1, 2):
        samples += [GroupSample(group((name, mine)), (10 * mine * MS,) * 3) for name in "ab"]
        samples += [GroupSample(group((name, mine), size=2), (9 * mine * MS,) * 3) for name in "ab"]
        samples += [
            GroupSample(group(("a", mine), ("b", theirs)), (11 * max(mine, theirs) * MS,) * 3) for theirs in (1, 2)
        ]
    digests = tuple((name, model.digest) for name, model in profile.models.items())
    settings = FitSettings(width=16, steps=400, hidden_steps=20)
    return fit_overlap(samples * 4, facts, settings=settings, fingerprint=profile.device.fingerprint, digests=digests)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        write_model(folder, name, "[tenant]\nslo_ms = 50\n", {1: lambda: scaled(2.0)})
    profile_path(folder).parent.mkdir(exist_ok=True)
    write_profile(profile_path(folder), times())
    save_overlap(overlap_path(folder), fitted(load_profile(profile_path(folder))))
    return folder


def known(root: Path, **changes: object) -> ProfiledGroups | None:
    profile = replace(load_profile(profile_path(root)), **changes)  # type: ignore[arg-type]
    return read_groups(root, profile, "p95", {name: name for name in profile.models})


def test_only_groups_near_measured_ones_are_known(root: Path) -> None:
    groups = known(root)
    assert groups is not None
    assert groups.count == 16
    assert list(groups.divisions(2, 2)) == list(groups.divisions(4, 2)) == [(1, 1)]
    assert list(groups.divisions(1, 2)) == list(groups.divisions(2, 3)) == []
    took = groups.group_ns([("a", 2, 1), ("b", 1, 1)], 2)
    assert took == pytest.approx(22 * MS, rel=0.25)
    assert groups.group_ns([("b", 1, 1), ("a", 2, 1)], 2) == took
    assert groups.group_ns([("a", 1, 1), ("c", 1, 1)], 2) is None, "c was in no group"
    assert groups.group_ns([("a", 1, 1), ("a", 1, 1)], 2) is None, "nor were two of a together"
    assert groups.group_ns([("a", 9, 1), ("b", 1, 1)], 2) is None, "no batch near 9 was"
    assert groups.group_ns([("a", 1, 1), ("nobody", 1, 1)], 2) is None


def test_groups_of_changed_models_and_of_other_devices_are_not_used(root: Path) -> None:
    profile = load_profile(profile_path(root))
    changed = known(root, models=profile.models | {"b": replace(profile.models["b"], digest="other")})
    assert changed is not None
    assert changed.group_ns([("a", 1, 1), ("b", 1, 1)], 2) is None
    assert known(root, device=replace(profile.device, fingerprint="other")) is None
    assert read_groups(root.parent, profile, "p95", {}) is None


def test_a_plan_of_a_repository_has_groups_where_they_serve_more(root: Path) -> None:
    tables = read_profile_costs(root)
    assert any(note.startswith("groups: 16 measured") for note in tables.notes)
    basis = basis_of({"": tables}, (CPU,), NAMES)
    loads = [Load(name, name, 60.0, 200 * MS) for name in "ab"]
    plan = Optimal(time_limit_s=0.1, saving_s=0.0).plan(loads, basis.devices, basis.costs)
    assert isinstance(plan, Plan), "in turn they take 18 ms for every 16.7"
    (step,) = plan.devices[0].partitions[0].round.steps
    assert [(slot.tenant, slot.group, slot.size) for slot in step] == [("a", 1, 1), ("b", 1, 1)]
    assert check_plan(plan, loads, basis.devices, basis.costs) == ()
    in_turn = basis_of({"": replace(tables, groups=None, tail_groups=None)}, (CPU,), NAMES)
    assert not isinstance(Optimal(time_limit_s=0.1, saving_s=0.0).plan(loads, basis.devices, in_turn.costs), Plan)
    assert check_plan(plan, loads, basis.devices, in_turn.costs)[0].kind == "group"
    assert in_turn.fingerprint == basis.fingerprint


def test_without_measured_groups_the_answer_says_so(tmp_path: Path) -> None:
    write_model(tmp_path, "a", "[tenant]\nslo_ms = 50\n", {1: lambda: scaled(2.0)})
    profile_path(tmp_path).parent.mkdir(exist_ok=True)
    write_profile(profile_path(tmp_path), {"a": times()["a"]})
    tables = read_profile_costs(tmp_path)
    assert tables.groups is None
    assert "groups: not measured; the slots of a partition run in turn" in tables.notes
