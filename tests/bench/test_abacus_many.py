"""Three and four models on one device: bounds, runs and figures, on networks that are made here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from abacus_networks import folder, group, units
from bench.papers.abacus import many, trace
from bench.papers.abacus import predictor as fits
from bench.papers.abacus._a100 import A100, FOUR
from bench.papers.abacus._bound import kinds_of, merging_gain, prices_ms
from bench.papers.abacus._comparison import (
    BASELINES,
    TERMS,
    contenders,
    gains,
    max_rate_gains,
    mean_of_each,
    reductions,
)
from bench.papers.abacus._experiment import Setting
from cotenant.core.predictor import Group
from cotenant.predict.table import TablePredictor

THREE = FOUR[:3]
UNITS = {"resnet101": 35, "resnet152": 52, "vgg19": 22, "bert": 12}


class Told(TablePredictor):
    """Believes what the world says of groups."""

    def __init__(self, world: A100, models: Sequence[str], most: int) -> None:
        super().__init__({each.name: each.table for each in fits.facts_of(world, models, most)})
        self.world = world

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        return [round(self.world.latency_ns(each)) for each in groups]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return folder(tmp_path)


def world_of(data: Path, pair: float, triple: float, ordered: bool = False, **more: float) -> A100:
    """A unit takes 1 ms alone, `pair` and `triple` ms in groups of two and three."""
    files = {
        size: units(data / f"{size}.npz", size, unit_ms)
        for size, unit_ms in ((1, 1.0), (2, pair), (3, triple), *((int(key[1:]), ms) for key, ms in more.items()))
    }
    return A100(data, files, ordered=ordered)


def test_bounds_know_groups_of_every_size_that_there_is(data: Path) -> None:
    """Alone and in pairs a unit takes 1 ms, in groups of three 0.5: the device is full at twice the rate."""
    world = world_of(data, 1.0, 0.5)
    whole = sum(UNITS[name] for name in THREE) / 3
    prices, rate = prices_ms(world, THREE)
    assert rate == pytest.approx(1000 / whole * 2)
    assert prices_ms(world, THREE, overlap=False)[1] == pytest.approx(1000 / whole)
    for chosen in product(*kinds_of(world, THREE)):  # no group of three takes less than its prices
        members = [group(name, end=UNITS[name], items=batch)[0] for name, _, batch in chosen]
        assert world.latencies_ms([tuple(members)])[0] >= sum(prices[kind] for kind in chosen) - 1e-6
    assert merging_gain(world, THREE) == pytest.approx(2.0)
    assert prices_ms(world, THREE[:2])[1] == prices_ms(world, THREE[:2], overlap=False)[1]


def test_bounds_use_the_best_of_all_sizes(data: Path) -> None:
    """Where three at once gain nothing, pairs do: any of the three models with any other."""
    world = world_of(data, 0.8, 1.0)
    assert prices_ms(world, THREE)[1] / prices_ms(world, THREE, overlap=False)[1] == pytest.approx(1.25)
    world = world_of(data, 1.0, 1.0, k4=0.25)
    assert prices_ms(world, FOUR)[1] / prices_ms(world, FOUR, overlap=False)[1] == pytest.approx(4.0)


def test_no_group_is_quicker_than_a_part_of_it_where_that_is_asked_for(data: Path) -> None:
    plain, ordered = (world_of(data, 0.75, 0.1, each) for each in (False, True))
    three = tuple(group(name, end=UNITS[name])[0] for name in THREE)
    pairs = [(35 + 52) * 0.75, (35 + 22) * 0.75, (52 + 22) * 0.75]
    assert plain.latencies_ms([three]).tolist() == pytest.approx([10.9])
    assert ordered.latencies_ms([three, three[:2]]).tolist() == pytest.approx([max(pairs), pairs[0]])
    assert ordered.latencies_ms([three[1:2], (three[1], group("bert")[0])]).tolist() == pytest.approx([52, 52])


@pytest.mark.parametrize(("unit_ms", "wins"), [(0.4, True), (1.0, False)])
def test_a_run_overlaps_three_models_where_that_gains(data: Path, unit_ms: float, wins: bool) -> None:
    world = world_of(data, 1.0, unit_ms)
    assert world.most(THREE) == 3
    setting = Setting(world, Told(world, THREE, 3), THREE, 300.0, noise=0.0)
    known = contenders()
    rate = 1.4 * prices_ms(world, THREE, overlap=False)[1]
    ours, theirs = (setting.run(known[name], rate, 150, 1).attainment for name in ("overlap, no merging", "edf"))
    assert theirs < 0.85
    assert (ours > theirs + 0.1) is wins


def test_samples_have_the_sizes_that_were_asked_for(data: Path) -> None:
    world = world_of(data, 1.0, 0.5)
    tenants = fits.tenants_of(world, FOUR)
    assert [tenant.name for tenant in tenants] == list(FOUR)
    samples, truth = fits.draw(world, tenants, 200, 1, 3, 3)
    assert {len(sample.members) for sample in samples} == {3}
    assert len(samples) == len(truth) == 200
    mixed, _ = fits.draw(world, tenants, 200, 1, 3)
    assert {len(sample.members) for sample in mixed} == {1, 2, 3}
    assert len(mixed) == 200
    facts = fits.facts_of(world, FOUR, 3)
    assert sorted({row.cores for each in facts for row in each.table.rows}) == [1, 2, 3]


def rows_of(models: str, rates: dict[str, float], violations: dict[str, list[float]]) -> list[dict[str, object]]:
    return [
        {
            "models": models,
            "contender": name,
            "violations_50": violations.get(name, [0.1, 0.2]),
            "goodput_100": [10.0, 20.0],
            "capacity_per_s": 200.0,
            "capacity_gain_bound": 2.0,
            "capacity_gain_bound_merging": 1.5,
        }
        | ({} if "late" in name else {"max_rate": rates.get(name, 50.0)})
        for name in contenders()
    ]


def test_figures_are_those_of_the_rows() -> None:
    few = {"overlap": [0.0, 0.1], "fcfs, drops late": [0.4, 0.4]}
    rows = rows_of("a+b+c", {"overlap, no merging": 100, "overlap": 150, "edf": 80, "sjf, merging": 120}, few)
    rows += rows_of("a+b+d", {"overlap, no merging": 64, "overlap": 49}, few)
    assert [max_rate_gains(rows, ours, suffix) for _, ours, suffix in TERMS] == [
        pytest.approx(each) for each in ([100 / 80, 64 / 50], [150 / 120, 49 / 50], [150 / 80, 49 / 50])
    ]
    by_policy = reductions(rows, "overlap", ", drops late", "violations_50")
    assert [mean for mean, _ in by_policy] == pytest.approx([87.5, 75, 75])  # 1 - 0 / 0.4, 1 - 0.1 / 0.4, ...
    assert by_policy[0][1] == pytest.approx(12.71 * math.sqrt(2) * 12.5 / math.sqrt(2))
    assert mean_of_each([(1, 2), (3, 4), (8, 3)]) == (4, 3)
    assert gains(rows, "overlap", "", "goodput_100") == [(0, 0)] * len(BASELINES)
    found = many._summary(rows, 3) | many._worst(rows)
    assert found["violation_reduction_pct"] == pytest.approx((87.5 + 150) / 3)
    assert found["max_rate_gain_triples_no_merging"] == pytest.approx(math.sqrt(1.25 * 1.28))
    assert found["of_capacity_bound"] == pytest.approx(math.sqrt(0.5 * 0.32))
    assert (found["worst_no_merging"], found["worst_all_merging"]) == pytest.approx((1.25, 0.98))
    four = many._summary(rows, 4)
    assert not set(four) & set(found)
    assert set(many.GOALS) <= {*found, *four}


def test_a_device_of_the_trace_has_all_four_models_in_groups_of_three_at_most(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(data, 0.8, 0.4)
    serial = prices_ms(world, FOUR, overlap=False)[1]
    told = Told(world, FOUR, 3)
    shared = {"world": world, "predictor": told, "shape": (0.5, 1.5), "seconds": 2.0, "serial": {FOUR: serial}}
    monkeypatch.setattr(trace, "_shared", shared)
    monkeypatch.setattr(trace, "TARGET_MS", 400.0)
    rows = trace._device((3, FOUR, 1.5))
    assert {row["models"] for row in rows} == {"+".join(FOUR)}
    assert len({row["offered"] for row in rows}) == 1  # everybody gets the same queries
    assert rows[0]["offered"] == pytest.approx(1.5 * serial * 4, rel=0.25)
    summary = trace._gains(Console(quiet=True), rows, (1.5,), "four_", "")
    answered = {row["contender"]: row["answered"] for row in rows}
    assert summary["answered_gain_four_1_5_pct"] == 100 * (answered["overlap"] / answered["clockwork"] - 1)
    assert summary["answered_gain_four_1_5_pct"] > 10
    assert summary["answered_gain_four_merging_1_5_pct"] == pytest.approx(
        100 * (answered["overlap, merging"] / answered["clockwork, merging"] - 1)
    )
