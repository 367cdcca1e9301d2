"""Beliefs that follow events; what each part of them follows is tested beside it (calibration, caution, grouped)."""

from __future__ import annotations

import pytest

from cotenant.core.actions import Launch
from cotenant.core.events import LaunchEnded, PredictorChanged, QueryArrived
from cotenant.predict.online import OnlineModel
from cotenant.profile.latency_table import LatencyRow, LatencyTable
from cotenant.types import Query
from cotenant.work import Share, Work

MS = 1_000_000
TABLE = LatencyTable((LatencyRow(0, 1, 1, 10 * MS),), (1.0,))


def launch(number: int, predicted_ns: int) -> Launch:
    return Launch(number, number, (number,), Work("a", 0, 1, 0, 1), True, Share((0,)), predicted_ns, 0, number)


def test_a_launch_is_compared_with_the_factor_that_predicted_it() -> None:
    """A launch that starts as another ends was decided before what that end says was believed."""
    model = OnlineModel(1)
    model.add("a", TABLE)
    predicted = 10 * MS
    model(0, QueryArrived(Query(0, "a", 0, MS)), [launch(0, predicted)])
    factors = []
    for number in range(40):
        following = launch(number + 1, predicted)
        changed = model((number + 1) * 20 * MS, LaunchEnded(number), [following])
        if isinstance(changed, PredictorChanged):
            predicted = model.predictor.latency_ns(Work("a", 0, 1, 0, 1), 1)
            factors.append(predicted / (10 * MS))
    assert factors == [pytest.approx(2.0)], "every launch took twice as long: one change is enough"


def test_what_is_not_to_adapt_stays_as_it_is() -> None:
    model = OnlineModel(1, adapt=False)
    model.add("a", TABLE)
    for number in range(40):
        assert model(2 * number, QueryArrived(Query(number, "a", 0, MS)), [launch(number, 10 * MS)]) is None
        assert model(2 * number + 1, LaunchEnded(number), []) is None
    assert model.doubt(["a"]) is None
    assert model.alone_ns("a") == 10 * MS


@pytest.mark.parametrize("grouped", [False, True])
def test_pressure_from_outside_stays_whatever_else_changes(grouped: bool) -> None:
    model = OnlineModel(1, grouped=grouped)
    model.add("a", TABLE)
    assert model.pressed(0.05) is None, "it is next to nothing"
    changed = model.pressed(0.4)
    assert isinstance(changed, PredictorChanged)
    assert changed.predictor is model.predictor
    model.add("b", TABLE)
    assert model.predictor.beside == 0.4
    for number in range(40):
        model(2 * number * MS, QueryArrived(Query(number, "a", 0, MS)), [launch(number, 10 * MS)])
        model((2 * number + 1) * 20 * MS, LaunchEnded(number), [])
    assert model.predictor.scales["a"] > 1 or grouped
    assert model.predictor.beside == 0.4
    assert model.pressed(0.45) is None
    assert isinstance(model.pressed(0.0), PredictorChanged)
