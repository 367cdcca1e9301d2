"""Interference model: the slowdown of a batch beside the batches in the other partitions of its device.

`PressureInterference` implements the protocol `Interference` with three values of each (model, batch, size):

    base         slowdown beside the co-runner of least pressure
    sensitivity  slope over pressure; 1 on average over the measurements
    pressure     contribution to the slowdown of the average model

    factor = max(1, base + sensitivity * sum of the pressures of the others)

The values are fitted to measured co-runs (`interference_fit`), without hardware counters. An antagonist counts as one
more co-runner, so a new model that was measured beside it alone can be combined with all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from math import log2, sqrt
from statistics import fmean
from typing import Protocol

from typing_extensions import override

from cotenant.errors import InvalidValueError
from cotenant.predict.conformal import conformal_quantile
from cotenant.techniques.partitions.coruns import CoRunner

MEDIAN = 0.5
CONFIDENCE = 1.645
"""One-sided 95 % quantile of the normal distribution, in standard errors."""


class Interference(Protocol):
    """Slowdowns on one type of device, for planners. `device` is ignored: it matches the signature of `Costs`."""

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = "") -> float:
        """Expected latency beside `others` over that alone: at least 1.0, and 1.0 alone."""
        ...

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str = "") -> float:
        """Contribution of one co-runner to the slowdown; negative if the batch runs faster beside it.

        `factor` never falls when the sum of the contributions grows, as long as there is a co-runner.
        """
        ...

    def factor_at(
        self, quantile: float, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = ""
    ) -> float:
        """Upper bound of the factor for a share `quantile` of runs. Never below `factor`.

        Raises InvalidValueError for a quantile that is not between 0 and 1.
        """
        ...


class Known(IntEnum):
    """Origin of a value; lower is more certain."""

    MEASURED = 0
    """The model was measured at this batch and size."""
    BETWEEN = 1
    """The model was measured at other batches or sizes."""
    FOREIGN = 2
    """The model was not measured: the value is the average of the measured models."""


@dataclass(frozen=True, slots=True)
class Surface:
    """Values by model, batch and size, with interpolation.

    Linear in log2 of the batch, then linear in the size, constant beyond the ends. An unknown model gets the average
    of all models at that batch and size. Raises InvalidValueError without values.
    """

    values: Mapping[CoRunner, tuple[float, ...]]
    _found: dict[CoRunner, tuple[tuple[float, ...], Known]] = field(default_factory=dict, compare=False, repr=False)
    _models: dict[str, dict[int, dict[int, tuple[float, ...]]]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.values:
            raise InvalidValueError("surface", "values", {}, "at least one")
        for (model, batch, size), value in sorted(self.values.items()):
            self._models.setdefault(model, {}).setdefault(size, {})[batch] = value

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that have values, sorted."""
        return tuple(self._models)

    def at(self, key: CoRunner) -> tuple[tuple[float, ...], Known]:
        """The values at (model, batch, size), and their origin."""
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._at(key)
        return found

    def _at(self, key: CoRunner) -> tuple[tuple[float, ...], Known]:
        model, batch, size = key
        if key in self.values:
            return self.values[key], Known.MEASURED
        if model in self._models:
            return self._between(model, batch, size), Known.BETWEEN
        every = [self._between(name, batch, size) for name in self._models]
        return tuple(map(fmean, zip(*every, strict=True))), Known.FOREIGN

    def _between(self, model: str, batch: int, size: int) -> tuple[float, ...]:
        by_size = [
            (float(each), interpolate([(log2(b), v) for b, v in row.items()], log2(batch)))
            for each, row in self._models[model].items()
        ]
        return interpolate(sorted(by_size), float(size))

    def without(self, keys: Iterable[CoRunner]) -> Surface:
        """A surface without some keys. Raises InvalidValueError when nothing is left."""
        gone = frozenset(keys)
        return Surface({key: value for key, value in self.values.items() if key not in gone})


def interpolate(points: Sequence[tuple[float, tuple[float, ...]]], at: float) -> tuple[float, ...]:
    """Linear interpolation between ascending points, element by element; constant beyond the ends."""
    if at <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in pairwise(points):
        if at <= high:
            share = (at - low) / (high - low)
            return tuple(a + share * (b - a) for a, b in zip(before, after, strict=True))
    return points[-1][1]


