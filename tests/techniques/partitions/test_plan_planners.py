"""The planners of the papers: whatever they answer for random loads holds, and small cases come out as they should."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from bench.papers.gpulet._nexus import SquishyBinPacking
from bench.papers.gpulet._planners import greedy
from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.partitions.plan.check import MEMORY as MEMORY_BROKEN
from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.follow import largest_fit
from cotenant.techniques.partitions.plan.rounds import Demand, RoundCache, round_cache_of
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.table_costs import TableCosts, WithoutInterference
from cotenant.techniques.partitions.plan.types import (
    DEVICES,
    INTERFERENCE,
    LATENCY,
    MEMORY,
    NS_PER_S,
    Costs,
    DevicePlan,
    DeviceType,
    Infeasible,
    Load,
    PartitionPlan,
    Plan,
    Planner,
    Slot,
)
from cotenant.work import Work
from plan_samples import CPU, GIB, GPU, MODELS, MS, Line, costs, latencies, load, some_devices, some_loads, table_costs

COSTS = costs()
BLIND: tuple[Planner, ...] = (SquishyBinPacking(), greedy(), greedy(knee_only=True), Elastic())
ALL: tuple[Planner, ...] = (*BLIND, Elastic(with_interference=True), Elastic(with_interference=True, most_partitions=3))
IDS = [f"{planner.name}{number}" for number, planner in enumerate(ALL)]


def believed(planner: Planner, costs: Costs) -> Costs:
    return WithoutInterference(costs) if planner in BLIND else costs


def planned(planner: Planner, loads: Sequence[Load], devices: Sequence[DeviceType] = (GPU,)) -> Plan:
    """A plan that the checker finds nothing wrong with."""
    plan = planner.plan(loads, devices, COSTS)
    assert isinstance(plan, Plan), plan
    assert check_plan(plan, loads, devices, believed(planner, COSTS)) == ()
    return plan


@pytest.mark.parametrize("planner", ALL, ids=IDS)
@given(loads=some_loads(), devices=some_devices())
@settings(max_examples=60)
def test_every_plan_holds_and_every_refusal_names_a_tenant(
    planner: Planner, loads: list[Load], devices: list[DeviceType]
) -> None:
    plan = planner.plan(loads, devices, COSTS)
    if isinstance(plan, Infeasible):
        assert plan.tenant in {load.tenant for load in loads}
        assert plan.constraint in {LATENCY, MEMORY, DEVICES, INTERFERENCE}
        assert repr(plan.tenant) in plan.detail
    else:
        assert check_plan(plan, loads, devices, believed(planner, COSTS)) == ()
        assert plan.planner == planner.name
    assert planner.plan(loads, devices, costs()) == plan


@pytest.mark.parametrize("planner", ALL, ids=IDS)
@given(loads=some_loads(4, 200.0), memory=st.integers(1, 6))
@settings(max_examples=30)
def test_memory_is_kept_within(planner: Planner, loads: list[Load], memory: int) -> None:
    tight = [replace(GPU, memory_bytes=memory * GIB, partition_bytes=GIB // 2)] * 3
    plan = planner.plan(loads, tight, COSTS)
    if isinstance(plan, Plan):
        assert check_plan(plan, loads, tight, believed(planner, COSTS)) == ()


@pytest.mark.parametrize("planner", ALL, ids=IDS)
@given(loads=some_loads(4), kind=st.sampled_from((GPU, CPU)), added=st.sampled_from((0.1, 1.0, 4.0)))
@settings(max_examples=60)
def test_plans_that_are_as_full_as_can_be_hold(
    planner: Planner, loads: list[Load], kind: DeviceType, added: float
) -> None:
    """The largest rates for which there is a plan, beside neighbours that harm little and much."""
    harmful = {each.name: Line(added, 0.35, 1.0) for each in (GPU, CPU)}
    made = table_costs(
        {each.name: latencies(each.sizes, each.whole) for each in (GPU, CPU)}, dict.fromkeys(MODELS, GIB), harmful
    )
    many = [structs.replace(each, rate_per_s=each.rate_per_s * 50) for each in loads]
    fitted = largest_fit(planner, many, [kind] * 2, made)
    if fitted.plan is not None:
        assert check_plan(fitted.plan, many, [kind] * 2, believed(planner, made), fitted.share) == ()


def test_a_plan_that_ignores_memory_would_be_refuted() -> None:
    loads = [load("small", 10, 60), load("middle", 10, 60)]
    plan = planned(Elastic(), loads)
    found = check_plan(plan, loads, [replace(GPU, memory_bytes=GIB)], WithoutInterference(COSTS))
    assert [violation.kind for violation in found] == [MEMORY_BROKEN]


# --- rounds ----------------------------------------------------------------------------------------------------


class UnitCosts(Costs):
    """Latencies of a few nanoseconds, so that every duty cycle can be tried."""

    def __init__(self, latencies: dict[str, tuple[int, ...]]) -> None:
        self.latencies = latencies

    def latency_ns(self, work: Work, size: int, device: str) -> int:
        return self.latencies[work.tenant][work.items - 1] * 2 // size

    def batches(self, model: str) -> Sequence[int]:
        return range(1, len(self.latencies[model]) + 1)

    def memory_bytes(self, model: str) -> int:
        return 1

    def factor(self, model: str, batch: int, size: int, others: Sequence[object], device: str) -> float:
        return 1.0

    def adds(self, model: str, batch: int, size: int, other: object, device: str) -> float:
        return 0.0


TINY = DeviceType("tiny", ((2,), (1, 1)), 100)


def brute_force(loads: Sequence[Load], costs: UnitCosts, size: int = 2) -> bool:
    """Whether any duty cycle and batches at all serve these loads in one partition, by the checker's word."""
    longest = min(each.slo_ns for each in loads)
    for duty in range(1, longest):
        for batches in product(*(costs.batches(each.model) for each in loads)):
            slots = tuple(Slot(each.tenant, batch, each.rate_per_s) for each, batch in zip(loads, batches, strict=True))
            plan = Plan((DevicePlan("tiny", (PartitionPlan(size, duty, slots),)),))
            if not check_plan(plan, loads, [TINY], costs):
                return True
    return False


