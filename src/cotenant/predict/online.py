"""What is believed of latencies while models run: tables and fitted groups, corrected by what is observed. Pure.

Events of the core come in with their times, predictors go out; the server and the simulator follow with the same class.
The quantile tracking is adaptive conformal inference (Gibbs and Candes, "Adaptive Conformal Inference Under
Distribution Shift", NeurIPS 2021) in its form by Angelopoulos, Candes and Tibshirani, 2023, which moves the margin
itself and so never has to answer "infinitely long".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import exp, log
from typing import Self

from cotenant.core.actions import Action, Expand, Launch, Respond, group_of
from cotenant.core.admission import most_cores
from cotenant.core.events import Event, LaunchEnded, PredictorChanged, QueryArrived
from cotenant.core.snapshot import Policy
from cotenant.errors import InvalidValueError
from cotenant.predict.conformal import SURE_QUANTILE
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.predict.margin import NO_MARGIN, SafetyMargin, Spread
from cotenant.predict.table import TablePredictor
from cotenant.profile.latency_table import LatencyTable
from cotenant.types import Outcome, Query, StageQuery
from cotenant.work import Work

_UNIT_NS = 1_000_000
"""Delays of answers are followed as multiples of this."""
_BOTH_WAYS = 2
"""A query waits for the same threads before it is read, unseen, as its answer does: believed to take as long."""
_PRESSURE_STEP = 0.1
"""Levels are some 0.25 apart."""
_WEIGHT = 0.05
"""Of a launch in the mean predicted latency of a tenant's launches."""


@dataclass(slots=True)
class Calibration:
    """Exponentially weighted mean, per tenant, of log(observed / believed) latency.

    `weight` is that of a new observation, `tolerance` the relative change that is worth a new predictor, `relaxation`
    what a refusal leaves of the logarithm of a factor; `smallest` and `largest` bound how far one launch may lie from
    what is believed. Neighbours, front-ends and clock rates all end up in the factor, and so does handing a launch
    over, which is nearly all of it for models that take next to nothing.
    """

    weight: float = 0.05
    tolerance: float = 0.05
    smallest: float = 0.25
    largest: float = 8.0
    warm_up: int = 8
    relaxation: float = 0.8
    _logs: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _used: dict[str, float] = field(default_factory=dict)

    def observe(
        self, tenant: str, believed_ns: int, observed_ns: int, factor: float | None = None
    ) -> dict[str, float] | None:
        """Take one launch; give the factors of all tenants when they should be used from now on, else None.

        `believed_ns` was predicted with `factor`, by default the one in use now, which is taken out of it first.
        """
        used = self.factor(tenant)
        ratio = min(max(max(observed_ns, 1) / max(believed_ns, 1), self.smallest), self.largest)
        sample = log(ratio * (used if factor is None else factor))
        count = self._counts.get(tenant, 0) + 1
        self._counts[tenant] = count
        before = self._logs.get(tenant, 0.0)
        step = max(self.weight, 1.0 / count)
        now = before + step * (sample - before)
        self._logs[tenant] = now
        if count < self.warm_up or abs(exp(now) / used - 1.0) <= self.tolerance:
            return None
        self._used = {name: exp(value) for name, value in self._logs.items() if self._counts[name] >= self.warm_up}
        return dict(self._used)

    def relax(self, tenant: str) -> dict[str, float] | None:
        """A query was refused because its tenant is believed to be too slow; believe a little less of that.

        Nothing is launched while everything is refused, so nothing would ever correct a factor that has become too
        large. Gives factors as `observe` does.
        """
        if self._logs.get(tenant, 0.0) <= 0.0:
            return None
        self._logs[tenant] *= self.relaxation
        self._used[tenant] = exp(self._logs[tenant])
        return dict(self._used)

    def forget(self, tenant: str) -> None:
        """A tenant was replaced: what was observed of it says nothing of the new one."""
        for known in (self._logs, self._counts, self._used):
            known.pop(tenant, None)

    def factor(self, tenant: str) -> float:
        """The factor in use for a tenant."""
        return self._used.get(tenant, 1.0)

    @property
    def scales(self) -> dict[str, float]:
        """The factors in use."""
        return dict(self._used)


