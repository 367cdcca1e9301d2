"""What compiled models give owns its memory, and is whole when a batch of them runs in parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cotenant.execute.open_model import open_model
from cotenant.execute.runner import array_of, to_numpy
from cotenant.execute.threads.executor import ThreadExecutor
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.execute.lease import Kept
from kernel_choices import compiled
from kernel_graphs import Writer
from kernels import a_compiler
from part_plans import check_answers, ways
from port_graphs import Arrays, onnx_answer, spoil, wrong_outputs

SIZE = 6
CHANNELS = 16


def ports(path: Path) -> None:
    """Convolutions whose results, of many pixels and of one, are outputs early on, as the input is and a copy of it."""
    w = Writer()
    stem = w.op("Relu", w.conv("x", 3, CHANNELS, 3, 1))
    softened = w.op("Softmax", w.conv(stem, CHANNELS, CHANNELS, 1), axis=1)  # for onnxruntime
    pixel = w.op("Sigmoid", w.conv(w.op("GlobalAveragePool", softened), CHANNELS, CHANNELS, 1))
    again = w.op("Relu", w.conv(pixel, CHANNELS, CHANNELS, 1))
    scaled = w.op("Mul", w.conv(stem, CHANNELS, CHANNELS, 3, 1), again)
    last = w.op("Softmax", w.conv(scaled, CHANNELS, 8, 1), axis=1)
    copy = w.op("Identity", "x")
    w.save(path, {"x": ["n", 3, SIZE, SIZE]}, [pixel, last, stem, copy, again])
    model = onnx.load(path)
    model.graph.output.append(model.graph.input[0])
    onnx.save(model, path)


def pictures(seed: int, rows: int) -> Arrays:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 3, SIZE, SIZE)).astype(np.float32)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    a_compiler()
    made = tmp_path_factory.mktemp("owned")
    ports(made / "ports.onnx")
    compiled(made / "ports.onnx", made / "cache", {"x": [1, 3, SIZE, SIZE]}, 1)
    return made


def opened(folder: Path) -> CompiledModel:
    model = open_model(folder / "ports.onnx", cache_dir=folder / "cache")
    assert isinstance(model, CompiledModel)
    assert any(model.prepared({"x": [1, 3, SIZE, SIZE]}).plan.ours)
    return model


def test_what_a_compiled_run_gives_stays_when_all_else_is_gone(folder: Path) -> None:
    source = onnx.load(folder / "ports.onnx")
    kept: list[tuple[list[int], dict[str, Any], Arrays]] = []
    with opened(folder) as model:
        units = model.unit_count
        every = [[0, units], list(range(units + 1)), *([0, cut, units] for cut in range(1, units))]
        for at, cuts in enumerate(every):
            given = pictures(at, 1 + at % 3)
            tensors: Mapping[str, Any] = {"x": given["x"].copy()}
            for start, end in pairwise(cuts):
                tensors = model.run(start, end, tensors)
            kept.append((cuts, to_numpy(tensors), onnx_answer(source, given)))
            del tensors
    del model
    held = [spoil(right) for _, _, right in kept]
    assert held
    for cuts, got, right in kept:
        assert not wrong_outputs(got, right), cuts


def test_an_array_of_what_stays_in_a_run_is_a_copy(folder: Path) -> None:
    """Of tensors of one pixel, too, whose blocks lie as an array does; the memory of a run is used for the next one."""
    with opened(folder) as model:
        seen = 0
        for cut in range(1, model.unit_count):
            tensors = model.run(0, cut, pictures(cut, 1))
            stay = {name: value for name, value in tensors.items() if isinstance(value, Kept)}
            arrays = {name: array_of(value) for name, value in stay.items()}
            copies = {name: array.copy() for name, array in arrays.items()}
            seen += len(stay)
            del tensors, stay
            for seed in range(3):
                model.run(0, model.unit_count, pictures(100 + seed, 1))
            for name, array in arrays.items():
                np.testing.assert_array_equal(array, copies[name], err_msg=f"{name} at {cut}")
        assert seen


def test_every_output_of_a_compiled_model_is_answered(folder: Path) -> None:
    source = onnx.load(folder / "ports.onnx")
    executor = ThreadExecutor()
    model = opened(folder)
    check_answers(executor, model, partial(onnx_answer, source), pictures, ways(model, 24))
    executor.close()


def test_left_out_tensors_are_left_out_of_what_a_compiled_run_gives(folder: Path) -> None:
    """Also where the memory of the run has room for them, and something lies there."""
    with opened(folder) as model:
        units, outputs = model.unit_count, [tensor.name for tensor in model.outputs]
        for cut in range(1, units):
            read, made = model.dfg.segment_io(cut, units)
            tensors = model.run(0, cut, pictures(cut, 2))
            found = model.run(cut, units, {name: tensors[name] for name in read})
            assert set(found) == set(made) | (set(read) & set(outputs)), cut


def test_tensors_that_are_not_live_any_more_may_be_given(folder: Path) -> None:
    """As where parts of a batch are joined: what earlier units made is still among them."""
    source = onnx.load(folder / "ports.onnx")
    with opened(folder) as model:
        units = model.unit_count
        for first, second in combinations(range(2, units), 2):
            given = pictures(second, 2)
            before = model.run(0, first - 1, given)
            arrays = to_numpy(model.run(first - 1, first, before))  # in the same memory, which has no more than that
            behind = model.run(first, second, arrays)
            found = model.run(second, units, {**before, **to_numpy(behind)})
            assert not wrong_outputs(to_numpy(found), onnx_answer(source, given)), (first, second)
