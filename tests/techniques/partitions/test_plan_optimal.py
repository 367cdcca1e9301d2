"""Our planner: agrees with brute force where that is possible, is never refuted, never dearer than the paper's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.search import opt_exact
from cotenant.techniques.partitions.plan.search.columns import Column, ColumnGenerator
from cotenant.techniques.partitions.plan.search.opt_bound import Bound
from cotenant.techniques.partitions.plan.search.opt_moves import aligned, moved
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.table_costs import WithoutInterference
from cotenant.techniques.partitions.plan.types import (
    DEVICES,
    INTERFERENCE,
    LATENCY,
    MEMORY,
    NS_PER_S,
    CoRunner,
    DevicePlan,
    DeviceType,
    Infeasible,
    Load,
    PartitionPlan,
    Plan,
    Slot,
)
from oracles import Few, all_rates, brute_force
from plan_samples import (
    CPU,
    FINE,
    GIB,
    GPU,
    MODELS,
    MS,
    THREE_CORES,
    TWO_WAYS,
    Line,
    costs,
    latencies,
    load,
    some_devices,
    some_loads,
    table_costs,
    tiny,
)

COSTS = costs()
QUICK = Optimal(time_limit_s=0.2, saving_s=0.2, solver=False)


@pytest.mark.parametrize("devices", [[TWO_WAYS] * 2, [TWO_WAYS, THREE_CORES]], ids=["equal", "mixed"])
@given(loads=tiny())
@settings(max_examples=20, deadline=None)
def test_the_exact_answer_is_that_of_brute_force(devices: list[DeviceType], loads: list[Load]) -> None:
    pytest.importorskip("ortools")
    few = Few(COSTS, (2, 8))
    found = Optimal().solve(loads, devices, few)
    assert found.is_proven
    expected = brute_force(loads, devices, few)
    if math.isinf(expected):
        assert isinstance(found.plan, Infeasible)
    else:
        assert isinstance(found.plan, Plan), found.plan
        assert found.price == pytest.approx(expected)
        assert check_plan(found.plan, loads, devices, few) == ()


@pytest.mark.parametrize("devices", [[TWO_WAYS] * 2, [TWO_WAYS, THREE_CORES]], ids=["equal", "mixed"])
@given(loads=tiny())
@settings(max_examples=20, deadline=None)
def test_bound_and_search_enclose_brute_force(devices: list[DeviceType], loads: list[Load]) -> None:
    few = Few(COSTS, (2, 8))
    found = QUICK.solve(loads, devices, few)
    expected = brute_force(loads, devices, few)
    assert found.bound <= expected * (1 + 1e-9)
    assert found.price >= expected * (1 - 1e-9)


@given(loads=tiny())
@settings(max_examples=20, deadline=None)
def test_all_configurations_serve_what_any_contents_of_a_device_serve(loads: list[Load]) -> None:
    few = Few(COSTS, (2, 8))
    rates = np.array([each.rate_per_s for each in loads])
    found = opt_exact.all_configurations(
        ColumnGenerator(RoundCache(few), loads, THREE_CORES), rates, len(loads), 10_000
    )
    assert found is not None
    reached = {tuple(np.minimum(config.served, rates).round(6)) for config in found}
    possible = {tuple(np.minimum(served, rates).round(6)) for served in all_rates(loads, THREE_CORES, few)}
    assert reached <= possible
    for served in possible:
        assert any(all(a >= b for a, b in zip(other, served, strict=True)) for other in reached) or not any(served)


@given(
    chosen=st.lists(
        st.sampled_from([(kind, at) for kind in ("gpu", "cpu") for at in range(2)]), min_size=1, max_size=8
    ),
    models=st.tuples(*[st.sampled_from(sorted(MODELS))] * 2),
)
@settings(max_examples=20, deadline=None)
def test_full_devices_are_not_proven_too_little(chosen: list[tuple[str, int]], models: tuple[str, str]) -> None:
    """Every device is full to the row of one load: thirds, sevenths and the like have to add up to the whole."""
    pytest.importorskip("ortools")
    whole = {kind.name: replace(kind, splits=((kind.whole,),)) for kind in (GPU, CPU)}
    rates = [0.0, 0.0]
    for kind, at in chosen:
        rates[at] += RoundCache(COSTS).capacity(models[at], 250 * MS, whole[kind].whole, kind)
    loads = [load(models[at], rate, 250, f"t{at}") for at, rate in enumerate(rates) if rate]
    devices = [whole[kind] for kind, _ in chosen]
    found = Optimal(saving_s=0.0).solve(loads, devices, COSTS)
    assert isinstance(found.plan, Plan), found.plan
    assert check_plan(found.plan, loads, devices, COSTS) == ()
    assert found.is_proven


def test_proofs_are_of_plans_with_one_slot_of_a_tenant_in_a_round() -> None:
    """Two slots of a tenant in a round may serve what no plan that is looked for can; one that runs is kept."""
    pytest.importorskip("ortools")
    kind = DeviceType("one", ((1,),), GIB)
    times = {"quick": {1: {1: 1 * MS}}, "slow": {1: {1: 10 * MS}}}
    few = table_costs({"one": times}, dict.fromkeys(times, 1))
    loads = [load("quick", 150, 100), load("slow", 80, 100)]
    slots = Slot("quick", 1, 75.0), Slot("slow", 1, 80.0), Slot("quick", 1, 75.0)
    double = Plan((DevicePlan("one", (PartitionPlan(1, 12 * MS, slots),)),))
    assert check_plan(double, loads, [kind], few) == ()

    found = Optimal().solve(loads, [kind], few)
    assert isinstance(found.plan, Infeasible)
    assert found.is_proven
    assert math.isinf(brute_force(loads, [kind], Few(few, (1,))))

    kept = Optimal().solve(loads, [kind], few, double)
    assert isinstance(kept.plan, Plan)
    assert check_plan(kept.plan, loads, [kind], few) == ()
    assert kept.moved == ()


@given(loads=some_loads(), devices=some_devices())
@settings(max_examples=40, deadline=None)
def test_every_plan_holds_and_is_never_dearer_than_the_papers(loads: list[Load], devices: list[DeviceType]) -> None:
    found = QUICK.solve(loads, devices, COSTS)
    paper = Elastic(with_interference=True).plan(loads, devices, COSTS)
    price = {kind.name: kind.price for kind in devices}
    if isinstance(found.plan, Infeasible):
        assert isinstance(paper, Infeasible)
        assert found.plan.tenant in {its.tenant for its in loads}
        assert found.plan.constraint in {LATENCY, MEMORY, DEVICES, INTERFERENCE}
        assert repr(found.plan.tenant) in found.plan.detail
        return
    assert check_plan(found.plan, loads, devices, COSTS) == ()
    assert found.price == pytest.approx(sum(price[device.device] for device in found.plan.devices))
    assert found.bound <= found.price
    assert found.plan.planner == "ours"
    if isinstance(paper, Plan):
        assert found.price <= sum(price[device.device] for device in paper.devices)


@given(loads=some_loads(5, 250.0), memory=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_memory_is_kept_within(loads: list[Load], memory: int) -> None:
    tight = [replace(FINE, memory_bytes=memory * GIB, partition_bytes=GIB // 2)] * 3
    plan = QUICK.plan(loads, tight, COSTS)
    if isinstance(plan, Plan):
        assert check_plan(plan, loads, tight, COSTS) == ()


def test_equal_questions_have_equal_answers() -> None:
    loads = [load(model, 60, 120) for model in MODELS]
    assert QUICK.plan(loads, [FINE] * 4, COSTS) == QUICK.plan(loads, [FINE] * 4, costs())


def test_finer_splits_serve_what_two_partitions_cannot() -> None:
    steps = [load("small", 500 * n, 30, "one") for n in range(2, 22, 2)]

    def most(kind: DeviceType) -> float:
        return max((its.rate_per_s for its in steps if isinstance(QUICK.plan([its], [kind], COSTS), Plan)), default=0)

    assert most(FINE) > most(GPU)


def test_a_load_is_spread_over_several_partitions() -> None:
    heavy = load("heavy", 1, 120)
    whole = RoundCache(COSTS).capacity("heavy", heavy.slo_ns, 100, "gpu")
    plan = QUICK.plan([structs.replace(heavy, rate_per_s=2.5 * whole)], [GPU] * 4, COSTS)
    assert isinstance(plan, Plan)
    assert len(plan.devices) == 3


def test_headroom_is_added_to_the_rates() -> None:
    loads = [load("middle", 50, 120)]
    plan = replace(QUICK, headroom=0.25).plan(loads, [GPU], COSTS)
    assert isinstance(plan, Plan)
    assert check_plan(plan, [structs.replace(loads[0], rate_per_s=62.5)], [GPU], COSTS) == ()


def test_the_cheaper_type_is_taken() -> None:
    loads = [load("small", 50, 120)]
    plan = QUICK.plan(loads, [GPU, replace(CPU, price=0.25)], COSTS)
    assert isinstance(plan, Plan)
    assert [device.device for device in plan.devices] == ["cpu"]


@pytest.mark.parametrize(
    ("loads", "devices", "constraint", "tenant"),
    [
        ([load("heavy", 10, 20), load("small", 5, 50)], [GPU], LATENCY, "heavy"),
        ([load("small", 5, 50), load("middle", 1e5, 100)], [GPU], DEVICES, "middle"),
        ([load("small", 1, 50)], [replace(GPU, memory_bytes=GIB // 2)], MEMORY, "small"),
        ([load(m, 1, 500) for m in MODELS], [replace(GPU, memory_bytes=2 * GIB)], MEMORY, None),
        ([load("small", 1, 50)], [], DEVICES, "small"),
    ],
)
def test_a_refusal_names_what_is_tightest(
    loads: list[Load], devices: list[DeviceType], constraint: str, tenant: str | None
) -> None:
    refused = QUICK.plan(loads, devices, COSTS)
    assert isinstance(refused, Infeasible)
    assert refused.constraint == constraint
    assert tenant in (None, refused.tenant)


def test_a_refusal_names_who_misses_most_of_a_device() -> None:
    """Ten devices are missing for a few heavy rows, half a device for many small ones."""
    book = RoundCache(COSTS)
    capacity = {model: book.capacity(model, 250 * MS, 100, "gpu") for model in ("small", "heavy")}
    assert capacity["small"] > 10 * capacity["heavy"]
    refused = QUICK.plan(
        [load("small", 1.5 * capacity["small"], 250), load("heavy", 10 * capacity["heavy"], 250)], [GPU], COSTS
    )
    assert isinstance(refused, Infeasible)
    assert refused.tenant == "heavy"


def test_what_is_not_found_is_not_proven() -> None:
    """Two loads that take more than half a device each, of three on two devices: what fractions could do, none can."""
    whole = replace(GPU, splits=((100,),), memory_bytes=3 * GIB // 2)
    models = ("heavy", "deep", "wide")
    loads = [load(model, 0.6 * RoundCache(COSTS).capacity(model, 250 * MS, 100, "gpu"), 250) for model in models]
    found = QUICK.solve(loads, [whole] * 2, COSTS)
    assert isinstance(found.plan, Infeasible)
    assert not found.is_proven
    assert found.price == math.inf


def test_a_refusal_for_interference_says_so() -> None:
    """Two loads that need half of the device each, and all of that half's time when alone."""
    rough = table_costs(
        {"gpu": latencies(GPU.sizes, GPU.whole)}, dict.fromkeys(MODELS, GIB), {"gpu": Line(constant=1.3)}
    )
    cache = RoundCache(rough)
    halves = replace(GPU, splits=((100,), (50, 50)))
    loads = [load("small", 1, 6), load("deep", 1, 100)]  # too short an SLO for both to share a round
    full = [structs.replace(its, rate_per_s=cache.capacity(its.model, its.slo_ns, 50, "gpu") * 0.995) for its in loads]
    refused = QUICK.plan(full, [halves], rough)
    assert isinstance(refused, Infeasible)
    assert refused.constraint == INTERFERENCE
    assert isinstance(QUICK.plan(full, [halves], WithoutInterference(rough)), Plan)


