"""The yardstick: serves whatever the paper's planner serves and more, and what it claims holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from msgspec import structs

from bench.papers.gpulet._ideal import Ideal
from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.types import DeviceType, Infeasible, Load, Plan
from plan_samples import CPU, GIB, GPU, costs, load, some_devices, some_loads

COSTS = costs()


@given(loads=some_loads(4), devices=some_devices(3))
@settings(max_examples=25, deadline=None)
def test_every_plan_holds_and_nothing_of_the_papers_is_missed(loads: list[Load], devices: list[DeviceType]) -> None:
    plan = Ideal().plan(loads, devices, COSTS)
    if isinstance(plan, Plan):
        assert check_plan(plan, loads, devices, COSTS) == ()
        assert plan.planner == "ideal"
        assert all(len(device.partitions) <= 2 for device in plan.devices)
    else:
        assert isinstance(Elastic(with_interference=True).plan(loads, devices, COSTS), Infeasible)


@pytest.mark.parametrize(
    "asked",
    [
        [("middle", 227, 40), ("wide", 231, 100), ("small", 271, 40), ("wide", 128, 40)],
        [("wide", 75, 40), ("heavy", 51, 100), ("wide", 212, 150), ("small", 173, 60)],
        [("middle", 250, 150), ("deep", 253, 150), ("heavy", 21, 150), ("wide", 240, 150)],
    ],
)
def test_it_finds_what_the_papers_planner_misses(asked: list[tuple[str, float, float]]) -> None:
    loads = [load(model, rate, slo, f"t{number}") for number, (model, rate, slo) in enumerate(asked)]
    assert isinstance(Elastic(with_interference=True).plan(loads, [GPU] * 2, COSTS), Infeasible)
    plan = Ideal().plan(loads, [GPU] * 2, COSTS)
    assert isinstance(plan, Plan)
    assert check_plan(plan, loads, [GPU] * 2, COSTS) == ()


def test_memory_is_kept_within() -> None:
    """Two loads that need more than one partition's memory each: one of them does not find room."""
    tight = replace(GPU, memory_bytes=2 * GIB, partition_bytes=GIB // 2)
    loads = [load("small", 100, 100), load("middle", 60, 100)]
    assert isinstance(Ideal().plan(loads, [tight] * 2, COSTS), Plan)
    assert isinstance(Ideal().plan(loads, [tight], COSTS), Infeasible)


def test_undivided_devices_alone() -> None:
    loads = [load("small", 100, 30), load("heavy", 30, 200)]
    plan = Ideal(most_partitions=1).plan(loads, [GPU] * 2, COSTS)
    assert isinstance(plan, Plan)
    assert {partition.size for device in plan.devices for partition in device.partitions} == {100}


def test_mixed_devices_and_headroom() -> None:
    its = load("heavy", 1, 150)
    most = RoundCache(COSTS).capacity("heavy", its.slo_ns, 100, "gpu")
    loads = [structs.replace(its, rate_per_s=0.9 * most), load("small", 20, 100)]
    assert isinstance(Ideal().plan(loads, [GPU, CPU], COSTS), Plan)
    assert isinstance(Ideal(headroom=2.0).plan(loads, [GPU, CPU], COSTS), Infeasible)


def test_too_many_loads_and_wrong_settings_are_refused() -> None:
    loads = [load("heavy", 20, 200, f"t{n}") for n in range(30)]
    with pytest.raises(PlanError, match=r"expected at most \d+ loads, got 30"):
        Ideal().plan(loads, [GPU] * 8, COSTS)
    with pytest.raises(InvalidValueError, match="most_partitions"):
        Ideal(most_partitions=3)
    with pytest.raises(InvalidValueError, match="most_models"):
        Ideal(most_models=0)
