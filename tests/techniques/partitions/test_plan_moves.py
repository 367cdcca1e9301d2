"""Steps between plans, against their definitions: every choice of devices, and every way to keep what runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from cotenant.techniques.partitions.plan.search.opt_moves import aligned, cheaper, limited, moved
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, PartitionPlan, Plan, Slot
from plan_samples import FINE, MS

TYPES = {name: DeviceType(name, ((1,),), 1, price) for name, price in (("a", 1.0), ("b", 2.0), ("c", 2.0), ("d", 3.5))}


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=6))
def test_cheaper_devices_are_all_that_are_one_step_away(devices: list[tuple[str, bool]]) -> None:
    inventory = Counter(name for name, _ in devices)
    kinds = Counter(name for name, is_used in devices if is_used)

    def price(names: Counter[str]) -> float:
        return sum(TYPES[name].price * count for name, count in names.items())

    expected = []
    for counts in product(*(range(inventory[name] + 1) for name in TYPES)):
        other = Counter(dict(zip(TYPES, counts, strict=True)))
        is_step = (kinds - other).total() == 1 and (other - kinds).total() <= 1
        if other.total() and is_step and price(other) < price(kinds):
            expected.append((price(other), tuple(sorted(other.elements()))))
    assert cheaper(list(kinds.elements()), list(inventory.elements()), TYPES) == [each for _, each in sorted(expected)]


def device(size: int, *tenants: str, name: str = "gpu") -> DevicePlan:
    return DevicePlan(name, (PartitionPlan(size, 10 * MS, tuple(Slot(each, 1, 1.0) for each in tenants)),))


def test_devices_beyond_those_that_run_come_last_in_their_order() -> None:
    running = Plan((device(100, "a"), device(50, "b")))
    made = Plan((device(20, "c"), device(20, "d"), device(50, "b"), device(20, "e"), device(100, "a")))
    new = aligned(made, running)
    assert [each.partitions[0].slots[0].tenant for each in new.devices] == list("abcde")
    assert moved(made, running) == moved(new, running) == ("c", "d", "e")


def test_a_device_of_another_type_is_another_place() -> None:
    running = Plan((device(4, "a"), device(4, "b", name="cpu")))
    made = Plan((device(4, "a", name="cpu"), device(4, "b", "c")))
    assert moved(made, running) == ("a", "b", "c")
    assert aligned(made, running).devices == made.devices[::-1]


def test_who_has_more_or_fewer_places_has_moved() -> None:
    one, two = Plan((device(4, "a"), device(4, "b"))), Plan((device(4, "a"), device(4, "a", "b")))
    assert moved(two, one) == moved(one, two) == ("a",)


def test_splits_of_too_many_partitions_are_left_out() -> None:
    assert limited(FINE, 0) == FINE
    for most in range(1, 6):
        assert limited(FINE, most) == replace(FINE, splits=tuple(each for each in FINE.splits if len(each) <= most))
