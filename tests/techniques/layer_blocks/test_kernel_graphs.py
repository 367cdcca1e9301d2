"""Graphs whose kernels were wrong, and random ones, held against onnxruntime; runs that go on from rows; choices."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench._kernel_graphs import RandomGraph, judge
from bench.compile_fuzz import in_child
from cotenant.execute.onnx.segment_store import content_of
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.open_model import open_model
from cotenant.execute.runner import to_numpy
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import SearchEffort
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.execute.choice import (
    FORMAT,
    ChosenKernels,
    KernelChoice,
    choice_path,
    save_choice,
)
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.execute.lease import ShapeRefusedError
from cotenant.techniques.layer_blocks.execute.loaded_kernels import store_of
from cotenant.techniques.layer_blocks.execute.nodes import Lowering
from kernel_graphs import Writer, on_kernels, pooled
from kernels import a_compiler

Build = Callable[[Writer], list[str]]


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_answer_as_onnxruntime(tmp_path: Path, seed: int) -> None:
    verdict = judge(seed, tmp_path, a_compiler())
    assert (verdict.first, verdict.wrong, verdict.nan_lost) == ("", 0, 0)
    assert verdict.answers >= 6


def a_row(w: Writer) -> list[str]:
    """A sum with one number a column behind a convolution, of which there are as many as filters."""
    return [w.op("Add", w.conv("x", 8, 6, 1), w.normal(6))]


def a_filter(w: Writer) -> list[str]:
    """The bias of a convolution, as a sum."""
    return [w.op("Add", w.op("Conv", "x", w.normal(5, 8, 3, 3)), w.normal(5, 1, 1))]


def tied(w: Writer) -> list[str]:
    """One square matrix, turned and not turned."""
    square, flat = w.normal(8, 8), w.op("Flatten", w.op("GlobalAveragePool", w.conv("x", 8, 8, 1)))
    first = w.op("Gemm", flat, square, transB=1)
    return [first, w.op("MatMul", w.op("Relu", first), square)]


def rimmed_mean(w: Writer) -> list[str]:
    """A mean that a padded convolution reads."""
    mean = w.op("GlobalAveragePool", w.conv("x", 8, 24, 1))
    return [mean, w.conv(mean, 24, 4, 3, 1), w.conv(w.op("Relu", mean), 24, 5, 3, 1)]


def rimmed_gate(w: Writer) -> list[str]:
    """Factors by channel that a padded convolution reads as well."""
    body = w.conv("x", 8, 24, 1)
    gate = w.op("Sigmoid", w.conv(w.op("GlobalAveragePool", body), 24, 24, 1))
    return [w.conv(w.op("Mul", body, gate), 24, 4, 1), w.conv(gate, 24, 4, 5, 2)]


def rimmed_flat(w: Writer) -> list[str]:
    """One pixel as a row of numbers, which a padded convolution reads as well."""
    pixel = w.conv(w.op("GlobalAveragePool", w.conv("x", 8, 24, 1)), 24, 24, 1)
    return [w.op("Gemm", w.op("Flatten", pixel), w.normal(24, 7), w.normal(7)), w.conv(pixel, 24, 4, 3, 1)]


def reused_rims(w: Writer) -> list[str]:
    """Means in memory whose rims later tensors of the same plane count on."""
    made = w.op("GlobalAveragePool", w.conv("x", 8, 24, 1))
    for _ in range(4):
        made = w.op("GlobalAveragePool", w.conv(made, 24, 24, 3, 1))
    return [made]


DIRECTED = (a_row, a_filter, tied, rimmed_mean, rimmed_gate, rimmed_flat, reused_rims)


def built(path: Path, build: Build, shape: list[Any]) -> None:
    w = Writer()
    w.save(path, {"x": shape}, build(w))


def numbers(rows: int, *dims: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, *dims), np.float32)}


def same(got: Any, right: Any) -> None:
    got, right = to_numpy(got), to_numpy(right)
    for name, array in right.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5 * float(np.abs(array).max()))


@pytest.mark.parametrize("build", DIRECTED)
def test_graphs_of_every_kind_that_was_wrong(tmp_path: Path, build: Build) -> None:
    path = tmp_path / "model.onnx"
    built(path, build, ["n", 8, 4, 6])
    given = numbers(2, 8, 4, 6)
    with on_kernels(path, tmp_path / "cache", [2, 8, 4, 6]) as model:
        assert any(model.prepared({"x": (2, 8, 4, 6)}).plan.ours)
        with SegmentedModel.open(path, cache_dir=tmp_path / "cache") as plain:
            right = plain.run(0, plain.unit_count, given)
            for _ in range(3):
                same(model.run(0, model.unit_count, given), right)


def chain(w: Writer) -> list[str]:
    """Kernels on both sides of what they cannot do, and an early output."""
    early = w.op("Relu", w.conv("x", 8, 24, 3, 1))
    odd = w.op("Softmax", w.conv(early, 24, 24, 1), axis=1)
    return [early, w.conv(w.op("Tanh", w.conv(odd, 24, 8, 3, 1)), 8, 8, 1), w.op("Flatten", odd)]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_runs_that_go_on_from_arrays_of_any_rows_use_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Rows of a run of three from every cut on: those of a chunk, and of a batch whose tensors all are arrays."""
    path = tmp_path / "model.onnx"
    built(path, chain, ["n", 8, 4, 6])
    given = numbers(3, 8, 4, 6)
    with on_kernels(path, tmp_path / "cache", [3, 8, 4, 6]) as model:
        with SegmentedModel.open(path, cache_dir=tmp_path / "cache") as plain:
            right = to_numpy(plain.run(0, plain.unit_count, given))
        lives = {
            cut: {name: np.array(each) for name, each in to_numpy(model.run(0, cut, given)).items()}
            for cut in range(1, model.unit_count)
        }

        def refused(*_: Any, **__: Any) -> None:
            raise AssertionError("onnxruntime ran it without kernels")

        monkeypatch.setattr(SegmentedModel, "run", refused)
        for cut, live in lives.items():
            part = {name: array[:rows] for name, array in live.items()}
            got = model.run(cut, model.unit_count, part)
            same(got, {name: array[:rows] for name, array in right.items()})


