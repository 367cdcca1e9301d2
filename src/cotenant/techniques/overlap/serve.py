"""Groups in the server: the fitted predictor, and latencies of likely groups predicted in advance."""

from __future__ import annotations

import logging
import time

from cotenant.core.engine import Engine
from cotenant.core.events import PredictorChanged
from cotenant.core.snapshot import Policy
from cotenant.measure.group_models import fitted_groups
from cotenant.predict.grouped import GroupedPredictor
from cotenant.repository import STATE_FOLDER
from cotenant.serve.models.served_models import ServedModel
from cotenant.serve.services import Host, Service
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_features import TenantFacts
from cotenant.techniques.overlap.predict.overlap_file import keep_overlap

_log = logging.getLogger("cotenant.groups")


class Groups(Service):
    """Applies the fitted predictor of groups to the served tenants, once a policy uses groups.

    Groups that the policy is likely to request are predicted before its decisions.
    """

    def __init__(self, server: Host) -> None:
        super().__init__(server)
        self._fitted: OverlapPredictor | None = None

    def start(self) -> None:
        """Read the fitted predictor."""
        if self.server.policy.spec.groups is not None:
            self._read()

    def added(self, served: ServedModel) -> None:
        """Add the model to the predictor, and use the predictor."""
        if self._fitted is not None:
            self._know(served)
            self.server.beliefs.believe_groups(self._fitted)

    def changing(self, policy: Policy) -> None:
        """Start to use the predictor, if the new policy is the first one with groups."""
        if policy.spec.groups is None or self._fitted is not None:
            return
        self._read()
        if self._fitted is None:
            return
        for served in self.server.served_models():
            self._know(served)
        beliefs, fitted = self.server.beliefs, self._fitted

        def believe(_: Engine) -> list[PredictorChanged]:
            beliefs.believe_groups(fitted)
            return [PredictorChanged(beliefs.predictor)]

        self.server.driver.post_from(believe)

    def settled(self) -> None:
        """Predict likely groups, in steps between events, since models may be served meanwhile."""
        driver, source = self.server.driver, self.server.policy.spec.groups
        predictor = driver.read(lambda engine: engine.predictor)
        if source is None or not isinstance(predictor, GroupedPredictor) or predictor.fitted is None:
            return
        began_s, count = time.perf_counter(), 0
        steps = predictor.prefetch(source.likely_groups(driver.read(lambda engine: engine.tenants)))
        while done := driver.read(lambda _: next(steps, 0)):
            count += done
        _log.info("%d likely groups predicted in advance in %.0f ms", count, 1e3 * (time.perf_counter() - began_s))

    def _read(self) -> None:
        fitted = fitted_groups(self.server.root)
        self._fitted = fitted if isinstance(fitted, OverlapPredictor) else None

    def _know(self, served: ServedModel) -> None:
        """Add a served tenant to the predictor, which is kept on disk for the replay of traces."""
        assert self._fitted is not None
        facts = TenantFacts(served.tenant.name, served.profile.table("p50"))
        if facts not in self._fitted.model.facts:
            self._fitted = self._fitted.with_unseen([facts])
        keep_overlap(self.server.root / STATE_FOLDER, self._fitted)
