"""Profile files with made-up latencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Point, Profile, save_profile
from cotenant.repository import STATE_FOLDER, profile_path, readable_versions
from cotenant.repository.measured_content import content_of


def save_current(root: Path, profile: Profile) -> None:
    """Save a profile of a repository that says to be of the models as they are there now."""
    now = {each.tenant: content_of(each) for each in readable_versions(root)}
    models = {name: replace(model, content=now.get(name, model.content)) for name, model in profile.models.items()}
    save_profile(profile_path(root), replace(profile, models=models))


def write_profile(path: Path, latencies_ns: Mapping[str, Mapping[int, Mapping[int, int]]], kind: str = "cpu") -> Path:
    """A profile with these latencies, by model, cores (or percents) and rows, at every quantile.

    That of a repository is of its models as they are."""
    models = {
        model: ModelProfile(
            "digest",
            tuple(
                Point(0, rows, size, 9, ns, ns, ns, ns) for size, points in sizes.items() for rows, ns in points.items()
            ),
            (1,),
            (0, 1),
            1.0,
        )
        for model, sizes in latencies_ns.items()
    }
    device = this_device()
    device = replace(device, versions=device.versions | ({"cuda": "12"} if kind == "gpu" else {}))
    profile = Profile(device, "2026-01-01", "a test", models)
    if path.parent.name == STATE_FOLDER:
        save_current(path.parent.parent, profile)
    else:
        save_profile(path, profile)
    return path
