"""Latencies of groups in partitions of cores, from a repository's measured groups (`cotenant profile --groups`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path

from cotenant.core.predictor import Group, Member
from cotenant.profiles.profile_file import QUANTILES, Profile
from cotenant.repository import overlap_path
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_file import read_overlap
from cotenant.techniques.partitions.plan.types import CoRunner
from cotenant.work import Work

LEAST_NEAR = 1
"""Least number of measured groups near a planned one (`MeasuredGroups.near`)."""


class ProfiledGroups:
    """Latencies of groups of whole models by the fitted predictor, if measured groups are near. Implements GroupTimes.

    `tenants`: the tenant of each model's name in plans. A member has the slowest of its declared shapes.
    """

    def __init__(self, fitted: OverlapPredictor, tenants: Mapping[str, str]) -> None:
        self._fitted = fitted
        self._tenants = dict(tenants)
        self._shapes = {facts.name: sorted({row.shape for row in facts.table.rows}) for facts in fitted.model.facts}
        measured = fitted.model.measured
        sizes = iter(measured.members[:, 1].astype(int).tolist())
        self._divided = {tuple(sorted(next(sizes) for _ in range(length))) for length in measured.lengths.tolist()}

    @property
    def count(self) -> int:
        """Number of measured groups of two and more members."""
        return int((self._fitted.model.measured.lengths > 1).sum())

    def divisions(self, size: int, members: int) -> Sequence[tuple[int, ...]]:
        """Measured combinations of part sizes that fit into a partition of `size`."""
        fitting = [each for each in self._divided if len(each) == members and sum(each) <= size]
        return sorted({order for each in fitting for order in permutations(each)})

    def group_ns(self, members: Sequence[CoRunner], size: int) -> int | None:
        """Predicted latency of a group in ns; None for unknown models or without a measured group near it."""
        group: Group = tuple(sorted(self._member(*member) for member in members if member[0] in self._tenants))
        if len(group) < len(members) or self._fitted.near(group) < LEAST_NEAR:
            return None
        (found,) = self._fitted.group_ns([group])
        return found

    def _member(self, model: str, batch: int, size: int) -> Member:
        tenant = self._tenants[model]
        units = self._fitted.unit_count(tenant)
        works = [Work(tenant, shape, batch, 0, units) for shape in self._shapes[tenant]]
        return Member(max(works, key=lambda work: self._fitted.latency_ns(work, size)), size)


def read_groups(root: Path, profile: Profile, quantile: str, names: Mapping[str, str]) -> ProfiledGroups | None:
    """The groups of a repository at one of QUANTILES; None if none were measured on the profile's device.

    `names`: the tenant of each model's name in plans. Models that changed since the measurement are left out. Raises
    OverlapFileError for a file that cannot be used.
    """
    assert quantile in QUANTILES
    if not overlap_path(root).exists():
        return None
    fitted = read_overlap(overlap_path(root), int(quantile[1:]) / 100)
    if fitted.model.fingerprint != profile.device.fingerprint:
        return None
    then = dict(fitted.model.digests)
    same = {name for name, model in profile.models.items() if then.get(name) == model.digest}
    return ProfiledGroups(fitted, {name: tenant for name, tenant in names.items() if tenant in same})