# --- running plans -------------------------------------------------------------------------------------------------


def test_what_runs_and_still_serves_stays() -> None:
    loads = [load(model, 40, 120) for model in MODELS]
    first = QUICK.plan(loads, [GPU] * 5, COSTS)
    assert isinstance(first, Plan)
    later = [structs.replace(its, rate_per_s=its.rate_per_s * 0.97) for its in loads]
    found = QUICK.solve(later, [GPU] * 5, COSTS, first)
    assert isinstance(found.plan, Plan)
    assert len(found.plan.devices) <= len(first.devices)
    if len(found.plan.devices) == len(first.devices):
        assert found.moved == ()


def test_a_running_plan_of_tenants_that_left_is_no_hindrance() -> None:
    running = QUICK.plan([load("heavy", 90, 150, "gone"), load("small", 40, 100)], [GPU] * 2, COSTS)
    assert isinstance(running, Plan)
    loads = [load("small", 40, 100), load("middle", 40, 100)]
    plan = QUICK.plan(loads, [GPU] * 2, COSTS, running)
    assert isinstance(plan, Plan)
    assert check_plan(plan, loads, [GPU] * 2, COSTS) == ()


def test_devices_keep_their_places_and_movers_are_named() -> None:
    def device(name: str, size: int, *tenants: str) -> DevicePlan:
        return DevicePlan(name, (PartitionPlan(size, 10 * MS, tuple(Slot(each, 1, 1.0) for each in tenants)),))

    running = Plan((device("gpu", 100, "a"), device("gpu", 50, "b", "c")))
    plan = Plan((device("gpu", 50, "b"), device("gpu", 20, "c"), device("gpu", 100, "a")))
    new = aligned(plan, running)
    assert [device.partitions[0].slots[0].tenant for device in new.devices] == ["a", "b", "c"]
    assert moved(new, running) == ("c",)
    assert moved(running, running) == ()


