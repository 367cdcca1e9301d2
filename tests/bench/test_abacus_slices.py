"""Slices of a device: bounds of what no network says, divisions, and the planner's choice, on networks made here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from abacus_networks import folder, group, units
from bench._registry import BenchError
from bench._weights import MIG2G, MIG4G, PAIRS, TRIPLES
from bench.papers.abacus import predictor as fits
from bench.papers.abacus import slices as experiment
from bench.papers.abacus._a100 import FOUR
from bench.papers.abacus._comparison import contenders
from bench.papers.abacus._divisions import Divided, Mixed, SliceCosts, World, as_planned, part_of, planned
from bench.papers.abacus._slices import SIZES, Slice
from cotenant.core.predictor import Group, Member
from cotenant.predict.table import TablePredictor
from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.types import DeviceType, Load
from cotenant.work import Work

UNITS = {"resnet101": 35, "resnet152": 52, "vgg19": 22, "bert": 12}
TARGETS = dict.fromkeys(SIZES, 300.0)


class Told(TablePredictor):
    """Believes what the world says of groups."""

    def __init__(self, world: Slice) -> None:
        super().__init__({each.name: each.table for each in fits.facts_of(world, FOUR, world.size)})  # type: ignore[arg-type]
        self.world = world

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        return [round(self.world.latency_ns(each)) for each in groups]


def data_of(path: Path, whole: float = 0.5, half: float = 1.0, four: float = 0.6) -> Path:
    """A unit of every member of a group takes so many ms on the whole device, on 2g.10gb and, of four, on 4g.20gb."""
    folder(path)
    for name, size, unit_ms in ((PAIRS, 2, whole), (TRIPLES, 3, whole), (MIG2G, 2, half), (MIG4G, 4, four)):
        units(path / "abacus" / name, size, unit_ms)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return data_of(tmp_path)


def whole(*models: str) -> Group:
    return tuple(Member(Work(name, 0, 4, 0, UNITS[name]), 1) for name in models)


def world_of(data: Path) -> World:
    slices = {size: Slice(data, size) for size in SIZES}
    return World(0.5, 0.5, slices, {size: Told(each) for size, each in slices.items()})


def test_what_no_network_says_lies_between_bounds(data: Path) -> None:
    alone, half, four = (Slice(data, size, 0.25) for size in SIZES)
    assert [bound.tolist() for bound in alone.bounds_ms([whole("vgg19")])] == [[22.0], [44.0]]
    assert alone.latency_ns(whole("vgg19")) == 27.5e6
    assert half.latencies_ms([whole("vgg19"), whole("vgg19", "bert")]).tolist() == [22.0, 34.0]
    low, high = four.bounds_ms([whole("resnet101"), whole("resnet101", "vgg19"), whole(*FOUR)])
    # As on the whole device; beside one operator of each other model, or side by side on two halves.
    assert low.tolist() == pytest.approx([17.5, 28.5, 0.6 * 121])
    assert high.tolist() == pytest.approx([0.6 * 38, 35.0, 0.6 * 121])
    assert four.latency_ns(whole("resnet101")) == pytest.approx(1e6 * (17.5 + 0.25 * (22.8 - 17.5)))
    assert [world.most(FOUR) for world in (alone, half, four)] == [1, 2, 4]
    assert four.most(FOUR[:2]) == 2


def test_where_networks_contradict_each_other_the_larger_slice_gives_way(tmp_path: Path) -> None:
    """Here four would be done at once, and the whole device is slower than a slice of it."""
    four = Slice(data_of(tmp_path, whole=2.0, half=1.0, four=0.001), 4)
    low, high = four.bounds_ms([whole("resnet101"), whole("resnet101", "vgg19"), whole(*FOUR)])
    assert low.tolist() == high.tolist() == [35.0, 35.0, 64.0]  # at best 52 + 12 beside 35 + 22


def test_a_part_is_never_slower_and_a_larger_slice_neither(data: Path) -> None:
    random = Random(1)
    slices = {size: Slice(data, size, at) for size, at in zip(SIZES, (0.3, 0.5, 0.8), strict=True)}
    for _ in range(40):
        members = []
        for name in FOUR:
            start = random.randrange(UNITS[name])
            members.append(
                Member(Work(name, 0, random.choice((4, 32)), start, random.randint(start + 1, UNITS[name])), 1)
            )
        for size, world in slices.items():
            for count in range(1, size + 1):
                for some in combinations(members, count):
                    low, high = world.bounds_ms([some])
                    assert low[0] <= high[0]
                    assert world.latency_ns(some) == world.latency_ns(some[::-1])
                    smaller = slices.get(size // 2)
                    if smaller is not None and count <= smaller.size:
                        assert high[0] <= smaller.latency_ns(some) / 1e6 + 1e-9
                    for part in combinations(some, count - 1) if count > 1 else ():
                        assert world.bounds_ms([part])[0][0] <= low[0] + 1e-9


def test_what_a_slice_cannot_be_asked(data: Path) -> None:
    with pytest.raises(BenchError, match="a slice of 3 sevenths: expected one of 1, 2, 4"):
        Slice(data, 3)
    with pytest.raises(BenchError, match=r"1\.5: expected a number from 0"):
        Slice(data, 1, 1.5)
    with pytest.raises(BenchError, match="a group of 2 on a slice of 1 sevenths: expected 1 to 1"):
        Slice(data, 1).latency_ns(group("bert", "vgg19"))
    with pytest.raises(BenchError, match="was not fitted for resnet50"):
        Slice(data, 2).latencies_ms([group("resnet50", "vgg19")])


def test_slices_share_the_queries(data: Path) -> None:
    world = world_of(data)
    parts = [part_of(world, 2, {name: weight}, TARGETS) for name, weight in (("vgg19", 0.75), ("bert", 0.25))]
    first, second = Divided(tuple(parts)).run(contenders()["edf"], 40.0, 200, 1)
    assert (first.offered, second.offered) == (150, 50)
    assert first.offered / first.seconds == pytest.approx(30, rel=0.3)
    assert second.offered / second.seconds == pytest.approx(10, rel=0.4)
    mixed, share = part_of(world, 2, {"vgg19": 0.3, "bert": 0.1}, TARGETS)
    assert share == pytest.approx(0.4)
    names = [query.tenant for query in mixed.queries(10.0, 2000, 1)]
    assert names.count("vgg19") / 2000 == pytest.approx(0.75, abs=0.03)


def test_two_slices_serve_what_each_does(data: Path) -> None:
    """Both have the same model: the device serves twice what one serves, and is full at twice its rate."""
    world = world_of(data)
    setting = Mixed(world.slices[2], world.believed[2], ("vgg19",), 130.0, weights=(1.0,))  # type: ignore[arg-type]
    one, two = Divided(((setting, 1.0),)), Divided(((setting, 0.5), (setting, 0.5)))
    edf = contenders()["edf"]
    rates = [each.max_rate(edf, 200, (1,), 1.1) for each in (one, two)]
    assert rates[1] / rates[0] == pytest.approx(2.0, rel=0.25)
    assert two.capacity() == pytest.approx(2 * one.capacity()) == pytest.approx(2 * 1000 / 22)
    uneven = Mixed(world.slices[2], world.believed[2], ("vgg19", "bert"), 130.0, weights=(0.7, 0.3))  # type: ignore[arg-type]
    assert math.isinf(Divided(((uneven, 1.0),)).capacity())


def test_plans_of_every_division_hold_and_use_groups_where_they_gain(data: Path) -> None:
    world = world_of(data)
    for size in SIZES:
        rate, plan = planned(world, size, (0.25,) * 4, TARGETS[size], 4.0)
        assert plan is not None
        loads = [Load(name, name, rate / 4 * 15, 300_000_000) for name in FOUR]
        kinds = [DeviceType(f"a100-{size}g", ((size,),), 10**12)]
        assert check_plan(plan, loads, kinds * (4 // size), SliceCosts(world)) == ()
        made = as_planned(world, size, plan, TARGETS)
        assert sum(share for _, share in made.parts) == pytest.approx(1.0)
        assert {name for setting, _ in made.parts for name in setting.models} == set(FOUR)
        tried = as_planned(world, size, plan, TARGETS, is_believed=True)
        asked = whole(*FOUR[: min(2, size)])
        assert tried.parts[0][0].world.latency_ns(asked) == made.parts[0][0].world.latency_ns(asked)
        assert bool(experiment._groups(plan)) is (size == 4)  # on a half nothing is gained by overlap here


def test_a_division_that_cannot_serve_has_no_plan(data: Path) -> None:
    assert planned(world_of(data), 1, (0.25,) * 4, 5.0, 1.5) == (0.0, None)


def row(division: str, contender: str, rate: float, **more: Any) -> dict[str, Any]:
    about = {"alone_at": 0.5, "few_at": 0.5, "mix": "even"}
    return {**about, "division": division, "contender": contender, "max_rate": rate, **more}


def test_the_choice_is_held_against_every_division() -> None:
    rows = [
        *(row("each alone", name, rate) for name, rate in (("overlap", 8.0), ("edf", 10.0))),
        row("pairs a+b | c+d", "overlap", 37.0),
        row("pairs a+c | b+d", "overlap", 41.0),
        *(row("all on one", name, rate) for name, rate in (("overlap", 60.0), ("edf", 70.0))),
        row("planned each alone", "overlap", 20.0, planned_rate=99.0, believed_rate=18.0),
        row("planned pairs", "overlap", 58.0, planned_rate=70.0, believed_rate=61.0),
        row("planned all on one", "overlap", 60.0, planned_rate=80.0, believed_rate=59.0),
    ]
    ((key, verdict),) = experiment.verdicts(rows).items()
    assert key == (0.5, 0.5, "even")
    assert (verdict.by_plan, verdict.picked) == (1, 2)
    assert verdict.simulated == {1: 20.0, 2: 58.0, 4: 60.0}
    assert [verdict.is_right(size) for size in SIZES] == [False, True, True]  # 58 and 60 are not told apart
    assert (verdict.ours, verdict.isolated) == (58.0, 10.0)
    summary = experiment._summary(rows)
    assert summary["planner_picks_best_pct"] == 100.0
    assert summary["plan_rates_pick_best_pct"] == 0.0
    assert summary["ours_over_best_isolated"] == 5.8
    assert summary["max_rate_pairs"] == 39.0
    unplanned = [each for each in rows if "planned_rate" not in each]
    (verdict,) = experiment.verdicts(unplanned).values()
    assert verdict.ours == 0.0


def test_rows_of_a_world_have_what_the_tables_show(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "QUICK_COUNT", 24)
    monkeypatch.setattr(experiment, "QUICK_STEP", 40.0)
    asked = world_of(data), "more vgg19", TARGETS, True
    rows = [*experiment.rows_as_in_the_paper(*asked), *experiment.rows_by_plan(*asked)]
    judged = experiment.verdicts(rows)[0.5, 0.5, "more vgg19"]
    assert all(judged.planned[size] > 0 < judged.believed[size] for size in SIZES)
    assert judged.ours > 0 < judged.isolated
    assert {each["contender"] for each in rows if each["division"] == "all on one"} == {"overlap"}


def test_the_released_networks_give_the_latencies_that_are_known(papers_data: Path) -> None:
    try:
        half, four = Slice(papers_data, 2), Slice(papers_data, 4)
        half.latencies_ms([whole("resnet101")])
        four.latencies_ms([whole(*FOUR)])
    except BenchError:
        pytest.skip("needs the released weights")
    pairs = [
        tuple(m._replace(work=Work(m.work.tenant, 0, rows, 0, m.work.end)) for m in whole(*FOUR[:2]))
        for rows in (4, 32)
    ]
    assert half.latencies_ms(pairs).tolist() == pytest.approx([25.5, 114.4], abs=0.06)
    low, high = four.bounds_ms(pairs)
    assert low.tolist() == pytest.approx([22.5, 47.7], abs=0.1)
    assert high.tolist() == pytest.approx([22.5, 60.4], abs=0.1)
