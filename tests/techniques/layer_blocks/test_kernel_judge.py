"""The judge of `cotenant compile`, and that one model's failure is that model's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from commands import Run, runner
from cotenant.execute.onnx.segment_store import content_of
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.runner import to_numpy
from cotenant.measure.campaign import leaving_out
from cotenant.repository import STATE_FOLDER
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.execute.choice import choice_path
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.measure import compile_campaign
from cotenant.techniques.layer_blocks.measure.compile_campaign import CompileEffort, compile_repository
from cotenant.techniques.layer_blocks.measure.kernel_judge import DIFFERS, error_of, judged_error
from cotenant.work import Share
from kernel_graphs import Writer, on_kernels, pooled
from kernels import a_compiler

ONE = (Share((0,)),)
SHAPE = (8, 4, 6)
Break = Callable[[dict[str, Any]], None]


def layers(w: Writer) -> list[str]:
    body = w.op("Relu", w.conv("x", 8, 24, 3, 1))
    return [w.op("Tanh", w.conv(body, 24, 8, 3, 1)), w.op("GlobalAveragePool", body)]


def with_nan(w: Writer) -> list[str]:
    """The root of numbers around 0: onnxruntime gives NaN, too."""
    body = w.op("Sqrt", w.conv("x", 8, 24, 1))
    return [body, w.conv(body, 24, 8, 1)]


def saved(path: Path, build: Callable[[Writer], list[str]], shape: tuple[int, ...] = SHAPE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    w = Writer()
    w.save(path, {"x": ["n", *shape]}, build(w))


class Wrong:
    """A compiled model some of whose answers are others."""

    def __init__(self, model: CompiledModel, is_wrong: Callable[[int, Any], bool], spoil: Break) -> None:
        self._model, self._is_wrong, self._spoil = model, is_wrong, spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run(self, start: int, end: int, tensors: Any, *more: Any) -> dict[str, Any]:
        made = self._model.run(start, end, tensors, *more)
        if end == self._model.unit_count and self._is_wrong(start, tensors):
            made = {name: np.array(each) for name, each in to_numpy(made).items()}
            self._spoil(made)
        return made


def scaled(made: dict[str, Any]) -> None:
    for each in made.values():
        each *= 1.1


def a_row_of_another(made: dict[str, Any]) -> None:
    for each in made.values():
        each[-1] = each[0] * 0.5


def without_nan(made: dict[str, Any]) -> None:
    for name, each in made.items():
        made[name] = np.nan_to_num(each, nan=0.5, posinf=np.inf, neginf=-np.inf)


def nan_of_infinities(made: dict[str, Any]) -> None:
    for name, each in made.items():
        made[name] = np.where(np.isinf(each), np.float32(np.nan), each)


def all_nan(made: dict[str, Any]) -> None:
    for each in made.values():
        each[...] = np.nan


def has(value: float) -> Callable[[int, Any], bool]:
    def is_there(start: int, tensors: Any) -> bool:
        given = tensors.get("x")
        if given is None:
            return False
        return bool(np.isnan(given).any() if np.isnan(value) else (given == value).any())

    return is_there


def rows_of(tensors: Any) -> int:
    shape = next(iter(tensors.values())).shape
    return int((shape() if callable(shape) else shape)[0])


FAULTS: dict[str, tuple[Callable[[int, Any], bool], Break]] = {
    "everywhere": (lambda *_: True, scaled),
    "NaN everywhere": (lambda *_: True, all_nan),
    "behind a cut": (lambda start, _: start > 0, scaled),
    "behind a cut, from arrays": (
        lambda start, given: start > 0 and all(isinstance(each, np.ndarray) for each in given.values()),
        scaled,
    ),
    "beside another row": (lambda start, given: rows_of(given) > 1, a_row_of_another),
    "of NaN": (has(np.nan), without_nan),
    "of an infinity": (has(np.inf), nan_of_infinities),
    "of a negative infinity": (has(-np.inf), nan_of_infinities),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CompiledModel, SegmentedModel]]:
    folder = tmp_path_factory.mktemp("judged")

    def plain(w: Writer) -> list[str]:
        body = w.conv("x", 8, 24, 1)
        return [w.conv(w.conv(w.op("Softmax", body, axis=1), 24, 8, 1), 8, 8, 1), body]

    saved(folder / "m.onnx", plain)
    with (
        on_kernels(folder / "m.onnx", folder / "cache", [1, *SHAPE]) as model,
        SegmentedModel.open(folder / "m.onnx", cache_dir=folder / "cache") as other,
    ):
        yield model, other


@pytest.mark.parametrize("fault", FAULTS)
def test_the_judge_sees_every_kind_of_wrong_answer(pair: tuple[CompiledModel, SegmentedModel], fault: str) -> None:
    model, plain = pair
    shape = {"x": [1, *SHAPE]}
    assert judged_error(model, plain, shape) < 1e-4
    wrong: Any = Wrong(model, *FAULTS[fault])
    assert judged_error(wrong, plain, shape) > 1e-3


@pytest.mark.parametrize("seed", range(30))
def test_an_error_is_none_of_rounding_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    right = rng.standard_normal((3, 5)).astype(np.float32)
    for value in (np.nan, np.inf, -np.inf):
        right[rng.integers(3), rng.integers(5)] = value
    assert error_of({"y": right.copy()}, {"y": right}) == 0.0
    rounded = right * np.float32(1 + 1e-5)
    assert 0 < error_of({"y": rounded}, {"y": right}) < 2e-5
    at = rng.integers(3), rng.integers(5)
    for value in (np.nan, np.inf, -np.inf, 0.0, 100.0):
        other = right.copy()
        other[at] = value
        is_same = np.array_equal(other, right, equal_nan=True)
        assert (error_of({"y": other}, {"y": right}) > 1e-3) == (not is_same)
        if not (np.isfinite(value) and np.isfinite(right[at])):
            assert error_of({"y": other}, {"y": right}) == (0.0 if is_same else DIFFERS)
    assert error_of({"y": right[:2]}, {"y": right}) == DIFFERS
    assert error_of({"y": right.astype(np.float64)}, {"y": right}) == DIFFERS
    whole = np.arange(6)
    assert error_of({"y": whole}, {"y": whole}) == 0.0
    assert error_of({"y": whole + 1}, {"y": whole}) == DIFFERS


def integers(path: Path) -> None:
    """No layer that kernels are for, and no tensor of numbers with a point but one."""
    made = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Add", ["rows", "rows"], ["sum"]),
        helper.make_node("Sub", ["sum", "rows"], ["y"]),
    ]
    table = numpy_helper.from_array(np.arange(12, dtype=np.int64).reshape(4, 3), "table")
    stored(path, made, TensorProto.INT64, TensorProto.INT64, [table], "ids")


def texts(path: Path) -> None:
    stored(path, [helper.make_node("Identity", ["x"], ["y"])], TensorProto.STRING, TensorProto.STRING)


def one_relu(path: Path) -> None:
    stored(path, [helper.make_node("Relu", ["x"], ["y"])], TensorProto.FLOAT, TensorProto.FLOAT)


def stored(path: Path, nodes: Any, given: int, made: int, constants: Any = (), name: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, given, ["n", 2])],
        [helper.make_tensor_value_info("y", made, None)],
        list(constants),
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=9)), path)


def clipped(w: Writer) -> list[str]:
    infinity = w.constant(float("inf"))
    body = w.op("Clip", w.conv("x", 8, 24, 1), w.constant(0.0), infinity)
    return [w.op("Clip", w.conv(body, 24, 8, 1), w.op("Neg", infinity), w.constant(2.0))]


def clipped_by_nan(w: Writer) -> list[str]:
    return [w.op("Clip", w.conv("x", 8, 24, 1), w.constant(float("nan")), w.constant(1.0))]


def summed_by_column(w: Writer) -> list[str]:
    return [w.op("Add", w.conv("x", 8, 5, 1), w.normal(6))]


ODD: dict[str, Callable[[Path], None]] = {
    "integers": integers,
    "texts": texts,
    "one_relu": one_relu,
    "with_nan": lambda path: saved(path, with_nan),
    "clipped": lambda path: saved(path, clipped),
    "clipped_by_nan": lambda path: saved(path, clipped_by_nan),
    "summed_by_column": lambda path: saved(path, summed_by_column),
    "pooled": lambda path: saved(path, pooled, (8, 12, 12)),
}


def a_repository(root: Path, names: list[str]) -> Path:
    a_compiler()
    for name in names:
        path = root / name / "1" / "model.onnx"
        ODD[name](path) if name in ODD else saved(path, layers)
        (root / name / "config.toml").write_text(f'[tenant]\nname = "{name}"\nslo_ms = 50\n', encoding="utf-8")
    return root


@pytest.mark.parametrize("odd", ODD)
def test_a_model_that_is_odd_costs_no_other_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    root = a_repository(tmp_path / "models", ["a_net", odd, "z_net"])
    monkeypatch.setattr(compile_campaign, "_NO_SLOWER", 1e9)
    results, errors = compile_repository(root, ONE, CompileEffort(1))
    assert errors == {}
    assert set(results) == {"a_net", odd, "z_net"}
    for name, result in results.items():
        path = root / name / "1" / "model.onnx"
        is_kept = choice_path(root / STATE_FOLDER / "graphs", content_of(path)).exists()
        assert is_kept == (result.units > 0), name
        assert result.error is not None
        assert result.error < 1e-3
    assert results["a_net"].units > 0
    assert results["z_net"].units > 0
    if odd in ("integers", "texts", "one_relu"):
        assert (results[odd].units, results[odd].ratios) == (0, {})
    elif odd not in ("clipped_by_nan",):
        assert results[odd].units > 0


def test_what_fails_for_one_model_is_told_of_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = a_repository(tmp_path / "models", ["a_net", "clipped", "with_nan"])
    run: Run = runner(monkeypatch, capfd)
    make, judge = CKernel.make, compile_campaign.judged_error

    def fail(self: CKernel, problem: Problem, *more: Any) -> Any:
        if problem.activation.kind == "clip":
            raise RuntimeError("no [such] register")
        return make(self, problem, *more)

    def judge_or_fail(model: CompiledModel, *more: Any) -> float:
        return DIFFERS if model.name == "with_nan" else judge(model, *more)

    monkeypatch.setattr(CKernel, "make", fail)
    monkeypatch.setattr(compile_campaign, "judged_error", judge_or_fail)
    monkeypatch.setattr(compile_campaign, "_NO_SLOWER", 1e9)
    status, out, _ = run("compile", root, "--candidates", 1, "--lanes", "0", "--json")
    assert status == 1
    told = json.loads(out)
    assert set(told["models"]) == {"a_net", "with_nan"}
    assert told["models"]["with_nan"]["error"] is None
    assert set(told["errors"]) == {"clipped"}
    assert "RuntimeError: no [such] register" in told["errors"]["clipped"]
    status, out, err = run("compile", root, "--candidates", 1, "--lanes", "0")
    assert status == 1
    assert "no [such] register" in out + err
    assert "other answers" in out
    cache = root / STATE_FOLDER / "graphs"
    kept = {name: choice_path(cache, content_of(root / name / "1" / "model.onnx")).exists() for name in told["models"]}
    assert kept == {"a_net": True, "with_nan": False}


def test_any_error_of_a_member_is_left_out_and_no_interrupt() -> None:
    errors: dict[str, str] = {}
    for error in (RuntimeError("one"), ValueError("two"), MemoryError("three")):
        with leaving_out(errors, type(error).__name__):
            raise error
    assert errors == {
        "RuntimeError": "RuntimeError: one",
        "ValueError": "ValueError: two",
        "MemoryError": "MemoryError: three",
    }
    with pytest.raises(KeyboardInterrupt), leaving_out(errors, "interrupt"):
        raise KeyboardInterrupt