@st.composite
def tiny(draw: st.DrawFn, most: int) -> tuple[list[Load], UnitCosts]:
    count = draw(st.integers(1, most))
    latencies = {f"m{n}": tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))) for n in range(count)}
    loads = []
    for model in latencies:
        rows, each_ns, slo_ns = draw(st.integers(1, 5)), draw(st.integers(3, 40)), draw(st.integers(2, 40))
        loads.append(Load(model, model, rows / each_ns * NS_PER_S, slo_ns))
    return loads, UnitCosts(latencies)


@given(tiny(3))
@settings(max_examples=150)
def test_a_round_is_found_exactly_when_there_is_one(case: tuple[list[Load], UnitCosts]) -> None:
    loads, unit = case
    demands = tuple(Demand(load.model, load.slo_ns, load.rate_per_s) for load in loads)
    made = RoundCache(unit).fit(demands, 2, "tiny")
    assert (made is not None) == brute_force(loads, unit)
    if made is not None:
        slots = tuple(
            Slot(load.tenant, batch, load.rate_per_s) for load, batch in zip(loads, made.batches, strict=True)
        )
        plan = Plan((DevicePlan("tiny", (PartitionPlan(2, made.duty_ns, slots),)),))
        assert check_plan(plan, loads, [TINY], unit) == ()


@given(tiny(3))
@settings(max_examples=100)
def test_squishy_bin_packing_is_exact_on_one_device(case: tuple[list[Load], UnitCosts]) -> None:
    loads, unit = case
    assert isinstance(SquishyBinPacking().plan(loads, [TINY], unit), Plan) == brute_force(loads, unit)


def halves(loads: Sequence[Load], unit: UnitCosts) -> bool:
    """Whether the loads, none of them divided, go onto one whole device or onto its two halves."""
    if brute_force(loads, unit):
        return True
    for sides in product((0, 1), repeat=len(loads)):
        parts = [[load for load, side in zip(loads, sides, strict=True) if side == part] for part in (0, 1)]
        if all(not part or brute_force(part, unit, size=1) for part in parts):
            return True
    return False


