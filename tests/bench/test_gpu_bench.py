"""The harness that measures a GPU: journal, budget, steps, tables; and a whole quick run on the cores here."""

from __future__ import annotations

import csv
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import _serving, overlap, partition
from bench.gpu.__main__ import main
from bench.gpu._belief import MeasuredGroups, segment_ratio, unit_ns
from bench.gpu._context import Context, Point, Step
from bench.gpu._fingerprint import Fingerprint
from bench.gpu._journal import Budget, Journal, MeasureError
from bench.gpu._latency import _splits, pairs_of
from bench.gpu._models import DEFAULT, HALF, TINY, Subjects, even_cuts
from bench.gpu._profile import TABLES
from bench.gpu._rig import CpuRig, Way
from bench.gpu._runner import Effort
from bench.gpu._stats import spread
from bench.gpu._steps import STEPS, TIERS, run_steps
from bench.gpu._tables import to_csv
from bench.gpu.first import kernels
from bench.gpu.first._base import PRECISIONS
from bench.gpu.first._shares import divisions
from cotenant.core.engine import Engine
from cotenant.core.predictor import Member
from cotenant.execute.gpu.sm_ladder import SmGrid, groups_of
from cotenant.graph.dfg import Operator, Tensor, build_dfg
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.profiles.profile_file import load_profile
from cotenant.techniques.overlap.group_samples import load_samples
from cotenant.types import Tenant
from cotenant.work import Work

ROOT = Path(__file__).resolve().parents[2]
EFFORT = Effort(0.0, 3, 5, 1)


# --- journal, budget, tables --------------------------------------------------------------------------------------


def test_what_is_measured_is_found_again_and_half_a_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    Journal(path).put("latency", "a", [{"p50_ms": 1.5}], 0.25)
    with path.open("a") as file:
        file.write('{"step": "latency", "key": "b", "ro')
    again = Journal(path)
    assert again.get("latency", "a") == [{"p50_ms": 1.5}]
    assert again.has("latency", "a")
    assert not again.has("latency", "b")
    assert again.rows("latency") == [{"p50_ms": 1.5}]
    assert again.rows("corun") == []
    again.put("latency", "b", [{"p50_ms": 2.5}], 0.25)  # half a line costs itself alone
    assert Journal(path).rows("latency") == [{"p50_ms": 1.5}, {"p50_ms": 2.5}]


def test_a_point_that_failed_is_left_alone_until_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.fail("corun", "a", "out of memory")
    assert journal.has("corun", "a")
    assert journal.failures == [{"step": "corun", "point": "a", "reason": "out of memory"}]
    later = Journal(path)
    assert not later.has("corun", "a")
    later.put("corun", "a", [{"x": 1}], 0.0)
    assert Journal(path).failures == []


def test_tables_have_every_column_once_and_spreads_are_in_milliseconds() -> None:
    assert to_csv([{"a": 1, "b_ms": 2.5}, {"b_ms": 3.0, "c": "x,y"}]) == 'a,b_ms,c\n1,2.5,\n,3.0,"x,y"\n'
    found = spread([1_000_000, 2_000_000, 3_000_000])
    assert (found["runs"], found["p50_ms"], found["mean_ms"], found["std_ms"]) == (3, 2.0, 2.0, 1.0)
    assert spread([5_000_000])["std_ms"] == 0.0


def test_cuts_part_the_cost_evenly() -> None:
    operators = [
        Operator(i, f"o{i}", "Relu", "", (f"t{i}",), (f"t{i + 1}",), macs=15 * (10**9 if i < 2 else 10**8))
        for i in range(8)
    ]
    tensors = {f"t{i}": Tensor(f"t{i}", "tensor(float)", (1, 4), 16) for i in range(9)}
    dfg = build_dfg("m", operators, [[i] for i in range(8)], [tensors["t0"]], [tensors["t8"]], tensors)
    assert even_cuts(dfg, 1) == (0, 8)
    assert even_cuts(dfg, 2) == (0, 1, 8)
    cuts = even_cuts(dfg, 100)
    assert cuts[0] == 0
    assert cuts[-1] == 8
    assert list(cuts) == sorted(set(cuts))


