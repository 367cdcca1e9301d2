"""How well co-runs are predicted from few of them: the error on held-out ones against how many were measured. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.coruns import CoRun, CoRunRow, runs_of
from cotenant.techniques.partitions.measure.corun_judge import errors_pct
from cotenant.techniques.partitions.measure.corun_sampler import order_by_gain
from cotenant.techniques.partitions.predict.interference_fit import fit_expected

SEEDS = (0, 1, 2, 3, 4)
FEWEST_RUNS = 15
ACTIVE, RANDOM = "active", "random"
HELD_OUT = 0.3
Order = Callable[[Sequence[Sequence[CoRun]], int, np.random.Generator], list[int]]
"""Numbers of the measurements to take, in order: of (measurements, how many, chance)."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Errors on held-out co-runs of a fit to `count` measurements, in per cent, means over the seeds."""

    order: str
    count: int
    median_error_pct: float
    p90_error_pct: float


def active_order(runs: Sequence[Sequence[CoRun]], count: int, rng: np.random.Generator) -> list[int]:
    """As the sampler chooses, when every measurement takes equally long."""
    return order_by_gain([[(each.target, each.others) for each in run] for run in runs], count, rng)


def random_order(runs: Sequence[Sequence[CoRun]], count: int, rng: np.random.Generator) -> list[int]:
    """Without a thought."""
    return [int(number) for number in rng.permutation(len(runs))[:count]]


def learning_curve(
    runs: Sequence[Sequence[CoRun]],
    counts: Sequence[int],
    seeds: Sequence[int],
    *,
    orders: Sequence[tuple[str, Order]] = ((ACTIVE, active_order), (RANDOM, random_order)),
    held_out: float = HELD_OUT,
    on_step: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> list[CurvePoint]:
    """Hold a part of the measurements out, take the others in each order, fit, and look at the errors.

    `runs` are measurements: co-runs that are known together. For each seed the same part is held out for all orders.
    Counts beyond what is left to choose from mean all of it. Raises InvalidValueError for fewer than ten measurements.
    """
    if len(runs) < 10:
        raise InvalidValueError("co-runs", "measurements", len(runs), "at least ten")
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for done, seed in enumerate(seeds):
        rng = np.random.default_rng(seed)
        shuffled = rng.permutation(len(runs)).tolist()
        cut = max(1, round(held_out * len(runs)))
        test = [each for number in shuffled[:cut] for each in runs[number]]
        pool = [runs[number] for number in sorted(shuffled[cut:])]
        for name, order in orders:
            on_step(done, len(seeds), f"seed {seed}, {name}")
            chosen = order(pool, min(max(counts), len(pool)), rng)
            for count in counts:
                coruns = [each for number in chosen[:count] for each in pool[number]]
                found.setdefault((name, count), []).append(errors_pct(fit_expected(coruns), test))
    on_step(len(seeds), len(seeds), "")
    return [
        CurvePoint(name, count, *(float(value) for value in np.mean(values, axis=0)))
        for (name, count), values in found.items()
    ]


def needed(curve: Sequence[CurvePoint], order: str, metric: str, level: float) -> int | None:
    """The least count of an order from which its error stays at `level` or below; None where it never does."""
    points = sorted((point for point in curve if point.order == order), key=lambda point: point.count)
    kept = None
    for is_good, group in groupby(points, key=lambda point: getattr(point, metric) <= level):
        kept = next(group).count if is_good else None
    return kept


def spread_counts(most: int, steps: int = 12) -> list[int]:
    """Counts from a few to `most`, at about equal ratios."""
    least = min(max(4, most // 40), most)
    return sorted({round(each) for each in np.geomspace(least, most, steps)})


@dataclass(frozen=True, slots=True)
class CoRunReport:
    """The curve and a sentence about it."""

    curve: tuple[CurvePoint, ...]
    lead: str


def report_of(rows: Sequence[CoRunRow]) -> CoRunReport | None:
    """The learning curve of all measurements; None where there are too few of them."""
    runs = [[row.corun() for row in run] for run in runs_of(rows)]
    if len(runs) < FEWEST_RUNS:
        return None
    curve = learning_curve(runs, spread_counts(round(0.7 * len(runs)), 8), SEEDS)
    last = {point.order: point for point in curve}
    lead = (
        f"{len(runs)} measurements. Fitted to seven of ten of them, half of the factors of the others are predicted "
        f"within {last[ACTIVE].median_error_pct:.1f} % and nine of ten within {last[ACTIVE].p90_error_pct:.1f} %, in "
        f"means over {len(SEEDS)} ways to hold some out. Chosen by the sampler the errors fall as the line "
        f"'{ACTIVE}' does, chosen at random as '{RANDOM}'."
    )
    return CoRunReport(tuple(curve), lead)
