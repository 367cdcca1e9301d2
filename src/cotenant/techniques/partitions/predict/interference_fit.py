"""Fits `PressureInterference` to measured co-runs: alternating least squares, then margins by cross-validation.

With base `a_t` and sensitivity `s_t` of target t, and pressure `p_o` of co-runner o, minimise over all co-runs

    sum of |factor - a_t - s_t * sum_o p_o| / factor        (L1 loss by iteratively reweighted least squares)

1. Given `p`, fit `a_t` and `s_t` of each target by weighted regression.
2. Given `a` and `s`, update `p`. Repeat `rounds` times.

The L1 loss is robust against targets that sometimes run in a slower way. In each connected part of the measurements,
`mean(s) = 1` and `min(p) = 0` fix the scale. Fitting is fast, so models are fitted when loaded and never stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.coruns import CoRun, CoRunner
from cotenant.techniques.partitions.predict.factors import Margin, PressureInterference, Scores, Surface

Real = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
_FOLDS = 10
_NONE = Scores(())
_NO_MARGIN = Margin({}, _NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class PressureSettings:
    """Settings of the fit: `rounds` of alternation, and regularisation where little was measured.

    Relative errors below `round_off` have a squared loss, larger ones a linear loss (Huber). `pull` draws sensitivities
    towards 1, and `damp` draws pressures towards 0. Chosen on random splits of measured co-runs on a GPU.
    """

    rounds: int = 60
    round_off: float = 0.005
    pull: float = 0.2
    damp: float = 0.05


@dataclass(frozen=True, slots=True)
class _Parts:
    """Fitted values: base and sensitivity of each target, pressure of each co-runner, in the order of `targets` and
    `others`."""

    targets: tuple[CoRunner, ...]
    others: tuple[CoRunner, ...]
    base: Real
    sensitivity: Real
    pressure: Real

    def surfaces(self) -> tuple[Surface, Surface]:
        answers = zip(self.base.tolist(), self.sensitivity.tolist(), strict=True)
        return (
            Surface(dict(zip(self.targets, answers, strict=True))),
            Surface({key: (value,) for key, value in zip(self.others, self.pressure.tolist(), strict=True)}),
        )


def fit_pressure(
    coruns: Sequence[CoRun], *, seed: int = 0, settings: PressureSettings = PressureSettings()
) -> PressureInterference:
    """Fit sensitivities, pressures and the margins of quantiles; `seed` draws the folds.

    Margins are those of cross-conformal prediction with ten folds. Raises InvalidValueError for fewer than two co-runs.
    """
    plain = fit_expected(coruns, settings=settings)
    return replace(plain, margin=_margin(coruns, plain, seed, settings))


def fit_expected(coruns: Sequence[CoRun], *, settings: PressureSettings = PressureSettings()) -> PressureInterference:
    """Fit sensitivities and pressures without margins (ten times faster): no quantiles above the median.

    Raises InvalidValueError for fewer than two co-runs.
    """
    if len(coruns) < 2:
        raise InvalidValueError("interference", "co-runs", len(coruns), "at least two")
    targets, pressures = _fit(coruns, settings).surfaces()
    counts = [len(each.others) for each in coruns]
    return PressureInterference(targets, pressures, _NO_MARGIN, min(counts), max(counts))


def errors(model: PressureInterference, coruns: Sequence[CoRun]) -> list[float]:
    """Relative errors, observed / predicted - 1."""
    return [each.factor / model.factor(*each.target, each.others) - 1.0 for each in coruns]


def _margin(coruns: Sequence[CoRun], model: PressureInterference, seed: int, settings: PressureSettings) -> Margin:
    folds = min(_FOLDS, len(coruns))
    fold = np.random.default_rng(seed).permutation(len(coruns)) % folds
    by_target: dict[CoRunner, list[float]] = {key: [] for key in model.targets.values}
    for number in range(folds):
        kept = [each for each, mine in zip(coruns, fold.tolist(), strict=True) if mine != number]
        held = [each for each, mine in zip(coruns, fold.tolist(), strict=True) if mine == number]
        fitted = PressureInterference(*_fit(kept, settings).surfaces(), model.margin)
        for each, error in zip(held, errors(fitted, held), strict=True):
            by_target[each.target].append(error)
    spread = Scores(tuple(sorted(error for found in by_target.values() for error in found)))
    floor = settings.round_off
    typical = max(floor, float(np.mean(np.maximum(0.0, spread.values))))
    scores: list[float] = []
    scales: dict[CoRunner, float] = {}
    for key, found in by_target.items():
        above = [max(0.0, error) for error in found]
        total = sum(above) + typical
        scales[key] = max(floor, total / (len(found) + 1))
        # Leave each error out of its own scale, or the largest errors would look small.
        scores += [e / max(floor, (total - over) / len(found)) for e, over in zip(found, above, strict=True)]
    measured = Scores(tuple(sorted(scores)))
    between = _between(coruns, model, spread)
    beside = _beside_foreign(coruns, model, scales, measured)
    return Margin(scales, measured, beside, between, _foreign(coruns, model, between))


def _between(coruns: Sequence[CoRun], model: PressureInterference, fallback: Scores) -> Scores:
    """Errors of targets interpolated from the other batches and sizes of their model."""
    by_target: dict[CoRunner, list[CoRun]] = {}
    of_model: dict[str, dict[CoRunner, tuple[float, ...]]] = {}
    for each in coruns:
        by_target.setdefault(each.target, []).append(each)
        of_model.setdefault(each.target[0], {})[each.target] = model.targets.values[each.target]
    found: list[float] = []
    for key, mine in by_target.items():
        left = {other: value for other, value in of_model[key[0]].items() if other != key}
        if left:
            found += errors(PressureInterference(Surface(left), model.pressures, model.margin), mine)
    return Scores(tuple(sorted(found))) if found else fallback


def _foreign(coruns: Sequence[CoRun], model: PressureInterference, fallback: Scores) -> Scores:
    """Errors of models predicted by the average of the other models."""
    names = model.targets.models
    if len(names) < 2:
        return fallback
    found: list[float] = []
    for name in names:
        left = model.targets.without(key for key in model.targets.values if key[0] == name)
        mine = [each for each in coruns if each.target[0] == name]
        found += errors(PressureInterference(left, model.pressures, model.margin), mine)
    return Scores(tuple(sorted(found)))


def _beside_foreign(
    coruns: Sequence[CoRun], model: PressureInterference, scales: Mapping[CoRunner, float], fallback: Scores
) -> Scores:
    """Errors beside models with the average pressure of the others, in units of the targets' scales."""
    names = model.pressures.models
    if len(names) < 2:
        return fallback
    found: list[float] = []
    for name in names:
        left = model.pressures.without(key for key in model.pressures.values if key[0] == name)
        beside = [each for each in coruns if any(other[0] == name for other in each.others)]
        missed = errors(PressureInterference(model.targets, left, model.margin), beside)
        found += [error / scales[each.target] for each, error in zip(beside, missed, strict=True)]
    return Scores(tuple(sorted(found)))


