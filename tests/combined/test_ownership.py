"""Answers own their memory, and parts of a batch are joined with what was made before them.

Each test runs a model, frees all else, writes over memory of the same sizes, and compares with onnxruntime or torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import cotenant
from cotenant.core.actions import Launch
from cotenant.execute.batch_tasks import BatchTasks
from cotenant.execute.errors import ModelError, RowsError
from cotenant.execute.onnx.segment_session import as_ort_value
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.open_model import open_model
from cotenant.execute.protocol import LoadSpec, ModelExecutor
from cotenant.execute.runner import Runner, array_of, to_numpy
from cotenant.execute.threads.executor import ThreadExecutor
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.work import Share, Work
from here_workers import here_workers
from onnx_samples import Sketch, info
from part_plans import Answer, Lead, check_answers, random_stages, ways
from placed_samples import open_placed, random_placement
from port_graphs import WIDTH, Arrays, onnx_answer, port_feeds, random_ports, spoil, wrong_outputs

ONE = Share((0,))
SEEDS = range(12)
SHAPES = dict.fromkeys("ab", (1, WIDTH))


# --- runners --------------------------------------------------------------------------------------------------------


def cut_runs(model: Runner, seed: int) -> Iterator[list[tuple[int, int]]]:
    """The whole, each single cut, every unit, and one random way."""
    count, rng = model.unit_count, Random(seed)
    yield [(0, count)]
    yield from ([(0, cut), (cut, count)] for cut in range(1, count))
    yield [(unit, unit + 1) for unit in range(count)]
    cuts = [0, *sorted(rng.sample(range(1, count), rng.randint(0, count - 1))), count]
    yield list(pairwise(cuts))


def run_cut(model: Runner, spans: Sequence[tuple[int, int]], feeds: Arrays, threads: Any = 1) -> dict[str, Any]:
    tensors: Mapping[str, Any] = {name: array.copy() for name, array in feeds.items()}
    for start, end in spans:
        tensors = model.run(start, end, tensors, threads)
    return to_numpy(tensors)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_run_gives_stays_when_all_else_is_gone(tmp_path: Path, seed: int) -> None:
    source = random_ports(seed)
    onnx.save(source, tmp_path / "ports.onnx")
    kept: list[tuple[str, dict[str, Any], Arrays]] = []
    with SegmentedModel.open(tmp_path / "ports.onnx", cache_dir=tmp_path / "cache") as model:
        for at, spans in enumerate(cut_runs(model, seed)):
            feeds = port_feeds(at, 1 + at % 3)
            kept.append((str(spans), run_cut(model, spans, feeds), onnx_answer(source, feeds)))
    del model
    held = [spoil(right) for _, _, right in kept]
    assert held
    for spans_text, got, right in kept:
        assert not wrong_outputs(got, right), spans_text


@pytest.mark.parametrize("seed", range(4))
def test_what_a_placed_run_gives_stays_when_all_else_is_gone(tmp_path: Path, seed: int) -> None:
    source = random_ports(seed)
    onnx.save(source, tmp_path / "ports.onnx")
    kept: list[tuple[dict[str, Any], Arrays]] = []
    with open_placed(tmp_path / "ports.onnx", cache_dir=tmp_path / "cache") as model:
        for at in range(4):
            model.place(random_placement(model, at, 2))
            feeds = port_feeds(at, 1 + at % 3)
            kept.append((run_cut(model, [(0, model.unit_count)], feeds, (0, 1)), onnx_answer(source, feeds)))
    del model
    held = [spoil(right) for _, right in kept]
    assert held
    for got, right in kept:
        assert not wrong_outputs(got, right)


def test_an_array_of_a_tensor_holds_the_tensor() -> None:
    for dtype in ("float32", "float16", "float64", "int64", "uint8", "bool"):
        for shape in ((), (0, 3), (7,), (64, 128)):
            right = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
            arrays = [array_of(as_ort_value(right.copy())) for _ in range(20)]
            held = spoil({"right": right})
            for array in arrays:
                np.testing.assert_array_equal(array, right)
                np.testing.assert_array_equal(array[...], right)
            del held


def test_arrays_of_tensors_are_made_in_one_place() -> None:
    """`numpy()` of a tensor of an engine gives a view that may not hold its memory: `array_of` and `to_numpy` do."""
    root = Path(cotenant.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "numpy"
    }
    assert found == {"execute/runner.py"}


def test_a_constant_output_cannot_be_written(tmp_path: Path) -> None:
    s = Sketch()
    s.constant(np.arange(500, dtype=np.float32), "table")
    s.op("Relu", s.op("MatMul", "a", s.weight(8, 8)), out="y")
    dims = ["rows", 8]
    onnx.save(s.model([info("a", dims)], [info("y", dims), info("table", [500])]), tmp_path / "m.onnx")
    with SegmentedModel.open(tmp_path / "m.onnx", cache_dir=tmp_path / "cache") as model:
        for spans in cut_runs(model, 1):
            table = run_cut(model, spans, {"a": np.ones((2, 8), np.float32)})["table"]
            with pytest.raises(ValueError, match="read-only"):
                table[0] = 7


# --- executors ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["threads", "workers"])
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelExecutor]:
    if request.param == "threads":
        made: ModelExecutor = ThreadExecutor()
        yield made
        made.close()
        return
    with here_workers(monkeypatch):
        made = ProcessExecutor()
        yield made
        made.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_output_is_answered_however_a_batch_runs(executor: ModelExecutor, tmp_path: Path, seed: int) -> None:
    source = random_ports(seed)
    onnx.save(source, tmp_path / "ports.onnx")
    model = open_model(tmp_path / "ports.onnx", cache_dir=tmp_path / "cache")
    check_answers(executor, model, partial(onnx_answer, source), port_feeds, ways(model, 12))


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_several_queries_get_every_output(executor: ModelExecutor, tmp_path: Path, seed: int) -> None:
    source = random_ports(seed, constants=False)
    onnx.save(source, tmp_path / "ports.onnx")
    model = open_model(tmp_path / "ports.onnx", cache_dir=tmp_path / "cache")
    rng, units = Random(seed), model.unit_count
    dfg, runs = model.dfg, model.row_graph(SHAPES).runs
    executor.add_model("ports", executor.load("ports", model, LoadSpec((ONE,), (0, units))))
    lead = Lead(executor, "ports", units, ONE)
    for at in range(8):
        feeds = [port_feeds(10 * at + rows, rows) for rows in (2, 1, 3)]
        stages = random_stages(rng, dfg, runs, 6)
        for got, given in zip(lead.run(stages, feeds), feeds, strict=True):
            assert not wrong_outputs(got, onnx_answer(source, given)), stages


@pytest.fixture(scope="module", params=range(3))
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    pytest.importorskip("torch")
    from port_modules import save_ports, torch_answer

    path = tmp_path_factory.mktemp("ports") / "ports.pt2"
    return path, partial(torch_answer, save_ports(path, request.param))


def test_every_output_of_a_torch_model_is_answered(executor: ModelExecutor, archive: tuple[Path, Answer]) -> None:
    path, answer = archive
    model = open_model(path, cache_dir=path.parent / "cache")
    check_answers(executor, model, answer, port_feeds, ways(model, 8))


@pytest.mark.parametrize("device", ["cores", "captured"])
def test_every_output_is_answered_on_streams(archive: tuple[Path, Answer], device: str) -> None:
    from cotenant.execute.gpu.streams import CpuStreams
    from cotenant.execute.torch.executor import TorchExecutor
    from prompt_streams import PromptStreams

    path, answer = archive
    prompt = PromptStreams()
    executor = TorchExecutor(CpuStreams() if device == "cores" else prompt)
    model = open_model(path, cache_dir=path.parent / "cache")
    cuts = tuple(range(model.unit_count + 1))
    check_answers(executor, model, answer, port_feeds, ways(model, 10), cuts if device == "captured" else ())
    assert bool(executor.chains.replayed) == bool(prompt.replays) == (device == "captured")
    executor.close()


def test_an_output_named_as_an_input_is_refused_when_a_torch_model_is_opened(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch_samples import saved

    class Same(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> dict[str, Any]:
            return {"x": torch.tanh(x)}

    saved(Same(), {"x": torch.ones(2, 3)}, tmp_path / "same.pt2")
    with pytest.raises(ModelError, match="output 'x' has the name of an input"):
        open_model(tmp_path / "same.pt2")


def test_text_that_is_an_input_and_an_output_stays_what_it_was(executor: ModelExecutor, tmp_path: Path) -> None:
    s = Sketch()
    s.op("Identity", "words", out="same")
    dims = ["rows", 2]
    kind = onnx.TensorProto.STRING
    source = s.model([info("words", dims, kind)], [info("same", dims, kind), info("words", dims, kind)])
    onnx.save(source, tmp_path / "words.onnx")
    model = open_model(tmp_path / "words.onnx", cache_dir=tmp_path / "cache")
    units = model.unit_count
    executor.add_model("words", executor.load("words", model, LoadSpec((ONE,), (0, units))))
    words = np.array([[b"one", b"zwei"], ["drü".encode(), b""]], np.object_)
    [got] = Lead(executor, "words", units, ONE).run([[(0, units, (0, 1)), (0, units, (1, 2))]], [{"words": words}])
    for name in ("same", "words"):
        assert got[name].tolist() == words.tolist()


# --- parts ----------------------------------------------------------------------------------------------------------


def test_an_output_that_no_part_makes_is_named() -> None:
    launch = Launch(1, 1, (1,), Work("ports", 0, 3, 2, 5), True, ONE, 1, part=True)
    parts = BatchTasks(3, {"early": np.zeros((3, 2))}, 2)
    assert parts.end(launch, {})
    assert list(parts.outputs(["early"])) == ["early"]
    with pytest.raises(RowsError, match="output 'late' is missing for some of the 3 rows"):
        parts.outputs(["early", "late"])


def test_an_engine_gives_views_that_do_not_hold_their_memory() -> None:
    """Why `array_of` is there: when this fails, onnxruntime has changed."""
    value = ort.OrtValue.ortvalue_from_numpy(np.ones(3, np.float32))
    assert value.numpy().base is not value
