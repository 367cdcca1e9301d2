"""Chooses cut points of a model: small segments with few live bytes at the cuts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cotenant.errors import InvalidValueError
from cotenant.graph.dfg import Dfg


def suggest_cuts(dfg: Dfg, weights: Sequence[float], max_weight: float) -> tuple[int, ...]:
    """Cut points, from 0 to `len(dfg.units)`, so that each segment weighs at most `max_weight`.

    `weights` has the weight of each unit (its time, its MACs...). A unit heavier than `max_weight` is a segment of its
    own. The result minimises the cuts that are not cheap, then the number of cuts, then the live bytes. It is exact, by
    dynamic programming over a sliding window in linear time: `best[e] = price(e) + min(best[s])` over all `s < e` with
    units [s, e) of at most `max_weight`.

    Raises InvalidValueError when the weights do not match the units, or `max_weight` is not positive.
    """
    count = len(dfg.units)
    if len(weights) != count:
        raise InvalidValueError(f"model {dfg.model!r}", "number of weights", len(weights), f"one a unit, {count}")
    if not max_weight > 0:
        raise InvalidValueError(f"model {dfg.model!r}", "max_weight", max_weight, "a positive number")
    if any(not weight >= 0 for weight in weights):
        raise InvalidValueError(f"model {dfg.model!r}", "weights", min(weights), "numbers of 0 or more")
    per_cut = 1 + sum(boundary.live_bytes for boundary in dfg.boundaries)
    per_dear_cut = per_cut * (count + 1)

    def price(boundary: int) -> int:
        place = dfg.boundaries[boundary]
        return per_cut + place.live_bytes + (0 if place.is_cheap else per_dear_cut)

    best = [0] * (count + 1)  # least price of cuts up to each boundary, its own included
    came = [0] * (count + 1)
    window: deque[int] = deque([0])  # candidates for the previous cut, cheapest first
    first, inside = 0, 0.0
    for end in range(1, count + 1):
        inside += weights[end - 1]
        while inside > max_weight and first < end - 1:
            inside -= weights[first]
            first += 1
        if first == end - 1:
            inside = weights[end - 1]
        while window[0] < first:
            window.popleft()
        came[end] = window[0]
        best[end] = best[window[0]] + price(end)
        while window and best[window[-1]] >= best[end]:
            window.pop()
        window.append(end)
    cuts = [count]
    while cuts[-1] > 0:
        cuts.append(came[cuts[-1]])
    return tuple(reversed(cuts))
