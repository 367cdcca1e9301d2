"""A placed model gives what onnxruntime gives for the whole, wherever its units run, and falls back where it cannot."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import onnx_samples as samples
from cotenant.errors import InvalidValueError
from cotenant.execute.errors import ModelError, TensorError
from cotenant.execute.runner import to_numpy
from cotenant.profiles.profile_file import ProfileError
from cotenant.techniques.placement.execute import placeable
from cotenant.techniques.placement.execute.placed_model import PlacedModel
from placed_samples import open_placed, placement, random_model, random_placement

CORES = (0, 1)


def opened(model: onnx.ModelProto, folder: Path) -> PlacedModel:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return open_placed(path, cache_dir=folder / "cache")


def whole(model: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(to_numpy(got)[name], value, err_msg=name)


class LaneWatch:
    """Lanes that begin after this was made."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    @property
    def names(self) -> list[str]:
        new = [each for each in threading.enumerate() if each not in self._before]
        return [each.name for each in new if each.name.startswith("cotenant-lane")]

    def left(self) -> list[str]:
        """Those that are there when such as end have ended: they are told to, and nobody waits for it."""
        for each in threading.enumerate():
            if each not in self._before:
                each.join(5)
        return self.names


def fork(s: samples.Sketch) -> onnx.ModelProto:
    """A stem, two branches and a sum, all of heavy operators."""
    stem = s.op("MatMul", "x", s.weight(4, 4), out="stem")
    ends = [s.op("MatMul", s.op("MatMul", stem, s.weight(4, 4)), s.weight(4, 4)) for _ in range(2)]
    s.op("MatMul", s.op("Add", *ends), s.weight(4, 4), out="y")
    return s.model([samples.info("x", ["rows", 4])], [samples.info("y", ["rows", 4])])


FORK = fork(samples.Sketch(5))
FEEDS = samples.feeds(FORK, 1, 3)
FORKED = ["cpu:0-1", "cpu:0", "cpu:0", "cpu:1", "cpu:1", "cpu:0-1"]
"""The stem and the end on both cores, a branch a core."""


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[PlacedModel]:
    with opened(FORK, tmp_path) as model:
        assert model.unit_count == len(FORKED)
        model.place(placement(model, list(zip(model.dfg.unit_names, FORKED, strict=True))))
        yield model


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(1, 16), st.sampled_from([2, 3]))
def test_any_placement_gives_what_the_whole_gives(tmp_path: Path, seed: int, size: int, cores: int) -> None:
    source = random_model(seed, size)
    feeds = samples.feeds(source, seed, 3)
    expected = whole(source, feeds)
    with opened(source, tmp_path) as model:
        for at in range(2):
            model.place(random_placement(model, seed + at, cores))
            for _ in range(2):  # bindings are used again
                assert_equal(model.run(0, model.unit_count, feeds, tuple(range(cores))), expected)


def test_a_branching_model_runs_in_pieces_with_a_lane_for_the_other_core(forked: PlacedModel) -> None:
    assert [piece.cores for piece in forked.tasks(2)] == [range(2), range(1), range(1, 2), range(2)]
    watch = LaneWatch()
    assert_equal(forked.run(0, 6, FEEDS, CORES), whole(FORK, FEEDS))
    assert watch.names == ["cotenant-lane-1"]
    forked.keep([1])
    assert watch.left() == []
    assert_equal(forked.run(0, 6, FEEDS, CORES), whole(FORK, FEEDS))


def test_a_linear_model_is_one_ordinary_session(tmp_path: Path) -> None:
    s = samples.Sketch(2)
    x = "x"
    for _ in range(5):
        x = s.op("MatMul", x, s.weight(4, 4))
    chain = s.model([samples.info("x", ["rows", 4])], [samples.info(x, ["rows", 4])])
    feeds = samples.feeds(chain, 0, 2)
    with opened(chain, tmp_path) as model:
        for device, threads in (("cpu:1", 1), ("cpu:0-1", CORES)):
            model.place(placement(model, [(name, device) for name in model.dfg.unit_names]))
            model.keep([])
            model.prepare([(0, model.unit_count)], CORES)
            assert len(model.tasks(2)) == 1
            assert list(model._segments) == [(threads, 0, model.unit_count)]
            assert_equal(model.run(0, model.unit_count, feeds, CORES), whole(chain, feeds))
            assert len(model._segments) == 1


