"""Upper quantiles by split conformal prediction (Vovk et al., "Algorithmic Learning in a Random World")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from cotenant.errors import InvalidValueError

UPPER_QUANTILE = 0.95
"""Quantile of upper estimates: of a group's latency (policy overlap), and of the time until the response is sent
(tail-aware policies; decision 0024). Chosen by hand: one in twenty may be wrong."""


def conformal_quantile(scores: npt.ArrayLike, level: float, count: int | None = None) -> float:
    """Upper bound of a new score with probability at least `level`, if it is exchangeable with those in `scores`.

    The bound is the `ceil((n + 1) * level) / n` quantile of the scores, and the largest score for too small n. `count`
    is n, the number of independent scores, by default all: runs of one group share the group's error.

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
    """Conformal scores of held-out runs, which give the margin of any quantile.

    The score of a run is `(observed - predicted) / (predicted + floor_ns)`: relative for long groups, absolute for
    short ones. `scores[k]` has the scores of groups of k + 1 members, the last entry also those of larger groups.
    `counts[k]` is the number of these groups.
    """

    floor_ns: float
    scores: tuple[tuple[float, ...], ...]
    counts: tuple[int, ...]

    def shares(self, level: float) -> tuple[float, ...]:
        """Margin by number of members at a quantile; 0 for the median and below.

        Where too few groups were held out, the quantile is over all groups. From two members on the margin never falls
        with their number, so that one more member never lowers an upper quantile.
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
    """Margins from held-out groups: predicted medians, single runs and numbers of members (at most `most` classes).

    The floor is the candidate for which short and long groups need the most similar margins.
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
