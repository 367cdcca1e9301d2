"""Campaigns of groups on this machine, small enough for tests."""

from __future__ import annotations

import os
from pathlib import Path

from cotenant.config import DeviceSection, ServerConfig
from cotenant.core.predictor import Member
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.profiles.profile_file import Profile
from cotenant.techniques.overlap.measure.measured_groups import GroupEffort, measure_groups

TINY = Effort(budget_s=0.0, min_runs=3, max_runs=3, warm_up=1)
GROUPS = GroupEffort(count=60, runs=3, warm_up=1)
CORES = tuple(sorted(os.sched_getaffinity(0)))
SETTINGS = ServerConfig(device=DeviceSection(cores=CORES[:2]))
SLOTS = min(2, len(CORES))


def profiled(root: Path) -> Profile:
    return profile_repository(root, SETTINGS, TINY, fresh=False, on_step=lambda *_: None)[0]


def measure(root: Path, profile: Profile, effort: GroupEffort = GROUPS) -> list[tuple[Member, ...]]:
    steps: list[tuple[int, int, str]] = []
    samples, errors = measure_groups(
        root, SETTINGS, profile, effort, fresh=False, on_step=lambda *step: steps.append(step)
    )
    assert errors == {}
    assert steps[-1][0] == steps[-1][1]
    assert all(len(sample.runs_ns) == effort.runs for sample in samples)
    return [sample.members for sample in samples]