# --- launches and points ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subjects]:
    made = Subjects(tmp_path_factory.mktemp("models"), "cpu", TINY)
    assert made.build(1) == {}
    yield made
    made.close()


@pytest.fixture
def context(subjects: Subjects, tmp_path: Path) -> Iterator[Context]:
    made = Context(CpuRig(), subjects, Journal(tmp_path / "journal.jsonl"), EFFORT, quick=True)
    yield made
    made.close()


def test_segments_go_through_the_executor_as_parts_of_one_batch(context: Context) -> None:
    runner = context.runner([context.whole])
    whole = runner.whole(TINY[0], 2, context.whole)
    ran = runner.chain(whole, (0, 1, runner.units(TINY[0])))
    assert len(ran) == 2
    assert all(0 < each.infer_ns < each.latency_ns for each in ran)
    assert ran[0].ended_ns < ran[1].ended_ns
    middle = runner.once(replace(whole, start=1, end=2))  # runs up to it first, and lets the batch go
    assert 0 < middle.infer_ns < middle.latency_ns
    found = runner.without_pause([whole, whole, replace(whole, model=TINY[1], end=runner.units(TINY[1]))], EFFORT)
    assert all(len(runs) >= EFFORT.min_runs for runs in found)


def test_partitions_are_added_below_one_executor_a_way(context: Context) -> None:
    first = context.runner([context.whole])
    assert context.runner(context.lanes(2)) is first
    assert set(context._open[Way.SHARES][0].shares.granted) == {context.whole, *context.lanes(2)}
    assert context.runner([context.whole], Way.STREAMS) is not first


@pytest.mark.parametrize("how", ["once", "without_pause"])
def test_a_launch_that_fails_fails_the_point(context: Context, how: str) -> None:
    runner = context.runner([context.whole])
    job = replace(runner.whole(TINY[0], 1, context.whole), end=99)
    with pytest.raises(MeasureError, match=f"{TINY[0]}: .*range of units"):
        runner.once(job) if how == "once" else runner.without_pause([job], Effort(0.0, 1, 1, 0))


def test_a_point_that_takes_long_is_content_with_two_runs() -> None:
    effort = Effort(0.2, 5, 200, 3, longest_s=4.0)
    assert [effort.is_enough(runs, 0.1) for runs in (4, 5, 200)] == [False, False, True]
    assert [effort.is_enough(runs, 0.3) for runs in (4, 5)] == [False, True]
    assert [effort.is_enough(runs, 4.1) for runs in (1, 2)] == [False, True]


def test_what_tells_most_comes_first_and_what_fails_is_passed_over(context: Context) -> None:
    order: list[str] = []
    now = [0.0]

    def step(name: str, *tiers: int) -> Step:
        def measure(key: str) -> list[dict[str, Any]]:
            now[0] += 1.0
            order.append(key)
            if key == "b1":
                raise MeasureError("cannot be")
            return [{"key": key}]

        points = [Point(f"{name}{at}", partial(measure, f"{name}{at}"), tier) for at, tier in enumerate(tiers)]
        return Step(name, "", lambda _: iter(points))

    steps, said, written = [step("a", 2, 0, 0), step("b", 1, 0)], [], []  # type: ignore[var-annotated]
    run = partial(run_steps, context, steps, tell=said.append, after=lambda: written.append(len(order)))
    assert not run(Budget(4.0, lambda: now[0]))
    assert order == ["a1", "a2", "b1", "b0"]
    assert "b: b1 failed: cannot be" in said
    assert run(Budget(9.0, lambda: now[0]))
    assert order[4:] == ["a0"]
    assert written == [2, 4, 5]


def test_all_points_of_six_models_have_keys_of_their_own(context: Context, subjects: Subjects) -> None:
    context.quick = False
    context.subjects = Subjects(Path("nowhere"), "cpu", DEFAULT)
    context.rig.slots = context.rig.parted = tuple(range(132))
    for step in STEPS:
        if step.name != "groups":  # which draws units of opened models
            points = list(step.points(context))
            assert len({point.key for point in points}) == len(points)
            assert {0} <= {point.tier for point in points} <= set(range(TIERS))
    assert pairs_of(context)[:3] == [DEFAULT[:2], DEFAULT[1:3], (DEFAULT[0], DEFAULT[2])]
    assert [context.share(part).size for part in (1.0, 0.5, 0.125)] == [132, 66, 16]


