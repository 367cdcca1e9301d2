"""Online calibration: predictors from tables and fitted groups, corrected by observed latencies. Pure.

Input: events of the core with their times; output: predictors. The server and the simulator use the same class.
Quantiles are tracked by adaptive conformal inference (Gibbs and Candes, "Adaptive Conformal Inference Under
Distribution Shift", NeurIPS 2021). The margin itself is moved, as by Angelopoulos, Candes and Tibshirani (2023), so it
is always finite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import exp, log
from statistics import median_low
from typing import Self

from cotenant.core.actions import Action, Expand, Launch, group_of
from cotenant.core.admission import most_cores
from cotenant.core.events import Event, LaunchEnded, PredictorChanged
from cotenant.core.snapshot import Policy
from cotenant.errors import InvalidValueError
from cotenant.predict.conformal import UPPER_QUANTILE
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.predict.margin import NO_MARGIN, SafetyMargin, Spread
from cotenant.predict.scales import Scales, scale_of
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyTable
from cotenant.work import Work

_UNIT_NS = 1_000_000
"""Unit in which delays of responses are tracked."""
_BOTH_WAYS = 2
"""Factor on the delay of a response: the delay before a query is read is not observed, and assumed to be equal."""
_PRESSURE_STEP = 0.1
"""Change of memory pressure that makes a new predictor; levels differ by about 0.25."""
ALL_SHAPES = -1
"""Stands for the shape of launches where a model has only one."""
_RECENT = 8
"""Number of launches that can show a shift of a tenant's latencies."""
_WEIGHT = 0.05
"""Weight of a launch in the moving average of a tenant's predicted latencies."""


@dataclass(slots=True)
class _Observed:
    """Observed over profiled latency of a tenant's launches at one shape, as logarithms; `factor` is in use."""

    log: float = 0.0
    count: int = 0
    factor: float = 1.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


@dataclass(slots=True)
class Calibration:
    """Factors of latencies by tenant and shape: the exponentially weighted mean of log(observed / profiled).

    - `weight`: weight of a new observation. The first ones have 1 / count; `warm_up` of them make a factor.
    - `tolerance`: relative change of a factor that makes a new predictor.
    - `smallest`, `largest`: bounds of observed / predicted, so that one stalled launch changes little.
    - `shift`: when the last _RECENT launches all differ from the mean to the same side by more than this factor, the
      mean becomes their median, without bounds. A wrong profile is corrected after so few launches however wrong it is.

    The factor includes interference, front ends, clock rates and the overhead of launches.
    """

    weight: float = 0.05
    tolerance: float = 0.05
    smallest: float = 0.25
    largest: float = 8.0
    warm_up: int = 8
    shift: float = 1.5
    _known: dict[str, dict[int, _Observed]] = field(default_factory=dict)
    _scales: dict[str, float | dict[int, float]] = field(default_factory=dict)

    def observe(
        self, tenant: str, believed_ns: int, observed_ns: int, factor: float | None = None, shape: int = ALL_SHAPES
    ) -> Scales | None:
        """Count one launch; returns the factors of all tenants if one changed by more than `tolerance`, else None.

        `believed_ns` was predicted with `factor`, by default the one in use now; the factor is divided out first.
        A tenant's launches have either all the shape ALL_SHAPES, or each its own.
        """
        seen = self._known.setdefault(tenant, {}).setdefault(shape, _Observed())
        used = self.factor(tenant, shape) if factor is None else factor
        ratio = max(observed_ns, 1) / max(believed_ns, 1)
        seen.count += 1
        sample = log(min(max(ratio, self.smallest), self.largest) * used)
        seen.log += max(self.weight, 1.0 / seen.count) * (sample - seen.log)
        seen.recent.append(log(ratio * used))
        if len(seen.recent) == _RECENT and self._has_shifted(seen):
            seen.log = median_low(seen.recent)
        if seen.count < self.warm_up or abs(exp(seen.log) / seen.factor - 1.0) <= self.tolerance:
            return None
        for each in (each for shapes in self._known.values() for each in shapes.values()):
            if each.count >= self.warm_up:
                each.factor = exp(each.log)
        return self._renewed(self._known)

    def begin(self, tenant: str, factors: Mapping[int, float]) -> None:
        """Begin with factors by shape that were observed before; those of 1 are left out."""
        found = {shape: factor for shape, factor in factors.items() if factor != 1.0}
        if found:
            self._known[tenant] = {
                shape: _Observed(log(factor), self.warm_up, factor) for shape, factor in found.items()
            }
            self._renewed((tenant,))

    def forget(self, tenant: str) -> None:
        """Remove the observations of a tenant that was replaced."""
        self._known.pop(tenant, None)
        self._scales.pop(tenant, None)

    def factor(self, tenant: str, shape: int = ALL_SHAPES) -> float:
        """The factor in use for a tenant's launches of a shape."""
        return scale_of(self._scales, tenant, shape)

    @property
    def scales(self) -> Scales:
        """The factors in use."""
        return dict(self._scales)

    def _has_shifted(self, seen: _Observed) -> bool:
        least = log(self.shift)
        return min(seen.recent) > seen.log + least or max(seen.recent) < seen.log - least

    def _renewed(self, tenants: Iterable[str]) -> Scales:
        """The factors in use, after those of these tenants changed."""
        for tenant in tenants:
            used = {shape: each.factor for shape, each in self._known[tenant].items() if each.factor != 1.0}
            if used:
                self._scales[tenant] = used.get(ALL_SHAPES, used)
        return self.scales


