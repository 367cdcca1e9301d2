"""The fast loop of VELTAIR's benchmarks against the product: engine, policies and many-core world, query by query."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from bench._data import DATA
from bench._registry import BenchError
from bench.papers.veltair import _bound, _capacity, _flat, _flat_slack, _jit, _loop, _play
from bench.papers.veltair._baselines import FixedBlocks, LayerWise, ModelWise, Prema
from bench.papers.veltair._models import Model, efficiency_of, of_class, rates_of, read_models, ssd_layers
from bench.papers.veltair._play import LANES, Stage, arrivals
from bench.papers.veltair._product import Beliefs, play_product
from bench.papers.veltair._worlds import FIGURE_1B, Drawn, drawn_gbps, interference, kept_worlds, tables_of
from cotenant.core.snapshot import DropRule
from cotenant.profiles.version_table import UnitCosts, UnitVersions
from cotenant.techniques.layer_blocks.policy.published import LayerBlock, Variant
from cotenant.techniques.layer_blocks.policy.slack_blocks import SlackBlocks

MODELS, MADE = read_models(DATA)
DRAWN = Drawn(3, 80.0, 0.8, 0.2, 220_000, 0.05, 4.0, 1.2, 2)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything runs as it stands: nothing is compiled."""
    plain = tuple(_jit.loaded(each.__name__, compiled=False) for each in (_loop, _flat, _flat_slack))
    monkeypatch.setattr(_play, "compiled", lambda: plain)
    monkeypatch.setattr(_capacity, "_compiled_bound", lambda: _bound)


POLICIES = {
    "model_wise": ModelWise(LANES, target=0.7),
    "layer_wise": LayerWise(LANES, target=0.5),
    "fixed_blocks": FixedBlocks(LANES, target=0.6, units=11),
    "AS": LayerBlock(LANES, target=0.6, variant=Variant.AS),
    "AC": LayerBlock(LANES, target=0.6, variant=Variant.AC),
    "FULL": LayerBlock(LANES, target=0.6),
    "prema": Prema(LANES),
    "slack_blocks": SlackBlocks(LANES),
}


