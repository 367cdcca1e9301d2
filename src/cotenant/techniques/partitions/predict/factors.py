"""How much a batch slows down beside what runs in the other partitions of its device.

`Interference` is the question, `PressureInterference` the answer. It gives every (model, batch, size) three meanings:

    base         its slowdown beside the gentlest co-runner there is: the cost of not being alone
    sensitivity  how strongly it answers to pressure, 1 for the average of what was measured
    pressure     how much it slows the average model down

    factor = max(1, base + sensitivity * sum of the pressures of the others)

All three come from measured co-runs alone (`interference_fit`), from no hardware counter. A calibrated antagonist is
one more co-runner: a new model that was measured beside it, and it beside the model, is thereby known to all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from math import log2, sqrt
from statistics import fmean
from typing import Protocol

from cotenant.errors import InvalidValueError
from cotenant.predict.conformal import conformal_quantile
from cotenant.techniques.partitions.coruns import CoRunner

MEDIAN = 0.5
CONFIDENCE = 1.645
"""Standard errors of a share that it stays below with 95 % probability."""


class Interference(Protocol):
    """What planners ask. It holds for one kind of device; `device` is there to fit the planners' costs."""

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = "") -> float:
        """Expected latency beside `others` over that alone: at least 1.0, and 1.0 alone."""
        ...

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str = "") -> float:
        """What one co-runner adds to the slowdown, below 0 where its company makes the batch quicker.

        `factor` never falls when the sum of what the others add grows, as long as there is one.
        """
        ...

    def factor_at(
        self, quantile: float, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = ""
    ) -> float:
        """The factor that a share `quantile` of runs stays below. Never below `factor`.

        Raises InvalidValueError for a quantile that is not between 0 and 1.
        """
        ...


class Known(IntEnum):
    """How a value is known, the better the lower."""

    MEASURED = 0
    """It was measured at this very batch and size."""
    BETWEEN = 1
    """The model was measured at other batches or sizes."""
    FOREIGN = 2
    """The model was never measured: the average of those that were."""


@dataclass(frozen=True, slots=True)
class Surface:
    """Values by model, batch and size: as they are where there are some, else interpolated.

    Linear in log2 of the batch, then linear in the size; at the edges the last value holds. A model that is not there
    gets the average of all models at that batch and size. Raises InvalidValueError without values.
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
        """The values at (model, batch, size), and how they are known."""
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
        """The same without some keys. Raises InvalidValueError when nothing is left."""
        gone = frozenset(keys)
        return Surface({key: value for key, value in self.values.items() if key not in gone})


def interpolate(points: Sequence[tuple[float, tuple[float, ...]]], at: float) -> tuple[float, ...]:
    """Values at a place between points in ascending order, element by element; level beyond the ends."""
    if at <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in pairwise(points):
        if at <= high:
            share = (at - low) / (high - low)
            return tuple(a + share * (b - a) for a, b in zip(before, after, strict=True))
    return points[-1][1]


@dataclass(frozen=True, slots=True)
class Scores:
    """Relative errors (observed / predicted - 1) of co-runs that a fit had not seen, in units of a kind."""

    values: tuple[float, ...]

    def margin(self, quantile: float) -> float:
        """What a share `quantile` of errors stays below, at least 0; 0 up to the median, which is believed as it is.

        The quantile is raised by what it takes to hold for 19 of 20 sets of scores, not only on average over them.
        Raises InvalidValueError for a quantile that is not between 0 and 1, and when there are no scores.
        """
        if not 0 < quantile < 1:
            raise InvalidValueError("interference", "quantile", quantile, "a number between 0 and 1")
        if quantile <= MEDIAN:
            return 0.0
        raised = quantile + CONFIDENCE * sqrt(quantile * (1 - quantile) / max(1, len(self.values)))
        return max(0.0, conformal_quantile(self.values, min(raised, 1 - 1e-12)))


@dataclass(frozen=True, slots=True)
class Margin:
    """What is added for a quantile, as a share of the prediction.

    `scales` holds how far each measured target typically exceeds its prediction: some answer alike every time, others
    choose between fast and slow ways of running (the algorithm search of a library) and are off by half. `measured` are
    errors of these targets in units of their scale, `beside_foreign` the same beside a co-runner whose model was never
    measured; `between` and `foreign` are errors of targets that are so `Known`, in no units.
    """

    scales: Mapping[CoRunner, float]
    measured: Scores
    beside_foreign: Scores
    between: Scores
    foreign: Scores
    _margins: dict[tuple[Known, Known, float], float] = field(default_factory=dict, compare=False, repr=False)

    def share(self, quantile: float, target: CoRunner, known: Known, others_known: Known) -> float:
        """The margin of a target that is known so, beside others of which the worst is known so.

        Raises InvalidValueError as `Scores.margin` says.
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
class PressureInterference:
    """Sensitivities times pressures; made by `interference_fit.fit_pressure`.

    `targets` holds base and sensitivity, `pressures` the pressure, both by (model, batch, size). `fewest_others` and
    `most_others` say beside how many co-runners it was measured; more are an extrapolation by adding pressures.
    """

    targets: Surface
    pressures: Surface
    margin: Margin
    fewest_others: int = 1
    most_others: int = 1

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = "") -> float:
        """See `Interference`."""
        return self._factor((model, batch, size), others) if others else 1.0

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str = "") -> float:
        """See `Interference`."""
        return self.sensitivity(model, batch, size) * self.pressure(*other)

    def factor_at(
        self, quantile: float, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = ""
    ) -> float:
        """See `Interference`."""
        if not others:
            Scores((0.0,)).margin(quantile)  # a wrong quantile is wrong for a lone batch too
            return 1.0
        target = (model, batch, size)
        known = self.targets.at(target)[1]
        others_known = max(self.pressures.at(other)[1] for other in others)
        return self._factor(target, others) * (1.0 + self.margin.share(quantile, target, known, others_known))

    def known(self, model: str, batch: int, size: int) -> Known:
        """How the sensitivity of a target is known."""
        return self.targets.at((model, batch, size))[1]

    def base(self, model: str, batch: int, size: int) -> float:
        """Slowdown beside the gentlest co-runner."""
        return self.targets.at((model, batch, size))[0][0]

    def sensitivity(self, model: str, batch: int, size: int) -> float:
        """Slowdown per pressure; 1 for the average of what was measured."""
        return self.targets.at((model, batch, size))[0][1]

    def pressure(self, model: str, batch: int, size: int) -> float:
        """What it adds to the slowdown of the average model, as a share of the latency alone."""
        return self.pressures.at((model, batch, size))[0][0]

    def _factor(self, target: CoRunner, others: Sequence[CoRunner]) -> float:
        base, sensitivity = self.targets.at(target)[0]
        return max(1.0, base + sensitivity * sum(self.pressures.at(other)[0][0] for other in others))
