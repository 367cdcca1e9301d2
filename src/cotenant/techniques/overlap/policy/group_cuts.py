"""The cuts of a model that the search for a group considers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_PIECES = 8
"""Into how many pieces a model is cut. With more of them nothing more was answered in time, and fewer of the many
ranges were ones that had been predicted before."""


@lru_cache(4096)
def spread(cuts: tuple[int, ...], start: int, ways: int) -> Sequence[int]:
    """At most `ways` cuts between `start` and the end, evenly spread."""
    inner = [cut for cut in coarse(cuts)[1:-1] if cut > start]
    if len(inner) <= ways:
        return inner
    return [inner[(2 * way + 1) * len(inner) // (2 * ways)] for way in range(ways)]


@lru_cache(4096)
def coarse(cuts: tuple[int, ...]) -> tuple[int, ...]:
    """The boundaries of at most _PIECES pieces of a model, with about as many cuts each."""
    last = len(cuts) - 1
    return cuts if last <= _PIECES else tuple([cuts[at * last // _PIECES] for at in range(_PIECES + 1)])