# --- parts ---------------------------------------------------------------------------------------------------------


def test_a_configuration_is_what_the_checker_sees() -> None:
    loads = [load("small", 1, 100), load("middle", 1, 100)]
    generator = ColumnGenerator(RoundCache(COSTS), loads, GPU)
    config = generator.config((Column(20, ((0, 4),)), Column(80, ((0, 2), (1, 8)))))
    assert config is not None
    small = 4 * NS_PER_S / config.duty_ns[0] + 2 * NS_PER_S / config.duty_ns[1]
    assert config.served == pytest.approx((small, 8 * NS_PER_S / config.duty_ns[1]))
    assert config.execution_ns[0][0] > generator.execution_ns(0, 4, 20, ())
    assert generator.config((Column(20, ((1, 16),)),)) is None  # too slow for the SLO


class OnlyTogether:
    """One heavy co-runner does no harm; two take half as long again."""

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = "") -> float:
        return 1.5 if sum(name == "heavy" for name, _, _ in others) > 1 else 1.0

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str = "") -> float:
        return float(other[0] == "heavy")

    def factor_at(
        self, quantile: float, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = ""
    ) -> float:
        return self.factor(model, batch, size, others, device)


def test_co_runners_that_are_harmless_alone_are_looked_at_together() -> None:
    believed = table_costs(
        {GPU.name: latencies(FINE.sizes, 100)}, dict.fromkeys(MODELS, GIB), {GPU.name: OnlyTogether()}
    )
    loads = [load("small", 1, 500), load("middle", 1, 900), load("heavy", 1, 900)]
    generator = ColumnGenerator(RoundCache(believed), loads, FINE)
    beside = Column(40, ((1, 1), (2, 1)))
    config = generator.config((Column(20, ((0, 4),)), beside, beside))
    assert config is not None
    assert config.execution_ns[0][0] == math.ceil(1.5 * generator.alone[20][0, generator.position(0, 4)])