@dataclass(frozen=True, slots=True)
class Scores:
    """Conformal scores: relative errors (observed / predicted - 1) on held-out co-runs, possibly scaled."""

    values: tuple[float, ...]

    def margin(self, quantile: float) -> float:
        """Conformal bound, at least 0: the raised quantile `q + 1.645 * sqrt(q * (1 - q) / n)` of n scores.

        So the bound covers a share q of runs for 19 of 20 sets of scores, not only on average. It is 0 for q up to the
        median. Raises InvalidValueError for a quantile that is not between 0 and 1, and without scores.
        """
        if not 0 < quantile < 1:
            raise InvalidValueError("interference", "quantile", quantile, "a number between 0 and 1")
        if quantile <= MEDIAN:
            return 0.0
        raised = quantile + CONFIDENCE * sqrt(quantile * (1 - quantile) / max(1, len(self.values)))
        return max(0.0, conformal_quantile(self.values, min(raised, 1 - 1e-12)))


@dataclass(frozen=True, slots=True)
class Margin:
    """Margin of a quantile, as a share of the prediction (normalised conformal prediction).

    `scales`: typical excess of each measured target over its prediction; some models vary much between runs. Scores of
    targets of each origin: `measured` and `beside_foreign` (beside an unmeasured model) in units of the scale,
    `between` and `foreign` without a scale.
    """

    scales: Mapping[CoRunner, float]
    measured: Scores
    beside_foreign: Scores
    between: Scores
    foreign: Scores
    _margins: dict[tuple[Known, Known, float], float] = field(default_factory=dict, compare=False, repr=False)

    def share(self, quantile: float, target: CoRunner, known: Known, others_known: Known) -> float:
        """Margin of a target by its origin and the least certain origin of its co-runners.

        Raises InvalidValueError as `Scores.margin`.
        """
        key = (known, others_known, quantile)
        if key not in self._margins:
            self._margins[key] = self._scores(known, others_known).margin(quantile)
        return self._margins[key] * (self.scales[target] if known is Known.MEASURED else 1.0)

    def _scores(self, known: Known, others_known: Known) -> Scores:
        if others_known is not Known.FOREIGN:
            return (self.measured, self.between, self.foreign)[known]
        return self.beside_foreign if known is Known.MEASURED else self.foreign


@dataclass(frozen=True, slots=True)
class PressureInterference(Interference):
    """Interference model with sensitivities and pressures, see above; made by `interference_fit.fit_pressure`.

    `targets`: base and sensitivity; `pressures`: pressure; both by (model, batch, size). `fewest_others` and
    `most_others`: numbers of co-runners in the measurements; more are extrapolated.
    """

    targets: Surface
    pressures: Surface
    margin: Margin
    fewest_others: int = 1
    most_others: int = 1

    @override
    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = "") -> float:
        return self._factor((model, batch, size), others) if others else 1.0

    @override
    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str = "") -> float:
        return self.sensitivity(model, batch, size) * self.pressure(*other)

    @override
    def factor_at(
        self, quantile: float, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = ""
    ) -> float:
        if not others:
            Scores((0.0,)).margin(quantile)  # refuses a wrong quantile here too
            return 1.0
        target = (model, batch, size)
        known = self.targets.at(target)[1]
        others_known = max(self.pressures.at(other)[1] for other in others)
        return self._factor(target, others) * (1.0 + self.margin.share(quantile, target, known, others_known))

    def known(self, model: str, batch: int, size: int) -> Known:
        """Origin of a target's sensitivity."""
        return self.targets.at((model, batch, size))[1]

    def base(self, model: str, batch: int, size: int) -> float:
        """Slowdown beside the co-runner of least pressure."""
        return self.targets.at((model, batch, size))[0][0]

    def sensitivity(self, model: str, batch: int, size: int) -> float:
        """Slowdown per pressure; 1 on average over the measurements."""
        return self.targets.at((model, batch, size))[0][1]

    def pressure(self, model: str, batch: int, size: int) -> float:
        """Contribution to the slowdown of the average model, as a share of its latency alone."""
        return self.pressures.at((model, batch, size))[0][0]

    def _factor(self, target: CoRunner, others: Sequence[CoRunner]) -> float:
        base, sensitivity = self.targets.at(target)[0]
        return max(1.0, base + sensitivity * sum(self.pressures.at(other)[0][0] for other in others))
