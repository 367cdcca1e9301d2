"""Observed over profiled latency by tenant and shape: the factors by which a predictor corrects its tables."""

from __future__ import annotations

from collections.abc import Mapping
from math import log

Scales = Mapping[str, float | Mapping[int, float]]
"""By tenant: one factor for all shapes, or a factor for each shape that was observed."""


def scale_of(scales: Scales, tenant: str, shape: int) -> float:
    """The factor of a tenant's launches of a shape; 1 without one. Other shapes have `typical_scale`."""
    found = scales.get(tenant, 1.0)
    if isinstance(found, Mapping):
        own = found.get(shape)
        return typical_scale(found) if own is None else own
    return found


def typical_scale(found: float | Mapping[int, float]) -> float:
    """The factor of a tenant where no shape is named.

    It is the median of the factors of all shapes and 1, so one shape with slow inputs does not change the others. Of
    two middle factors it is the one closer to 1.
    """
    if not isinstance(found, Mapping):
        return found
    ordered = sorted([1.0, *found.values()])
    half = len(ordered) // 2
    return min(max(1.0, ordered[-1 - half]), ordered[half])


def farthest_scale(found: float | Mapping[int, float]) -> float:
    """The largest deviation from the profile of all shapes."""
    return max(found.values(), key=lambda each: abs(log(each))) if isinstance(found, Mapping) else found
