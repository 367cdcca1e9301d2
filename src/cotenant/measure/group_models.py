"""Predictors fitted to measured groups: where they come from, and what policies derive options from them."""

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
from cotenant.profile.profile_file import Profile, load_profile
from cotenant.repository import profile_path
from cotenant.repository.measured_content import changes, valid_profile
from cotenant.work import Share

Fitted = tuple[FittedGroups, Profile]
Pairs = dict[tuple[str, str], PairLatency]

_log = logging.getLogger("cotenant.groups")


class GroupModels(Protocol):
    """The predictors of groups that a package fits and keeps. A package joins by `registry.GROUP_MODELS`."""

    def load(self, root: Path, profile: Profile, quantile: float) -> FittedGroups:
        """The predictor of a repository. Raises CotenantError with what to do when there is none."""

    def keep(self, folder: Path, fitted: FittedGroups) -> None:
        """Keep a predictor in a folder, for the replay of traces that were decided with it."""

    def find(self, folder: Path, key: str, quantile: float) -> FittedGroups:
        """What `keep` has written under a key. Raises CotenantError when it is not there."""

    def pairs(self, fitted: FittedGroups, profile: Profile, cores: int) -> Pairs:
        """What is predicted of each pair of tenants, at the median: one row each at the first shape, on `cores` cores
        each."""


class NoGroupModels:
    """Stands in where no package predicts groups. Implements GroupModels."""

    def load(self, root: Path, profile: Profile, quantile: float) -> FittedGroups:
        """Raises CotenantError."""
        raise CotenantError("no installed package predicts groups")

    def keep(self, folder: Path, fitted: FittedGroups) -> None:
        """There is nothing to keep."""

    def find(self, folder: Path, key: str, quantile: float) -> FittedGroups:
        """Raises CotenantError."""
        raise CotenantError("no installed package predicts groups")

    def pairs(self, fitted: FittedGroups, profile: Profile, cores: int) -> Pairs:
        """None."""
        return {}


def group_models() -> GroupModels:
    """What the installed packages have."""
    found: GroupModels = next(iter(registry.load_all(registry.GROUP_MODELS).values()), NoGroupModels())
    return found


def fitted_groups(root: Path) -> FittedGroups | None:
    """The predictor of a repository; None, with a warning that says why, when there is none.

    Models that changed since they were measured count as unseen, with a warning.
    """
    try:
        profile = valid_profile(root, stale=True)
        changed = {name: replace(profile.models[name], digest="") for name in changes(root, profile.contents)}
        known = replace(profile, models={**profile.models, **changed})
        return group_models().load(root, known, UPPER_QUANTILE)
    except CotenantError as error:
        _log.warning("%s; until then launches on disjoint cores are believed not to slow each other down", error)
        return None


def resolved(root: Path, settings: ServerConfig, lanes: tuple[Share, ...]) -> PolicySection:
    """`[policy]` with what the policy derives from measurements of this repository, for these lanes.

    Where no groups were measured and fitted it derives it from that: nothing is known of what slows what down.
    """

    def found() -> Fitted | None:
        fitted = fitted_groups(root)
        return None if fitted is None else (fitted, load_profile(profile_path(root)))

    return resolved_by(settings.policy, lanes, found)


def resolved_by(section: PolicySection, lanes: tuple[Share, ...], find: Callable[[], Fitted | None]) -> PolicySection:
    """The same by what `find` gives: a fitted predictor with its profile. It is asked where something was left open."""
    facts = LayoutFacts(lanes)
    if resolve_options(section.name, section.options, facts) == section.options:
        return section
    found = find()
    if found is not None:
        facts = LayoutFacts(lanes, group_models().pairs(*found, min(lane.size for lane in lanes)))
    options = resolve_options(section.name, section.options, facts)
    text = ", ".join(f"{key} = {value}" for key, value in options.items() if key not in section.options)
    text += f", by {lanes[0].device} and {len(facts.pairs)} measured pairs of models"
    _log.info("policy %s: %s", section.name, text)
    return PolicySection(section.name, options)
