"""Arrivals for the simulation of plans: Poisson, at rates that may change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.types import NS_PER_S

Times = npt.NDArray[np.int64]
RateCurve = Sequence[tuple[int, float]]
"""Rates a second, each from a time in ns on; ascending, the first from 0."""


def poisson_arrivals(rates: Mapping[str, float], duration_ns: int, seed: int) -> dict[str, Times]:
    """Ascending times in [0, duration) of each tenant, in ns. Each draws from a child of the seed, in their order.

    Raises InvalidValueError for a duration or a rate that is not positive, and a seed below 0.
    """
    return curve_arrivals({name: ((0, rate),) for name, rate in rates.items()}, duration_ns, seed)


def curve_arrivals(curves: Mapping[str, RateCurve], duration_ns: int, seed: int) -> dict[str, Times]:
    """Poisson arrivals with rates by piecewise-constant curves. Raises as `poisson_arrivals`; rates may be 0."""
    if duration_ns <= 0:
        raise InvalidValueError("arrivals", "duration_ns", duration_ns, "a positive duration")
    if seed < 0:
        raise InvalidValueError("arrivals", "seed", seed, "an integer from 0")
    children = np.random.SeedSequence(seed).spawn(len(curves))
    return {
        name: _draw(name, curve, duration_ns, np.random.default_rng(child))
        for (name, curve), child in zip(curves.items(), children, strict=True)
    }


def _draw(name: str, curve: RateCurve, duration_ns: int, rng: np.random.Generator) -> Times:
    starts = [start for start, _ in curve]
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise InvalidValueError(f"arrivals of {name!r}", "curve", starts, "times that ascend from 0")
    parts = []
    for (start, rate), end in zip(curve, [*starts[1:], duration_ns], strict=True):
        if not 0 <= rate < math.inf:
            raise InvalidValueError(f"arrivals of {name!r}", "rate", rate, "a finite rate from 0")
        end = min(end, duration_ns)
        if start < end:
            count = rng.poisson(rate * (end - start) / NS_PER_S)
            parts.append(np.sort(rng.integers(start, end, count, dtype=np.int64)))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
