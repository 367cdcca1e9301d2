"""What the server believes of latencies: the profile's tables, corrected by what is observed."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.core.actions import Action, Launch, Respond
from cotenant.core.events import Event, LaunchEnded, PredictorChanged, QueryArrived
from cotenant.execute.protocol import Timing
from cotenant.predict.calibration import Calibration
from cotenant.predict.table import LatencyTable, TablePredictor
from cotenant.types import Outcome, Query


@dataclass(frozen=True, slots=True)
class _Belief:
    """What was predicted of a launch, with which factor, and when it began."""

    tenant: str
    predicted_ns: int
    started_ns: int
    factor: float


class Beliefs:
    """Holds the predictor in use and, as an observer of the driver, replaces it when it turns out to be off.

    `widest` is the size in cores of the largest partition. With `adapt` off the profile is believed as it is.
    Everything but the constructor is called under the driver's lock.
    """

    def __init__(self, widest: int, *, adapt: bool) -> None:
        self.predictor = TablePredictor({})
        self._widest = widest
        self._adapt = adapt
        self._tables: dict[str, LatencyTable] = {}
        self._calibration = Calibration()
        self._launched: dict[int, _Belief] = {}

    def add(self, tenant: str, table: LatencyTable) -> None:
        """Believe this table of a tenant from now on; what was observed under the name before is forgotten."""
        self._calibration.forget(tenant)
        self._launched = {launch: belief for launch, belief in self._launched.items() if belief.tenant != tenant}
        self._tables[tenant] = table
        self.predictor = TablePredictor(self._tables, self._calibration.scales)

    def alone_ns(self, tenant: str, shape: int = 0, items: int = 1) -> int:
        """Latency of the whole model in the largest partition: the best that a query can get."""
        units = self.predictor.unit_count(tenant)
        return self.predictor.latency_ns(tenant, shape, items, 0, units, self._widest)

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """See Observer: compare each launch with what was believed of it."""
        if not self._adapt:
            return None
        for action in actions:
            if isinstance(action, Launch):
                factor = self._calibration.factor(action.tenant)
                self._launched[action.id] = _Belief(action.tenant, action.predicted_ns, time_ns, factor)
        scales = None
        if isinstance(event, LaunchEnded):
            belief = self._launched.pop(event.launch, None)
            if event.error is None and belief is not None:
                observed = time_ns - belief.started_ns
                scales = self._calibration.observe(belief.tenant, belief.predicted_ns, observed, belief.factor)
        elif isinstance(event, QueryArrived) and _is_refused(actions):
            scales = self._relaxed(event.query)
        if scales is None:
            return None
        self.predictor = self.predictor.scaled(scales)
        return PredictorChanged(self.predictor)

    def _relaxed(self, query: Query) -> dict[str, float] | None:
        """New factors, if it was the belief in a slow model that refused this query."""
        if query.tenant not in self._tables:
            return None
        is_believed_slow = self.alone_ns(query.tenant, query.shape, query.items) > query.deadline_ns - query.arrival_ns
        return self._calibration.relax(query.tenant) if is_believed_slow else None


def _is_refused(actions: list[Action]) -> bool:
    return any(isinstance(action, Respond) and action.outcome is Outcome.REJECTED for action in actions)