@given(loads=some_loads(4), data=st.data())
@settings(max_examples=30, deadline=None)
def test_no_configuration_is_worth_more_than_the_bound_on_it(loads: list[Load], data: st.DataObject) -> None:
    generator = ColumnGenerator(RoundCache(COSTS), loads, FINE)
    prices = np.array([data.draw(st.floats(0.001, 1.0)) for _ in loads])
    bound, _ = generator.value(prices)
    split = data.draw(st.sampled_from(FINE.splits))
    columns = []
    for size in split:
        numbers = data.draw(st.lists(st.integers(0, len(loads) - 1), min_size=1, max_size=2, unique=True))
        columns.append(Column(size, tuple((n, data.draw(st.sampled_from((1, 2, 4, 8, 16)))) for n in numbers)))
    config = generator.config(columns)
    if config is not None:
        assert np.array(config.served) @ prices <= bound * (1 + 1e-9)


def test_too_many_columns_are_not_enumerated() -> None:
    loads = [load(model, 10, 120) for model in MODELS]
    assert (
        opt_exact.all_configurations(ColumnGenerator(RoundCache(COSTS), loads, GPU), np.full(5, 10.0), 3, 1000) is None
    )


def test_more_than_the_devices_can_do_is_proven() -> None:
    loads = [load("middle", 1e4, 100)]
    bound = Bound({"gpu": ColumnGenerator(RoundCache(COSTS), loads, GPU)}, np.array([1e4]))
    assert bound.is_too_little(["gpu"] * 3)
    assert not bound.is_too_little(["gpu"] * 1000)
    assert bound.devices() > 3


def test_works_without_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.techniques.partitions.plan.search.optimal.has_solver", lambda: False)
    loads = [load("small", 50, 100)]
    assert isinstance(Optimal().plan(loads, [GPU], COSTS), Plan)


def test_no_loads_need_no_devices() -> None:
    assert QUICK.plan([], [GPU], COSTS) == Plan((), "ours")


def test_settings_and_loads_are_checked() -> None:
    with pytest.raises(InvalidValueError, match="most_slots"):
        Optimal(most_slots=0)
    with pytest.raises(InvalidValueError, match="headroom"):
        Optimal(headroom=-1).plan([load("small", 1, 50)], [GPU], COSTS)
    with pytest.raises(PlanError, match="two loads"):
        QUICK.plan([load("small", 1, 50)] * 2, [GPU], COSTS)
