"""Groups in the server: predicted ahead of time, and of tenants as they are served."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from cotenant.core.engine import Engine
from cotenant.core.events import PredictorChanged
from cotenant.core.snapshot import GroupPolicy, Policy
from cotenant.predict.online import OnlineModel
from cotenant.profile.latency_table import LatencyTable
from cotenant.repository import STATE_FOLDER
from cotenant.serve.engine.driver import Driver
from cotenant.serve.models.served_models import ServedModel
from cotenant.techniques.overlap.predict.grouped import GroupedPredictor
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_features import TenantFacts
from cotenant.techniques.overlap.predict.overlap_file import keep_overlap
from cotenant.techniques.placement.measure.layout_facts import fitted_groups

_log = logging.getLogger("cotenant.groups")


def foresee(driver: Driver, policy: Policy) -> None:
    """Have the groups predicted that the policy is likely to think of, before its decisions need them.

    Step by step, each between two events, since models may be served meanwhile.
    """
    predictor = driver.read(lambda engine: engine.predictor)
    if not policy.asks_groups or not isinstance(predictor, GroupedPredictor) or predictor.fitted is None:
        return
    began_s, count = time.perf_counter(), 0
    steps = predictor.foresee(cast(GroupPolicy, policy).likely_groups(driver.read(lambda engine: engine.tenants)))
    while done := driver.read(lambda _: next(steps, 0)):
        count += done
    _log.info("%d likely groups predicted ahead of time in %.0f ms", count, 1e3 * (time.perf_counter() - began_s))


def learn_groups(
    driver: Driver, beliefs: OnlineModel, root: Path, models: Iterable[ServedModel]
) -> OverlapPredictor | None:
    """Have the measured groups of a repository believed by a server that has not asked for groups until now; None, with
    a warning, where there are none."""
    fitted = fitted_groups(root)
    if fitted is None:
        return None
    for served in models:
        fitted = knowing(fitted, root, served.tenant.name, served.profile.table("p50"))

    def believe(_: Engine) -> PredictorChanged:
        beliefs.believe_groups(fitted)
        return PredictorChanged(beliefs.predictor)

    driver.follow(believe)
    return fitted


def knowing(fitted: OverlapPredictor, root: Path, tenant: str, table: LatencyTable) -> OverlapPredictor:
    """The same predictor for a tenant as it is served, kept on disk so that a trace can be replayed."""
    facts = TenantFacts(tenant, table)
    if facts not in fitted.model.facts:
        fitted = fitted.with_unseen([facts])
    keep_overlap(root / STATE_FOLDER, fitted)
    return fitted
