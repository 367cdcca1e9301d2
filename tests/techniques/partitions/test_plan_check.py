"""The checker of plans: every rule is broken once, on its own, in a plan that holds otherwise.

The checker is checked in turn: what it says of each plan here is what becomes of the plan in `plan_truth`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from msgspec import structs

from bench.papers.gpulet._nexus import SquishyBinPacking
from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.partitions.plan import check
from cotenant.techniques.partitions.plan.check import (
    BATCH,
    INVENTORY,
    MEMORY,
    RATE,
    ROUND,
    SLO,
    SPLIT,
    UNKNOWN,
    check_plan,
)
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.table_costs import WithoutInterference
from cotenant.techniques.partitions.plan.types import (
    NS_PER_S,
    CoRunner,
    Costs,
    DevicePlan,
    DeviceType,
    Load,
    PartitionPlan,
    Plan,
    Slot,
    checked,
)
from cotenant.work import Work
from group_costs import grouped_costs
from plan_samples import CPU, GIB, GPU, MS, costs, load, some_devices, some_loads
from plan_truth import branches, reached, truth

COSTS = WithoutInterference(costs())
LOADS = (load("small", 100, 60), load("middle", 50, 60))
GROUPED = grouped_costs("gpu", 100, {name: {1: 9.0} for name in "abc"}, {frozenset("ab"): 1.5})
SMALL = PartitionPlan(20, 20 * MS, (Slot("small", 2, 100),))
MIDDLE = PartitionPlan(80, 20 * MS, (Slot("middle", 1, 50),))
GOOD = Plan((DevicePlan("gpu", (SMALL, MIDDLE)),))


def kinds(
    plan: Plan,
    loads: Sequence[Load] = LOADS,
    devices: Sequence[DeviceType] = (GPU,),
    costs: Costs = COSTS,
    served_share: float = 1.0,
    *,
    is_close: bool = False,
) -> list[str]:
    """The rules that a plan breaks. It is also run: exactly the plans that break none of them go well.

    `is_close`: it breaks one by less than can be seen when it runs.
    """
    found = [violation.kind for violation in check_plan(plan, loads, devices, costs, served_share)]
    if not is_close:
        wrong = truth(plan, loads, devices, costs, served_share)
        assert bool(found) == bool(wrong), (found, wrong)
    return found


def one(*partitions: PartitionPlan, device: str = "gpu") -> Plan:
    return Plan((DevicePlan(device, partitions),))


def test_a_plan_that_holds_has_no_violation() -> None:
    assert kinds(GOOD) == []


BROKEN = [
    (one(SMALL, structs.replace(MIDDLE, size=60)), [SPLIT]),
    (one(SMALL, MIDDLE, device="tpu"), [INVENTORY]),
    (Plan((*GOOD.devices, DevicePlan("gpu", (SMALL,)))), [INVENTORY]),
    (one(structs.replace(SMALL, slots=(*SMALL.slots, Slot("nobody", 1, 1))), MIDDLE), [UNKNOWN]),
    (one(structs.replace(SMALL, slots=(Slot("small", 17, 100),)), MIDDLE), [UNKNOWN]),
    (one(structs.replace(SMALL, slots=(Slot("small", 1, 100),)), MIDDLE), [BATCH]),
    (one(SMALL, structs.replace(MIDDLE, slots=(Slot("middle", 1, 49.9),))), [RATE]),
    (one(SMALL), [RATE]),
    (one(SMALL, structs.replace(MIDDLE, duty_ns=5 * MS)), [ROUND]),
    (one(structs.replace(SMALL, duty_ns=58 * MS, slots=(Slot("small", 8, 100),)), MIDDLE), [SLO]),
]


@pytest.mark.parametrize(("plan", "expected"), BROKEN)
def test_every_rule_is_noticed(plan: Plan, expected: list[str]) -> None:
    assert kinds(plan) == expected


def test_the_edges_are_allowed() -> None:
    execution = COSTS.latency_ns(Work("middle", 0, 1), 80, "gpu")
    full = one(SMALL, PartitionPlan(80, execution, (Slot("middle", 1, 1e9 / execution),)))
    late = Load("middle", "middle", 50, 2 * execution)
    assert kinds(full, (LOADS[0], late)) == []
    assert kinds(full, (LOADS[0], structs.replace(late, slo_ns=2 * execution - 1)), is_close=True) == [SLO]


def test_memory_counts_models_and_partitions() -> None:
    def fits(bytes_: int, partition_bytes: int, plan: Plan) -> bool:
        return not kinds(plan, devices=[replace(GPU, memory_bytes=bytes_, partition_bytes=partition_bytes)])

    assert fits(2 * GIB, 0, GOOD)
    assert not fits(2 * GIB - 1, 0, GOOD)
    assert not fits(2 * GIB, 1, GOOD)
    together = one(PartitionPlan(100, 20 * MS, (Slot("small", 2, 100), Slot("small", 2, 1), Slot("middle", 1, 50))))
    assert fits(2 * GIB, 0, together)
    apart = Plan(
        (DevicePlan("gpu", (structs.replace(SMALL, size=50), structs.replace(SMALL, size=50))), *one(MIDDLE).devices)
    )
    held = check_plan(apart, LOADS, [replace(GPU, memory_bytes=2 * GIB - 1)] * 2, COSTS)
    assert [(each.kind, each.device) for each in held] == [(MEMORY, 0)]


def test_rates_of_all_slots_add_up() -> None:
    split = one(
        structs.replace(SMALL, slots=(Slot("small", 2, 60),)),
        structs.replace(MIDDLE, slots=(*MIDDLE.slots, Slot("small", 1, 40))),
    )
    assert kinds(split) == []


def test_part_of_the_rate_may_be_enough() -> None:
    plan = one(SMALL, structs.replace(MIDDLE, slots=(Slot("middle", 1, 45),)))
    assert kinds(plan) == [RATE]
    assert kinds(plan, served_share=0.9) == []
    with pytest.raises(PlanError, match="served_share is 0"):
        check_plan(plan, LOADS, [GPU], COSTS, served_share=0)


class PairCosts(WithoutInterference):
    """Each co-runner slows down by its batch in percent."""

    def __init__(self) -> None:
        super().__init__(COSTS)

    def factor(self, model: str, batch: int, size: int, others: object, device: str) -> float:
        assert isinstance(others, list | tuple)
        return 1 + sum(rows for _, rows, _ in others) / 100

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str) -> float:
        return other[1] / 100


def test_the_worst_slot_of_each_neighbour_counts() -> None:
    partitions = (
        PartitionPlan(1, 40 * MS, (Slot("first", 4, 100),)),
        PartitionPlan(1, 40 * MS, (Slot("small", 1, 1), Slot("middle", 5, 1))),
        PartitionPlan(2, 40 * MS, (Slot("middle", 2, 1), Slot("small", 16, 1))),
    )
    others = (load("small", 2, 1000), load("middle", 2, 1000))
    within = -(-COSTS.latency_ns(Work("small", 0, 4), 1, "cpu") * (100 + 5 + 16) // 100)
    tight = Load("first", "small", 100, 40 * MS + within)
    plan = one(*partitions, device="cpu")
    assert kinds(plan, (tight, *others), [CPU], PairCosts()) == []
    found = check_plan(plan, (structs.replace(tight, slo_ns=tight.slo_ns - 1), *others), [CPU], PairCosts())
    assert [(each.kind, each.tenant, each.partition) for each in found] == [(SLO, "first", 0)]


# --- many neighbours -----------------------------------------------------------------------------------------------

MANY = DeviceType("many", ((16,), (1,) * 16), GIB)
TIMES = {"quick": 4 * MS, "light": 1 * MS, "heavy": 20 * MS, "helper": 3 * MS}


class Added(Costs):
    """Batches of one row, slower by what each co-runner adds, as far as that is more than half in all."""

    more = {"quick": 0.05, "light": 0.0, "heavy": 0.3, "helper": -0.4}  # noqa: RUF012

    def latency_ns(self, work: Work, size: int, device: str) -> int:
        return TIMES[work.tenant]

    def batches(self, model: str) -> Sequence[int]:
        return (1,)

    def memory_bytes(self, model: str) -> int:
        return 1

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str) -> float:
        return max(1.0, 0.5 + sum(self.more[name] for name, _, _ in others)) if others else 1.0

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str) -> float:
        return self.more[other[0]]


Case = tuple[Plan, list[Load]]


def beside(duty_ms: float, slo_ms: float, *rounds: tuple[float, tuple[str, ...]]) -> Case:
    """A partition with the tenant quick, and others by their duty cycles in ms and tenants, all of them full."""
    made = [
        PartitionPlan(1, int(ms * MS), tuple(Slot(name, 1, NS_PER_S / int(ms * MS)) for name in names))
        for ms, names in ((duty_ms, ("quick",)), *rounds)
    ]
    rates = Counter[str]()
    for partition in made:
        for slot in partition.slots:
            rates[slot.tenant] += slot.rate_per_s  # type: ignore[assignment]
    loads = [
        Load(name, name.rstrip("0123456789"), rate, int((slo_ms if name == "quick" else 500) * MS))
        for name, rate in rates.items()
    ]
    return one(*made, device=MANY.name), loads


THREE_EACH = [(58.4, ("light", "light2", "heavy"))] * 8
ONE_EACH = [(83.1, ("heavy",))] * 13
HELPED = [(60.0, ("heavy",))] * 3 + [(100.0, ("helper",))]
MANY_CASES = [
    # four or three choices of each neighbour, none included: 65,536 and 8,192
    (beside(11.7, 23.4, *THREE_EACH), []),
    (beside(11.7, 20.0, *THREE_EACH), [SLO]),
    (beside(9.0, 23.4, *THREE_EACH), [ROUND]),
    (beside(4.1, 8.2, *THREE_EACH), [SLO, ROUND]),
    (beside(17.7, 35.4, *ONE_EACH), []),
    (beside(17.7, 31.0, *ONE_EACH), [SLO]),
    # who helps may be idle
    (beside(5.7, 11.4, *HELPED), []),
    (beside(4.1, 8.2, *HELPED), [SLO, ROUND]),
]


@pytest.mark.parametrize(("case", "expected"), MANY_CASES)
def test_neighbours_are_reckoned_with_as_they_really_are(case: Case, expected: list[str]) -> None:
    """Each neighbour alone, and each of its slots, leaves the tenant quick as quick as it is: all together do not."""
    plan, loads = case
    assert kinds(plan, loads, [MANY], Added()) == expected


@given(loads=some_loads(4), devices=some_devices(2))
@settings(max_examples=15, deadline=None)
def test_plans_that_pass_go_well(loads: list[Load], devices: list[DeviceType]) -> None:
    believed = costs()
    for planner in (
        Elastic(with_interference=True),
        Elastic(with_interference=False),
        SquishyBinPacking(),
        Optimal(time_limit_s=0.1, saving_s=0.1, solver=False),
    ):
        plan = planner.plan(loads, devices, believed)
        if isinstance(plan, Plan) and not check_plan(plan, loads, devices, believed):
            assert truth(plan, loads, devices, believed) == []


def test_every_branch_of_the_checker_is_reached() -> None:
    """By plans that are run above, all of them, or cannot even be laid out."""
    path = Path(check.__file__)
    with reached(path) as found:
        for plan, _ in BROKEN:
            check_plan(plan, LOADS, [GPU], COSTS)
        for (plan, loads), _ in MANY_CASES:
            check_plan(plan, loads, [MANY], Added())
        check_plan(GOOD, LOADS, [replace(GPU, memory_bytes=1)], COSTS)
        for names in ("ab", "ac"):
            group = tuple(Slot(name, 1, 10.0, 1, 50) for name in names)
            plan = one(PartitionPlan(100, 40 * MS, group))
            own = [Load(name, name, 10.0, 99 * MS) for name in names]
            assert len(check_plan(plan, own, [GPU], GROUPED)) == (names == "ac"), "the group of a and c is not known"
        with pytest.raises(PlanError, match="served_share is 2"):
            check_plan(GOOD, LOADS, [GPU], COSTS, served_share=2)
    assert len(branches(path)) > 30
    assert found == branches(path)


def test_one_load_a_tenant_and_one_form_a_device_type() -> None:
    with pytest.raises(PlanError, match="tenant 'small' has two loads"):
        checked([*LOADS, LOADS[0]], [GPU])
    with pytest.raises(PlanError, match="'gpu' is described in two ways"):
        checked(LOADS, [GPU, replace(GPU, price=2.0)])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Load("a", "m", 0, 1), "tenant 'a': rate_per_s is 0"),
        (lambda: Load("a", "m", float("nan"), 1), "rate_per_s is nan"),
        (lambda: Load("a", "m", 1, 0), "slo_ns is 0"),
        (lambda: Slot("a", 0, 1), "batch is 0"),
        (lambda: Slot("a", 1, -1), "rate_per_s is -1"),
        (lambda: PartitionPlan(0, 1, (Slot("a", 1, 1),)), "size is 0"),
        (lambda: PartitionPlan(1, 0, (Slot("a", 1, 1),)), "duty_ns is 0"),
        (lambda: PartitionPlan(1, 1, ()), "at least one slot"),
        (lambda: DevicePlan("gpu", ()), "at least one"),
        (lambda: DeviceType("gpu", (), 1), "at least one list"),
        (lambda: DeviceType("gpu", ((50, 50),), 1), "one split that is the whole device"),
        (lambda: DeviceType("gpu", ((0,),), 1), "sizes from 1"),
        (lambda: DeviceType("gpu", ((1,),), 0), "memory_bytes is 0"),
        (lambda: DeviceType("gpu", ((1,),), 1, price=-1), "price is -1"),
        (lambda: DeviceType("gpu", ((1,),), 1, partition_bytes=-1), "partition_bytes is -1"),
    ],
)
def test_values_out_of_range_are_named(make: object, text: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidValueError, match=text):
        make()


def test_sizes_of_a_device() -> None:
    assert GPU.whole == 100
    assert GPU.sizes == (20, 40, 50, 60, 80, 100)
    assert CPU.sizes == (1, 2, 3, 4)
