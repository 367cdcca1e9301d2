"""Active sampling of co-runs: chooses the next measurement by its information gain. Pure; a seed breaks ties.

A Gaussian process models the slowdown of a target: a base of the target, plus a contribution of each co-runner. Values
of one model are correlated over batch and size. With prior covariance K conditioned on all measurements, variance
`v_x = K_xx`, noise `s` and use `u_y`, measuring side x has the gain

    gain(x) = sum_y u_y * K_xy^2 / (v_x + s)

the decrease of the weighted variance of all slowdowns (Cohn 1996, "Neural network exploration using optimal experiment
design"). The next candidate has the largest total gain of its sides per second of measuring.

Bases and pressures of unconnected parts of the measurements cannot be separated. So targets are first measured beside
a few reference co-runners; further co-runners follow when the known ones are connected well enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2

import numpy as np
import numpy.typing as npt

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.coruns import CoRunner

Real = npt.NDArray[np.float64]
Side = tuple[CoRunner, tuple[CoRunner, ...]]
"""A target and its co-runners, of which a slowdown is measured."""
Launches = tuple[CoRunner, ...]
"""Concurrent launches, one in each partition; each is a target beside the others."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """Variances of a value: of each (model, batch, size) alone, shared within a model, and shared by all models."""

    own: float
    model: float
    common: float


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """Prior of the Gaussian process, and rules for choosing co-runners.

    `batches` and `share`: length scales, in doublings of the batch and as a share of the largest partition. `noise`:
    variance of one measured slowdown. The variances are about those of measured co-runs on a GPU; only ratios matter.

    For each combination of partition sizes, `references` co-runners come first, at least one of each model. Others
    follow when every target was measured beside `target_ties` of these. A further one follows when all before it were
    measured `other_ties` times, since a pressure from one noisy slowdown is worse than an interpolated one.
    """

    target: Likeness = Likeness(0.04, 0.04, 0.02)
    other: Likeness = Likeness(0.001, 0.002, 0.001)
    noise: float = 0.004
    batches: float = 2.0
    share: float = 0.5
    references: int = 4
    target_ties: int = 2
    other_ties: int = 3


@dataclass(slots=True)
class _Met:
    """Numbers of measurements of each target and each co-runner, for one combination of partition sizes."""

    targets: dict[CoRunner, int] = field(default_factory=dict)
    others: dict[CoRunner, int] = field(default_factory=dict)

    def fitting(self, open_: Sequence[tuple[int, Side]], settings: SamplerSettings) -> list[int]:
        """Numbers of the open sides (given with their numbers) that the rules allow next."""
        if len(self.others) < settings.references:
            return [row for row, _ in open_]
        models = list(dict.fromkeys(name for name, _, _ in self.others))
        foreign = [row for row, (_, others) in open_ if any(name not in models for name, _, _ in others)]
        if any(self.targets.get(target, 0) < settings.target_ties for _, (target, _) in open_):
            tied = [row for row, (_, others) in open_ if all(other in self.others for other in others)]
            return tied + foreign
        weak = [other for other, count in self.others.items() if count < settings.other_ties]
        tying = [row for row, (_, others) in open_ if any(other in weak for other in others)]
        return tying + foreign if tying else [row for row, _ in open_]


def sides(launches: Launches) -> tuple[Side, ...]:
    """The sides of concurrent launches: each launch as a target beside the others."""
    return tuple((target, tuple(sorted((*launches[:at], *launches[at + 1 :])))) for at, target in enumerate(launches))


class CoRunSampler:
    """Chooses among numbered candidates; `take` and `skip` report the result of each choice.

    A candidate has the `Side`s that one measurement yields. `known`: sides measured before; `use`: expected frequency
    of a side; `cost`: time of measuring a candidate; both 1 by default.

    Raises InvalidValueError without candidates, for candidates without sides, and for costs that are not positive.
    """

    def __init__(
        self,
        candidates: Sequence[Sequence[Side]],
        rng: np.random.Generator,
        *,
        known: Sequence[Side] = (),
        use: Callable[[Side], float] = lambda side: 1.0,
        cost: Sequence[float] | None = None,
        settings: SamplerSettings = SamplerSettings(),
    ) -> None:
        if not candidates or not all(candidates):
            raise InvalidValueError("co-run sampler", "candidates", len(candidates), "groups of sides, at least one")
        self._cost = np.ones(len(candidates)) if cost is None else np.array(cost, dtype=np.float64)
        if len(self._cost) != len(candidates) or not np.all(self._cost > 0):
            raise InvalidValueError("co-run sampler", "cost", cost, "a positive number for each candidate")
        rows: dict[Side, int] = {}
        self._rows = [[rows.setdefault(side, len(rows)) for side in group] for group in candidates]
        wanted = len(rows)
        for side in known:
            rows.setdefault(side, len(rows))
        self._use = np.array([use(side) if at < wanted else 0.0 for side, at in rows.items()])
        self._settings = settings
        self._noise = settings.noise
        self._met: dict[tuple[int, ...], _Met] = {}
        self._placed = list(rows)
        self._open = np.ones(len(candidates), dtype=bool)
        self._tie = 1e-9 * rng.random(len(candidates))
        self._prior = _covariance(list(rows), settings)
        self._columns = np.empty((16, len(rows)))
        self._learned = 0
        self._left = np.diag(self._prior).copy()
        self._reduction = self._use @ self._prior**2
        for side in known:
            self._learn(rows[side])

    @property
    def left(self) -> int:
        """Number of open candidates."""
        return int(self._open.sum())

    def variance(self) -> float:
        """Remaining variance of the slowdowns of all candidates, weighted by use."""
        return float(self._use @ self._left)

    def gains(self) -> Real:
        """Gain of each candidate: decrease of the weighted variance per cost."""
        each = self._reduction / (self._left + self._noise)
        found = np.array([each[rows].sum() for rows in self._rows]) / self._cost
        return np.asarray(found, dtype=np.float64)

    def next(self) -> int | None:
        """The number of the open candidate with the largest gain; None when none is open."""
        if not self._open.any():
            return None
        return int(np.argmax(np.where(self._allowed(), self.gains() * (1 + self._tie), -1.0)))

    def random(self, rng: np.random.Generator) -> int | None:
        """The number of a uniformly drawn open candidate; None when none is open."""
        left = np.flatnonzero(self._open)
        return int(rng.choice(left)) if left.size else None

    def take(self, number: int) -> None:
        """Record that this candidate was measured."""
        self._open[number] = False
        for row in self._rows[number]:
            self._learn(row)

    def skip(self, number: int) -> None:
        """Record that this candidate cannot be measured."""
        self._open[number] = False

    def _allowed(self) -> npt.NDArray[np.bool_]:
        """Open candidates with a side that the rules allow; all open ones if there is none."""
        open_rows = np.zeros(len(self._placed), dtype=bool)
        for number in np.flatnonzero(self._open):
            open_rows[self._rows[number]] = True
        groups: dict[tuple[int, ...], list[tuple[int, Side]]] = {}
        for row in np.flatnonzero(open_rows):
            groups.setdefault(_sizes(self._placed[row]), []).append((int(row), self._placed[row]))
        fits = np.zeros(len(self._placed), dtype=bool)
        for sizes, group in groups.items():
            met = self._met.get(sizes, _Met())
            fits[met.fitting(group, self._settings) or [row for row, _ in group]] = True
        allowed = self._open & np.array([bool(fits[rows].any()) for rows in self._rows])
        return allowed if allowed.any() else self._open

    def _learn(self, row: int) -> None:
        target, others = self._placed[row]
        met = self._met.setdefault(_sizes(self._placed[row]), _Met())
        met.targets[target] = met.targets.get(target, 0) + 1
        for other in others:
            met.others[other] = met.others.get(other, 0) + 1
        before = self._columns[: self._learned]
        column = self._prior[:, row] - before[:, row] @ before
        column /= np.sqrt(self._left[row] + self._noise)
        # The conditioned covariance is the prior less the outer products of all columns. It is never computed as a
        # whole, which would take longer than all other steps.
        weighted = self._use * column
        covered = self._prior @ weighted - (before @ weighted) @ before
        self._reduction += column * (column * (weighted @ column) - 2 * covered)
        self._left -= column**2
        if self._learned == len(self._columns):
            self._columns = np.concatenate([self._columns, np.empty_like(self._columns)])
        self._columns[self._learned] = column
        self._learned += 1


def order_by_gain(
    candidates: Sequence[Sequence[Side]],
    count: int,
    rng: np.random.Generator,
    settings: SamplerSettings = SamplerSettings(),
) -> list[int]:
    """The first `count` candidates that the sampler chooses at equal costs."""
    sampler = CoRunSampler(candidates, rng, settings=settings)
    found: list[int] = []
    while len(found) < count and (number := sampler.next()) is not None:
        sampler.take(number)
        found.append(number)
    return found


def _sizes(side: Side) -> tuple[int, ...]:
    target, others = side
    return target[2], *sorted(size for _, _, size in others)


def _covariance(rows: Sequence[Side], settings: SamplerSettings) -> Real:
    """Prior covariance of the slowdowns of all sides."""
    largest = max(size for target, others in rows for _, _, size in (target, *others))
    targets = list(dict.fromkeys(target for target, _ in rows))
    others = list(dict.fromkeys(other for _, beside in rows for other in beside))
    target_at: Mapping[CoRunner, int] = {key: at for at, key in enumerate(targets)}
    other_at: Mapping[CoRunner, int] = {key: at for at, key in enumerate(others)}
    own = np.array([target_at[target] for target, _ in rows], dtype=np.intp)
    counts = np.zeros((len(rows), len(others)))
    for at, (_, beside) in enumerate(rows):
        for other in beside:
            counts[at, other_at[other]] += 1.0
    bases = _likeness(targets, settings.target, settings, largest)[np.ix_(own, own)]
    added = counts @ _likeness(others, settings.other, settings, largest) @ counts.T
    return np.asarray(bases + added, dtype=np.float64)


def _likeness(keys: Sequence[CoRunner], kind: Likeness, settings: SamplerSettings, largest: int) -> Real:
    names = {name: at for at, name in enumerate(dict.fromkeys(model for model, _, _ in keys))}
    model = np.array([names[name] for name, _, _ in keys])
    batch = np.array([log2(each) for _, each, _ in keys]) / settings.batches
    size = np.array([each / largest for _, _, each in keys]) / settings.share
    near = np.exp(-0.5 * (np.subtract.outer(batch, batch) ** 2 + np.subtract.outer(size, size) ** 2))
    same = np.equal.outer(model, model)
    found = kind.own * np.eye(len(keys)) + kind.model * same * near + kind.common * near
    return np.asarray(found, dtype=np.float64)