def test_what_hangs_on_a_pool_that_is_counted_otherwise_stays_with_onnxruntime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.onnx"
    built(path, pooled, ["n", 8, 12, 12])
    given = numbers(1, 8, 12, 12)
    with SegmentedModel.open(path, cache_dir=tmp_path / "cache") as plain:
        right = plain.run(0, plain.unit_count, given)
    caplog.set_level(logging.WARNING)
    with on_kernels(path, tmp_path / "cache", [1, 8, 12, 12]) as model:
        assert model.prepared({"x": (1, 8, 12, 12)}).plan.ours[0], "what comes before runs on kernels"
        same(model.run(0, model.unit_count, given), right)
        assert not caplog.records
    monkeypatch.setattr(Lowering, "certain", lambda _, __, shape: shape)
    with on_kernels(path, tmp_path / "cache", [1, 8, 12, 12]) as model:
        with pytest.raises(ShapeRefusedError, match=r"has shape \(1, 24, 6, 6\) .*; its kernels are for .*7, 7\)"):
            model.segment_ns(given)
        for _ in range(2):
            same(model.run(0, model.unit_count, given), right)
    assert len(caplog.records) == 1, "it is said once"
    assert "onnxruntime runs it at these shapes: tensor" in caplog.text


def test_a_tensor_of_another_shape_or_type_never_reaches_native_code(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    built(path, chain, ["n", 8, 4, 6])
    with on_kernels(path, tmp_path / "cache", [1, 8, 4, 6]) as model:
        lease = model.prepared({"x": (1, 8, 4, 6)}).lease()
        for wrong in (
            np.zeros((1, 8, 4, 5), np.float32),
            np.zeros((2, 8, 4, 6), np.float32),
            np.zeros((8, 4, 6), np.float32),
            np.zeros((1, 8, 4, 6), np.float64),
            np.zeros((1, 8, 4, 6), np.int32),
        ):
            with pytest.raises(ShapeRefusedError, match="its kernels are for shape"):
                lease.set_plain("x", wrong)
        lease.set_plain("x", np.zeros((1, 8, 4, 6), np.float32))
        held = [lease.steps[step].p[pointer] for step, pointer in lease.readers["x"]]
        lease.forget()
        assert all(held)
        assert not any(lease.steps[step].p[pointer] for step, pointer in lease.readers["x"])


def a_choice(tmp_path: Path) -> tuple[Path, Path, KernelChoice]:
    path, cache = tmp_path / "model.onnx", tmp_path / "cache"
    built(path, chain, ["n", 8, 4, 6])
    store = store_of(cache)
    with on_kernels(path, cache, [1, 8, 4, 6]) as model:
        asked = model.planner({"x": [1, 8, 4, 6]}, store.target.lanes).problems()
        problems = list(dict.fromkeys(each for unit in asked.values() for each in unit))
        found = [search(each, store, CKernel(a_compiler()), SearchEffort(1))[0].name for each in problems]
        kernels = tuple(ChosenKernels(each, (key,)) for each, key in zip(problems, found, strict=True))
        choice = KernelChoice(FORMAT, model.unit_count, kernels)
    return path, cache, choice


@pytest.mark.parametrize("shift", [1, 2])
def test_a_choice_that_lists_kernels_of_other_problems_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shift: int
) -> None:
    path, cache, choice = a_choice(tmp_path)
    given = numbers(1, 8, 4, 6)
    place = choice_path(cache, content_of(path))
    save_choice(place, choice)
    with open_model(path, cache_dir=cache) as model:
        assert isinstance(model, CompiledModel)
        right = to_numpy(model.run(0, model.unit_count, given))
    kept = json.loads(place.read_text(encoding="utf-8"))
    libraries = [each["libraries"] for each in kept["kernels"]]
    assert len(libraries) > 2
    for at, each in enumerate(kept["kernels"]):
        each["libraries"] = libraries[(at + shift) % len(libraries)]
    place.write_text(json.dumps(kept), encoding="utf-8")
    caplog.set_level(logging.WARNING)
    with open_model(path, cache_dir=cache) as model:
        assert not isinstance(model, CompiledModel)
        same(model.run(0, model.unit_count, given), right)
    assert "and the choice lists it for" in caplog.text


def test_a_child_that_crashes_is_counted() -> None:
    def crash() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def fail() -> dict[str, Any]:
        raise ValueError("no such graph")

    assert in_child(crash, 10) == (None, "ended by SIGKILL")
    assert in_child(fail, 10) == (None, "ValueError: no such graph")
    assert in_child(lambda: {"wrong": 0}, 10) == ({"wrong": 0}, "")


def test_the_generator_makes_everything_that_kernels_do() -> None:
    kinds: set[str] = set()
    for seed in range(60):
        kinds |= {node.op_type for node in RandomGraph(seed).model().graph.node}
    assert kinds >= {"Conv", "MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean", "Mul", "Add", "Concat"}
    assert kinds >= {"Gemm", "MatMul", "Clip", "Relu", "LeakyRelu", "HardSwish", "Gelu", "QuickGelu", "Softmax"}
