"""How good the fit to a repository's co-runs is, by the co-runs that were drawn at random and by a learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cotenant.predict.interference_fit import fit_expected, fit_pressure
from cotenant.profile.corun import CoRunRow, runs_of
from cotenant.profile.corun_curve import (
    ACTIVE,
    RANDOM,
    CurvePoint,
    errors_pct,
    learning_curve,
    spread_counts,
)

SEEDS = (0, 1, 2, 3, 4)
QUANTILE = 0.95
FEWEST_RUNS = 15


@dataclass(frozen=True, slots=True)
class CoRunReport:
    """The curve and a sentence about it."""

    curve: tuple[CurvePoint, ...]
    lead: str


def judge_random(rows: Sequence[CoRunRow]) -> dict[str, Any] | None:
    """Errors on the co-runs that were drawn at random, of a fit to all others; None where there are too few of either.

    `coverage_p95` is the share of them, in per cent, that stay below the 95 % quantile of the fit.
    """
    test = [row.corun() for row in rows if row.chosen == "random"]
    train = [row.corun() for row in rows if row.chosen != "random"]
    if len(test) < 2 or len(train) < 2:
        return None
    median, p90 = errors_pct(fit_expected(train), test)
    fitted = fit_pressure(train)
    below = [each.factor <= fitted.factor_at(QUANTILE, *each.target, each.others) for each in test]
    return {
        "tests": len(test),
        "fitted_to": len(train),
        "median_error_pct": median,
        "p90_error_pct": p90,
        "coverage_p95": 100 * sum(below) / len(below),
    }


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
