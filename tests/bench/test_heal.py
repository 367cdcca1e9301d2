"""The figures of the benchmark of wrong profiles."""

from __future__ import annotations

from typing import Any

import pytest

from bench.heal import OTHERS, judge, settled_s


def test_a_belief_has_settled_when_it_stays_near_its_end() -> None:
    rising = [(float(at), belief) for at, belief in enumerate((1.0, 5.0, 10.5, 20.0, 9.5, 10.0, 10.2, 10.0, 10.0))]
    assert settled_s(rising) == (4.0, 10.0)
    assert settled_s([(0.0, 3.0), (1.0, 3.0)]) == (0.0, 3.0)
    assert settled_s([(0.0, 1.0), (1.0, 2.0)]) == (1.0, 2.0)


def row(error: float, attained: float, *, is_loaded: bool = True, belief: float = 2.0) -> dict[str, Any]:
    return {
        "is_loaded": is_loaded,
        "error": error,
        "seconds_to_first_answer": error,
        "seconds_to_within_10_pct": 2 * error,
        "belief": belief,
        "attainment": dict.fromkeys(OTHERS, attained) if is_loaded else {},
    }


def test_the_worst_row_counts_and_is_compared_with_the_true_profile() -> None:
    idle = [row(each, 0.0, is_loaded=False) for each in (1.0, 25.0, 0.04)]
    rows = [*idle, row(1.0, 0.99), row(25.0, 0.96), row(0.04, 1.0, belief=0.5)]
    assert judge(rows) == pytest.approx(
        {
            "seconds_to_first_answer": 25.0,
            "seconds_to_within_10_pct": 50.0,
            "others_lose_points": 3.0,
            "belief_ratio_worst": 0.25,
        }
    )
    assert rows[-1]["others_lose_points"] == 0.0