@given(tiny(3))
@settings(max_examples=100)
def test_elastic_claims_nothing_that_brute_force_denies(case: tuple[list[Load], UnitCosts]) -> None:
    loads, unit = case
    plan = Elastic().plan(loads, [TINY], unit)
    if isinstance(plan, Plan):
        assert check_plan(plan, loads, [TINY], unit) == ()
        slots = [slot.tenant for device in plan.devices for part in device.partitions for slot in part.slots]
        if len(set(slots)) == len(slots):  # no load is divided: brute force covers it
            assert halves(loads, unit)


def test_elastic_finds_most_of_what_brute_force_finds() -> None:
    random = Random(7)
    possible = found = 0
    for _ in range(60):
        latencies = {f"m{n}": tuple(sorted(random.randint(1, 9) for _ in range(3))) for n in range(3)}
        unit = UnitCosts(latencies)
        loads = [
            Load(model, model, random.randint(1, 4) / random.randint(10, 40) * NS_PER_S, random.randint(15, 40))
            for model in latencies
        ]
        if halves(loads, unit):
            possible += 1
            found += isinstance(Elastic().plan(loads, [TINY], unit), Plan)
    assert possible > 20
    assert found >= 0.9 * possible


@pytest.mark.parametrize("per_ms", [0.05, 0.1, 0.3])
def test_the_round_that_bears_most_is_chosen(per_ms: float) -> None:
    latencies = tuple(ns * 1000 for ns in (2, 3, 4, 5))
    made = RoundCache(UnitCosts({"m": latencies})).fit((Demand("m", 20_000, per_ms * 1e6),), 2, "tiny")
    assert made is not None
    best = max(
        min(duty, 20_000 - duty) / latencies[batch - 1]
        for batch in range(1, 5)
        for duty in range(1, 20_000)
        if per_ms * duty <= batch * 1000
    )
    assert made.bears == pytest.approx(best)
    assert made.bears == pytest.approx(min(made.duty_ns, 20_000 - made.duty_ns) / latencies[made.batches[0] - 1])


def test_of_larger_batches_the_quicker_is_run() -> None:
    unit = UnitCosts({"m": (9, 8, 3, 4)})
    curve = RoundCache(unit).curve("m", 2, "tiny")
    assert [curve.batches[position] for position in curve.choice[1:]] == [3, 3, 3, 4]
    assert curve.capacity(8) == (1 * NS_PER_S, 3)
    assert curve.capacity(7) == (1 * NS_PER_S, 3)
    assert curve.capacity(5) == (0.0, 0)


def test_batches_that_do_not_ascend_are_refused() -> None:
    class Wrong(UnitCosts):
        def batches(self, model: str) -> Sequence[int]:
            return (2, 1)

    with pytest.raises(PlanError, match="ascending"):
        RoundCache(Wrong({"m": (1, 2)})).curve("m", 1, "tiny")


def test_costs_keep_their_book() -> None:
    assert round_cache_of(COSTS) is round_cache_of(COSTS)
    assert round_cache_of(COSTS) is not round_cache_of(costs())

    class Unhashable(UnitCosts):
        __hash__ = None  # type: ignore[assignment]

    assert isinstance(round_cache_of(Unhashable({"m": (1,)})), RoundCache)


# --- squishy bin packing ---------------------------------------------------------------------------------------


def test_saturated_loads_take_whole_devices_and_the_rest_share_one() -> None:
    capacity = RoundCache(COSTS).capacity("wide", 120 * MS, 100, "gpu")
    loads = [load("wide", 2.3 * capacity, 120), load("small", 20, 60), load("middle", 10, 120)]
    plan = planned(SquishyBinPacking(), loads, [GPU] * 4)
    assert len(plan.devices) == 3
    assert all([part.size for part in device.partitions] == [100] for device in plan.devices)
    tenants = [sorted(slot.tenant for slot in device.partitions[0].slots) for device in plan.devices]
    assert sorted(tenants, key=len) == [["wide"], ["wide"], ["middle", "small", "wide"]]


