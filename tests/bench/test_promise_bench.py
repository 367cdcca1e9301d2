"""The judge of promises: attainment of tenants with few and many queries, and steps of rates."""

from __future__ import annotations

import pytest

from bench.promise import LEAST_QUERIES, LOWER, STEPS, _loads, _sustained, judge, pooled


def test_tenants_with_few_queries_are_judged_together() -> None:
    served = {"many": (LEAST_QUERIES, 297), "few": (100, 50), "fewer": (100, 100), "none": (0, 0)}
    assert pooled(served) == {"many": (0.99, 0.99), "": (0.75, 0.99)}
    assert pooled(served, {"many": 1.0, "few": 0.5, "fewer": 0.9, "none": 0.0}) == {
        "many": (0.99, 1.0),
        "": (0.75, pytest.approx(0.7)),
    }


@pytest.mark.parametrize(
    ("limit", "is_kept", "found"),
    [(1.0, True, 1.0), (1.3, True, 1.25), (9.0, True, STEPS[-1]), (0.7, False, 0.6), (0.1, False, LOWER[-1] / 2)],
)
def test_sustained_rates_are_sought_up_or_down(limit: float, is_kept: bool, found: float) -> None:
    assert _sustained(lambda step: step <= limit, is_kept=is_kept) == found


def test_the_summary_leaves_the_trivial_model_out_of_the_medians() -> None:
    row = {"simulated_minus_served_points": [-2.0, 1.0], "promised_over_sustained": 0.9}
    rows = [
        {**row, "seed": -1, "promised_minus_served_points": [50.0], "promised_over_sustained": 1.1},
        {**row, "seed": 0, "promised_minus_served_points": [0.5, 1.5]},
        {**row, "seed": 1, "promised_minus_served_points": [-1.0]},
    ]
    assert judge(rows) == {
        "promised_minus_served_points": 0.5,
        "promised_minus_served_points_p90": 1.5,
        "promised_rate_over_sustained": 0.9,
        "simulated_minus_served_points": 1.5,
        "trivial_model_rate_error_pct": pytest.approx(10.0),
    }


def test_workloads_are_drawn_by_seed_and_the_trivial_model_is_alone() -> None:
    assert [load.model for load in _loads(-1, {})] == ["tiny"]
    assert _loads(3, {}) == _loads(3, {})
    assert len({tuple(load.model for load in _loads(seed, {})) for seed in range(12)}) > 6
