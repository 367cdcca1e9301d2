"""What the server believes about groups: the predictor that was fitted to measured ones, if there is one."""

from __future__ import annotations

import logging
from pathlib import Path

from cotenant.errors import CotenantError
from cotenant.predict.overlap import OverlapPredictor
from cotenant.predict.overlap_features import TenantFacts
from cotenant.predict.overlap_file import keep_overlap
from cotenant.predict.table import LatencyTable
from cotenant.profile.groups import load_overlap
from cotenant.profile.table import load_profile
from cotenant.repository import STATE_FOLDER, profile_path

_log = logging.getLogger("cotenant.groups")


def fitted_groups(root: Path, quantile: float) -> OverlapPredictor | None:
    """The predictor of a repository at this quantile; None, with a warning that says why, when there is none."""
    try:
        return load_overlap(root, load_profile(profile_path(root)), quantile=quantile)
    except CotenantError as error:
        _log.warning("%s; until then launches on disjoint cores are believed not to slow each other down", error)
        return None


def knowing(fitted: OverlapPredictor, root: Path, tenant: str, table: LatencyTable) -> OverlapPredictor:
    """The same predictor for a tenant as it is served, kept on disk so that a trace can be replayed."""
    facts = TenantFacts(tenant, table)
    if facts not in fitted.model.facts:
        fitted = fitted.with_unseen([facts])
    keep_overlap(root / STATE_FOLDER, fitted)
    return fitted
