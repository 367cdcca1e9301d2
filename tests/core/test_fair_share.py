"""Max-min fair sharing against linear programs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from cotenant.fair_share import fair_shares

asks = st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(1, 16)), min_size=1, max_size=6)


@given(asks, st.floats(0.5, 80.0))
@settings(max_examples=60, deadline=None)
def test_shares_are_max_min_fair_as_a_row_of_linear_programs_finds_them(
    some: list[tuple[float, int]], capacity: float
) -> None:
    demand, weights = [each[0] for each in some], [each[1] for each in some]
    shares = fair_shares(demand, weights, capacity)
    assert shares == pytest.approx(_max_min(demand, weights, capacity), abs=1e-6)
    assert sum(shares) == pytest.approx(min(capacity, sum(demand)))


def _max_min(demand: Sequence[float], weights: Sequence[int], capacity: float) -> list[float]:
    """Raise the least share of a unit of weight as far as it goes, fix who cannot have more, and so on."""
    count = len(demand)
    fixed: dict[int, float] = {}
    while len(fixed) < count:
        level = _level(demand, weights, capacity, fixed)
        for i in range(count):
            if i not in fixed and _most(i, level, demand, weights, capacity, fixed) <= level * weights[i] + 1e-7:
                fixed[i] = min(demand[i], level * weights[i])
    return [fixed[i] for i in range(count)]


def _level(demand: Sequence[float], weights: Sequence[int], capacity: float, fixed: dict[int, float]) -> float:
    """The highest least share of a unit of weight of those that are not fixed."""
    count = len(demand)
    rows = [[0.0] * i + [-1.0] + [0.0] * (count - i - 1) + [float(weights[i])] for i in range(count) if i not in fixed]
    bounds = [(fixed[i], fixed[i]) if i in fixed else (0.0, demand[i]) for i in range(count)]
    found = linprog(
        [0.0] * count + [-1.0],
        A_ub=[*rows, [1.0] * count + [0.0]],
        b_ub=[0.0] * len(rows) + [capacity],
        bounds=[*bounds, (0.0, None)],
    )
    assert found.status == 0
    return float(found.x[-1])


def _most(
    one: int, level: float, demand: Sequence[float], weights: Sequence[int], capacity: float, fixed: dict[int, float]
) -> float:
    """The most that one can have while the others keep what they have."""
    others = sum(fixed.get(i, level * weights[i]) for i in range(len(demand)) if i != one)
    return min(demand[one], capacity - others)