def test_no_more_models_share_a_device_than_allowed() -> None:
    loads = [load("small", 5, 250, f"t{n}") for n in range(4)]
    assert len(planned(SquishyBinPacking(), loads, [GPU] * 2).devices) == 2
    assert len(planned(SquishyBinPacking(most_models=4), loads, [GPU] * 2).devices) == 1


def test_the_cheapest_device_that_serves_is_taken() -> None:
    dear = replace(GPU, price=3.0)
    plan = planned(SquishyBinPacking(), [load("small", 50, 60)], [dear, CPU])
    assert [device.device for device in plan.devices] == ["cpu"]


# --- partitions ------------------------------------------------------------------------------------------------


def test_greedy_never_shares_a_partition() -> None:
    loads = [load(model, 30, 120) for model in MODELS]
    plan = planned(greedy(), loads, [GPU] * 4)
    assert all(len(part.slots) == 1 for device in plan.devices for part in device.partitions)


def test_elastic_shares_where_greedy_runs_out_of_partitions() -> None:
    loads = [load("small", 20, 120, f"t{n}") for n in range(3)]
    assert isinstance(greedy().plan(loads, [GPU], COSTS), Infeasible)
    plan = planned(Elastic(), loads)
    assert sorted(slot.tenant for part in plan.devices[0].partitions for slot in part.slots) == ["t0", "t1", "t2"]


def test_partitions_serve_what_no_time_sharing_can() -> None:
    """A load of small batches leaves most of a device unused; half of it is nearly as good."""
    flat = {"a": {50: {1: 10 * MS}, 100: {1: 9 * MS}}, "b": {50: {1: 10 * MS}, 100: {1: 9 * MS}}}
    device = DeviceType("gpu", ((100,), (50, 50)), GIB)
    loads = [load("a", 95, 25), load("b", 95, 25)]
    made = table_costs({"gpu": flat}, {"a": 1, "b": 1})
    assert isinstance(SquishyBinPacking().plan(loads, [device], made), Infeasible)
    plan = Elastic().plan(loads, [device], made)
    assert isinstance(plan, Plan)
    assert check_plan(plan, loads, [device], made) == ()
    assert [part.size for part in plan.devices[0].partitions] == [50, 50]


def test_a_rest_takes_the_least_size_that_serves_it() -> None:
    cache = RoundCache(COSTS)
    kind_sizes = {size: cache.capacity("heavy", 250 * MS, size, "gpu") for size in GPU.sizes}
    assert kind_sizes[20] < kind_sizes[40] < kind_sizes[100]
    plan = planned(Elastic(), [load("heavy", 0.9 * kind_sizes[20], 250)])
    assert [part.size for part in plan.devices[0].partitions] == [20]
    wider = planned(greedy(knee_only=True), [load("heavy", 0.9 * kind_sizes[20], 250)])
    assert wider.devices[0].partitions[0].size == cache.knee("heavy", 250 * MS, GPU, 1.05) > 20