@dataclass(slots=True)
class AdaptiveConformal:
    """Follows a drift of the device: the factor on predictions at which a share `level` of observations stays below.

    After a miss the logarithm of the factor grows by `step * level`, after a hit it falls by `step * (1 - level)`, so
    the share of misses tends to `1 - level` whatever the distribution does; over n observations it is off by at most
    (log(largest / smallest) / step + 1) / n as long as the bounds are not reached. `tolerance` is the relative change
    of the factor that is worth a new predictor.

    Raises InvalidValueError for a value out of its range.
    """

    level: float = 0.99
    step: float = 0.05
    tolerance: float = 0.02
    smallest: float = 0.5
    largest: float = 8.0
    _log: float = 0.0
    _used: float = 1.0

    def __post_init__(self) -> None:
        for name, value, fits, expected in (
            ("level", self.level, 0 < self.level < 1, "a number between 0 and 1"),
            ("step", self.step, self.step > 0, "a positive number"),
            ("smallest", self.smallest, 0 < self.smallest <= 1, "a number in (0, 1]"),
            ("largest", self.largest, self.largest >= 1, "at least 1"),
        ):
            if not fits:
                raise InvalidValueError("adaptive conformal margin", name, value, expected)

    def observe(self, predicted_ns: int, observed_ns: int, factor: float | None = None) -> float | None:
        """Take one group; give the factor when it should be used from now on, else None.

        `predicted_ns` is the upper quantile that was predicted with `factor`, by default the one in use now.
        """
        plain = max(predicted_ns, 1) / (self._used if factor is None else factor)
        is_missed = observed_ns > plain * exp(self._log)
        self._log += self.step * (self.level if is_missed else self.level - 1.0)
        self._log = min(max(self._log, log(self.smallest)), log(self.largest))
        if abs(exp(self._log) / self._used - 1.0) <= self.tolerance:
            return None
        self._used = exp(self._log)
        return self._used

    @property
    def factor(self) -> float:
        """The factor in use."""
        return self._used


