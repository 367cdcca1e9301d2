"""The cuts of a model that the search for a group considers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_SEGMENTS = 8
"""Segments of a model at most. Chosen by simulation: more do not raise attainment, and lower the hit rate of the
predictor's cache (docs/overlap.md)."""


@lru_cache(4096)
def spread(cuts: tuple[int, ...], start: int, ways: int) -> Sequence[int]:
    """At most `ways` cuts between `start` and the end, evenly spread."""
    inner = [cut for cut in coarse(cuts)[1:-1] if cut > start]
    if len(inner) <= ways:
        return inner
    return [inner[(2 * way + 1) * len(inner) // (2 * ways)] for way in range(ways)]


@lru_cache(4096)
def coarse(cuts: tuple[int, ...]) -> tuple[int, ...]:
    """The boundaries of at most _SEGMENTS segments of a model, with about as many cuts each."""
    last = len(cuts) - 1
    return cuts if last <= _SEGMENTS else tuple([cuts[at * last // _SEGMENTS] for at in range(_SEGMENTS + 1)])