@dataclass(slots=True)
class AdaptiveConformal:
    """Quantile tracker: the factor on predictions that a share `level` of observations stays below.

    A miss is an observation above `f * prediction`. After a miss `log f += step * level`, after a hit `log f -= step *
    (1 - level)`. So the share of misses tends to `1 - level` for any distribution. Over n observations its error is at
    most `(log(largest / smallest) / step + 1) / n` while f is inside the bounds. `tolerance` is the relative change of
    f that makes a new predictor.

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
        """Count one observation; returns the factor if it changed by more than `tolerance`, else None.

        `predicted_ns` was predicted with `factor`, by default the one in use now.
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
    """Learns the safety margin of tail-aware policies from observed launches and responses.

    Tracks a quantile of observed over predicted latency by tenant, and of delays of responses. A change of a tenth of a
    spread, or a quarter of a delay, makes a new margin.
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
        """Count an ended launch."""
        follower = self._factors.get(tenant)
        if follower is None:
            follower = AdaptiveConformal(self._quantile, step=0.02, tolerance=0.1, smallest=1.0)
            self._factors[tenant], self._launch_ns[tenant] = follower, predicted_ns
        self._launch_ns[tenant] += _WEIGHT * (predicted_ns - self._launch_ns[tenant])
        factor = follower.observe(predicted_ns, observed_ns, 1.0)
        if factor is not None:
            self._spreads[tenant] = Spread(factor, max(1, round(self._launch_ns[tenant])))

    def replied(self, delay_ns: int) -> None:
        """Count the delay between the end of a query and its response."""
        factor = self._reply.observe(_UNIT_NS, delay_ns, 1.0)
        if factor is not None:
            self._reply_ns = round(_BOTH_WAYS * factor * _UNIT_NS)

    def forget(self, tenant: str) -> None:
        """Remove the observations of a tenant that was replaced."""
        for known in (self._factors, self._launch_ns, self._spreads):
            known.pop(tenant, None)

    def margin(self) -> SafetyMargin:
        """The present margin; the same object until it changes."""
        if self._spreads != self._margin.spreads or self._reply_ns != self._margin.reply_ns:
            self._margin = SafetyMargin(dict(self._spreads), self._reply_ns)
        return self._margin


@dataclass(slots=True)
class _Expected:
    """Prediction of a running launch, or of a group with `left` running launches, with its factor and start time."""

    predicted_ns: int
    started_ns: int
    factor: float
    tenant: str = ""
    shape: int = ALL_SHAPES
    left: int = 1
    has_failed: bool = False


class OnlineModel:
    """Holds the predictor in use; observes events and replaces the predictor when observations differ from it.

    - `widest`: size in cores of the largest partition.
    - `adapt`: False uses the profile unchanged.
    - `grouped`: the policy launches groups. Groups are predicted at `quantile`, by the fit if there is one, and
      calibrated as a whole; single launches only in groups of one member.
    - `tail_aware`: predictors have a safety margin at `quantile`.

    Not thread-safe, except `replied`, which may run beside all other methods.
    """

    def __init__(
        self,
        widest: int,
        *,
        adapt: bool = True,
        grouped: bool = False,
        quantile: float = UPPER_QUANTILE,
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
        """By launch; the launches of one group share an object."""

    @classmethod
    def under(cls, policy: Policy) -> Self:
        """The model for a policy, in a server or a simulation; with a margin if the policy uses it."""
        spec = policy.spec
        return cls(most_cores(spec), grouped=spec.grouped, tail_aware=spec.goes_by_margin)

    def add(self, tenant: str, table: LatencyTable, learnt: float | Mapping[int, float] = 1.0) -> None:
        """Use this table of a tenant from now on; earlier observations under the name are removed.

        `learnt` is the factor of all shapes or of each, as an earlier model had it in `predictor.scales`.
        """
        self._calibration.forget(tenant)
        self._calibration.begin(tenant, learnt if isinstance(learnt, Mapping) else {ALL_SHAPES: learnt})
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
        """Use this fit of groups from now on."""
        self.predictor = GroupedPredictor(
            self._tables, self._calibration.scales, fitted, self._promise.factor, self.predictor.models
        )

    def alone_ns(self, tenant: str, shape: int = 0, items: int = 1) -> int:
        """Latency in ns of the whole model in the largest partition."""
        work = Work(tenant, shape, items, 0, self.predictor.unit_count(tenant))
        return self.predictor.latency_ns(work, self.widest)

    def pressed(self, beside: float) -> PredictorChanged | None:
        """Set the measured memory pressure of other processes; changes below _PRESSURE_STEP are ignored."""
        if abs(beside - self.predictor.beside) < _PRESSURE_STEP:
            return None
        self.predictor = self.predictor.with_beside(beside)
        return PredictorChanged(self.predictor)

    def replied(self, delay_ns: int) -> None:
        """Count the delay between the end of a query and its response. One thread at a time, beside other methods."""
        if self._upper_estimate is not None:
            self._upper_estimate.replied(delay_ns)

    def __call__(
        self, time_ns: int, event: Event, actions: Sequence[Action], timing: object = None
    ) -> PredictorChanged | None:
        """Observe a handled event: compare each ended launch or group with its prediction."""
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
            if isinstance(action, Expand):  # its latency from its start on was not predicted
                self._launched.pop(action.launch, None)
        if isinstance(event, LaunchEnded):
            self._ended(event.launch, time_ns, event.error is not None)
        return None if self.predictor is before else PredictorChanged(self.predictor)

    def _started(self, started: Sequence[Launch], time_ns: int) -> None:
        """Record the predictions of started launches; of a group's launch only if it is the only member."""
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
            shape = launch.work.shape if predictor.models[tenant].shape_count > 1 else ALL_SHAPES
            factor = self._calibration.factor(tenant, shape)
            self._launched[launch.id] = _Expected(alone, time_ns, factor, tenant, shape)

    def _ended(self, launch: int, time_ns: int, has_failed: bool) -> None:
        alone = self._launched.pop(launch, None)
        if alone is not None and not has_failed:
            observed = time_ns - alone.started_ns
            self._use(self._calibration.observe(alone.tenant, alone.predicted_ns, observed, alone.factor, alone.shape))
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

    def _use(self, scales: Scales | None) -> None:
        if scales is not None:
            self.predictor = self.predictor.scaled(scales)