def begun(model: Model) -> Model:
    """The first layers of a model, in a quarter of its QoS."""
    return replace(model, layers=model.layers[:13], profiles=model.profiles[:13], qos_ns=model.qos_ns // 4)


CASES = [(name, load, rate, drop) for name in POLICIES for load, rate, drop in (
    ("medium", 1600.0, DropRule.HOPELESS), ("light", 1500.0, DropRule.EXPIRED), ("medium", 1000.0, DropRule.NONE),
)]  # fmt: skip


@pytest.mark.parametrize(("name", "load", "rate", "drop"), CASES)
def test_the_loop_does_what_the_product_does(name: str, load: str, rate: float, drop: DropRule) -> None:
    models = [begun(model) for model in of_class(MODELS, load)]
    stage = Stage(DRAWN, [tables_of(DRAWN, model, MADE) for model in models])
    policy = replace(POLICIES[name], drop=drop)
    given = arrivals(5, 24, rates_of(models)).at(rate)
    played = stage.play(stage.cast(policy), drop, given)
    beliefs = Beliefs(stage.truths, DRAWN.machine.bandwidth_bytes_per_s)
    end, ends, outcomes = play_product(stage.truths, beliefs, policy, given, DRAWN.machine)
    assert played.outcomes.tolist() == outcomes
    assert played.ends.tolist() == ends
    assert played.end_ns == end
    if name in ("AS", "FULL", "fixed_blocks") and load == "medium" and rate > 1500:
        assert played.stats[_loop.CONFLICTS] > 0
        assert played.stats[_loop.GROWTHS] > 0


def test_it_is_broken_off_where_too_many_have_missed() -> None:
    stage = Stage(DRAWN, [tables_of(DRAWN, model, MADE) for model in of_class(MODELS, "medium")])
    given = arrivals(5, 40, rates_of(of_class(MODELS, "medium"))).at(4000.0)
    ready = stage.cast(POLICIES["model_wise"])
    whole = stage.play(ready, DropRule.EXPIRED, given)
    assert (whole.outcomes != _loop.ANSWERED).sum() > 4
    assert stage.play(ready, DropRule.EXPIRED, given, np.array([2, 2])).end_ns == -1


def test_layers_are_those_of_the_paper() -> None:
    by_name = {model.name: model for model in MODELS}
    assert sum(layer.macs for layer in ssd_layers()) == pytest.approx(31.4e9, rel=0.01)  # Liu et al., VGG16, 300 x 300
    assert sum(layer.weights for layer in by_name["ResNet-50"].layers) == pytest.approx(23.5e6 * 4, rel=0.01)
    assert len(by_name["Bert-Large"].layers) == 144
    assert rates_of(of_class(MODELS, "mix"))[0] == pytest.approx(1 / 15 / (3 / 10 + 2 / 15 + 1 / 100 + 1 / 130))
    heavy = [rates_of(MODELS)[MODELS.index(by_name[name])] for name in ("SSD", "Bert-Large")]
    assert sum(heavy) == pytest.approx(0.039, abs=0.001)


def test_made_times_are_close_to_those_that_were_measured() -> None:
    model = MODELS[0]
    for cores in (8, 16, 32, 56):
        measured = sum(profile[cores] for profile in model.profiles)
        assert sum(MADE.profile(layer, 1.0, 1.0)[cores] for layer in model.layers) == pytest.approx(measured, rel=0.1)


def test_a_line_over_operations_is_found_again() -> None:
    layers = [layer for layer in MODELS[0].layers if not layer.is_depthwise]
    profiles = [{8: 3.0 + layer.macs / (1e5 if layer.is_pointwise else 2e5)} for layer in layers]
    made = efficiency_of(layers, profiles)
    assert made.overhead_us[0] == pytest.approx(3.0)
    assert made.pointwise[0] == pytest.approx(1e5)
    assert made.larger[0] == pytest.approx(2e5)


def test_other_measurements_are_taken_and_core_counts_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    lines = ["model,layer,cores,latency_us,macs"]
    points = [(layer, cores) for layer in range(8) for cores in (4, 64 - layer)]
    lines += [f"tinyyolo,{layer},{cores},{1000 * (layer + 1) / cores},1" for layer, cores in points]
    path.write_text("\n".join(lines), encoding="utf-8")
    model = next(model for model in read_models(DATA, path)[0] if model.name == "Tiny-YOLOV2")
    assert model.profiles[1] == {4: 500.0, 63: 2000 / 63}
    table = tables_of(replace(DRAWN, cold=0), model, MADE).real
    assert table.units[0].implementations[0].cores == (4, 64)
    for text, message in (
        ("tinyyolo,0,8,10,1", "has 1 layers of tinyyolo, expected 0 to 7"),
        ("mine,0,8,10,1", "has a model 'mine', expected one of"),
        ("tinyyolo,0,8,fast,1", "expected numbers"),
        ("tinyyolo,0,0,10,1", "expected at least 1 core"),
    ):
        path.write_text(lines[0] + "\n" + text, encoding="utf-8")
        with pytest.raises(BenchError, match=message):
            read_models(DATA, path)


def test_four_resnet_draw_far_more_with_the_worse_axis_and_slow_each_other_down_as_in_figure_1b() -> None:
    model = MODELS[0]
    worse, better = (0.8 * drawn_gbps(model, 16, worse) for worse in (True, False))
    assert worse == pytest.approx(150, rel=0.05)
    assert better == pytest.approx(65, rel=0.05)
    fast = tables_of(DRAWN, model, MADE).real
    assert FIGURE_1B[0] <= interference(fast, DRAWN.machine) <= FIGURE_1B[1]
    robust = [replace_units(unit) for unit in fast.units]
    assert interference(structs.replace(fast, units=tuple(robust)), DRAWN.machine) < 1.1
    (kept,) = kept_worlds(DATA, 0, 1)
    assert FIGURE_1B[0] <= interference(tables_of(kept, model, MADE).real, kept.machine) <= FIGURE_1B[1]


def replace_units(unit: UnitVersions) -> UnitVersions:
    """The implementation for the highest pressure at every level."""
    return UnitVersions(unit.implementations, (unit.by_level[-1],) * len(unit.by_level))


def test_alone_a_model_takes_what_was_measured() -> None:
    truth = tables_of(replace(DRAWN, cold=0, belief=0.0), MODELS[0], MADE)
    for table in (truth.real, truth.believed):
        spans = table.spans()
        for cores in range(8, 65, 8):
            best = [min(us for c, us in profile.items() if c <= cores) for profile in MODELS[0].profiles]
            assert spans.block_ns(0, 53, 0, 0, cores) == pytest.approx(1000 * sum(best), rel=0.02)


def test_the_bound_is_the_best_order_on_one_server() -> None:
    random = np.random.default_rng(3)
    for _ in range(60):
        n = 6
        times, who = np.sort(random.integers(0, 60, n)), random.integers(0, 2, n)
        work, slo = np.array([9, 20]), np.array([30, 45])
        met = np.zeros(2, np.int64)
        got = _bound.met_in_time(times, who, slo, work, met)
        assert got == met.sum() <= _most_in_time(times, who, slo, work)
        if got < n:  # where all can be met, EDF meets all
            assert _most_in_time(times, who, slo, work) < n


def _most_in_time(times: np.ndarray, who: np.ndarray, slo: np.ndarray, work: np.ndarray) -> int:
    """By trying all sets: preemptive EDF of a set meets all of it where anything does."""
    best = 0
    for chosen in range(1 << len(times)):
        some = [i for i in range(len(times)) if chosen >> i & 1]
        left = {i: int(work[who[i]]) for i in some}
        now, late = 0, False
        while left and not late:
            ready = [i for i in left if times[i] <= now]
            if not ready:
                now = min(int(times[i]) for i in left)
                continue
            first = min(ready, key=lambda i: int(times[i] + slo[who[i]]))
            left[first] -= 1
            now += 1
            if left[first] == 0:
                late = now > times[first] + slo[who[first]]
                del left[first]
        if not late:
            best = max(best, len(some))
    return best


def test_no_query_in_time_takes_less_core_time() -> None:
    random = np.random.default_rng(5)
    for _ in range(40):
        ns = np.sort(random.integers(10, 200, (3, 2)), axis=0)[::-1]  # two units on one to three cores
        costs = UnitCosts(2, 1, 3, tuple(ns.ravel().tolist()), (0,) * 6, (1,) * 6)
        for slo in (60, 150, 400):
            ways = [(a, b) for a in range(3) for b in range(3) if ns[a, 0] + ns[b, 1] <= slo]
            exact = min(((a + 1) * ns[a, 0] + (b + 1) * ns[b, 1] for a, b in ways), default=None)
            found = _play.least_work(costs, slo)
            if exact is not None:
                assert found <= exact
                assert found >= 0.6 * exact
            least = min((a + 1) * ns[a, 0] for a in range(3)) + min((b + 1) * ns[b, 1] for b in range(3))
            assert found >= least - 1


def test_the_highest_rate_is_found_from_any_guess() -> None:
    for guess in (1.0, 90.0, 100.0, 5000.0):
        assert _capacity.most(lambda rate: rate <= 100.0, guess, 0.01) == pytest.approx(100.0, rel=0.01)
    assert _capacity.most(lambda rate: False, 100.0, 0.01) == 0.0