def _fit(coruns: Sequence[CoRun], settings: PressureSettings) -> _Parts:
    targets = tuple(sorted({each.target for each in coruns}))
    others = tuple(sorted({other for each in coruns for other in each.others}))
    target_at = {key: at for at, key in enumerate(targets)}
    other_at = {key: at for at, key in enumerate(others)}
    target: Index = np.array([target_at[each.target] for each in coruns], dtype=np.intp)
    count = np.array([len(each.others) for each in coruns], dtype=np.float64)
    row = np.repeat(np.arange(len(coruns)), count.astype(np.intp))
    other = np.array([other_at[each] for corun in coruns for each in corun.others], dtype=np.intp)
    factor = np.array([each.factor for each in coruns])
    is_uniform = bool(np.all(count == count[0]))

    base = _medians(target, factor, len(targets))
    sensitivity = np.ones(len(targets))
    pressure = _medians(other, ((factor - base[target]) / count)[row], len(others))
    for _ in range(settings.rounds):
        total: Real = np.bincount(row, pressure[other], len(coruns)).astype(np.float64)
        weight = _weights(factor, base[target] + sensitivity[target] * total, settings)
        base, sensitivity = _regress(target, total, factor, weight, len(targets), settings.pull)
        miss = factor - base[target] - sensitivity[target] * total
        weight = _weights(factor, factor - miss, settings) * sensitivity[target]
        # Co-runners of one row share its residual equally; with one co-runner a row this is the exact minimum.
        slope = np.bincount(other, (weight * miss)[row], len(others))
        curve = np.bincount(other, (weight * sensitivity[target] * count)[row], len(others)) + settings.damp
        pressure = pressure + (slope - settings.damp * pressure) / curve
        if is_uniform:  # base and pressures can be shifted against each other: keep the pressures centred
            middle = float(pressure.mean())
            base, pressure = base + sensitivity * count[0] * middle, pressure - middle
        else:
            pressure = np.maximum(pressure, 0.0)
        mean = max(float(sensitivity.mean()), 1e-9)
        sensitivity, pressure = sensitivity / mean, pressure * mean
    _settle(target, row, other, count, base, sensitivity, pressure)
    return _Parts(targets, others, base, sensitivity, pressure)