def test_the_knee_is_where_the_curve_bends() -> None:
    def knee(rates: dict[int, int], min_gain: float = 1.05) -> int:
        table = {"m": {size: {1: NS_PER_S // rate} for size, rate in rates.items()}}
        return RoundCache(table_costs({"gpu": table}, {"m": 1})).knee("m", NS_PER_S, GPU, min_gain)

    assert knee({20: 20, 40: 40, 50: 50, 60: 60, 80: 80, 100: 100}) == 100
    assert knee({20: 50, 40: 90, 50: 92, 60: 94, 80: 97, 100: 100}) == 40
    assert knee({20: 100, 40: 101, 50: 102, 60: 103, 80: 104, 100: 104}) == 20
    assert knee({20: 20, 40: 25, 50: 25, 60: 90, 80: 91, 100: 92}) == 60
    assert knee({20: 50, 40: 90, 50: 92, 60: 94, 80: 97, 100: 100}, min_gain=2.0) == 20
    assert RoundCache(COSTS).knee("heavy", MS, GPU, 1.05) == 0


@pytest.mark.parametrize("planner", ALL, ids=IDS)
def test_a_load_beyond_one_device_is_divided(planner: Planner) -> None:
    capacity = RoundCache(COSTS).capacity("middle", 120 * MS, 100, "gpu")
    plan = planned(planner, [load("middle", 2.5 * capacity, 120)], [GPU] * 4)
    slots = [slot for device in plan.devices for part in device.partitions for slot in part.slots]
    assert len(slots) > 2
    assert math.isclose(sum(slot.rate_per_s for slot in slots), 2.5 * capacity, rel_tol=1e-9)


@pytest.mark.parametrize("planner", [SquishyBinPacking(0.25), greedy(0.25), Elastic(headroom=0.25)])
def test_headroom_is_served_too(planner: Planner) -> None:
    plan = planner.plan([load("small", 100, 60)], [GPU], COSTS)
    assert isinstance(plan, Plan)
    assert plan.devices[0].partitions[0].slots[0].rate_per_s == pytest.approx(125)


def test_three_partitions_where_they_are_allowed() -> None:
    loads = [load("small", 200, 10, f"t{n}") for n in range(3)]
    two = Elastic(time_sharing=False).plan(loads, [CPU], COSTS)
    assert isinstance(two, Infeasible)
    three = planned(Elastic(with_interference=True, time_sharing=False, most_partitions=4), loads, [CPU])
    assert [part.size for part in three.devices[0].partitions] == [1, 1, 1]


def test_a_leftover_may_count_as_served() -> None:
    whole = RoundCache(COSTS).capacity("heavy", 60 * MS, 100, "gpu")
    loads = [load("heavy", whole + 10, 60)]
    slack = Elastic(rate_slack_per_s=15, knee_only=True).plan(loads, [GPU], COSTS)
    strict = Elastic(knee_only=True).plan(loads, [GPU], COSTS)
    assert isinstance(strict, Infeasible)
    assert isinstance(slack, Plan)
    assert check_plan(slack, loads, [GPU], WithoutInterference(COSTS), served_share=whole / (whole + 10)) == ()


def test_a_load_that_found_no_room_goes_first_next() -> None:
    loads = [load("heavy", 60, 120), load("deep", 40, 60), load("small", 150, 250)]
    strict = Elastic(retries=0).plan(loads, [GPU], COSTS)
    assert isinstance(strict, Infeasible)
    assert strict.tenant == "deep"
    planned(Elastic(retries=1), loads)


# --- interference ----------------------------------------------------------------------------------------------


def harsh(l2_other: float) -> TableCosts:
    table = {model: {50: {1: 10 * MS, 2: 12 * MS}, 100: {1: 10 * MS, 2: 12 * MS}} for model in ("wide", "heavy")}
    return table_costs({"gpu": table}, dict.fromkeys(table, 1), {"gpu": Line(l2_other, 0.0, 1.0)})


def test_interference_is_kept_within_or_named() -> None:
    device = DeviceType("gpu", ((100,), (50, 50)), GIB)
    loads = [load("heavy", 90, 30), load("wide", 90, 30)]
    aware, blind = Elastic(with_interference=True), Elastic()
    for l2_other, expected in ((0.0, True), (1.0, True), (40.0, False)):
        made = harsh(l2_other)
        plan = aware.plan(loads, [device], made)
        assert isinstance(plan, Plan) == expected
        if isinstance(plan, Plan):
            assert check_plan(plan, loads, [device], made) == ()
        else:
            assert (plan.tenant, plan.constraint) == ("wide", INTERFERENCE)
            unaware = blind.plan(loads, [device], made)
            assert isinstance(unaware, Plan)
            assert check_plan(unaware, loads, [device], made) != ()


def test_devices_stay_whole_where_partitions_interfere_too_much() -> None:
    device = DeviceType("gpu", ((100,), (50, 50)), GIB)
    loads = [load("heavy", 140, 30), load("wide", 140, 30)]
    made = harsh(40.0)
    plan = Elastic(with_interference=True).plan(loads, [device] * 2, made)
    assert isinstance(plan, Plan)
    assert check_plan(plan, loads, [device] * 2, made) == ()
    assert [len(each.partitions) for each in plan.devices] == [1, 1]


@given(some_loads())
@settings(max_examples=40)
@example([load("wide", 150, 60, "x"), load("heavy", 20, 250, "y")])
def test_without_factors_both_elastic_planners_agree(loads: list[Load]) -> None:
    flat = WithoutInterference(COSTS)
    plan = Elastic().plan(loads, [GPU] * 3, flat)
    aware = Elastic(with_interference=True).plan(loads, [GPU] * 3, flat)
    if isinstance(plan, Plan):
        assert isinstance(aware, Plan)
        assert aware.devices == plan.devices


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ALL, ids=IDS)
def test_the_tightest_constraint_is_named(planner: Planner) -> None:
    def reason(loads: list[Load], devices: list[DeviceType]) -> tuple[str, str]:
        answer = planner.plan(loads, devices, COSTS)
        assert isinstance(answer, Infeasible)
        return answer.tenant, answer.constraint

    easy = load("small", 10, 60, "easy")
    assert reason([easy, load("heavy", 1, 10, "hasty")], [GPU]) == ("hasty", LATENCY)
    assert reason([easy, load("heavy", 5000, 60, "greedy")], [GPU]) == ("greedy", DEVICES)
    assert reason([easy], [replace(GPU, memory_bytes=GIB - 1)]) == ("easy", MEMORY)
    assert reason([easy, load("small", 5, 60, "x"), load("deep", 1, 250, "y")], [replace(GPU, memory_bytes=GIB)])[
        1
    ] == (MEMORY)
    assert reason([easy], []) == ("easy", DEVICES)


def test_figures_stand_in_the_reason() -> None:
    answer = Elastic().plan([load("heavy", 1, 10)], [GPU], COSTS)
    assert isinstance(answer, Infeasible)
    assert "needs an SLO of 32 ms and has 10 ms" in answer.detail


@pytest.mark.parametrize("planner", ALL, ids=IDS)
def test_nothing_asked_needs_nothing(planner: Planner) -> None:
    assert planner.plan([], [GPU], COSTS) == Plan((), planner.name)


def test_settings_out_of_range_are_named() -> None:
    for make, text in (
        (lambda: Elastic(min_gain=0.9), "min_gain is 0.9"),
        (lambda: Elastic(rate_slack_per_s=-1), "rate_slack_per_s is -1"),
        (lambda: Elastic(most_partitions=0), "most_partitions is 0"),
        (lambda: Elastic(most_models=0), "most_models is 0"),
        (lambda: Elastic(retries=-1), "retries is -1"),
        (lambda: SquishyBinPacking(most_models=0), "most_models is 0"),
        (lambda: Elastic(headroom=-0.1).plan([load("small", 1, 60)], [GPU], COSTS), "headroom is -0.1"),
    ):
        with pytest.raises(InvalidValueError, match=text):
            make()


@pytest.mark.parametrize("planner", [Elastic(with_interference=True), Optimal()])
def test_interference_is_never_blamed_where_there_is_none(planner: Planner) -> None:
    loads = [load("small", 2000, 60), load("middle", 900, 60), load("deep", 300, 250)]
    found = planner.plan(loads, [GPU], WithoutInterference(COSTS))
    assert isinstance(found, Infeasible)
    assert found.constraint == DEVICES


def test_models_that_slow_each_other_down_are_told() -> None:
    assert RoundCache(COSTS).interferes(["small", "middle"], [GPU])
    assert not RoundCache(WithoutInterference(COSTS)).interferes(["small", "middle"], [GPU])


@pytest.mark.parametrize("planner", BLIND, ids=lambda planner: planner.name)
def test_a_device_that_is_too_slow_for_a_tenant_is_left_out(planner: Planner) -> None:
    slow, fast = DeviceType("slow", ((1,),), GIB), DeviceType("fast", ((1,),), GIB)
    times = {"slow": {"m": {1: {1: 60 * MS}}}, "fast": {"m": {1: {1: 5 * MS}}}}
    plan = planner.plan([load("m", 20, 100)], [slow, fast], table_costs(times, {"m": 1}))
    assert isinstance(plan, Plan)
    assert [device.device for device in plan.devices] == ["fast"]
