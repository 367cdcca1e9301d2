"""Calibration: factors follow what is observed, no launch moves them far, and refusing everything relaxes them."""

from __future__ import annotations

import pytest

from cotenant.predict.online import Calibration

MS = 1_000_000


def feed(calibration: Calibration, ratio: float, count: int, tenant: str = "a", base_ns: int = 10 * MS) -> int:
    """Observe launches that take `ratio` times what the profile says; believe what the calibration says meanwhile."""
    changes = 0
    for _ in range(count):
        believed = round(base_ns * calibration.factor(tenant))
        changes += calibration.observe(tenant, believed, round(base_ns * ratio)) is not None
    return changes


def test_nothing_changes_before_the_warm_up_or_within_the_tolerance() -> None:
    calibration = Calibration()
    assert feed(calibration, 2.0, calibration.warm_up - 1) == 0
    assert calibration.scales == {}
    assert feed(calibration, 2.0, 1) == 1
    assert calibration.factor("a") == pytest.approx(2.0)
    exact = Calibration()
    assert feed(exact, 1.04, 100) == 0
    assert exact.factor("a") == 1.0


@pytest.mark.parametrize("ratio", [0.5, 1.3, 3.0])
def test_factors_follow_and_settle(ratio: float) -> None:
    calibration = Calibration()
    feed(calibration, ratio, 50)
    assert calibration.factor("a") == pytest.approx(ratio, rel=calibration.tolerance)
    assert feed(calibration, ratio, 50) == 0  # and stay: no new predictor without need
    feed(calibration, 1.0, 200)
    assert calibration.factor("a") == pytest.approx(1.0, rel=2 * calibration.tolerance)


def test_what_one_launch_says_is_bounded_and_not_what_all_of_them_say() -> None:
    calibration = Calibration()
    feed(calibration, 1e6, calibration.warm_up)
    assert calibration.factor("a") == pytest.approx(calibration.largest)
    settled = Calibration()
    feed(settled, 25.0, 200)
    assert settled.factor("a") == pytest.approx(25.0, rel=2 * settled.tolerance)
    feed(settled, 0.04, 400)
    assert settled.factor("a") == pytest.approx(0.04, rel=2 * settled.tolerance)
    assert calibration.observe("b", 0, 0) is None


def test_one_outlier_moves_little() -> None:
    calibration = Calibration()
    feed(calibration, 1.0, 200)
    feed(calibration, 50.0, 1)
    assert calibration.factor("a") < 1.12


def test_tenants_are_apart() -> None:
    calibration = Calibration()
    feed(calibration, 2.0, 20, "a")
    feed(calibration, 0.5, 20, "b")
    assert calibration.scales == pytest.approx({"a": 2.0, "b": 0.5}, rel=0.05)
    calibration.forget("a")
    assert calibration.factor("a") == 1.0
    assert calibration.scales.keys() == {"b"}
    assert feed(calibration, 2.0, calibration.warm_up - 1, "a") == 0  # it has to warm up anew
    calibration.forget("nobody")


def test_a_launch_that_was_believed_with_another_factor_is_compared_with_that_one() -> None:
    """Several lanes: the factor changes while a launch runs. It must not be taken for twice as slow again."""
    calibration = Calibration()
    feed(calibration, 2.0, 20)
    before = dict(calibration._logs)
    calibration.observe("a", 10 * MS, 20 * MS, 1.0)  # predicted before the factor became 2
    assert calibration._logs == pytest.approx(before)


def test_refusals_relax_what_is_too_large_alone() -> None:
    calibration = Calibration()
    assert calibration.relax("a") is None
    feed(calibration, 0.5, 20)
    assert calibration.relax("a") is None
    feed(calibration, 8.0, 300)
    factor = calibration.factor("a")
    steps = []
    for _ in range(40):
        scales = calibration.relax("a")
        assert scales is not None
        steps.append(scales["a"])
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == pytest.approx(factor**calibration.relaxation, rel=0.1)
    assert steps[-1] == pytest.approx(1.0, abs=0.01)
    assert min(steps) >= 1.0
