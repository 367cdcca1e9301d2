"""Profile files with made-up latencies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cotenant.profile.device import this_device
from cotenant.profile.profile_file import ModelProfile, Point, Profile, save_profile


def write_profile(path: Path, latencies_ns: Mapping[str, Mapping[int, Mapping[int, int]]]) -> Path:
    """A profile that says these latencies, by model, cores (or percents) and rows, at every quantile."""
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
    save_profile(path, Profile(this_device(), "2026-01-01", "a test", models))
    return path
