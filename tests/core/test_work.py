"""Work, shares and machines: what is to run, where, and how the slots of several devices are numbered."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.types import Tenant
from cotenant.work import CPU, Machine, Round, Share, Slot, Work

DEVICES = st.dictionaries(
    st.sampled_from(["cpu", "cuda:0", "cuda:1", "npu"]), st.sets(st.integers(0, 140), min_size=1), min_size=1
)


def test_work_is_taken_apart_at_units_and_rows() -> None:
    work = Work("a", 1, 4, 2, 9, version=3)
    assert work.until(5) == Work("a", 1, 4, 2, 5, 3)
    assert work.since(5) == Work("a", 1, 4, 5, 9, 3)
    assert work.part(1, 4) == Work("a", 1, 3, 2, 9, 3, (1, 4))
    assert work.part(1, 4).until(5).rows == (1, 4)
    assert [
        each.is_first for each in (work, Work("a", 0, 4), Work("a", 0, 4).part(0, 1), Work("a", 0, 4).part(1, 4))
    ] == [
        False,
        True,
        True,
        False,
    ]


def test_work_is_remembered_by_what_it_says() -> None:
    known = {(Work("a", 0, 1, 0, 4), 2): 5}
    assert known[Work("a", 0, 1, 0, 4), 2] == 5
    assert (Work("a", 0, 1, 0, 4, 1), 2) not in known
    assert (Work("a", 0, 1, 0, 4, rows=(0, 1)), 2) not in known
    assert sorted([Work("a", 0, 2), Work("a", 0, 1, rows=(0, 1)), Work("a", 0, 1)]) == [
        Work("a", 0, 1),
        Work("a", 0, 1, rows=(0, 1)),
        Work("a", 0, 2),
    ]


def test_a_tenant_knows_the_work_of_its_batches() -> None:
    tenant = Tenant("a", 5, cuts=(0, 3, 7))
    assert tenant.work(1, 2) == Work("a", 1, 2, 0, 7)
    assert tenant.work(1, 2) is tenant.work(1, 2)
    assert tenant.work(0, 2, 3) == Work("a", 0, 2, 3, 7)
    assert pickle.loads(pickle.dumps(tenant)) == tenant
    assert pickle.loads(pickle.dumps(tenant)).work(1, 2) == tenant.work(1, 2)


@given(devices=DEVICES)
def test_slots_of_different_devices_have_different_numbers(devices: dict[str, set[int]]) -> None:
    machine = Machine.of(devices)
    assert machine.mask.bit_count() == sum(len(slots) for slots in devices.values())
    singles = [machine.share((slot,), device) for device, slots in devices.items() for slot in slots]
    assert len({share.mask for share in singles}) == len(singles)
    assert sum(share.mask for share in singles) == machine.mask
    assert all(share in machine and share.mask & machine.mask for share in singles)
    assert Machine.holding(singles).mask == machine.mask


def test_the_same_core_of_two_devices_is_not_the_same() -> None:
    machine = Machine.of({CPU: (0, 1), "cuda:0": range(3)})
    cpu, gpu = machine.share((0,)), machine.share((0,), "cuda:0")
    assert (cpu.mask, gpu.mask, gpu.first) == (1, 4, 2)
    assert cpu != gpu
    assert Share((0,), "cuda:0") not in machine, "of another machine, in which its number is another"


@pytest.mark.parametrize(
    ("cores", "device", "text"),
    [
        ((2,), CPU, "cores is (2,), expected cores that device 'cpu' has"),
        ((0,), "npu", "device is 'npu', expected a device of the machine: cpu, cuda:0"),
        ((), CPU, "distinct core numbers from 0, at least one"),
        ((1, 1), CPU, "distinct core numbers"),
        ((-1,), CPU, "distinct core numbers"),
        ((0,), "", "expected a device of the machine"),
    ],
)
def test_a_share_that_is_not_there_is_named(cores: tuple[int, ...], device: str, text: str) -> None:
    with pytest.raises(InvalidValueError) as error:
        Machine.of({CPU: (0, 1), "cuda:0": (0, 1)}).share(cores, device)
    assert text in str(error.value)


def test_a_machine_has_devices_of_different_names_and_slots() -> None:
    for devices in ((), (Share((0,)), Share((1,))), (Share((0,)), Share((0,), "npu"))):
        with pytest.raises(InvalidValueError, match="devices of different names and slots"):
            Machine(devices)


def test_files_say_nothing_twice_of_a_share() -> None:
    share = Machine.of({CPU: (0, 1), "cuda:0": range(132)}).share(range(100, 132), "cuda:0")
    told = msgspec.json.encode(share)
    assert b"mask" not in told
    assert b"size" not in told
    read = msgspec.json.decode(told, type=Share)
    assert (read, read.mask, read.size) == (share, share.mask, 32)
    assert pickle.loads(pickle.dumps(share)).mask == share.mask


@given(
    slots=st.sets(st.integers(0, 140), min_size=1),
    others=st.sets(st.integers(141, 200), min_size=1),
    first=st.integers(0, 90),
)
def test_a_share_by_its_mask_is_the_one_by_its_cores(slots: set[int], others: set[int], first: int) -> None:
    share, other = (Share(tuple(sorted(each)), "cuda:0", first) for each in (slots, others))
    assert (made := Share.of_mask(share.mask, "cuda:0", first)) == share
    assert (made.mask, made.size) == (share.mask, share.size)
    both = Share((*other.cores, *share.cores), "cuda:0", first)
    assert (made := other.joined(share)) == both
    assert (made.mask, made.size) == (both.mask, both.size)


def test_a_round_runs_the_members_of_a_group_in_one_step() -> None:
    a, b, c, d = Slot("a", 2, 5.0, 2, 1), Slot("b", 1, 5.0, 2, 1), Slot("c", 1, 5.0), Slot("d", 1, 5.0)
    assert Round(100, (c, a, b, d)).steps == ((c,), (a, b), (d,))
    assert Round(100, (c, d)).steps == ((c,), (d,))
    assert Round().steps == ()
    pair = Slot("c", 1, 5.0, 1, 2), Slot("a", 1, 5.0, 1, 1)
    assert Round(100, (a, b, *pair)).steps == ((a, b), pair)
    assert msgspec.json.decode(msgspec.json.encode(Round(100, (c, a, b))), type=Round) == Round(100, (c, a, b))


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ((("a", 1, 1), ("b", 0, 0), ("c", 1, 1)), "group 1 of a round: slots .*next to each other"),
        ((("a", 1, 1), ("a", 1, 1)), "group 1 of a round: slots .*different tenants"),
    ],
)
def test_a_group_that_cannot_run_is_named(slots: tuple[tuple[str, int, int], ...], text: str) -> None:
    with pytest.raises(InvalidValueError, match=text):
        Round(100, tuple(Slot(tenant, 1, 5.0, group, size) for tenant, group, size in slots))


@pytest.mark.parametrize(
    ("group", "size", "text"), [(-1, 0, "group is -1"), (1, 0, "size is 0"), (1, -1, "size is -1"), (0, 1, "size is 1")]
)
def test_a_slot_with_an_impossible_place_in_a_group_is_named(group: int, size: int, text: str) -> None:
    with pytest.raises(InvalidValueError, match=f"slot of tenant 'a': {text}"):
        Slot("a", 1, 5.0, group, size)
