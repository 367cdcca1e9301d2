"""Figures of a sample of durations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

QUANTILES = (50, 90, 95, 99)


def spread(durations_ns: Sequence[int]) -> dict[str, Any]:
    """Columns of a sample: runs, p50 to p99, mean and standard deviation, in milliseconds.

    Raises ValueError for an empty sample.
    """
    if not durations_ns:
        raise ValueError("a sample of durations is empty")
    values = np.asarray(durations_ns, np.float64) / 1e6
    quantiles = {f"p{q}_ms": plain(v) for q, v in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)}
    return {
        "runs": len(durations_ns),
        **quantiles,
        "mean_ms": plain(values.mean()),
        "std_ms": plain(values.std(ddof=1)) if len(values) > 1 else 0.0,
    }


def median(values: Iterable[float]) -> float:
    """The median, nan where there is none."""
    found = list(values)
    return statistics.median(found) if found else math.nan


def plain(value: float) -> float:
    """A Python float with six significant digits: nothing measured here has more."""
    return float(f"{float(value):.6g}")
