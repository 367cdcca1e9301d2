"""Models on compiled kernels against onnxruntime: whole, cut anywhere, in parts, on several cores, in any version."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.core.actions import Launch
from cotenant.errors import InvalidValueError
from cotenant.execute.errors import ModelError, TensorError
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.open_model import open_model
from cotenant.execute.runner import to_numpy
from cotenant.execute.threads.executor import ThreadExecutor
from cotenant.techniques.layer_blocks.execute.choice import KernelChoice
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.execute.lease import Kept
from cotenant.techniques.layer_blocks.execute.loaded_kernels import apply, store_of
from cotenant.work import Share, Work
from kernel_choices import compiled
from kernel_graphs import SIZE, network, products
from kernels import a_compiler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    a_compiler()
    made = tmp_path_factory.mktemp("compiled")
    network(made / "network.onnx")
    products(made / "products.onnx")
    compiled(made / "network.onnx", made / "cache", {"x": [1, 3, SIZE, SIZE]}, 2)
    compiled(made / "products.onnx", made / "cache", {"x": [1, 7, 20]}, 1)
    return made


@pytest.fixture
def model(folder: Path) -> Iterator[CompiledModel]:
    opened = open_model(folder / "network.onnx", cache_dir=folder / "cache")
    assert isinstance(opened, CompiledModel)
    with opened:
        yield opened


def inputs(rows: int = 1, seed: int = 0) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 3, SIZE, SIZE), np.float32)}


def expected(folder: Path, given: dict[str, Any], name: str = "network.onnx") -> dict[str, Any]:
    with SegmentedModel.open(folder / name, cache_dir=folder / "cache") as plain:
        return to_numpy(plain.run(0, plain.unit_count, given))


def same(got: dict[str, Any], right: dict[str, Any]) -> None:
    got = to_numpy(got)
    assert got.keys() == right.keys()
    for name, array in right.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-4 * float(np.abs(array).max()))


def test_most_units_run_on_kernels(model: CompiledModel) -> None:
    plan = model.prepared({"x": [1, 3, SIZE, SIZE]}).plan
    kinds = [
        {model.dfg.operators[at].op_type for at in unit.operators}
        for unit, ours in zip(model.dfg.units, plan.ours, strict=True)
        if not ours
    ]
    assert kinds == [{"Softmax"}] or kinds == [{"Softmax", "Mul"}]


@pytest.mark.parametrize("rows", [1, 3])
def test_the_whole_is_that_of_onnxruntime(model: CompiledModel, folder: Path, rows: int) -> None:
    same(model.run(0, model.unit_count, inputs(rows)), expected(folder, inputs(rows)))


def test_it_may_be_cut_anywhere(model: CompiledModel, folder: Path) -> None:
    right = expected(folder, inputs(2))
    end = model.unit_count
    for cut in range(1, end):
        same(model.run(cut, end, model.run(0, cut, inputs(2))), right)
    tensors = inputs(2)
    for start in range(end):
        tensors = model.run(start, start + 1, tensors)
    same(tensors, right)


def test_tensors_that_stay_are_used_where_they_are_or_copied(model: CompiledModel, folder: Path) -> None:
    """Two runs at a time, each cut; then tensors of one that were made arrays, as parts of rows are."""
    right = [expected(folder, inputs(1, seed)) for seed in (1, 2)]
    end = model.unit_count
    for cut in range(1, end):
        halves = [model.run(0, cut, inputs(1, seed)) for seed in (1, 2)]
        for half, each in zip(halves, right, strict=True):
            same(model.run(cut, end, half), each)
        arrays = to_numpy(model.run(0, cut, inputs(1, 1)))
        same(model.run(cut, end, arrays), right[0])


def test_units_side_by_side_leave_each_other_alone(model: CompiledModel, folder: Path) -> None:
    """From one cut, two stretches run from the same tensors, the later one first; then what follows takes both."""
    right = expected(folder, inputs())
    end = model.unit_count
    found = 0
    for first, middle, last in itertools.combinations(range(1, end), 3):
        reads = set(model.dfg.segment_io(middle, last)[0])
        if reads - set(model.dfg.live(first)):
            continue  # the second stretch needs the first
        found += 1
        live = model.run(0, first, inputs())
        second = model.run(middle, last, live)
        one = model.run(first, middle, live)
        both = {**live, **one, **second}
        same(model.run(last, end, {name: both[name] for name in model.dfg.live(last)}), right)
    assert found


def test_what_was_overwritten_is_refused(model: CompiledModel) -> None:
    end = model.unit_count
    live = model.run(0, 1, inputs())
    kept = [each for each in live.values() if isinstance(each, Kept)]
    assert kept
    later = model.run(1, end - 1, live)
    with pytest.raises(TensorError, match="is gone: later units of its run have been run"):
        kept[0].numpy()
    assert later


def test_memory_is_used_again_when_nobody_holds_it(model: CompiledModel) -> None:
    prepared = model.prepared({"x": [1, 3, SIZE, SIZE]})
    model.run(0, model.unit_count, inputs())
    assert len(prepared._idle) == 1
    halves = [model.run(0, 3, inputs()) for _ in range(3)]
    assert len(prepared._idle) == 0
    del halves
    gc.collect()
    assert len(prepared._idle) == 3
    model.run(0, model.unit_count, inputs())
    assert len(prepared._idle) == 3


def test_every_version_computes_the_same(model: CompiledModel, folder: Path) -> None:
    right = expected(folder, inputs())
    assert model.prepared({"x": [1, 3, SIZE, SIZE]}).versions == 2
    for version in (1, 0, 7):
        same(model.run(0, model.unit_count, inputs(), version=version), right)
        half = model.run(0, 4, inputs(), version=version)
        same(model.run(4, model.unit_count, half, version=1 - min(version, 1)), right)


def test_more_cores_compute_the_same_and_join_at_a_stop(folder: Path, model: CompiledModel) -> None:
    cores = sorted(os.sched_getaffinity(0))
    right = expected(folder, inputs(2))
    threads = (cores[0], cores[-1] if len(cores) > 1 else 900, 901)
    for _ in range(10):
        same(model.run(0, model.unit_count, inputs(2), threads), right)
        same(model.run(0, model.unit_count, inputs(2), 2), right)
    executor = ThreadExecutor()
    executor.add_model("t", model)
    executor.put(1, inputs(2))
    ended, expanded = threading.Event(), []
    errors: list[str | None] = []
    end = model.unit_count
    work = Work("t", 0, 2, 0, end, 1)
    launch = Launch(1, 1, (1,), work, True, Share(threads[:1]), 0, stops=tuple(range(1, end)))
    executor.expand(1, Share(tuple(sorted(threads[:2]))), expanded.append)
    executor.start(launch, lambda _, error, __: (errors.append(error), ended.set()))  # type: ignore[func-returns-value]
    assert ended.wait(20)
    assert errors == [None]
    assert expanded == [1]
    same(dict(executor.take(1)), right)
    executor.close()


def test_a_launch_takes_in_a_core_without_a_stop(folder: Path, model: CompiledModel) -> None:
    """While its steps run: it is one block from its first unit to its last, whatever stops it has."""
    executor = ThreadExecutor()
    executor.add_model("t", model)
    right = expected(folder, inputs())
    runtime, took, most, sizes = model._runtime, [], [], []
    assert runtime is not None

    class Expanding:
        """Has the launch grow when its block is open, and waits for who was called."""

        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

        def run(self, block: int, steps: Any, first: int, last: int, others: Any = ()) -> int:
            took.append(executor.expand(1, Share((0, 903)), lambda _: took.append(False)))
            most.append(runtime.run(block, steps, first, last, others, wait=True))
            sizes.append(last - first)
            return most[-1]

    prepared = model.prepared({"x": [1, 3, SIZE, SIZE]})
    prepared.runtime = Expanding()  # type: ignore[assignment]
    executor.put(1, inputs())
    ended, end = threading.Event(), model.unit_count
    launch = Launch(1, 1, (1,), Work("t", 0, 1, 0, end), True, Share((0,)), 0, stops=tuple(range(1, end)))
    executor.start(launch, lambda *_: ended.set())
    assert ended.wait(20)
    prepared.runtime = runtime
    assert all(took)
    assert max(most) == 2
    assert max(sizes) > 3, "steps of many units, without a stop"
    same(dict(executor.take(1)), right)
    assert not executor.expand(1, Share((0, 903)), took.append), "it has ended"
    executor.close()


def test_products_run_on_kernels_at_the_shapes_they_were_made_for(folder: Path) -> None:
    with open_model(folder / "products.onnx", cache_dir=folder / "cache") as model:
        assert isinstance(model, CompiledModel)
        for rows, batch, ours in ((7, 1, 2), (7, 4, 2), (5, 1, 0)):
            given = {"x": np.random.default_rng(0).standard_normal((batch, rows, 20), np.float32)}
            assert sum(model.prepared({"x": given["x"].shape}).plan.ours) == ours
            same(model.run(0, model.unit_count, given), expected(folder, given, "products.onnx"))


def test_times_of_units_and_of_stretches_are_told(model: CompiledModel) -> None:
    assert len(model.unit_ns(inputs())) == model.unit_count
    assert min(model.unit_ns(inputs())) >= 1
    segments = model.segment_ns(inputs())
    plan = model.prepared({"x": [1, 3, SIZE, SIZE]}).plan
    assert [at for start, end in segments for at in range(start, end)] == [
        at for at, ours in enumerate(plan.ours) if ours
    ]
    assert all(min(pair) > 0 for pair in segments.values())


def test_units_left_out_and_numbers_of_threads_stay_with_onnxruntime(folder: Path) -> None:
    store = store_of(folder / "cache")
    with CompiledModel.open(folder / "network.onnx", cache_dir=folder / "cache") as model:
        choice = compiled(folder / "network.onnx", folder / "cache", {"x": [1, 3, SIZE, SIZE]}, 2)
        kept = KernelChoice(choice.format, choice.units, choice.kernels, (0, 1, 2), (1,))
        apply(model, kept, store)
        plan = model.prepared({"x": [1, 3, SIZE, SIZE]}).plan
        assert plan.ours[:3] == (False, False, False)
        right = expected(folder, inputs())
        same(model.run(0, model.unit_count, inputs()), right)
        assert model.prepared({"x": [1, 3, SIZE, SIZE]})._idle == [], "onnxruntime ran it whole"
        same(model.run(1, model.unit_count, model.run(0, 1, inputs())), right)


def test_a_wrong_call_is_refused(model: CompiledModel) -> None:
    with pytest.raises(TensorError, match="input 'x' is missing"):
        model.run(0, model.unit_count, {})
    with pytest.raises(TensorError, match="has shape"):
        model.run(0, model.unit_count, {"x": np.zeros((1, 3, SIZE), np.float32)})
    with pytest.raises(InvalidValueError):
        model.run(3, 3, inputs())


def test_a_broken_library_is_refused_with_a_sentence(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder / "cache", tmp_path / "cache")
    store = store_of(tmp_path / "cache")
    with open_model(folder / "network.onnx", cache_dir=tmp_path / "cache") as model:
        assert isinstance(model, CompiledModel)
        content = model.graph_path.parent.name
    for library in (tmp_path / "cache" / "compiled" / "libraries").iterdir():
        library.write_bytes(library.read_bytes() + b"\0")
    caplog.set_level(logging.WARNING)
    with open_model(folder / "network.onnx", cache_dir=tmp_path / "cache") as model:
        assert not isinstance(model, CompiledModel)
        same(model.run(0, model.unit_count, inputs()), expected(folder, inputs()))
    assert "its compiled kernels are not used" in caplog.text
    assert "its digest differs; remove it and run cotenant compile again" in caplog.text
    with pytest.raises(ModelError, match="its kernels cannot be used"):
        open_model(folder / "network.onnx", cache_dir=tmp_path / "cache", content=content)
    (store.folder / "candidates.jsonl").unlink()
    caplog.clear()
    with open_model(folder / "network.onnx", cache_dir=tmp_path / "cache") as model:
        assert not isinstance(model, CompiledModel)
    assert "has no record of a library" in caplog.text