def test_other_shares_and_parts_run_as_ever(forked: PlacedModel) -> None:
    expected = whole(FORK, FEEDS)
    for threads in (1, 2, (0,), (0, 1, 2)):
        assert_equal(forked.run(0, 6, FEEDS, threads), expected)
    between = forked.run(0, 3, FEEDS, CORES)
    assert tuple(between) == forked.dfg.live(3)
    assert_equal(forked.run(3, 6, between, CORES), expected)
    assert not forked._loaded


def test_runs_side_by_side_do_not_mix(forked: PlacedModel) -> None:
    feeds = [samples.feeds(FORK, seed, 1 + seed) for seed in range(6)]
    expected = [whole(FORK, each) for each in feeds]
    got: dict[int, list[Any]] = {at: [] for at in range(len(feeds))}

    def ask(at: int) -> None:
        for _ in range(20):
            got[at].append(forked.run(0, 6, feeds[at], CORES))

    askers = [threading.Thread(target=ask, args=(at,)) for at in got]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    for at, answers in got.items():
        assert len(answers) == 20
        for answer in answers:
            assert_equal(answer, expected[at])


def test_a_piece_that_fails_fails_its_launch_once(tmp_path: Path) -> None:
    s = samples.Sketch(4)
    s.constant(np.arange(20, dtype=np.float32).reshape(10, 2), "table")
    left = s.op("MatMul", s.op("Gather", "table", "index", axis=0), s.weight(2, 2), out="left")
    right = s.op("MatMul", "x", s.weight(2, 2), out="right")
    s.op("MatMul", s.op("Sum", left, right), s.weight(2, 2), out="y")
    source = s.model(
        [samples.info("index", ["n"], onnx.TensorProto.INT64), samples.info("x", ["n", 2])],
        [samples.info("y", ["n", 2])],
    )
    good = {"index": np.array([1, 2]), "x": np.ones((2, 2), np.float32)}
    with opened(source, tmp_path) as model:
        lanes = {"left": "cpu:1", "right": "cpu:0"}
        units = [
            (name, lanes.get(unit.outputs[0], "cpu:0-1"))
            for name, unit in zip(model.dfg.unit_names, model.dfg.units, strict=True)
        ]
        units = [(name, "cpu:1" if "Gather" in name else device) for name, device in units]
        model.place(placement(model, units))
        assert {piece.cores for piece in model.tasks(2)} == {range(1), range(1, 2), range(2)}
        watch = LaneWatch()
        for _ in range(3):
            with pytest.raises(ModelError, match="indices element out of data bounds"):
                model.run(0, model.unit_count, {**good, "index": np.array([1, 20])}, CORES)
            assert_equal(model.run(0, model.unit_count, good, CORES), whole(source, good))
        with pytest.raises(TensorError, match="'x' is missing"):
            model.run(0, model.unit_count, {"index": good["index"]}, CORES)
        assert watch.names == ["cotenant-lane-1"]
    assert watch.left() == []


