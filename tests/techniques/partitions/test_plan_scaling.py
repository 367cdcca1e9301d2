"""As few devices as will do: taken at once, given back late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from bench.papers.gpulet._nexus import SquishyBinPacking
from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.scaling import Scaled, ScalingSettings, least_devices, rescale
from cotenant.techniques.partitions.plan.table_costs import WithoutInterference
from cotenant.techniques.partitions.plan.types import DEVICES, LATENCY, NS_PER_S, Infeasible, Load, Plan, Planner
from plan_samples import GPU, MS, costs, load, some_loads, table_costs

COSTS = costs()
CAPACITY = RoundCache(COSTS).capacity("middle", 120 * MS, 100, "gpu")
INVENTORY = [GPU] * 6


def middle(devices: float) -> list[Load]:
    return [load("middle", devices * CAPACITY, 120)]


@pytest.mark.parametrize("planner", [SquishyBinPacking(), Elastic()])
@given(loads=some_loads(4, 300.0))
@settings(max_examples=30)
def test_one_device_fewer_is_not_enough(planner: Planner, loads: list[Load]) -> None:
    found = least_devices(planner, loads, INVENTORY, COSTS)
    if isinstance(found.plan, Infeasible):
        assert found.devices == len(INVENTORY)
        assert isinstance(planner.plan(loads, INVENTORY, COSTS), Infeasible)
    else:
        given_ = INVENTORY[: found.devices]
        assert check_plan(found.plan, loads, given_, WithoutInterference(COSTS)) == ()
        for fewer in range(1, found.devices):
            assert isinstance(planner.plan(loads, INVENTORY[:fewer], COSTS), Infeasible)


def test_what_cannot_be_served_is_the_planners_word() -> None:
    found = least_devices(Elastic(), [load("heavy", 1, 10)], INVENTORY, COSTS)
    assert isinstance(found.plan, Infeasible)
    assert found.plan.constraint == LATENCY
    assert isinstance(least_devices(Elastic(), middle(9), INVENTORY, COSTS).plan, Infeasible)
    empty = least_devices(Elastic(), middle(1), [], COSTS)
    assert isinstance(empty.plan, Infeasible)
    assert empty.plan.constraint == DEVICES


def test_devices_are_taken_at_once_and_given_back_late() -> None:
    planner = SquishyBinPacking()
    state = least_devices(planner, middle(0.5), INVENTORY, COSTS)
    assert state.devices == 1
    state = rescale(planner, middle(3.5), INVENTORY, COSTS, state)
    assert (state.devices, state.calm) == (4, 0)
    patient = ScalingSettings(margin=0.1, patience=3)
    counts = []
    for _ in range(4):
        state = rescale(planner, middle(1.5), INVENTORY, COSTS, state, patient)
        assert isinstance(state.plan, Plan)
        assert check_plan(state.plan, middle(1.5), INVENTORY[: state.devices], COSTS) == ()
        counts.append((state.devices, state.calm))
    assert counts == [(4, 1), (4, 2), (2, 0), (2, 0)]


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_devices_that_are_exactly_full_are_enough(devices: int) -> None:
    planner, inventory = SquishyBinPacking(), [replace(GPU, splits=((100,),))] * 6
    held = least_devices(planner, middle(devices), inventory, COSTS)
    assert held.devices == devices
    again = rescale(planner, middle(devices), inventory, COSTS, held)
    assert again == Scaled(held.plan, devices)


def test_less_than_a_row_a_second_is_a_rate() -> None:
    slow = table_costs({"gpu": {"slow": {100: {1: 4 * NS_PER_S}}}}, {"slow": 1})
    whole = replace(GPU, splits=((100,),))
    assert least_devices(Elastic(), [load("slow", 0.2, 10_000)], [whole] * 3, slow).devices == 1


def test_a_load_that_comes_back_starts_the_wait_anew() -> None:
    planner = SquishyBinPacking()
    settings_ = ScalingSettings(patience=2)
    state = least_devices(planner, middle(3.5), INVENTORY, COSTS)
    for devices, expected in ((1.5, (4, 1)), (3.5, (4, 0)), (1.5, (4, 1)), (1.5, (2, 0))):
        state = rescale(planner, middle(devices), INVENTORY, COSTS, state, settings_)
        assert (state.devices, state.calm) == expected


def test_a_load_just_below_the_step_does_not_swing() -> None:
    planner = SquishyBinPacking()
    state = least_devices(planner, middle(2.05), INVENTORY, COSTS)
    for _ in range(5):
        state = rescale(planner, middle(1.95), INVENTORY, COSTS, state, ScalingSettings(margin=0.1, patience=1))
        assert state.devices == 3
    state = rescale(planner, middle(1.8), INVENTORY, COSTS, state, ScalingSettings(margin=0.1, patience=1))
    assert state.devices == 2


def test_after_a_refusal_it_goes_on() -> None:
    planner = Elastic()
    refused = rescale(planner, middle(50), INVENTORY, COSTS, Scaled(Plan(()), 1))
    assert isinstance(refused.plan, Infeasible)
    assert refused.devices == len(INVENTORY)
    again = rescale(planner, middle(0.5), INVENTORY, COSTS, refused, ScalingSettings(patience=1))
    assert again.devices == 1
    assert isinstance(again.plan, Plan)


def test_the_order_of_the_inventory_is_kept() -> None:
    dear = replace(GPU, name="cpu", splits=((4,),))
    found = least_devices(SquishyBinPacking(), [load("small", 10, 60)], [dear, GPU], COSTS)
    assert isinstance(found.plan, Plan)
    assert [device.device for device in found.plan.devices] == ["cpu"]


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(InvalidValueError, match="margin is -1"):
        ScalingSettings(margin=-1)
    with pytest.raises(InvalidValueError, match="margin is inf"):
        ScalingSettings(margin=float("inf"))
    with pytest.raises(InvalidValueError, match="patience is 0"):
        ScalingSettings(patience=0)
