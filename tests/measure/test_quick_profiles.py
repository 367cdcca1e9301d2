"""Quick profiles outlive the server that measured them, on the same processor and with the same libraries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.measure import quick_profiles
from cotenant.measure.load_spec import VersionSpec
from cotenant.measure.loader import load
from cotenant.measure.quick_profiles import QuickProfiles
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile
from cotenant.repository import find_versions, quick_profiles_path
from cotenant.work import Share
from repositories import write_good


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> VersionSpec:
    root = write_good(tmp_path_factory.mktemp("quick") / "models", "add_sub")
    return VersionSpec(str(root), find_versions(root, "add_sub")[0], (Share((0,)),))


@pytest.fixture(scope="module")
def profile(spec: VersionSpec) -> ModelProfile:
    report = load(spec)
    assert report.is_measured
    return report.profile


def test_a_load_with_a_known_profile_measures_nothing(spec: VersionSpec, profile: ModelProfile, tmp_path: Path) -> None:
    path = quick_profiles_path(tmp_path)
    QuickProfiles(path).add(profile)
    known = QuickProfiles(path).known
    assert known == (profile,)
    report = load(VersionSpec(spec.root, spec.found, spec.shares, known))
    assert (report.is_measured, report.profile.points) == (False, profile.points)


def test_another_processor_and_other_libraries_measure_anew(
    profile: ModelProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quick_profiles_path(tmp_path)
    QuickProfiles(path).add(profile)
    here = this_device()
    for other in (replace(here, processor="another"), replace(here, versions={**here.versions, "onnxruntime": "1.0"})):
        monkeypatch.setattr(quick_profiles, "this_device", lambda other=other: other)
        assert QuickProfiles(path).known == ()


def test_disturbed_profiles_and_damaged_files_are_not_kept(profile: ModelProfile, tmp_path: Path) -> None:
    path = quick_profiles_path(tmp_path)
    points = tuple(replace(point, cores=2, is_disturbed=True) for point in profile.points)
    busy = QuickProfiles(path)
    busy.add(replace(profile, points=points))
    assert len(busy.known) == 1
    assert not path.exists()
    on_one_core = replace(profile, points=tuple(replace(point, is_disturbed=True) for point in profile.points))
    busy.add(on_one_core)  # its latencies leave out what others took
    assert QuickProfiles(path).known == (on_one_core,)
    path.write_text("{", encoding="utf-8")
    assert QuickProfiles(path).known == ()


def test_there_is_a_limit(profile: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_profiles, "_MOST", 2)
    kept = QuickProfiles(None)
    for digest in ("a", "b", "a", "c"):
        kept.add(replace(profile, digest=digest))
    assert [each.digest for each in kept.known] == ["a", "c"]