def test_every_contender_can_be_served_on_a_gpu(context: Context) -> None:
    context.rig.slots, context.rig.granule, context.rig.device = tuple(range(132)), 8, "cuda:0"  # type: ignore[misc]
    context.rig.parted = context.rig.slots[:120]
    for make in _serving.policies_of(context).values():
        Engine([Tenant("a", 1000, (0, 1))], make(), TablePredictor({}), context.machine)


@pytest.mark.parametrize("groups", [1, 3, 8, 15, 16])
def test_shares_are_made_of_the_slots_of_groups_alone(context: Context, groups: int) -> None:
    grid = SmGrid(132, 8, groups)
    context.rig.slots, context.rig.granule = tuple(range(132)), 8  # type: ignore[misc]
    context.rig.parted = context.rig.slots[: groups * 8]
    for count in (2, 4):
        lanes = context.lanes(count)
        sizes = [len(groups_of(lane, grid)) for lane in lanes]
        assert sum(sizes) == groups
        assert max(sizes) - min(sizes) <= 1
    for first, second in _splits(context):
        assert not set(first.cores) & set(second.cores)
        assert len(groups_of(first, grid)) + len(groups_of(second, grid)) == groups
    assert all(sum(each) <= groups for each in divisions(groups))
    assert all(min(each) > 0 for each in divisions(groups))


def test_a_machine_without_a_gpu_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("bench/gpu: there is no GPU that torch ")
    for module in (overlap, partition):
        assert module.run(True, None) == {"summary": {}, "rows": []}
        assert "there is no GPU to measure: torch" in capsys.readouterr().out


# --- beliefs and figures ------------------------------------------------------------------------------------------


def test_a_group_is_believed_to_take_its_slowest_member_slowed_down() -> None:
    tables = {name: LatencyTable((LatencyRow(0, 1, 8, ns),)) for name, ns in (("a", 1000), ("b", 3000))}
    groups = MeasuredGroups(TablePredictor(tables), {("a", "b"): 4.0, ("b", "a"): 1.2})
    a, b = (Member(Work(name, 0, 1, 0, 1), 8) for name in "ab")
    assert groups.group_ns([(a,), (b,), (a, b)]) == [1000, 3000, 4000]


def test_units_and_the_ratio_of_segments_come_from_the_measured_parts() -> None:
    parts = [
        {"start": 2, "end": 3, "p50_ms": 2.0, "whole_p50_ms": 2.5, "units_ns": "2000000"},
        {"start": 0, "end": 2, "p50_ms": 1.0, "whole_p50_ms": 2.5, "units_ns": "300000 700000"},
    ]
    assert unit_ns(parts) == [300000, 700000, 2000000]
    assert segment_ratio(parts) == pytest.approx(1.2)


def served(contender: str, goodput: float, attainment: float, load: float) -> dict[str, Any]:
    return {
        "pair": "a+b",
        "items": 8,
        "load": load,
        "contender": contender,
        "goodput_per_s": goodput,
        "attainment": attainment,
        "offered": 100,
    }


def test_gains_compare_cells_that_all_contenders_have() -> None:
    rows = [served(name, 100.0, 0.5, 1.2) for name in _serving.BASELINES] + [served("overlap", 130.0, 0.8, 1.2)]
    rows += [served(name, 80.0, 0.9, 0.8) for name in _serving.BASELINES] + [served("overlap", 80.0, 1.0, 0.8)]
    rows += [served("overlap", 900.0, 1.0, 1.5)]
    found = _serving.gains(rows)
    assert found["throughput_gain_vs_edf_pct"] == pytest.approx(30.0)
    assert found["violation_reduction_vs_edf_pct"] == pytest.approx(100 * (1 - 20 / 60), rel=1e-4)
    assert found["violation_reduction_vs_edf_halves_pct"] == found["violation_reduction_vs_fcfs_pct"]
    assert _serving.gains(rows[:2]) == {}