def _weights(factor: Real, predicted: Real, settings: PressureSettings) -> Real:
    relative = np.abs(factor - predicted) / factor
    weight: Real = 1.0 / np.maximum(relative, settings.round_off) / factor**2
    return weight


def _regress(at: Index, x: Real, y: Real, weight: Real, size: int, pull: float) -> tuple[Real, Real]:
    """Weighted regression of y on x for each group of rows: base, and a slope >= 0 drawn towards 1."""
    w, wx, wxx = (np.bincount(at, weight * power, size) for power in (np.ones_like(x), x, x * x))
    wy, wxy = np.bincount(at, weight * y, size), np.bincount(at, weight * x * y, size)
    slope = np.maximum(0.0, (w * (wxy + pull) - wx * wy) / (w * (wxx + pull) - wx * wx))
    return (wy - slope * wx) / w, slope


def _medians(at: Index, values: Real, size: int) -> Real:
    order = np.lexsort((values, at))
    ends = np.cumsum(np.bincount(at, minlength=size))
    return np.array([np.median(part) for part in np.split(values[order], ends[:-1])])


def _settle(
    target: Index, row: Index, other: Index, count: Real, base: Real, sensitivity: Real, pressure: Real
) -> None:
    """Normalise scale and zero of each connected part of the measurements, in place."""
    part = _connected(target[row], other, len(base), len(pressure))
    for number in range(int(part.max()) + 1):
        mine, theirs = part[: len(base)] == number, part[len(base) :] == number
        scale = float(sensitivity[mine].mean())
        if scale > 1e-9:
            sensitivity[mine] /= scale
            pressure[theirs] *= scale
        counts = count[mine[target]]
        if np.all(counts == counts[0]):
            least = float(pressure[theirs].min())
            base[mine] += sensitivity[mine] * counts[0] * least
            pressure[theirs] -= least
    np.maximum(pressure, 0.0, out=pressure)


def _connected(left: Index, right: Index, lefts: int, rights: int) -> Index:
    """Numbers of the connected parts of a graph with edges left[i] - right[i], for all left nodes, then all right."""
    root = np.arange(lefts + rights)
    a, b = left, right + lefts
    while True:
        least = np.minimum(root[a], root[b])
        before = root.copy()
        np.minimum.at(root, a, least)
        np.minimum.at(root, b, least)
        if np.array_equal(root, before):
            return np.unique(root, return_inverse=True)[1]
