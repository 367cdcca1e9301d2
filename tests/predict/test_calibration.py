"""Calibration: factors follow what is observed, no launch moves them far, and refusing everything relaxes them."""

from __future__ import annotations

import pytest

from cotenant.predict.online import ALL_SHAPES, Calibration
from cotenant.predict.scales import farthest_scale, scale_of, typical_scale

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
    feed(calibration, 1e6, calibration.warm_up - 1)
    feed(calibration, 1.0, 1)
    assert calibration.factor("a") <= calibration.largest
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
    before = calibration._known["a"][ALL_SHAPES].log
    calibration.observe("a", 10 * MS, 20 * MS, 1.0)  # predicted before the factor became 2
    assert calibration._known["a"][ALL_SHAPES].log == pytest.approx(before)


@pytest.mark.parametrize("ratio", [25_000.0, 25.0, 3.0, 0.3, 0.04, 1 / 25_000])
@pytest.mark.parametrize("before", [0, 100])
def test_a_wrong_profile_is_corrected_after_eight_launches_however_wrong_it_is(ratio: float, before: int) -> None:
    calibration = Calibration()
    feed(calibration, 1.0, before)
    feed(calibration, ratio, 8, base_ns=10**12)
    assert calibration.factor("a") == pytest.approx(ratio, rel=0.1)
    assert feed(calibration, ratio, 100, base_ns=10**12) <= 1


def test_stalls_now_and_then_are_no_shift() -> None:
    calibration = Calibration()
    for _ in range(20):
        feed(calibration, 1.0, 7)
        feed(calibration, 1000.0, 1)
    assert calibration.factor("a") < calibration.largest ** (1 / 4)


def test_shapes_are_apart_and_a_slow_one_does_not_change_those_that_were_not_observed() -> None:
    calibration = Calibration()
    for _ in range(20):
        for shape, ratio in ((0, 8.0), (1, 1.25)):
            believed = 10 * MS * calibration.factor("a", shape)
            calibration.observe("a", round(believed), round(10 * MS * ratio), shape=shape)
    assert calibration.factor("a", 0) == pytest.approx(8.0, rel=0.06)
    assert calibration.factor("a", 1) == pytest.approx(1.25, rel=0.06)
    assert calibration.factor("a", 2) == calibration.factor("a", 1)  # the median of 1, 1.25 and 8
    assert calibration.factor("b", 0) == 1.0


@pytest.mark.parametrize(
    ("by_shape", "typical", "farthest"),
    [
        ({0: 8.0}, 1.0, 8.0),
        ({0: 0.1}, 1.0, 0.1),
        ({0: 8.0, 1: 6.0}, 6.0, 8.0),
        ({0: 0.5, 1: 6.0}, 1.0, 6.0),
        ({0: 0.5, 1: 0.25, 2: 0.2}, 0.5, 0.2),
    ],
)
def test_where_no_shape_is_named_the_median_with_one_holds(
    by_shape: dict[int, float], typical: float, farthest: float
) -> None:
    assert (typical_scale(by_shape), farthest_scale(by_shape)) == (typical, farthest)
    assert scale_of({"a": by_shape}, "a", 99) == typical
    assert scale_of({"a": by_shape}, "a", 0) == by_shape[0]
    assert typical_scale(3.0) == farthest_scale(3.0) == scale_of({"a": 3.0}, "a", 5) == 3.0
