"""GACER's benchmarks: kernels of our files, what they take by roofline, worlds, files of others, and metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bench import _campaign
from bench._data import DATA
from bench._registry import BenchError
from bench.papers.gacer import granularity, sets
from bench.papers.gacer._gpus import GPUS, V100, Gpu
from bench.papers.gacer._joint_run import JointWorld
from bench.papers.gacer._judge import Effort, judge_set, mistaken, rules_of, world_bound_ns
from bench.papers.gacer._kernel_world import Admission
from bench.papers.gacer._kernels_csv import measured_table, read_kernels
from bench.papers.gacer._models import model_table, table_of
from bench.papers.gacer._sets import JointSet, given_sets, paper_sets, v100_sets
from bench.papers.gacer._worlds import draw
from bench.papers.gacer._zoo_kernels import PAPER_NAMES, ZooKernel, kernels_of, read_table, write_table, zoo_kernels
from cotenant.errors import InvalidValueError
from cotenant.techniques.granularity.predict.evaluator import JointEvaluator
from kernel_sets import random_plan, random_set

WORLDS = [draw(seed) for seed in range(12)]
PLAIN = replace(
    WORLDS[0], mixed=1.0, product=0.5, winograd=1.0, memory=0.8, fill=0.0, enough=0.5, ramp_us=0.0, waves=True, tile=0
)
SMALL = Effort(rounds=10, evaluations=16, measured=2)


# --- kernels of our files -------------------------------------------------------------------------------------------


def test_the_ten_models_are_there_with_the_operations_that_are_known_of_them() -> None:
    giga = {
        name: sum(2 * k.height * k.width * k.depth * k.groups * k.steps for k in zoo_kernels(model)) / 1e9
        for name, model in PAPER_NAMES.items()
    }
    # Multiply-adds that the models' papers print, twice: VGG16 15.5, ResNet 1.8, 3.6, 3.8 to 4.1, 7.6, DenseNet 2.9.
    expected = {"ALEX": 1.4, "V16": 31.0, "R18": 3.6, "R34": 7.3, "R50": 8.2, "R101": 15.6, "D121": 5.7, "M3": 0.44}
    for name, value in expected.items():
        assert giga[name] == pytest.approx(value, rel=0.06), name
    assert giga["LSTM"] == pytest.approx(2 * 64 * (4 * 512 * (256 + 512) + 4 * 512 * 1024) / 1e9, rel=0.01)
    assert all(kernel.writes > 0 for model in PAPER_NAMES.values() for kernel in zoo_kernels(model))
    assert sum(kernel.kind == "recurrent" for kernel in zoo_kernels("lstm_classifier")) == 16


def test_kernels_are_heavy_operators_with_the_light_ones_behind_them(tmp_path: Path) -> None:
    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, (8, 4, 3, 3), np.zeros(288)),
        helper.make_tensor("d", TensorProto.FLOAT, (8, 1, 3, 3), np.zeros(72)),
        helper.make_tensor("f", TensorProto.FLOAT, (10, 8), np.zeros(80)),
        helper.make_tensor("b", TensorProto.FLOAT, (10,), np.zeros(10)),
    ]
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], "before"),
        helper.make_node("Conv", ["r", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["cr"], "after"),
        helper.make_node("Conv", ["cr", "d"], ["e"], "deep", pads=[1, 1, 1, 1], group=8, strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["e"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["v"], "view"),
        helper.make_node("Gemm", ["v", "f", "b"], ["y"], "head", transB=1),
    ]
    taken = helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 4, 6, 6))
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", 10))
    graph = helper.make_graph(nodes, "g", [taken], [made], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    onnx.checker.check_model(model)
    found = kernels_of(model)
    assert [(each.kernel, each.kind) for each in found] == [
        ("Relu_0", "memory"),
        ("Conv_1", "product"),
        ("Conv_3", "depthwise"),
        ("GlobalAveragePool_4", "memory"),
        ("Gemm_6", "product"),
    ]
    conv, deep, head = found[1], found[2], found[4]
    assert (conv.height, conv.width, conv.depth, conv.groups, conv.winograd) == (36, 8, 36, 1, 1)
    assert (conv.reads, conv.writes, conv.weights) == (4 * 36 * 4, 8 * 36 * 4, 288 * 4)
    assert (deep.height, deep.width, deep.depth, deep.winograd) == (9, 8, 9, 0)
    assert (head.height, head.width, head.depth, head.reads) == (1, 10, 8, 8 * 4)
    write_table(tmp_path / "g.csv", found)
    assert list(read_table(tmp_path / "g.csv")) == found


# --- what they take -------------------------------------------------------------------------------------------------


def test_a_product_takes_its_waves_or_its_bytes() -> None:
    card = Gpu("card", 10, 1.0, 100.0)
    kernel = ZooKernel("k", "product", height=128, width=128, depth=200, reads=1, writes=1)
    table = table_of("m", [kernel], 40, card, PLAIN)
    # Half of 1 TFLOPS, and a wave of 20 tiles of 128 x 128 x 200.
    wave_ns = 2 * 128 * 128 * 200 * 20 / 500
    assert table.need[0, 19] == 1.0
    assert table.duration_ns[0, 19] == pytest.approx(wave_ns)
    assert table.duration_ns[0, 39] == pytest.approx(2 * wave_ns)
    assert table.compute[0, 19] == pytest.approx(1.0)
    assert (np.diff(table.duration_ns[0]) >= 0).all()
    heavy = replace(kernel, weights=100_000_000)
    taken = table_of("m", [heavy], 1, card, PLAIN)
    assert taken.duration_ns[0, 0] >= 100_000_000 / (100 * 0.8)
    assert taken.bandwidth[0, 0] <= 1.0


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_no_model_is_faster_than_its_card(gpu: Gpu) -> None:
    for drawn in WORLDS[:6]:
        for name in ("R50", "M3", "LSTM"):
            model = PAPER_NAMES[name]
            table = model_table(model, 8, gpu, drawn)
            for rows in (1, 8):
                operations = sum(2.0 * k.height * k.width * k.depth * k.groups * k.steps for k in zoo_kernels(model))
                moved = sum((k.reads + k.writes) * rows + k.weights for k in zoo_kernels(model))
                took = table.duration_ns[:, rows - 1].sum()
                assert took >= operations * rows / (gpu.tflops * 1000 * drawn.winograd)
                assert took >= moved / gpu.gbps
                for shares in (table.compute, table.bandwidth):
                    assert shares[:, rows - 1].max() <= 1
            assert (table.join_ns > 0).all() == drawn.copies


def test_worlds_are_drawn_over_their_ranges_and_again_the_same() -> None:
    assert draw(3) == draw(3) != draw(4)
    many = [draw(seed) for seed in range(200)]
    assert {each.admission for each in many} == set(Admission)
    assert {(each.admission, each.believed) for each in many} == {(a, b) for a in Admission for b in (0, 1)}
    launches = sorted(each.launch_us for each in many)
    assert 3 <= launches[0] < 4
    assert 30 < launches[-1] <= 40
    assert 8 < launches[100] < 14  # the middle of factors
    for drawn in many:
        assert drawn.device.launch_ns == round(1000 * drawn.launch_us)
        assert drawn.device.admission is drawn.admission
    assert {rules_of(each).admission.value for each in many} == {"whole", "fill"}


# --- files of others ------------------------------------------------------------------------------------------------

HEAD = "model,batch,kernel,class,duration_us,sm_needed,sm_needed_capped80,bound"


def test_measured_kernels_are_scaled_by_rows_and_keep_what_was_measured() -> None:
    known = read_kernels(DATA / "orion" / "kernels.csv")
    table = measured_table(known, "resnet50", 4, V100, WORLDS[1])
    assert table.size == 175
    assert table.duration_ns[:, 3].sum() == pytest.approx(6.50e6, rel=0.01)
    assert table.need[0, 3] == pytest.approx(98 / 80)
    assert table.need[0, 1] == pytest.approx(49 / 80)
    assert (np.diff(table.duration_ns, axis=1) >= -1e-6).all()
    wide = measured_table(known, "resnet50", 8, V100, WORLDS[1])
    assert wide.duration_ns[:, 3] == pytest.approx(table.duration_ns[:, 3])
    assert wide.duration_ns[:, 7].sum() > 1.5 * table.duration_ns[:, 3].sum() * 0.9


def test_counted_operations_are_taken_at_their_word(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEAD},flops,bytes,splits\na,2,k,c,100,40,40,compute,1e8,1e6,0\n", encoding="utf-8")
    table = measured_table(read_kernels(path), "a", 2, Gpu("x", 80, 10.0, 500.0), PLAIN)
    assert table.compute[0, 1] == pytest.approx(1e8 / (100_000 * 10_000 * 0.5))
    assert table.bandwidth[0, 1] == pytest.approx(1e6 / (100_000 * 500 * 0.8))
    assert table.splits == ()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a,0,k,c,1,1,1,compute", "line 2: batch is '0'"),
        ("a,1.5,k,c,1,1,1,compute", "batch is '1.5', expected a whole number"),
        ("a,1,k,c,fast,1,1,compute", "line 2: duration_us is 'fast'"),
        ("a,1,k,c,1,0,1,compute", "sm_needed is '0'"),
        ("a,1,k,c,1,1,1,disk", "bound 'disk': expected a name and one of compute, memory, unknown"),
        (",1,k,c,1,1,1,memory", "model ''"),
        ("", "has no lines"),
    ],
)
def test_what_is_no_kernel_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEAD}\n{line}\n" if line else f"{HEAD}\n", encoding="utf-8")
    with pytest.raises(BenchError, match=problem):
        read_kernels(path)


def test_sets_are_the_papers_or_what_options_name(tmp_path: Path) -> None:
    names = [each.name for each in paper_sets(DATA, GPUS[0])]
    assert names == ["ALEX+V16+R18", "D121+V16+LSTM", "R50+V16+M3", "R101+D121+M3", "R34+LSTM+BST"]
    assert paper_sets(DATA, GPUS[0])[4].models == (("resnet34", 8), ("lstm_classifier", 128), ("bst", 64))
    assert [len(each.tables(WORLDS[0])) for each in v100_sets(DATA)[:1]] == [2]
    (mine,) = given_sets(["R18:4, resnet50:2"], None, GPUS[:1])
    assert mine.models == (("resnet18", 4), ("resnet50", 2))
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEAD}\na,2,k,c,1,1,1,compute\nb,4,k,c,1,1,1,memory\nb,1,k,c,1,1,1,memory\n", encoding="utf-8")
    (whole,) = given_sets((), path, (V100,))
    assert whole.models == (("a", 2), ("b", 4))
    for text in ("a", "a:0", "c:1", "a:1,,b:2", "a:-1", "a:x"):
        with pytest.raises(BenchError, match="is no model and batch, expected NAME:BATCH"):
            given_sets([text], path, (V100,))


def test_the_card_of_a_file_has_to_be_described(tmp_path: Path) -> None:
    path = DATA / "orion" / "kernels.csv"
    with pytest.raises(BenchError, match="--sms is missing or 0"):
        sets.run(True, DATA, kernels=path)
    with pytest.raises(BenchError, match="--gbps is missing or"):
        sets.run(True, DATA, kernels=path, sms=80, tflops=15.7, gbps=float("nan"))
    with pytest.raises(BenchError, match="describe the card of --kernels"):
        sets.run(True, DATA, sms=80)
    with pytest.raises(BenchError, match="--worlds is -1"):
        sets.run(True, DATA, worlds=-1)
    assert sets.card_of(path, 80, 15.7, 900.0) == Gpu("kernels", 80, 15.7, 900.0)


# --- judging --------------------------------------------------------------------------------------------------------

PAIR = JointSet("pair", (("alexnet", 4), ("bst", 8)), GPUS[0])


def test_ours_is_never_worse_than_streams_and_never_below_the_bound() -> None:
    for drawn in WORLDS[:2]:
        row = judge_set(PAIR, drawn, SMALL)
        taken = {key.removesuffix("_ms"): value for key, value in row.items() if key.endswith("_ms")}
        assert taken["ours"] <= taken["streams"]
        assert taken["robust"] <= taken["streams"]
        assert taken["bound"] <= min(taken.values()) * 1.001
        assert row["both_plan"][1] == 0


def test_a_bound_holds_for_plans_that_a_world_plays() -> None:
    for drawn in WORLDS:
        tables = PAIR.tables(drawn)
        world = JointWorld(tables, drawn.device)
        least = min(world.streams([4, 8]).makespan_ns, world.in_turn([4, 8]).makespan_ns)
        assert 0.1 * least < world_bound_ns(tables, drawn.device) <= least * 1.001


def test_a_bound_holds_for_any_plan() -> None:
    for seed in range(30):
        tables, device = random_set(seed), WORLDS[seed % 12].device
        plan = random_plan(seed, tables)
        try:
            took = JointWorld(tables, device).run(plan).makespan_ns
        except InvalidValueError:
            continue  # its waits form a circle
        assert world_bound_ns(tables, device) <= took * 1.005, seed


def test_beliefs_are_off_by_unit() -> None:
    tables = PAIR.tables(WORLDS[0])
    wrong = mistaken(tables, WORLDS[0])
    factors = np.log(
        np.concatenate([(b.duration_ns / a.duration_ns)[:, 0] for a, b in zip(tables, wrong, strict=True)])
    )
    needs = np.log(np.concatenate([(b.need / a.need)[:, 0] for a, b in zip(tables, wrong, strict=True)]))
    assert 0.08 < factors.std() < 0.22
    assert 0.12 < needs.std() < 0.30
    assert all(
        (a.duration_ns * a.compute >= 0.999 * b.duration_ns * b.compute).all()
        for a, b in zip(tables, wrong, strict=True)
    )


def row(world: int, name: str, gpu: str, **ms: float) -> dict[str, Any]:
    usual = {"sequential": 12.0, "streams": 10.0, "both": 9.0, "ours": 8.0, "robust": 9.5, "bound": 7.2}
    usual |= {
        "ours_unmeasured": 8.5,
        "robust_unmeasured": 10.5,
        "both_measured": 9.0,
        "spatial": 9.5,
        "temporal": 9.9,
    } | ms
    return {"world": world, "set": name, "gpu": gpu} | {f"{key}_ms": value for key, value in usual.items()}


def test_figures_are_medians_over_worlds_of_means_over_sets() -> None:
    rows = [row(0, "a", "P6000"), row(0, "b", "P6000", both=8.0), row(1, "a", "P6000"), row(2, "a", "P6000", both=6.0)]
    rows += [row(0, "v", "V100", ours=5.0)]
    made = sets.summary_of(rows)
    assert made["both_over_sequential_geomean"] == pytest.approx((12 / 9 * 12 / 8) ** 0.5)
    assert made["both_over_sequential_min"] == pytest.approx(12 / 9)
    assert made["ours_of_bound_geomean"] == pytest.approx(7.2 / 8)
    assert made["v100_ours_over_streams"] == 2.0
    graphs = sets.summary_of([*rows, row(0, "a", sets.GRAPHS.name, ours=4.0)])
    assert graphs["graphs_ours_over_streams_geomean"] == 2.5
    assert graphs["ours_over_streams_geomean"] == made["ours_over_streams_geomean"] == pytest.approx(1.25)
    assert made["ours_slower_than_streams"] == made["both_slower_than_streams"] == 0
    slower = sets.summary_of([*rows, row(0, "a", "1080Ti", ours_unmeasured=10.1, both=10.2)])
    assert (slower["ours_slower_than_streams"], slower["both_slower_than_streams"]) == (1, 1)
    assert slower["cases"] == len(rows) + 1
    assert sets.given_summary(rows[:1])["ours_over_streams"] == pytest.approx(10 / 8)


def test_a_run_prints_its_tables_and_goes_on_where_it_was_left_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_campaign, "PROCESSES", 1)
    monkeypatch.setattr(sets, "QUICK", SMALL)
    monkeypatch.setattr(sets, "GPUS", GPUS[:1])
    made = sets.run(True, DATA, sets=["ALEX:2,BST:4"], worlds=4)
    assert len(made["rows"]) == 4
    assert set(made["summary"]) >= {
        "streams_over_sequential",
        "both_over_streams",
        "ours_over_streams",
        "ours_of_bound",
    }
    assert made["summary"]["cases"] == 4
    printed = capsys.readouterr()
    assert "Gains by drawn parameter" in printed.out
    again = sets.run(True, DATA, sets=["ALEX:2,BST:4"], worlds=4)
    assert again["rows"] == made["rows"]
    assert "4 of 4 are known from before" in capsys.readouterr().err


# --- granularity ----------------------------------------------------------------------------------------------------


def test_pointers_are_even_and_only_moved_where_that_helps() -> None:
    tables = PAIR.tables(WORLDS[2])
    evaluator = JointEvaluator(tables, rules_of(WORLDS[2]))
    plan = granularity.evenly(evaluator, 3)
    assert len(plan.barriers) == 3
    for member, table in enumerate(tables):
        ends = np.cumsum(table.duration_ns[:, -1])
        for number, barrier in enumerate(plan.barriers, 1):
            wanted = number / 4 * ends[-1]
            assert (
                (ends[barrier[member] - 1] if barrier[member] else 0.0)
                <= wanted * 1.001
                <= ends[barrier[member]] * 1.002
            )
    better = granularity.descended(evaluator, plan, 200)
    assert len(better.barriers) == 3
    assert evaluator.cost(better).makespan_ns <= evaluator.cost(plan).makespan_ns
    finest = granularity.evenly(evaluator, max(table.size for table in tables) - 1)
    assert len(finest.barriers) == max(table.size for table in tables) - 1


def test_table_3_has_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granularity, "_ROWS", 32)
    rows = granularity.judge(granularity.GrainTask(WORLDS[0], None, 10))
    assert [each["case"] for each in rows] == [
        "1 each",
        *(f"{case} {kind}" for case in (2, 3, 4, 5) for kind in ("each", "run")),
    ]
    assert len({each["ms"] for each in rows}) == len(rows)


def test_a_sweet_spot_is_found_where_there_is_one() -> None:
    def curve(world: int, **ms: float) -> list[dict[str, Any]]:
        cases = {"0": 10.0, "1": 9.0, "operators": 14.0, "found": 9.05} | ms
        return [{"world": world, "set": "a", "case": case, "ms": value} for case, value in cases.items()]

    third = [{"world": 0, "set": "Table 3", "case": f"{case} each", "ms": float(8 + case)} for case in range(1, 6)]
    rows = [*curve(0), *curve(1, found=9.5), *curve(2, **{"1": 10.5, "found": 10.0}), *third]
    made = granularity.summary_of(rows)
    assert made["sweet_spot_found"] == 0.0  # by medians the best is 0.9, and what is found takes 0.95
    assert granularity.summary_of([*curve(0), *curve(1), *third])["sweet_spot_found"] == 1.0
    assert made["sweet_spot_in_the_middle"] == pytest.approx(2 / 3)
    assert made["sweet_spot_found_by_world"] == 0.5
    assert made["operators_over_streams_time"] == 1.4
    assert made["table_3_case_2_time"] == pytest.approx(10 / 9)
