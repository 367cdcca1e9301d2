"""The largest rate at which something works."""

from __future__ import annotations

import math
from collections.abc import Callable


def largest_rate(works: Callable[[float], bool], low: float, high: float, step: float) -> float:
    """The largest rate that works, to a ratio of `step`, if all below it do; `low` is taken to work, `high` not to."""
    while high / low > step:
        middle = math.sqrt(low * high)
        if works(middle):
            low = middle
        else:
            high = middle
    return low
