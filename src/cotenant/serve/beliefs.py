"""What the server believes of latencies: the profile's tables and the fitted groups, corrected by what is observed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cotenant.core.actions import Action, Launch, Respond
from cotenant.core.events import Event, LaunchEnded, PredictorChanged, QueryArrived
from cotenant.execute.protocol import Timing
from cotenant.frozen import quick_init
from cotenant.predict.calibration import Calibration
from cotenant.predict.conformal import AdaptiveConformal
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.predict.margin import NO_MARGIN, SafetyMargin
from cotenant.predict.table import LatencyTable, TablePredictor
from cotenant.serve.caution import Caution
from cotenant.types import Outcome, Query, StageQuery


@quick_init
@dataclass(frozen=True, slots=True)
class _Belief:
    """What was predicted of a launch alone, with which factor, and when it began."""

    tenant: str
    predicted_ns: int
    started_ns: int
    factor: float


@dataclass(slots=True)
class _Group:
    """A group under way: what was predicted of it, with which factor, and the launches that have not ended."""

    predicted_ns: int
    started_ns: int
    factor: float
    left: int
    has_failed: bool = False


class Beliefs:
    """Holds the predictor in use and, as an observer of the driver, replaces it when it turns out to be off.

    `widest` is the size in cores of the largest partition. With `adapt` off the profile is believed as it is. With
    `grouped` latencies of groups are believed, at `quantile`, by what was fitted to measured ones if there is any;
    they are followed as a whole, and single launches only where a group has one member. With
    `caution` predictors have its safety margin, and single launches are told to it.
    Everything but the constructor is called under the driver's lock.
    """

    def __init__(
        self, widest: int, *, adapt: bool, grouped: bool = False, quantile: float = 0.95, caution: Caution | None = None
    ) -> None:
        self.predictor = GroupedPredictor({}) if grouped else TablePredictor({})
        self.widest = widest
        self._adapt = adapt
        self._caution = caution
        self._tables: dict[str, LatencyTable] = {}
        self._calibration = Calibration()
        self._margin = AdaptiveConformal(level=quantile)
        self._launched: dict[int, _Belief] = {}
        self._groups: dict[int, _Group] = {}
        self._group_of: dict[int, int] = {}

    def add(self, tenant: str, table: LatencyTable) -> None:
        """Believe this table of a tenant from now on; what was observed under the name before is forgotten."""
        self._calibration.forget(tenant)
        self._launched = {launch: belief for launch, belief in self._launched.items() if belief.tenant != tenant}
        self._tables[tenant] = table
        if self._caution is not None:
            self._caution.forget(tenant)
        scales = self._calibration.scales
        if isinstance(self.predictor, GroupedPredictor):
            self.predictor = self.predictor.with_beliefs(self._tables, scales, self.predictor.factor)
        else:
            self.predictor = TablePredictor(self._tables, scales).with_margin(self._margin_now())

    def believe_groups(self, fitted: FittedGroups | None) -> None:
        """Believe what was fitted to measured groups from now on. Only with `grouped`."""
        self.predictor = GroupedPredictor(self._tables, self._calibration.scales, fitted, self._margin.factor)

    def doubt(self, tenants: Iterable[str]) -> PredictorChanged | None:
        """Queries were refused as these tenants are believed to be too slow together: believe a little less of it."""
        scales: dict[str, float] | None = None
        for tenant in tenants:
            scales = self._calibration.relax(tenant) or scales
        return PredictorChanged(self.predictor) if self._adapt and self._use(scales) else None

    def alone_ns(self, tenant: str, shape: int = 0, items: int = 1) -> int:
        """Latency of the whole model in the largest partition: the best that a query can get."""
        units = self.predictor.unit_count(tenant)
        return self.predictor.latency_ns(tenant, shape, items, 0, units, self.widest)

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """See Observer: compare each launch, or each group, with what was believed of it."""
        if not self._adapt:
            return None
        if isinstance(self.predictor, GroupedPredictor):
            changed = self._follow_group(time_ns, event, self.predictor)
            self._remember([action for action in actions if isinstance(action, Launch)], time_ns, self.predictor)
        else:
            changed = self._follow_launch(time_ns, event)
            for action in actions:
                if isinstance(action, Launch):
                    factor = self._calibration.factor(action.tenant)
                    self._launched[action.id] = _Belief(action.tenant, action.predicted_ns, time_ns, factor)
        if actions and isinstance(event, QueryArrived) and _is_refused(actions):
            changed = self._use(self._relaxed(event.query))
        return PredictorChanged(self.predictor) if changed else None

    def _remember(self, started: list[Launch], time_ns: int, predictor: GroupedPredictor) -> None:
        """Keep what is believed of a group that starts, and of its launch alone if there is only one."""
        for launch in started:
            self._group_of[launch.id] = launch.group
            self._groups[launch.group] = _Group(launch.predicted_ns, time_ns, predictor.factor, len(started))
        if len(started) == 1:
            (launch,) = started
            alone = predictor.latency_ns(
                launch.tenant, launch.shape, launch.items, launch.start, launch.end, launch.partition.size
            )
            factor = self._calibration.factor(launch.tenant)
            self._launched[launch.id] = _Belief(launch.tenant, alone, time_ns, factor)

    def _follow_group(self, time_ns: int, event: Event, predictor: GroupedPredictor) -> bool:
        changed = self._follow_launch(time_ns, event)
        if not isinstance(event, LaunchEnded):
            return changed
        number = self._group_of.pop(event.launch, None)
        group = self._groups.get(number) if number is not None else None
        if group is None or number is None:
            return changed
        group.left -= 1
        group.has_failed |= event.error is not None
        if group.left:
            return changed
        del self._groups[number]
        factor = None
        if not group.has_failed:
            factor = self._margin.observe(group.predicted_ns, time_ns - group.started_ns, group.factor)
        if factor is None:
            return changed
        self.predictor = predictor.with_beliefs(self._tables, self._calibration.scales, factor)
        return True

    def _follow_launch(self, time_ns: int, event: Event) -> bool:
        if not isinstance(event, LaunchEnded):
            return False
        belief = self._launched.pop(event.launch, None)
        if event.error is not None or belief is None:
            return False
        observed = time_ns - belief.started_ns
        scales = self._calibration.observe(belief.tenant, belief.predicted_ns, observed, belief.factor)
        is_changed = self._use(scales)
        if self._caution is not None:
            self._caution.launched(belief.tenant, belief.predicted_ns, observed)
        margin = self._margin_now()
        if margin is self.predictor.margin:
            return is_changed
        self.predictor = self.predictor.with_margin(margin)
        return True

    def _margin_now(self) -> SafetyMargin:
        return NO_MARGIN if self._caution is None else self._caution.margin()

    def _use(self, scales: dict[str, float] | None) -> bool:
        if scales is None:
            return False
        self.predictor = self.predictor.scaled(scales)
        return True

    def _relaxed(self, query: Query) -> dict[str, float] | None:
        """New factors, if it was the belief in a slow model that refused this query."""
        if query.tenant not in self._tables or isinstance(query, StageQuery):  # of a stage see `doubt`
            return None
        is_believed_slow = self.alone_ns(query.tenant, query.shape, query.items) > query.deadline_ns - query.arrival_ns
        return self._calibration.relax(query.tenant) if is_believed_slow else None


def _is_refused(actions: list[Action]) -> bool:
    return any(isinstance(action, Respond) and action.outcome is Outcome.REJECTED for action in actions)