def test_arrivals_are_the_same_for_the_same_seed_and_have_the_rate() -> None:
    found = _serving.arrivals({"a": 100.0, "b": 50.0}, 20.0, 1)
    assert found == _serving.arrivals({"a": 100.0, "b": 50.0}, 20.0, 1)
    assert found == sorted(found)
    assert sum(name == "a" for _, name in found) == pytest.approx(2000, rel=0.1)
    assert sum(name == "b" for _, name in found) == pytest.approx(1000, rel=0.1)
    assert found[-1][0] < 20e9


def device() -> Fingerprint:
    texts = {"driver": "1", "cuda": "13.0", "torch": "2.13.0", "host": "x", "system": "Linux", "python": "3.11"}
    return Fingerprint(
        "cuda", "NVIDIA H100 80GB <HBM3>", 132, "9.0", 1 << 36, host_cores=2, clocks={"clocks.sm": "1980 MHz"}, **texts
    )


def test_a_device_has_a_folder_of_its_own_and_clocks_do_not_change_it() -> None:
    one, other = device(), device()
    other.clocks["clocks.sm"] = "345 MHz"
    assert one.folder == other.folder
    assert one.folder.startswith("nvidia-h100-80gb-hbm3-")


def test_segments_of_an_archive_give_what_the_whole_gives(subjects: Subjects, tmp_path: Path) -> None:
    from bench.torch_segments import _measure

    feeds = subjects.get(TINY[1]).feeds(1)
    rows = _measure("cpu", subjects.get(TINY[1]).model.path, feeds, None, 2)
    assert [row["segments"] for row in rows] == [4, 4, 4]
    assert all(row["max_abs_error"] < 1e-5 and row["pairs"] == 2 and row["ratio"] > 0 for row in rows)


def test_half_precision_gives_about_what_single_gives_in_channels_last(subjects: Subjects, tmp_path: Path) -> None:
    import torch

    halves = Subjects(tmp_path, "cpu", [TINY[0] + HALF])
    assert halves.build(1) == {}
    half, single = halves.get(TINY[0] + HALF), subjects.get(TINY[0])
    given = torch.from_numpy(half.feeds(2)["x"])
    assert given.dtype == torch.float16
    found = half.model.run(0, half.units, {"x": given.to(memory_format=torch.channels_last)})["y"]
    expected = single.model.run(0, single.units, {"x": given.float()})["y"]
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert float((found - expected).abs().max()) < 1e-2
    halves.close()


# --- a whole run --------------------------------------------------------------------------------------------------

_ONLY_TORCH = """
import importlib.machinery

find = importlib.machinery.PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {blocked!r} else find(name, path, target)

importlib.machinery.PathFinder.find_spec = find_spec
from bench.gpu.__main__ import main
arguments = {arguments!r}
assert main(arguments) == 0
print("AGAIN")
assert main(arguments) == 0
"""
BLOCKED = (
    *("typer", "rich", "onnx", "onnxruntime", "onnxscript", "grpc", "google", "uvloop"),
    *("httptools", "prometheus_client", "scipy", "sklearn", "safetensors", "PIL", "pytest", "hypothesis"),
    "ml_dtypes",
)


