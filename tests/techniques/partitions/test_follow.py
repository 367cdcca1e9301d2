"""What is planned anew when devices come and go and rates change: see `plan.follow`."""

from __future__ import annotations

from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.follow import (
    FollowSettings,
    PlanFollower,
    Reason,
    RunningPlan,
    compare,
    demanded_loads,
)
from cotenant.techniques.partitions.plan.scaling import ScalingSettings
from cotenant.techniques.partitions.plan.tracking import TrackingSettings
from cotenant.techniques.partitions.plan.types import DeviceType, Load
from plan_samples import table_costs

MS = 1_000_000
CORE = DeviceType("core", ((1,),), 1 << 40)
COSTS = table_costs({"core": {name: {1: {1: 10 * MS}} for name in "abc"}}, dict.fromkeys("abc", 0))
"""10 ms a row, never batched: a core serves 100 rows a second."""
PLANNER = Elastic()
FOLLOW = FollowSettings(TrackingSettings(headroom=0.0, patience=2), ScalingSettings(margin=0.0))


def loads(**rates: float) -> tuple[Load, ...]:
    return tuple(Load(name, name, rate, 200 * MS) for name, rate in rates.items())


def first(devices: int = 3, **rates: float) -> RunningPlan:
    step = PlanFollower(PLANNER, [CORE] * devices, COSTS, FOLLOW).next_step(loads(**rates), None)
    assert step.reason is Reason.FIRST
    assert step.held is not None
    return step.held


def test_the_first_plan_takes_as_few_nodes_as_can_be_and_is_kept() -> None:
    held = first(a=80.0, b=70.0)
    assert len(held.plan.devices) == 2
    step = PlanFollower(PLANNER, [CORE] * 3, COSTS, FOLLOW).next_step(loads(a=80.0, b=70.0), held)
    assert (step.reason, step.held) == (Reason.KEEP, held)


def test_a_rise_takes_another_node_at_once() -> None:
    held = first(a=40.0, b=30.0)
    assert len(held.plan.devices) == 1
    step = PlanFollower(PLANNER, [CORE] * 3, COSTS, FOLLOW).next_step(loads(a=90.0, b=60.0), held)
    assert step.reason is Reason.GROW
    assert step.held is not None
    assert len(step.held.plan.devices) == 2


def test_a_fall_gives_a_node_back_after_patience() -> None:
    held = first(a=80.0, b=70.0)
    small = loads(a=30.0, b=20.0)
    step = PlanFollower(PLANNER, [CORE] * 3, COSTS, FOLLOW).next_step(small, held)
    assert step.reason is Reason.KEEP
    assert step.held is not None
    step = PlanFollower(PLANNER, [CORE] * 3, COSTS, FOLLOW).next_step(small, step.held)
    assert step.reason is Reason.SHRINK
    assert step.held is not None
    assert (len(step.held.plan.devices), step.held.devices) == (1, 1)


def test_a_loss_is_planned_around_and_what_does_not_fit_is_shared_out_and_mended_by_the_next_node() -> None:
    held = first(a=80.0, b=70.0)
    step = PlanFollower(PLANNER, [CORE], COSTS, FOLLOW).next_step(loads(a=80.0, b=70.0), held, lost=True)
    assert step.reason is Reason.LOST
    assert step.held is not None
    assert step.breaks is not None
    assert 0.6 < step.held.share <= 0.625  # rounds of 20 ms serve 50 rows/s of each
    assert set(step.held.plan.rates_per_s) == {"a", "b"}
    same = PlanFollower(PLANNER, [CORE], COSTS, FOLLOW).next_step(loads(a=80.0, b=70.0), step.held)
    assert same.reason is Reason.KEEP
    more = PlanFollower(PLANNER, [CORE] * 2, COSTS, FOLLOW).next_step(loads(a=80.0, b=70.0), step.held)
    assert more.reason is Reason.MORE
    assert more.held is not None
    assert more.held.share == 1.0


def test_what_did_not_fit_is_sought_again_when_its_rate_changes() -> None:
    held = first(a=80.0, b=70.0)
    step = PlanFollower(PLANNER, [CORE], COSTS, FOLLOW).next_step(loads(a=80.0, b=70.0), held, lost=True)
    assert step.held is not None
    assert step.held.share < 1
    reason, looked = compare(loads(a=80.0, b=80.0), [CORE], step.held, FOLLOW.tracking)
    assert reason is Reason.GROW
    assert compare(loads(a=80.0, b=80.0), [CORE], looked, FOLLOW.tracking)[0] is Reason.KEEP, "it was sought"


def test_who_is_left_out_gets_a_place_when_there_is_room_again() -> None:
    urgent = Load("a", "a", 10.0, 25 * MS)  # a round of 10 ms and 10 ms of work: nothing else fits beside it
    step = PlanFollower(PLANNER, [CORE], COSTS, FOLLOW).next_step((urgent, *loads(b=40.0)), None)
    assert step.held is not None
    assert step.held.left_out == ("a",)
    stays = PlanFollower(PLANNER, [CORE], COSTS, FollowSettings(leave_out=False)).next_step(
        (urgent, *loads(b=40.0)), None
    )
    assert stays.held is None
    assert stays.breaks is not None
    more = PlanFollower(PLANNER, [CORE] * 2, COSTS, FOLLOW).next_step((urgent, *loads(b=40.0)), step.held)
    assert more.held is not None
    assert more.held.whole


def test_without_nodes_there_is_no_plan() -> None:
    step = PlanFollower(PLANNER, [], COSTS, FOLLOW).next_step(loads(a=80.0), first(a=80.0))
    assert (step.reason, step.held) == (Reason.LOST, None)


def test_tracked_rates_stand_in_for_declared_ones_above_a_floor() -> None:
    asked = demanded_loads(loads(a=100.0, b=100.0, c=100.0), {"a": 150.0, "b": 1.0}, floor=0.2)
    assert [load.rate_per_s for load in asked] == [150.0, 20.0, 100.0]
