"""What the server believes about groups: the predictor that was fitted to measured ones, if there is one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from cotenant.config import ServerConfig, device_cores, lanes_of
from cotenant.errors import CotenantError
from cotenant.policies import AnyPolicy
from cotenant.policies.overlap import Overlap
from cotenant.predict.grouped import GroupedPredictor
from cotenant.predict.overlap import OverlapPredictor
from cotenant.predict.overlap_features import TenantFacts
from cotenant.predict.overlap_file import keep_overlap
from cotenant.predict.table import LatencyTable
from cotenant.profile.groups import load_overlap, slowdowns
from cotenant.profile.table import load_profile
from cotenant.repository import STATE_FOLDER, profile_path
from cotenant.serve.driver import Driver
from cotenant.types import Partition

_LITTLE_INTERFERENCE = 1.5
"""Median slowdown up to which lanes are served on their own. Chosen by hand: a barrier, too, costs lanes time, on two
cores more than models cost each other that take 1.2 times as long side by side."""

_log = logging.getLogger("cotenant.groups")


def fitted_groups(root: Path, quantile: float) -> OverlapPredictor | None:
    """The predictor of a repository at this quantile; None, with a warning that says why, when there is none."""
    try:
        return load_overlap(root, load_profile(profile_path(root)), quantile=quantile)
    except CotenantError as error:
        _log.warning("%s; until then launches on disjoint cores are believed not to slow each other down", error)
        return None


def settle_barrier(root: Path, settings: ServerConfig) -> ServerConfig:
    """The settings with `policy.barrier` as the repository's measured groups ask for it, where it was left open."""
    section = settings.policy
    if section.name != Overlap.name or section.barrier is not None:
        return settings
    lanes = lanes_of(settings.device, device_cores(settings.device))
    fitted = fitted_groups(root, settings.predict.group_quantile)
    barrier = fitted is not None and len(lanes) > 1 and _interfere(root, fitted, lanes)
    return msgspec.structs.replace(settings, policy=msgspec.structs.replace(section, barrier=barrier))


def _interfere(root: Path, fitted: OverlapPredictor, lanes: Sequence[Partition]) -> bool:
    """Whether launches on different lanes slow each other down so much that groups have to be predicted as a whole."""
    found = slowdowns(fitted, load_profile(profile_path(root)), min(lane.size for lane in lanes))
    typical = median(found.values())
    needed = typical > _LITTLE_INTERFERENCE
    _log.info(
        "models side by side take %.2f times as long as the slower one alone (median of %d pairs): %s",
        *(typical, len(found), "groups start and end together" if needed else "every lane is served on its own"),
    )
    return needed


def foresee(driver: Driver, policy: AnyPolicy) -> None:
    """Have the groups predicted that the policy is likely to think of, before its decisions need them.

    Step by step, each between two events, since models may be served meanwhile.
    """
    predictor = driver.read(lambda engine: engine.predictor)
    if not isinstance(policy, Overlap) or not isinstance(predictor, GroupedPredictor) or predictor.fitted is None:
        return
    began_s, count = time.perf_counter(), 0
    steps = predictor.foresee(policy.likely_groups(driver.read(lambda engine: engine.tenants)))
    while done := driver.read(lambda _: next(steps, 0)):
        count += done
    _log.info("%d likely groups predicted ahead of time in %.0f ms", count, 1e3 * (time.perf_counter() - began_s))


def knowing(fitted: OverlapPredictor, root: Path, tenant: str, table: LatencyTable) -> OverlapPredictor:
    """The same predictor for a tenant as it is served, kept on disk so that a trace can be replayed."""
    facts = TenantFacts(tenant, table)
    if facts not in fitted.model.facts:
        fitted = fitted.with_unseen([facts])
    keep_overlap(root / STATE_FOLDER, fitted)
    return fitted
