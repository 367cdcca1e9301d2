"""The fitted predictors of this technique, for the socket `registry.GROUP_MODELS`."""

from __future__ import annotations

from itertools import combinations_with_replacement
from pathlib import Path
from typing import cast

from cotenant.core.predictor import Member
from cotenant.policies.facts import PairLatency
from cotenant.predict.grouped import FittedGroups
from cotenant.predict.latency import LatencyModel
from cotenant.profiles.profile_file import Profile
from cotenant.techniques.overlap.measure.measured_groups import load_overlap
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_file import find_overlap, keep_overlap
from cotenant.work import Work


class OverlapModels:
    """Loads and saves predictors that `cotenant profile --groups` fits. Implements GroupModels."""

    def load(self, root: Path, profile: Profile, quantile: float) -> OverlapPredictor:
        """The predictor of a repository. Raises CotenantError with the command that makes one."""
        return load_overlap(root, profile, quantile=quantile)

    def keep(self, folder: Path, fitted: FittedGroups) -> None:
        """Save a predictor of this technique in a folder, under its key."""
        if isinstance(fitted, OverlapPredictor):
            keep_overlap(folder, fitted)

    def find(self, folder: Path, key: str, quantile: float) -> OverlapPredictor:
        """Read a predictor by its key. Raises OverlapFileError when there is none."""
        return find_overlap(folder, key, quantile)

    def pairs(self, fitted: FittedGroups, profile: Profile, cores: int) -> dict[tuple[str, str], PairLatency]:
        """Predicted latencies of each pair of tenants: see `pair_latencies`."""
        return pair_latencies(cast(OverlapPredictor, fitted), profile, cores)


MODELS = OverlapModels()


def pair_latencies(fitted: OverlapPredictor, profile: Profile, cores: int) -> dict[tuple[str, str], PairLatency]:
    """Predicted median latency of each pair of tenants: one row each at the first shape, `cores` cores each."""
    median = fitted.at(0.5)
    models = {name: LatencyModel(model.table("p50")) for name, model in profile.models.items()}
    found: dict[tuple[str, str], PairLatency] = {}
    for pair in combinations_with_replacement(sorted(profile.models), 2):
        members = tuple(Member(Work(name, 0, 1, 0, profile.models[name].cuts[-1]), cores) for name in pair)
        first, second = (models[name].latency_ns(0, 1, cores) for name in pair)
        found[pair] = PairLatency((first, second), median.group_ns([members])[0])
    return found
