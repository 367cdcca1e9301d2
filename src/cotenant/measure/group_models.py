"""Predictors fitted to measured groups: their registry, and policy options derived from them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cotenant import registry
from cotenant.config import PolicySection, ServerConfig
from cotenant.errors import CotenantError
from cotenant.policies.facts import LayoutFacts, PairLatency
from cotenant.policies.registry import resolve_options
from cotenant.predict.conformal import UPPER_QUANTILE
from cotenant.predict.grouped import FittedGroups
from cotenant.profiles.profile_file import Profile, load_profile
from cotenant.repository import profile_path
from cotenant.repository.measured_content import changes, valid_profile
from cotenant.work import Share

Fitted = tuple[FittedGroups, Profile]
Pairs = dict[tuple[str, str], PairLatency]

_log = logging.getLogger("cotenant.groups")


class GroupModels(Protocol):
    """Fits and stores predictors of groups. A package joins by an entry point of `registry.GROUP_MODELS`."""

    def load(self, root: Path, profile: Profile, quantile: float) -> FittedGroups:
        """The predictor of a repository. Raises CotenantError with a remedy when there is none."""

    def keep(self, folder: Path, fitted: FittedGroups) -> None:
        """Store a predictor in a folder, for replays of traces that were decided with it."""

    def find(self, folder: Path, key: str, quantile: float) -> FittedGroups:
        """The predictor that `keep` stored under a key. Raises CotenantError when it is missing."""

    def pairs(self, fitted: FittedGroups, profile: Profile, cores: int) -> Pairs:
        """Median predictions of each pair of tenants: one row each at the first shape, on `cores` cores each."""


class NoGroupModels:
    """Used when no package predicts groups. Implements GroupModels."""

    def load(self, root: Path, profile: Profile, quantile: float) -> FittedGroups:
        """Raises CotenantError."""
        raise CotenantError("no installed package predicts groups")

    def keep(self, folder: Path, fitted: FittedGroups) -> None:
        """Do nothing."""

    def find(self, folder: Path, key: str, quantile: float) -> FittedGroups:
        """Raises CotenantError."""
        raise CotenantError("no installed package predicts groups")

    def pairs(self, fitted: FittedGroups, profile: Profile, cores: int) -> Pairs:
        """No predictions."""
        return {}


def group_models() -> GroupModels:
    """The group models of the installed packages."""
    found: GroupModels = next(iter(registry.load_all(registry.GROUP_MODELS).values()), NoGroupModels())
    return found


def fitted_groups(root: Path) -> FittedGroups | None:
    """The predictor of a repository; None, with a warning that gives the reason, without one.

    Models that changed since they were measured count as unknown, with a warning.
    """
    try:
        profile = valid_profile(root, stale=True)
        changed = {name: replace(profile.models[name], digest="") for name in changes(root, profile.contents)}
        known = replace(profile, models={**profile.models, **changed})
        return group_models().load(root, known, UPPER_QUANTILE)
    except CotenantError as error:
        _log.warning("%s; until then launches on disjoint cores are assumed not to slow each other down", error)
        return None


def resolved(root: Path, settings: ServerConfig, lanes: tuple[Share, ...]) -> PolicySection:
    """`[policy]` with the options that the policy derives from measurements of this repository, for these lanes.

    Without measured and fitted groups, options are derived from the lanes alone.
    """

    def found() -> Fitted | None:
        fitted = fitted_groups(root)
        return None if fitted is None else (fitted, load_profile(profile_path(root)))

    return resolved_by(settings.policy, lanes, found)


def resolved_by(section: PolicySection, lanes: tuple[Share, ...], find: Callable[[], Fitted | None]) -> PolicySection:
    """Like `resolved`, by the result of `find` (a predictor and its profile), called only for missing options."""
    facts = LayoutFacts(lanes)
    if resolve_options(section.name, section.options, facts) == section.options:
        return section
    found = find()
    if found is not None:
        facts = LayoutFacts(lanes, group_models().pairs(*found, min(lane.size for lane in lanes)))
    options = resolve_options(section.name, section.options, facts)
    text = ", ".join(f"{key} = {value}" for key, value in options.items() if key not in section.options)
    text += f", derived from {lanes[0].device} and {len(facts.pairs)} measured pairs of models"
    _log.info("policy %s: %s", section.name, text)
    return PolicySection(section.name, options)
