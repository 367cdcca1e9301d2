"""Max-min fair sharing of one resource, by water filling.

Source: Bertsekas and Gallager, *Data Networks* (1992), section 6.5.2, with weights.
"""

from __future__ import annotations

from collections.abc import Sequence


def fair_shares(demands: Sequence[float], weights: Sequence[int], capacity: float) -> list[float]:
    """Weighted max-min fair shares of a capacity: `min(demand, level * weight)`, with one level for all demands.

    The level is the largest at which the shares fit into the capacity. Demands and shares have the unit of the
    capacity; weights are positive. A plain loop, so that numba compiles it as it stands.
    """
    count = len(demands)
    shares = [-1.0] * count
    left = capacity
    weight = 0
    for i in range(count):
        weight += weights[i]
    while weight > 0:
        level = left / weight
        is_settled = True
        for i in range(count):
            if shares[i] < 0.0 and demands[i] <= level * weights[i]:
                shares[i] = demands[i]
                left -= demands[i]
                weight -= weights[i]
                is_settled = False
        if is_settled:
            for i in range(count):
                if shares[i] < 0.0:
                    shares[i] = level * weights[i]
            weight = 0
    return shares