class UpperEstimate:
    """The safety margin that tail-aware policies count on, from what launches and answers are seen to take.

    Follows, at a quantile, launches over what was predicted of them, by tenant, and delays of answers. Changes of less
    than a tenth of a spread, or a quarter of a delay, are not worth a new margin.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._factors: dict[str, AdaptiveConformal] = {}
        self._launch_ns: dict[str, float] = {}
        self._spreads: dict[str, Spread] = {}
        self._reply = AdaptiveConformal(quantile, tolerance=0.25, smallest=1 / 64, largest=256.0)
        self._reply_ns = 0
        self._margin = NO_MARGIN

    def launched(self, tenant: str, predicted_ns: int, observed_ns: int) -> None:
        """A launch has ended."""
        follower = self._factors.get(tenant)
        if follower is None:
            follower = AdaptiveConformal(self._quantile, step=0.02, tolerance=0.1, smallest=1.0)
            self._factors[tenant], self._launch_ns[tenant] = follower, predicted_ns
        self._launch_ns[tenant] += _WEIGHT * (predicted_ns - self._launch_ns[tenant])
        factor = follower.observe(predicted_ns, observed_ns, 1.0)
        if factor is not None:
            self._spreads[tenant] = Spread(factor, max(1, round(self._launch_ns[tenant])))

    def replied(self, delay_ns: int) -> None:
        """An answer leaves so long after its query ended."""
        factor = self._reply.observe(_UNIT_NS, delay_ns, 1.0)
        if factor is not None:
            self._reply_ns = round(_BOTH_WAYS * factor * _UNIT_NS)

    def forget(self, tenant: str) -> None:
        """A tenant was replaced."""
        for known in (self._factors, self._launch_ns, self._spreads):
            known.pop(tenant, None)

    def margin(self) -> SafetyMargin:
        """What to count on; the same object until it changes."""
        if self._spreads != self._margin.spreads or self._reply_ns != self._margin.reply_ns:
            self._margin = SafetyMargin(dict(self._spreads), self._reply_ns)
        return self._margin


@dataclass(slots=True)
class _Expected:
    """What was predicted of a launch, or of a group with so many launches left, with which factor, and since when."""

    predicted_ns: int
    started_ns: int
    factor: float
    tenant: str = ""
    left: int = 1
    has_failed: bool = False


class OnlineModel:
    """Holds the predictor in use and, as an observer of what happens, replaces it when it turns out to be off.

    `widest` is the size in cores of the largest partition. With `adapt` off the profile is believed as it is. With
    `grouped` latencies of groups are believed, those of one member too, at `quantile`, by what was fitted to measured
    ones if there is any; they are followed as a whole, and single launches only where a group has one member. Else
    those of several members are, once `believe_groups` was called. With `tail_aware` predictors have
    a safety margin at that quantile. Not thread-safe, but for `replied`, which may be called beside all else.
    """

    def __init__(
        self,
        widest: int,
        *,
        adapt: bool = True,
        grouped: bool = False,
        quantile: float = SURE_QUANTILE,
        tail_aware: bool = False,
    ) -> None:
        self.predictor = GroupedPredictor({}) if grouped else TablePredictor({})
        self._grouped = grouped
        self.widest = widest
        self._adapt = adapt
        self._upper_estimate = UpperEstimate(quantile) if tail_aware else None
        self._tables: dict[str, LatencyTable] = {}
        self._calibration = Calibration()
        self._promise = AdaptiveConformal(level=quantile)
        self._launched: dict[int, _Expected] = {}
        self._groups: dict[int, _Expected] = {}
        """By launch: those of one group have the same."""

    @classmethod
    def under(cls, policy: Policy) -> Self:
        """What a server believes under a policy, and whoever simulates one: with a margin where it goes by that."""
        spec = policy.spec
        return cls(most_cores(spec), grouped=spec.grouped, tail_aware=spec.goes_by_margin)

    def add(self, tenant: str, table: LatencyTable) -> None:
        """Believe this table of a tenant from now on; what was observed under the name before is forgotten."""
        self._calibration.forget(tenant)
        self._launched = {launch: known for launch, known in self._launched.items() if known.tenant != tenant}
        self._tables[tenant] = table
        scales, beside = self._calibration.scales, self.predictor.beside
        if isinstance(self.predictor, GroupedPredictor):
            self.predictor = self.predictor.with_beliefs(self._tables, scales, self.predictor.factor)
        else:
            self.predictor = TablePredictor(self._tables, scales, self.predictor.models).with_beside(beside)
        if self._upper_estimate is not None:
            self._upper_estimate.forget(tenant)
            self.predictor = self.predictor.with_margin(self._upper_estimate.margin())

    def believe_groups(self, fitted: FittedGroups | None) -> None:
        """Believe what was fitted to measured groups from now on."""
        self.predictor = GroupedPredictor(
            self._tables, self._calibration.scales, fitted, self._promise.factor, self.predictor.models
        )

    def alone_ns(self, tenant: str, shape: int = 0, items: int = 1) -> int:
        """Latency of the whole model in the largest partition: the best that a query can get."""
        work = Work(tenant, shape, items, 0, self.predictor.unit_count(tenant))
        return self.predictor.latency_ns(work, self.widest)

    def doubt(self, tenants: Iterable[str]) -> PredictorChanged | None:
        """Queries were refused as these tenants are believed to be too slow together: believe a little less of it."""
        before = self.predictor
        scales: dict[str, float] | None = None
        for tenant in tenants if self._adapt else ():
            scales = self._calibration.relax(tenant) or scales
        self._use(scales)
        return None if self.predictor is before else PredictorChanged(self.predictor)

    def pressed(self, beside: float) -> PredictorChanged | None:
        """The measured pressure on the memory from outside; small changes are not worth a predictor."""
        if abs(beside - self.predictor.beside) < _PRESSURE_STEP:
            return None
        self.predictor = self.predictor.with_beside(beside)
        return PredictorChanged(self.predictor)

    def replied(self, delay_ns: int) -> None:
        """An answer leaves so long after its query ended. May be called beside all else, by one thread at a time."""
        if self._upper_estimate is not None:
            self._upper_estimate.replied(delay_ns)

    def __call__(
        self, time_ns: int, event: Event, actions: Sequence[Action], timing: object = None
    ) -> PredictorChanged | None:
        """An event was handled: compare each launch, or each group, with what was believed of it."""
        if not self._adapt:
            return None
        before = self.predictor
        started = [action for action in actions if isinstance(action, Launch)]
        if isinstance(before, GroupedPredictor):
            for _, group in groupby(started, group_of):
                self._started([*group], time_ns)
        elif started:
            self._started(started, time_ns)
        for action in actions:
            if isinstance(action, Expand):  # what it takes now, nobody has predicted from its start on
                self._launched.pop(action.launch, None)
        if isinstance(event, LaunchEnded):
            self._ended(event.launch, time_ns, event.error is not None)
        elif isinstance(event, QueryArrived) and actions and self._is_doubtful(event.query, actions):
            self._use(self._calibration.relax(event.query.tenant))
        return None if self.predictor is before else PredictorChanged(self.predictor)

    def _started(self, started: Sequence[Launch], time_ns: int) -> None:
        """Keep what the predictor that decided says of these launches; of a group's launch only if it is alone."""
        predictor = self.predictor
        if isinstance(predictor, GroupedPredictor) and (self._grouped or len(started) > 1):
            group = _Expected(started[-1].predicted_ns, time_ns, predictor.factor, left=len(started))
            self._groups.update((launch.id, group) for launch in started)
            if len(started) > 1:
                return
        for launch in started:
            alone = launch.predicted_ns
            if isinstance(predictor, GroupedPredictor):
                alone = predictor.latency_ns(launch.work, launch.share.size)
            tenant = launch.work.tenant
            self._launched[launch.id] = _Expected(alone, time_ns, self._calibration.factor(tenant), tenant)

    def _ended(self, launch: int, time_ns: int, has_failed: bool) -> None:
        alone = self._launched.pop(launch, None)
        if alone is not None and not has_failed:
            observed = time_ns - alone.started_ns
            self._use(self._calibration.observe(alone.tenant, alone.predicted_ns, observed, alone.factor))
            if self._upper_estimate is not None:
                self._upper_estimate.launched(alone.tenant, alone.predicted_ns, observed)
                if (margin := self._upper_estimate.margin()) is not self.predictor.margin:
                    self.predictor = self.predictor.with_margin(margin)
        group = self._groups.pop(launch, None)
        if group is None:
            return
        group.left -= 1
        group.has_failed |= has_failed
        if group.left or group.has_failed or not isinstance(self.predictor, GroupedPredictor):
            return
        factor = self._promise.observe(group.predicted_ns, time_ns - group.started_ns, group.factor)
        if factor is not None:
            self.predictor = self.predictor.with_beliefs(self._tables, self._calibration.scales, factor)

    def _use(self, scales: dict[str, float] | None) -> None:
        if scales is not None:
            self.predictor = self.predictor.scaled(scales)

    def _is_doubtful(self, query: Query, actions: Sequence[Action]) -> bool:
        """Whether it was the belief in a slow model that refused this query; of a stage see `doubt`."""
        return (
            any(isinstance(action, Respond) and action.outcome is Outcome.REJECTED for action in actions)
            and query.tenant in self._tables
            and not isinstance(query, StageQuery)
            and self.alone_ns(query.tenant, query.shape, query.items) > query.deadline_ns - query.arrival_ns
        )
