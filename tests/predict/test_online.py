"""Beliefs that follow events; each part of them has tests of its own (calibration, upper estimates, groups)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cotenant.core.actions import GroupBasis, Launch
from cotenant.core.events import LaunchEnded, PredictorChanged, QueryArrived
from cotenant.core.predictor import Group, Member
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.predict.online import OnlineModel
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Query
from cotenant.work import Share, Work

MS = 1_000_000
TABLE = LatencyTable((LatencyRow(0, 1, 1, 10 * MS),), (1.0,))


def launch(number: int, predicted_ns: int) -> Launch:
    return Launch(number, number, (number,), Work("a", 0, 1, 0, 1), True, Share((0,)), predicted_ns)


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


class Pairs(FittedGroups):
    """Every group takes 12 ms."""

    key, quantile = "pairs", 0.95

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        return [12 * MS for _ in groups]


def member(number: int, tenant: str, group: int, predicted_ns: int) -> Launch:
    work = Work(tenant, 0, 1, 0, 1)
    return Launch(number, number, (number,), work, True, Share((number % 4,)), predicted_ns, basis=GroupBasis(group))


def test_groups_in_partitions_are_followed_each_by_itself_and_who_is_alone_as_ever() -> None:
    """Two groups and one alone start at one event: the groups take twice as long as believed, the one alone as long."""
    model = OnlineModel(4)
    for name in "abc":
        model.add(name, TABLE)
    model.believe_groups(Pairs())
    for turn in range(60):
        number, now = 5 * turn, 100 * turn * MS
        believed = model.predictor.group_ns([(Member(Work("a", 0, 1, 0, 1), 1), Member(Work("b", 0, 1, 0, 1), 1))])[0]
        pairs = [member(number + at, "ab"[at % 2], 3 * turn + at // 2, believed) for at in range(4)]
        alone = member(number + 4, "c", 3 * turn + 2, model.predictor.latency_ns(Work("c", 0, 1, 0, 1), 1))
        model(now, QueryArrived(Query(turn, "a", 0, MS)), [*pairs, alone])
        model(now + 10 * MS, LaunchEnded(number + 4), [])
        for at in range(4):
            model(now + (24 if at % 2 else 5) * MS, LaunchEnded(number + at), [])
    assert isinstance(model.predictor, GroupedPredictor)
    assert model.predictor.factor == pytest.approx(2.0, rel=0.1)
    assert all(scale == pytest.approx(1.0, rel=0.05) for scale in model.predictor.scales.values())
