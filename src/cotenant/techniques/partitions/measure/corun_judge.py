"""Errors of the interference model on the randomly drawn co-runs of a repository, as a test set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cotenant.techniques.partitions.coruns import CoRun, CoRunRow
from cotenant.techniques.partitions.predict.factors import PressureInterference
from cotenant.techniques.partitions.predict.interference_fit import fit_expected, fit_pressure

QUANTILE = 0.95


def judge_random(rows: Sequence[CoRunRow]) -> dict[str, Any] | None:
    """Errors on the random co-runs of a fit to all others; None if there are too few of either.

    `coverage_p95`: percent of the random co-runs below the 95 % quantile of the fit.
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


def errors_pct(model: PressureInterference, tests: Sequence[CoRun]) -> tuple[float, float]:
    """Median and 90th percentile of the relative errors, in percent."""
    found: npt.NDArray[np.float64] = np.array(
        [100 * abs(model.factor(*each.target, each.others) / each.factor - 1) for each in tests]
    )
    return float(np.median(found)), float(np.quantile(found, 0.9))