def test_a_quick_run_on_cores_with_torch_numpy_and_msgspec_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--device", "cpu", "--quick", "--out", str(out), "--models", str(tmp_path / "models")]
    before = sorted((ROOT / "profiles").rglob("*")) if (ROOT / "profiles").exists() else []
    done = subprocess.run(
        [sys.executable, "-c", _ONLY_TORCH.format(blocked=set(BLOCKED), arguments=arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": "src:.", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, again = done.stdout.split("AGAIN")
    assert "failed" not in first, first
    assert "run the same command again" not in first
    for step in STEPS:
        assert f"{step.name}: " in first
        assert f"{step.name}: " not in again
    profile = load_profile(out / "profile.json")
    assert set(profile.models) == {"tiny_convolutions", "tiny_perceptron"}
    for name, model in profile.models.items():
        assert len(model.unit_ns) == model.cuts[-1]
        cores = {point.cores for point in model.points}
        predictor = TablePredictor(profile.tables())
        assert all(predictor.latency_ns(Work(name, 0, 1, 0, model.cuts[-1]), each) > 0 for each in cores)
    header, samples = load_samples(out / "groups.jsonl")
    assert header.fingerprint == profile.device.fingerprint
    assert samples
    for name in TABLES:
        assert list(csv.DictReader((out / f"{name}.csv").read_text().splitlines())), name
    with tarfile.open(out / "results.tgz") as packed:
        assert {f"out/{path.name}" for path in out.iterdir()} - {"out/results.tgz"} == set(packed.getnames())
    assert (sorted((ROOT / "profiles").rglob("*")) if (ROOT / "profiles").exists() else []) == before


# --- the first questions ------------------------------------------------------------------------------------------

FIRST = {
    "floor": {"smallest kernel", "tiny_convolutions", "copy up, pageable", "version", "left out"},
    "sweep": {"tiny_convolutions", "tiny_perceptron"},
    "pairs": {"streams", "halves", "first with priority"},
    "kernels": {"tiny_convolutions"},
    "tasks": {"tiny_convolutions", "tiny_perceptron"},
}
"""By script: what its table has in the column `what`, `model` or `how` when the cores have answered for a moment."""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archives")
    names = [name + suffix for suffix in PRECISIONS.values() for name in TINY]
    made = Subjects(folder / f"torch-{str(torch.__version__).replace('+', '-')}", "cpu", names)
    assert made.build(1) == {}
    return folder


def run_first(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "first" / f"{name}.py"), "--device", "cpu", *arguments]
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.parametrize("name", FIRST)
def test_the_first_questions_are_answered_by_cores(name: str, archives: Path, tmp_path: Path) -> None:
    seconds = {"pairs": ["15"], "sweep": ["15"]}.get(name, [])
    began = time.monotonic()
    run_first(name, *seconds, "--out", str(tmp_path), "--models", str(archives))
    if seconds:  # and the import of torch, on cores that others use
        assert time.monotonic() - began < 25 + float(seconds[0])
    rows = list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines()))
    assert [row["error"] for row in rows if row["error"]] == []
    column = {"floor": "what", "pairs": "how"}.get(name, "model")
    assert {row[column] for row in rows} >= FIRST[name]
    figure = {"floor": "value", "pairs": "gain", "kernels": "duration_us"}.get(name, "ms")
    measured = [row[figure] for row in rows if row[column] not in ("version", "left out")]
    assert all(float(value) >= 0 for value in measured)


def test_a_point_that_fails_is_a_row_and_none_begins_when_time_is_over(archives: Path, tmp_path: Path) -> None:
    done = run_first("tasks", "nobody", "tiny_perceptron", "--out", str(tmp_path), "--models", str(archives))
    assert "nobody is left out" in done.stdout
    rows = list(csv.DictReader((tmp_path / "tasks.csv").read_text().splitlines()))
    assert {row["model"] for row in rows if not row["error"]} == {"tiny_perceptron"}
    assert all("could not be built" in row["error"] for row in rows if row["model"] == "nobody")
    assert any(row["model"] == "nobody" for row in rows)
    run_first("sweep", "0", "--out", str(tmp_path), "--models", str(archives))
    assert (tmp_path / "sweep.csv").read_text().count("\n") == 1
    assert "8 rows: ran once" in run_first("kernels", "tiny_perceptron", "8", "--models", str(archives)).stdout


@pytest.mark.parametrize(
    ("grid", "block", "registers", "shared", "sms"),
    [
        ([264, 1, 1], [1024, 1, 1], 32, 0, 132),  # two blocks of so many threads fit
        ([264, 1, 1], [128, 1, 1], 255, 0, 132),  # two by 65,536 registers: 128 threads take 32,768
        ([10, 2, 1], [32, 1, 1], 16, 100 << 10, 10),  # two by shared memory
        ([64, 1, 1], [32, 1, 1], 16, 0, 2),  # 32 blocks at most
        ([3, 1, 1], [256, 1, 1], 255, 227 << 10, 3),
    ],
)
def test_sms_that_a_kernel_fills(grid: list[int], block: list[int], registers: int, shared: int, sms: int) -> None:
    kernel = {"grid": grid, "block": block, "registers per thread": registers, "shared memory": shared}
    assert kernels.sm_needed(kernel) == sms
    assert kernels.class_of("sm80_xmma_fprop_implicit_gemm_f16") == "conv"
    assert kernels.class_of("void at::native::vectorized_elementwise_kernel<4>") == "elementwise"
