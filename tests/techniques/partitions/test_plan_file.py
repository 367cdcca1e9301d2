"""Files of tenants and of plans: what is written is read back, and errors name the file, the key and what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cotenant import registry
from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.partitions.plan.application import Application, Stage
from cotenant.techniques.partitions.plan.file import (
    UNLIMITED_BYTES,
    KnownTenant,
    PlanFile,
    Request,
    parse_plan,
    parse_request,
    plan_text,
    read_plan,
    read_request,
    request_text,
    splits_of_cores,
)
from cotenant.techniques.partitions.plan.planners import make_planner
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Load, PartitionPlan, Plan, Slot
from plan_samples import costs

MS = 1_000_000
GIB = 1 << 30
TENANTS = """
[[device]]
name = "cpu"
count = 2
cores = 2
memory_gib = 1.5
price = 0.25

[[device]]
name = "gpu"
kind = "gpu"
splits = [[100], [50, 50]]
partition_mib = 300

[[tenant]]
name = "mail"
model = "minilm"
rate = 30
slo_ms = 40.5

[[application]]
name = "traffic"
rate = 5.5
slo_ms = 200

[[application.stage]]
name = "detect"
model = "ssd"

[[application.stage]]
name = "cars"
model = "googlenet"
after = ["detect"]
"""


def test_a_file_of_tenants_is_read() -> None:
    request = parse_request(TENANTS, "tenants.toml")
    cpu = DeviceType("cpu", ((2,), (1, 1)), GIB * 3 // 2, 0.25)
    gpu = DeviceType("gpu", ((100,), (50, 50)), UNLIMITED_BYTES, 1.0, 300 << 20, "gpu")
    stages = Stage("detect", "ssd"), Stage("cars", "googlenet", ("detect",))
    assert request == Request(
        (Load("mail", "minilm", 30, 40_500_000),),
        (cpu, cpu, gpu),
        (Application("traffic", 200 * MS, 5.5, stages),),
    )


def test_what_a_repository_knows_fills_in_what_is_left_out() -> None:
    text = '[[device]]\nname = "cpu"\ncores = 1\n[[tenant]]\nname = "mail"\nrate = 1\n'
    known = {"mail": KnownTenant("minilm", 7 * MS)}
    assert parse_request(text, "t", known).loads == (Load("mail", "minilm", 1, 7 * MS),)
    own = text + 'model = "other"\nslo_ms = 9\n'
    assert parse_request(own, "t", known).loads == (Load("mail", "other", 1, 9 * MS),)
    assert parse_request(text + "slo_ms = 9\n", "t").loads == (Load("mail", "mail", 1, 9 * MS),)
    with pytest.raises(PlanError, match="t: tenant 'mail': slo_ms is missing; add a line like 'slo_ms = 100'"):
        parse_request(text, "t")


def broken(old: str, new: str) -> str:
    assert old in TENANTS
    return TENANTS.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            broken("rate = 30", "rate = -1"),
            r"tenant\[0\]: load of tenant 'mail': rate_per_s is -1.0, expected a positive",
        ),
        (broken("rate = 30", "rate = nan"), "rate"),
        (broken("rate = 30", "rat = 30"), r"tenant\[0\]: .*(missing|unknown field)"),
        (broken("rate = 30", 'rate = "30"'), r"tenant\[0\].rate: Expected `float`, got `str`"),
        (broken("slo_ms = 40.5", "slo_ms = 0"), r"tenant\[0\].slo_ms: Expected milliseconds from a nanosecond .*got 0"),
        (broken("slo_ms = 40.5", "slo_ms = 1e-9"), "slo_ms: Expected milliseconds from a nanosecond .*got 1e-09"),
        (broken("cores = 2", ""), "device 'cpu': cores is missing"),
        (broken("cores = 2", "cores = 65"), "device 'cpu': 65 cores have too many splits"),
        (broken("cores = 2", "cores = 2\nsplits = [[3]]"), "device 'cpu': cores is 2, but the largest of splits has 3"),
        (broken("splits = [[100], [50, 50]]", ""), "device 'gpu': splits is missing"),
        (broken("[[100], [50, 50]]", "[[50, 50]]"), "device type 'gpu': splits .*the whole device"),
        (broken('name = "gpu"', 'name = "cpu"'), "device type 'cpu' is described in two ways"),
        (broken("count = 2", "count = -2"), r"device\[0\].count: .*>= 0"),
        (TENANTS + '[[tenant]]\nname="mail"\nrate=1\nslo_ms=1\n', "tenant 'mail' has two loads"),
        (TENANTS + TENANTS[TENANTS.index("[[application]]") :], "application 'traffic' is there twice"),
        (broken('after = ["detect"]', 'after = ["nobody"]'), "nobody"),
        ("[[tenant]]\nname='a'\nrate=1\nslo_ms=1\n", r"no \[\[device\]\]"),
        ("[[device]]\nname='a'\ncores=1\n", r"neither \[\[tenant\]\] nor \[\[application\]\]"),
        ("tenant = {", "is not valid TOML"),
        (broken("slo_ms = 40.5", "slo_ms = 3600001"), r"tenant\[0\].slo_ms: Expected milliseconds .*got 3600001"),
        (broken("rate = 30", "rate = 1e13"), r"tenant\[0\].rate: .*<= 1"),
        (broken('name = "mail"', 'name = ""'), r"tenant\[0\].name: .*length >= 1"),
        (broken('kind = "gpu"', 'kind = "tpu"'), r"device\[1\].kind: .*'tpu', expected one of cpu, gpu"),
        (broken('after = ["detect"]', "sleeps = 1"), r"stage\[1\]: .*`sleeps`, expected one of name, model"),
        ('format = "cotenant-tenants/2"\n' + TENANTS, "format is 'cotenant-tenants/2', expected 'cotenant-tenants/1'"),
        (TENANTS + "[[plan]]\n", "holds a plan"),
    ],
)
def test_what_is_wrong_with_a_file_of_tenants_is_named(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=rf"^here\.toml: .*{message}"):
        parse_request(text, "here.toml")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.toml: cannot be read \(No such file"):
        read_request(tmp_path / "none.toml")
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"name = '\xff'")
    with pytest.raises(PlanError, match=r"latin\.toml: is not valid TOML"):
        read_plan(latin)


GOOD = PlanFile(
    Request((Load("mail", "minilm", 30, 40 * MS),), (DeviceType("cpu", ((2,), (1, 1)), GIB),)),
    Plan((DevicePlan("cpu", (PartitionPlan(1, 12_345_678, (Slot("mail", 2, 33.0),)),)),), "elastic"),
    0.1,
    "abc",
)


def test_a_plan_file_is_readable(tmp_path: Path) -> None:
    text = plan_text(GOOD)
    assert "duty_ms = 12.345678" in text
    assert '    { tenant = "mail", batch = 2, rate = 33 },' in text
    assert "memory_gib = 1\n" in text
    path = tmp_path / "plan.toml"
    path.write_text(text, encoding="utf-8")
    assert read_plan(path) == GOOD


def test_a_plan_file_says_which_slots_are_a_group() -> None:
    slots = Slot("mail", 2, 33.0, 1, 1), Slot("news", 1, 5.0, 1, 2), Slot("chat", 1, 5.0)
    file = replace(GOOD, plan=Plan((DevicePlan("cpu", (PartitionPlan(3, 12 * MS, slots),)),)))
    text = plan_text(file)
    assert '    { tenant = "mail", batch = 2, group = 1, size = 1, rate = 33 },' in text
    assert '    { tenant = "chat", batch = 1, rate = 5 },' in text
    assert parse_plan(text, "plan.toml") == file
    with pytest.raises(
        PlanError, match=r"plan\[0\].partition\[0\]: .*size 3: sizes is \[3, 2\], expected .* of 3 in all"
    ):
        parse_plan(text.replace("size = 1,", "size = 3,"), "plan.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"cotenant-plan/1"', '"cotenant-plan/9"', "format is 'cotenant-plan/9', expected 'cotenant-plan/1'"),
        ("duty_ms = 12.345678", "duty_ms = 0", r"plan\[0\].partition\[0\].duty_ms: Expected milliseconds .*got 0"),
        ("duty_ms = 12.345678", "duty_ms = 1e-8", "duty_ms: Expected milliseconds from a nanosecond .*got 1e-08"),
        ("batch = 2", "batch = 0", r"plan\[0\].partition\[0\].slots\[0\]: .*batch is 0, expected at least 1"),
        ("size = 1", "", r"plan\[0\].partition\[0\]: .*`size`"),
        ("headroom = 0.1", "headroom = -0.1", "headroom: .*>= 0"),
        ("[[plan]]", "[[plans]]", "unknown field `plans`"),
    ],
)
def test_what_is_wrong_with_a_plan_file_is_named(old: str, new: str, message: str) -> None:
    text = plan_text(GOOD)
    assert old in text
    with pytest.raises(PlanError, match=rf"^plan\.toml: .*{message}"):
        parse_plan(text.replace(old, new), "plan.toml")


NAMES = st.text(min_size=1, max_size=8)
RATES = st.floats(1e-6, 1e12)
NS = st.integers(1, 3_600_000 * MS)


@st.composite
def device_types(draw: st.DrawFn) -> list[DeviceType]:
    made = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
        whole = draw(st.integers(1, 200))
        cut = draw(st.integers(0, whole - 1))
        splits = ((whole,), (whole - cut, cut)) if cut else ((whole,),)
        memory = draw(st.one_of(st.just(UNLIMITED_BYTES), st.integers(1, UNLIMITED_BYTES)))
        price, taken = draw(st.floats(0, 1e12)), draw(st.integers(0, 1 << 50))
        made.append(DeviceType(name, splits, memory, price, taken, draw(st.sampled_from(["cpu", "gpu"]))))
    return draw(st.lists(st.sampled_from(made), min_size=1, max_size=6))


def grouped(alone: Sequence[Slot], group: Sequence[Slot], size: int, number: int) -> tuple[Slot, ...]:
    """Some slots alone, and then a group, the members of it with that size of the partition, and one more each."""
    return (*alone, *[structs.replace(slot, group=number, size=size + at) for at, slot in enumerate(group)])


@st.composite
def plan_files(draw: st.DrawFn) -> PlanFile:
    tenants = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    loads = tuple(Load(name, draw(NAMES), draw(RATES), draw(NS)) for name in tenants)
    devices = tuple(draw(device_types()))
    applications = []
    for name in draw(st.lists(NAMES, max_size=2, unique=True)):
        stages: list[Stage] = []
        for stage in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
            after = draw(st.lists(st.sampled_from([each.name for each in stages]), unique=True)) if stages else []
            stages.append(Stage(stage, draw(NAMES), tuple(after)))
        applications.append(Application(name, draw(NS.filter(lambda ns: ns >= 3)), draw(RATES), tuple(stages)))
    slots = st.builds(Slot, NAMES, st.integers(1, 2**40), RATES)
    alone = st.lists(slots, min_size=1, max_size=3).map(tuple)
    group = st.lists(slots, min_size=2, max_size=3, unique_by=lambda slot: slot.tenant)
    rounds = st.one_of(alone, st.builds(grouped, alone, group, st.integers(1, 4), st.integers(1, 9)))
    partitions = st.builds(PartitionPlan, st.integers(15, 10**6), NS, rounds)
    placed = st.builds(DevicePlan, NAMES, st.lists(partitions, min_size=1, max_size=3).map(tuple))
    plan = Plan(tuple(draw(st.lists(placed, max_size=3))), draw(st.text(max_size=8)))
    headroom = draw(st.floats(0, 10))
    return PlanFile(Request(loads, devices, tuple(applications)), plan, headroom, draw(st.text(max_size=8)))


@given(plan_files())
def test_a_plan_file_is_read_back_as_it_was_written(file: PlanFile) -> None:
    assert parse_plan(plan_text(file), "a plan") == file


@given(plan_files())
def test_digests_of_plans_are_those_of_their_files(file: PlanFile) -> None:
    read = parse_plan(plan_text(file), "a plan").plan.devices
    assert [each.digest for each in read] == [each.digest for each in file.plan.devices]


FIELDS_OF_PLANS = ("device", "size", "duty", "tenant", "batch", "rate", "share", "group", "order")


@given(plan_files(), st.data())
def test_another_value_of_any_field_is_another_digest(file: PlanFile, data: st.DataObject) -> None:
    """Groups and sizes of slots are fields, too."""
    if not file.plan.devices:
        return
    device = file.plan.devices[0]
    partition = data.draw(st.sampled_from(device.partitions))
    slot = data.draw(st.sampled_from(partition.slots))
    other: object
    match data.draw(st.sampled_from(FIELDS_OF_PLANS)):
        case "device":
            assert structs.replace(device, device=device.device + "x").digest != device.digest
            return
        case "size":
            other = structs.replace(partition, size=partition.size + 1)
        case "duty":
            other = structs.replace(partition, duty_ns=partition.duty_ns + 1)
        case "order":
            alone = structs.replace(slot, group=0, size=0)
            other = structs.replace(partition, slots=(alone, *partition.slots))
        case "group":
            slots = [
                structs.replace(each, group=each.group + 1, size=each.size + (not each.group))
                if each.group == slot.group and (each.group or each is slot)
                else each
                for each in partition.slots
            ]
            other = structs.replace(partition, slots=tuple(slots))
        case field:
            changed = {
                "tenant": {"tenant": "".join(each.tenant for each in partition.slots) + "x"},
                "batch": {"batch": slot.batch + 1},
                "rate": {"rate_per_s": slot.rate_per_s * 1.5},
                "share": {"size": slot.size + 1, "group": slot.group or 11},
            }[field]
            slots = [structs.replace(each, **changed) if each is slot else each for each in partition.slots]
            other = structs.replace(partition, slots=tuple(slots))
    partitions = tuple(other if each is partition else each for each in device.partitions)
    assert structs.replace(device, partitions=partitions).digest != device.digest


@given(plan_files())
def test_a_file_of_tenants_is_read_back_as_it_was_written(file: PlanFile) -> None:
    assert parse_request(request_text(file.request), "a request") == file.request


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 2), (4, 5), (12, 77), (16, 36), (64, 1828)])
def test_cores_are_split_in_every_way_while_they_are_few(cores: int, count: int) -> None:
    splits = splits_of_cores(cores)
    assert len(set(splits)) == len(splits) == count
    assert splits[0] == (cores,)
    assert all(sum(split) == cores for split in splits)


@pytest.mark.parametrize("name", registry.built_in(registry.PLANNERS))
def test_planners_have_the_names_they_are_asked_for(name: str) -> None:
    planner = make_planner(name, 0.25)
    assert planner.name == name
    loads = (Load("small", "small", 40, 60 * MS),)
    plan = planner.plan(loads, (DeviceType("gpu", ((100,), (50, 50)), 8 * GIB),), costs())
    assert isinstance(plan, Plan)
    served = sum(slot.rate_per_s for device in plan.devices for part in device.partitions for slot in part.slots)
    assert served >= 50 * (1 - 1e-9), "the headroom is not part of the plan"


def test_an_unknown_planner_is_named() -> None:
    with pytest.raises(PlanError, match="planner is 'best', expected one of ours, elastic_int"):
        make_planner("best")
    with pytest.raises(InvalidValueError, match="headroom"):
        make_planner("elastic", -1)