def test_without_pieces_or_lanes_it_runs_sequentially(
    forked: PlacedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(placeable, "Lane", no_thread)
        forked.prepare([(0, 6)], CORES)
    assert "runs sequentially on 2 cores, not by its placement: can't start new thread" in caplog.text
    assert (CORES, 0, 6) in forked._segments
    assert_equal(forked.run(0, 6, FEEDS, CORES), whole(FORK, FEEDS))
    forked.keep([])  # which forgets that
    forked._weights._file = Path("gone")
    forked._weights._values = None
    monkeypatch.setattr(
        forked.inner, "load_units", lambda *_, **__: (_ for _ in ()).throw(ModelError(Path("m"), "no", "way"))
    )
    assert_equal(forked.run(0, 6, FEEDS, CORES), whole(FORK, FEEDS))


def test_tensors_go_when_the_last_reader_has_ended(forked: PlacedModel) -> None:
    forked.prepare([(0, 6)], CORES)
    crew = forked._loaded[CORES]
    assert crew is not None
    held: list[set[str]] = []
    run_segment = forked.inner.run_segment

    def noted(segment: Any, values: dict[str, Any], options: Any = None) -> None:
        run_segment(segment, values, options)
        held.append(set(values))

    forked.inner.run_segment = noted  # type: ignore[method-assign]
    forked.run(0, 6, FEEDS, CORES)
    assert held[0] == {"x", "stem"}
    assert held[3] == {*forked.tasks(2)[3].inputs, "y"}


def test_it_ends_with_its_model(tmp_path: Path) -> None:
    watch = LaneWatch()
    with opened(FORK, tmp_path) as model:
        model.place(placement(model, list(zip(model.dfg.unit_names, FORKED, strict=True))))
        model.run(0, 6, FEEDS, CORES)
    with pytest.raises(ModelError, match="closed"):
        model.run(0, 6, FEEDS, CORES)
    assert watch.left() == []


def test_a_placement_of_another_graph_is_refused(forked: PlacedModel) -> None:
    units = list(zip(forked.dfg.unit_names, FORKED, strict=True))
    good = placement(forked, units)
    with pytest.raises(ProfileError, match="expected each of its 6 units once"):
        forked.place(placement(forked, units[:-1]))
    with pytest.raises(InvalidValueError, match="behind what they read"):
        forked.place(placement(forked, units[::-1]))
    other = type(good)(good.model, "other", 2, 0, 0, 0, good.runs)
    with pytest.raises(ProfileError, match="it is of graph other"):
        forked.place(other)
    assert_equal(forked.run(0, 6, FEEDS, CORES), whole(FORK, FEEDS))


def test_a_failure_ends_what_runs_beside_it(tmp_path: Path) -> None:
    """The other lane is in a loop of hours."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["v", "v"], ["w"])],
        "body",
        [samples.info("i", [], TensorProto.INT64), samples.info("go", [], TensorProto.BOOL), samples.info("v", [1])],
        [samples.info("go_on", [], TensorProto.BOOL), samples.info("w", [1])],
    )
    s = samples.Sketch(4)
    s.constant(np.zeros((10, 1), np.float32), "table")
    s.op("Loop", "times", s.constant(np.array(True)), "x", out="long", body=body)
    s.op("Gather", "table", "index", out="short", axis=0)
    s.op("Concat", "long", "short", out="y", axis=0)
    inputs = [("times", [], TensorProto.INT64), ("x", [1], TensorProto.FLOAT), ("index", [], TensorProto.INT64)]
    source = s.model([samples.info(*each) for each in inputs], [samples.info("y", [2])])
    feeds = {"times": np.array(3), "x": np.ones(1, np.float32), "index": np.array(0)}
    with opened(source, tmp_path) as model:
        lanes = {"long": "cpu:1", "short": "cpu:0"}
        units = zip(model.dfg.unit_names, model.dfg.units, strict=True)
        model.place(placement(model, [(name, lanes.get(unit.outputs[0], "cpu:0-1")) for name, unit in units]))
        assert len(model.tasks(2)) == 3
        assert_equal(model.run(0, model.unit_count, feeds, CORES), whole(source, feeds))
        with pytest.raises(ModelError, match="indices element out of data bounds"):
            model.run(0, model.unit_count, {**feeds, "times": np.array(10**12), "index": np.array(99)}, CORES)


@pytest.mark.parametrize("at", range(3))
def test_crews_may_be_let_go_while_one_is_looked_up(forked: PlacedModel, at: int) -> None:
    """`keep` may come between any two looks at the crews."""

    class Let(dict[Any, Any]):
        """Crews that are let go at one look at them."""

        looks = 0

        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            if Let.looks == at:
                forked._loaded = {}
            Let.looks += 1
            return found

    forked.run(0, forked.unit_count, FEEDS, CORES)
    forked._loaded = Let(forked._loaded)
    for _ in range(3):
        assert_equal(forked.run(0, forked.unit_count, FEEDS, CORES), whole(FORK, FEEDS))
