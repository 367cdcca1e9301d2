"""Cut execution equals whole execution, whatever the cuts, threads and models."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onnx_samples as samples
from cotenant.errors import InvalidValueError
from cotenant.execute.errors import ModelError, TensorError
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.runner import to_numpy
from cotenant.graph.datatypes import numpy_type

FLAG = {"flag": np.array(True)}


def opened(model: onnx.ModelProto, folder: Path) -> SegmentedModel:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return SegmentedModel.open(path, cache_dir=folder / "cache")


def by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def along(model: SegmentedModel, cuts: list[int], feeds: dict[str, Any], threads: Any = 1) -> dict[str, Any]:
    places = [0, *cuts, model.unit_count]
    tensors: dict[str, Any] = feeds
    for start, end in itertools.pairwise(places):
        tensors = model.run(start, end, tensors, threads)
        if end < model.unit_count:
            assert tuple(tensors) == model.dfg.live(end)
    return to_numpy(tensors)


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, atol=1e-4, rtol=1e-4, err_msg=name)


CASES: dict[str, tuple[onnx.ModelProto, list[dict[str, Any]]]] = {}
for _name, _model in {
    "residual_cnn": samples.residual_cnn(),
    "many_ports": samples.many_ports(),
    "sequences": samples.sequences(),
}.items():
    CASES[_name] = (_model, [samples.feeds(_model, seed, dim) for seed, dim in ((0, 1), (1, 3))])
CASES["encoder"] = (samples.encoder(), [samples.encoder_feeds(1, 5), samples.encoder_feeds(3, 9)])
CASES["branching"] = (
    samples.branching(stateful=False),
    [{**samples.feeds(samples.branching(stateful=False), 0, 2), "flag": np.array(flag)} for flag in (True, False)],
)
CASES["stateful"] = (
    samples.branching(),
    [{**samples.feeds(samples.branching(), 0, 3), "flag": np.array(flag)} for flag in (True, False)],
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = {name: opened(model, tmp_path_factory.mktemp(name)) for name, (model, _) in CASES.items()}
    yield made
    for model in made.values():
        model.close()


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_cuts_give_the_results_of_the_whole(
    models: dict[str, SegmentedModel], name: str, data: st.DataObject
) -> None:
    model = models[name]
    cuts = sorted(data.draw(st.sets(st.integers(1, model.unit_count - 1)) if model.unit_count > 1 else st.just(set())))
    threads = data.draw(st.sampled_from([1, 2, (0,)]))
    for feeds in CASES[name][1]:
        assert_same(along(model, cuts, feeds, threads), by_onnxruntime(CASES[name][0], feeds))


@pytest.mark.parametrize("name", CASES)
def test_every_unit_alone_and_the_whole_agree(models: dict[str, SegmentedModel], name: str) -> None:
    model = models[name]
    model.prepare([(0, model.unit_count)])
    for feeds in CASES[name][1]:
        expected = by_onnxruntime(CASES[name][0], feeds)
        assert_same(to_numpy(model.run(0, model.unit_count, feeds)), expected)
        assert_same(along(model, list(range(1, model.unit_count)), feeds), expected)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12),
    outputs=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    seed=st.integers(0, 9),
)
def test_random_graphs(tmp_path: Path, steps: list[tuple[int, int, int]], outputs: list[int], seed: int) -> None:
    proto = samples.random_dag(steps, outputs)
    feeds = samples.feeds(proto, seed)
    with opened(proto, tmp_path) as model:
        assert_same(along(model, list(range(1, model.unit_count)), feeds), by_onnxruntime(proto, feeds))


def test_prepared_ranges_are_composed_longest_first(tmp_path: Path) -> None:
    proto = samples.residual_cnn()
    feeds = samples.feeds(proto)
    with opened(proto, tmp_path) as model:
        count = model.unit_count
        assert count > 6
        model.prepare([(0, 2), (0, 1), (4, 5), (0, 2)])
        model.prepare([(0, 2)])
        assert_same(to_numpy(model.run(0, count, feeds)), by_onnxruntime(proto, feeds))
        used = [(s.start, s.end) for s in model._plans[(1, 0, count)]]
        assert used == [(0, 2), (2, 4), (4, 5), (5, count)]
        model.prepare([(0, count)])
        assert_same(to_numpy(model.run(0, count, feeds)), by_onnxruntime(proto, feeds))
        assert [(s.start, s.end) for s in model._plans[(1, 0, count)]] == [(0, count)]


def test_the_blocked_layout_crosses_cuts(models: dict[str, SegmentedModel]) -> None:
    ops = [op.op_type for op in models["residual_cnn"].dfg.operators]
    assert ops.count("ReorderOutput") <= 2  # naive cuts would reorder at every one
    assert models["residual_cnn"].unit_count >= 8


def test_several_threads_share_sessions(models: dict[str, SegmentedModel]) -> None:
    model, proto = models["residual_cnn"], CASES["residual_cnn"][0]
    inputs = [samples.feeds(proto, seed, 1 + seed % 3) for seed in range(6)]
    expected = [by_onnxruntime(proto, feeds) for feeds in inputs]
    failures: list[BaseException] = []
    start = threading.Barrier(len(inputs))

    def work(position: int) -> None:
        try:
            start.wait()
            for turn in range(5):
                cuts = sorted({1 + (position + turn + k) % (model.unit_count - 1) for k in range(3)})
                assert_same(along(model, cuts, inputs[position], 1 + turn % 2), expected[position])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_results_outlive_the_model(tmp_path: Path) -> None:
    proto = samples.residual_cnn()
    feeds = samples.feeds(proto)
    model = opened(proto, tmp_path)
    half = model.run(0, 3, feeds)
    kept = model.run(3, model.unit_count, half)
    model.close()
    assert_same(to_numpy(kept), by_onnxruntime(proto, feeds))
    with pytest.raises(ModelError, match="closed"):
        model.run(0, 3, feeds)


def test_cores_name_a_session(models: dict[str, SegmentedModel]) -> None:
    model, proto = models["residual_cnn"], CASES["residual_cnn"][0]
    feeds = samples.feeds(proto)
    for threads in ((0,), (1,), (0, 1), 2):
        assert_same(along(model, [3], feeds, threads), by_onnxruntime(proto, feeds))
    rungs = {key[0] for key in model._segments}
    assert {1, 2, (0, 1)} <= rungs
    assert not rungs & {(0,), (1,)}
    for wrong in (0, -1, (), (1, 1)):
        with pytest.raises(ValueError):
            model.run(0, 1, feeds, wrong)


def test_sequences_never_cross_a_cut(models: dict[str, SegmentedModel]) -> None:
    model = models["sequences"]
    assert model.unit_count >= 2
    for boundary in model.dfg.boundaries:
        assert all(model.dfg.tensors[name].dtype.startswith("tensor(") for name in boundary.live)


def test_strings_run_as_a_whole(tmp_path: Path) -> None:
    with opened(samples.strings(), tmp_path) as model:
        assert model.unit_count == 1
        assert "not numeric" in model.uncut_reason
        words = np.array(["one", "two"], dtype=object)
        assert list(model.run(0, 1, {"words": words})["same"]) == ["one", "two"]
        assert numpy_type(model.inputs[0].dtype) == np.dtype(np.str_)


def test_inputs_and_outputs_are_described(models: dict[str, SegmentedModel]) -> None:
    model = models["encoder"]
    assert [(t.name, t.dtype, t.shape) for t in model.inputs] == [
        ("ids", "tensor(int64)", (None, None)),
        ("mask", "tensor(int64)", (None, None)),
    ]
    assert [(t.name, t.dtype, t.shape) for t in model.outputs] == [("y", "tensor(float)", (None, None, 16))]
    assert numpy_type("tensor(int64)") == np.dtype(np.int64)
    assert numpy_type("seq(tensor(float))") is None


def test_wrong_tensors_are_named(models: dict[str, SegmentedModel]) -> None:
    model = models["residual_cnn"]
    good = samples.feeds(CASES["residual_cnn"][0])
    with pytest.raises(TensorError, match="'x' is missing"):
        model.run(0, 1, {})
    with pytest.raises(TensorError, match=r"has shape \(2, 3, 16\), expected"):
        model.run(0, 1, {"x": good["x"][..., 0]})
    with pytest.raises(TensorError, match=r"is tensor\(double\), expected tensor\(float\)"):
        model.run(0, 1, {"x": good["x"].astype(np.float64)})
    with pytest.raises(TensorError, match="no input 'z'"):
        model.run(0, 1, {**good, "z": good["x"]})
    with pytest.raises(TensorError, match="is live before unit 2"):
        model.run(2, 3, good)
    for bad in ((0, 0), (-1, 2), (3, model.unit_count + 1)):
        with pytest.raises(InvalidValueError, match="range of units"):
            model.run(*bad, good)
        with pytest.raises(InvalidValueError, match="range of units"):
            model.prepare([bad])


def test_non_contiguous_arrays_are_taken(models: dict[str, SegmentedModel]) -> None:
    proto = CASES["residual_cnn"][0]
    feeds = samples.feeds(proto)
    turned = {"x": np.ascontiguousarray(feeds["x"].transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)}
    assert not turned["x"].flags["C_CONTIGUOUS"]
    assert_same(along(models["residual_cnn"], [2], turned), by_onnxruntime(proto, feeds))


def test_suggested_cuts_run(models: dict[str, SegmentedModel]) -> None:
    model, proto = models["encoder"], CASES["encoder"][0]
    weights = [float(unit.macs + 1) for unit in model.dfg.units]
    cuts = model.suggest_cuts(weights, sum(weights) / 3)
    assert cuts[0] == 0
    assert cuts[-1] == model.unit_count
    assert len(cuts) >= 4
    feeds = samples.encoder_feeds(2, 4)
    assert_same(along(model, list(cuts[1:-1]), feeds), by_onnxruntime(proto, feeds))


def test_costs_at_other_shapes(models: dict[str, SegmentedModel]) -> None:
    model = models["encoder"]
    long = model.dfg_at({"ids": (2, 40), "mask": (2, 40)})
    assert [unit.operators for unit in long.units] == [unit.operators for unit in model.dfg.units]
    assert long.assumed == ()
    linear = 2 * (4 * 16 * 16 + 2 * 16 * 32)
    assert long.macs == 2 * 40 * linear + 2 * 2 * 2 * 40 * 40 * 16
    assert all(op.is_costed for op in long.operators)
    assert models["residual_cnn"].dfg_at({"x": (5, 3, 16, 16)}).macs >= 5 * models["residual_cnn"].dfg.macs
