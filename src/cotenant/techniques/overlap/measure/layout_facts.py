"""What policies derive options from, out of a repository's profile and its measured groups."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path

from cotenant.config import PolicySection, ServerConfig
from cotenant.core.predictor import Member
from cotenant.errors import CotenantError
from cotenant.policies.facts import LayoutFacts, PairLatency
from cotenant.policies.registry import resolve_options
from cotenant.predict.conformal import SURE_QUANTILE
from cotenant.predict.table import interpolate
from cotenant.profile.profile_file import Profile, load_profile
from cotenant.repository import profile_path
from cotenant.repository.measured_content import changes, valid_profile
from cotenant.techniques.overlap.measure.groups import load_overlap
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.work import Share, Work

Fitted = tuple[OverlapPredictor, Profile]

_log = logging.getLogger("cotenant.groups")


def fitted_groups(root: Path) -> OverlapPredictor | None:
    """The predictor of a repository; None, with a warning that says why, when there is none.

    Models that changed since they were measured count as unseen, with a warning.
    """
    try:
        profile = valid_profile(root, stale=True)
        changed = {name: replace(profile.models[name], digest="") for name in changes(root, profile.contents)}
        known = replace(profile, models={**profile.models, **changed})
        return load_overlap(root, known, quantile=SURE_QUANTILE)
    except CotenantError as error:
        _log.warning("%s; until then launches on disjoint cores are believed not to slow each other down", error)
        return None


def pair_latencies(predictor: OverlapPredictor, profile: Profile, cores: int) -> dict[tuple[str, str], PairLatency]:
    """What is predicted of each pair of tenants, at the median: one row each at the first shape, `cores` cores each."""
    median = predictor.at(0.5)
    tables = {name: model.table("p50").rows for name, model in profile.models.items()}
    found: dict[tuple[str, str], PairLatency] = {}
    for pair in combinations_with_replacement(sorted(profile.models), 2):
        members = tuple(Member(Work(name, 0, 1, 0, profile.models[name].cuts[-1]), cores) for name in pair)
        first, second = (round(interpolate(tables[name], 0, 1, cores)) for name in pair)
        found[pair] = PairLatency((first, second), median.group_ns([members])[0])
    return found


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
        facts = LayoutFacts(lanes, pair_latencies(*found, min(lane.size for lane in lanes)))
    options = resolve_options(section.name, section.options, facts)
    text = ", ".join(f"{key} = {value}" for key, value in options.items() if key not in section.options)
    text += f", by {lanes[0].device} and {len(facts.pairs)} measured pairs of models"
    _log.info("policy %s: %s", section.name, text)
    return PolicySection(section.name, options)
