"""Honest upper quantiles: split conformal margins, and one that follows drift.

Sources: Vovk et al., "Algorithmic Learning in a Random World" (split conformal); Gibbs and Candes, "Adaptive Conformal
Inference Under Distribution Shift" (NeurIPS 2021), here in its form of quantile tracking (Angelopoulos, Candes and
Tibshirani, 2023), which moves the margin itself and so never has to answer "infinitely long".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, log

import numpy as np
import numpy.typing as npt

from cotenant.errors import InvalidValueError


def conformal_quantile(scores: npt.ArrayLike, level: float, count: int | None = None) -> float:
    """The score that a new one stays below with probability `level` at least, if it is like those in `scores`.

    `count` is the number of independent ones among them, by default all: runs of one group share the group's error.
    With too few of them the largest score is the best that can be said.

    Raises InvalidValueError when there is no score, or the level is not between 0 and 1.
    """
    ordered = np.sort(np.asarray(scores, dtype=np.float64).ravel())
    if not ordered.size:
        raise InvalidValueError("conformal quantile", "scores", [], "at least one")
    if not 0 < level < 1:
        raise InvalidValueError("conformal quantile", "level", level, "a number between 0 and 1")
    independent = count or ordered.size
    share = min(1.0, ceil((independent + 1) * level - 1e-9) / independent)
    return float(ordered[min(ordered.size, ceil(share * ordered.size - 1e-9)) - 1])


@dataclass(frozen=True, slots=True)
class Margins:
    """Scores of held-out runs, from which the margin of any quantile follows.

    The score of a run is (observed - predicted) / (predicted + floor_ns): relative for long groups, absolute for short
    ones. `scores[k]` holds those of groups of k + 1 members, the last entry of all larger ones too, `counts` the number
    of groups they come from.
    """

    floor_ns: float
    scores: tuple[tuple[float, ...], ...]
    counts: tuple[int, ...]

    def shares(self, level: float) -> tuple[float, ...]:
        """Margin by number of members at a quantile; the median, level 0.5, is believed as it is.

        Where too few groups were held out for a quantile of their own, all of them together speak. From two members on
        it never falls with their number, or one more member could lower an upper quantile.
        """
        if level <= 0.5:
            return tuple(0.0 for _ in self.scores)
        pooled = conformal_quantile([s for kind in self.scores for s in kind], level, sum(self.counts))
        found: list[float] = []
        for kind, count in zip(self.scores, self.counts, strict=True):
            own = conformal_quantile(kind, level, count) if count * (1 - level) >= 2 else pooled
            found.append(max([0.0, own, *found[1:]]))
        return tuple(found)


def make_margins(
    predicted_ns: Sequence[float], runs_ns: Sequence[Sequence[int]], members: Sequence[int], most: int
) -> Margins:
    """Margins from held-out groups: predicted medians, single runs and numbers of members (at most `most` kinds).

    The floor is the one of a few at which short and long groups need the same margin most nearly.
    Raises InvalidValueError without groups.
    """
    if not predicted_ns:
        raise InvalidValueError("margins", "groups", [], "at least one held-out group")
    predicted = np.asarray(predicted_ns)
    typical = float(np.median(predicted))
    is_short = predicted < typical

    def score(floor: float) -> list[npt.NDArray[np.float64]]:
        return [
            (np.asarray(runs, float) - mine) / (mine + floor) for mine, runs in zip(predicted, runs_ns, strict=True)
        ]

    def imbalance(floor: float) -> float:
        scores = score(floor)
        sides = [
            np.concatenate([each for each, short in zip(scores, is_short, strict=True) if short == side])
            for side in (True, False)
            if bool((is_short == side).any())
        ]
        if len(sides) < 2:
            return 0.0
        low, high = (float(np.quantile(side, 0.95)) for side in sides)
        return abs(low - high) / max(abs(low), abs(high), 1e-9)

    floor = min((share * typical for share in (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)), key=imbalance)
    kinds: list[list[float]] = [[] for _ in range(most)]
    counts = [0] * most
    for size, scores in zip(members, score(floor), strict=True):
        at = min(size, most) - 1
        kinds[at].extend(scores.tolist())
        counts[at] += 1
    return Margins(floor, tuple(tuple(sorted(kind)) for kind in kinds), tuple(counts))


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
        for field, value, fits, expected in (
            ("level", self.level, 0 < self.level < 1, "a number between 0 and 1"),
            ("step", self.step, self.step > 0, "a positive number"),
            ("smallest", self.smallest, 0 < self.smallest <= 1, "a number in (0, 1]"),
            ("largest", self.largest, self.largest >= 1, "at least 1"),
        ):
            if not fits:
                raise InvalidValueError("adaptive conformal margin", field, value, expected)

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
