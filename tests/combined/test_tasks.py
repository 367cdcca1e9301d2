"""The profile of tasks: measured with the real engine, kept, gone on with where it stopped."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from msgspec.structs import replace

from cotenant.errors import ConfigError
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.onnx.unit_times import tensor_bytes, unit_times
from cotenant.measure.opened_model import OpenedModel
from cotenant.measure.solo import Effort
from cotenant.profiles.profile_file import ProfileError
from cotenant.repository import find_versions, tasks_path
from cotenant.techniques.placement.measure import tasks as measuring
from cotenant.techniques.placement.measure.tasks import measure_tasks, placeable
from cotenant.techniques.placement.plan.flat import PlacementProblem
from cotenant.techniques.placement.plan.profiled import graph_of
from cotenant.techniques.placement.task_profile import ModelTasks, load_tasks, save_tasks
from cotenant.work import Share
from onnx_samples import Sketch, info
from repositories import config, write_model

BOTH = Share((0, 1))
QUICK = Effort(budget_s=0.0, min_runs=2, warm_up=1)
BRANCHES = 5


def wide() -> onnx.ModelProto:
    """A matrix product that five branches of two read, one of which keeps as many rows as it likes."""
    s = Sketch()
    trunk = s.op("Relu", s.op("MatMul", "x", s.weight(16, 32)))
    ends = []
    for _ in range(BRANCHES - 1):
        inner = s.op("Tanh", s.op("MatMul", trunk, s.weight(32, 32)))
        ends.append(s.op("MatMul", inner, s.weight(32, 4)))
    above = s.op("NonZero", s.op("Greater", trunk, s.constant(np.float32(0))))
    ends.append(s.op("Gather", s.weight(64, 4), s.op("Gather", above, s.constant(np.array(1)), axis=0)))
    s.op("Concat", *ends, out="y", axis=0)
    return s.model([info("x", [8, 16])], [info("y", [None, 4])])


def repository(root: Path) -> Path:
    write_model(root, "wide", config(), {1: wide})
    return root


def measured(root: Path, steps: list[str] | None = None, **options: bool) -> ModelTasks:
    said = [] if steps is None else steps
    return measure_tasks(root, "wide", BOTH, QUICK, on_step=lambda *each: said.append(each[2]), **options)[1]


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cotenant.techniques.placement.task_profile.MOST_DISTURBANCE", 1e9
    )  # however busy the machine is
    monkeypatch.setattr(measuring, "_PAIR_RUNS", 5)
    monkeypatch.setattr(measuring, "_HAND_OVERS", 5)
    monkeypatch.setattr(measuring, "_TIMED_RUNS", 6)


def test_units_and_tensors_of_a_wide_model_are_measured_and_kept(tmp_path: Path) -> None:
    root = repository(tmp_path)
    steps: list[str] = []
    found = measured(root, steps)
    assert len(steps) == 7
    assert found.cores == 2
    assert len(found.units) == len(found.core.unit_ns) == len(found.whole.unit_ns) > 2 * BRANCHES
    widest = max(found.tensors, key=lambda tensor: len(tensor.readers))
    assert len(widest.readers) == BRANCHES  # one tensor, whoever reads it
    assert widest.size_bytes == 8 * 32 * 4
    assert all(tensor.size_bytes > 0 for tensor in found.tensors)  # also where no size can be inferred
    assert found.hand_over_ns > 0
    assert found.core.whole_ns > 0 < found.whole.whole_ns
    steps.clear()
    assert measured(root, steps) == found
    assert not steps
    kept = load_tasks(tasks_path(root))
    assert kept.models == {"wide": {2: found}}
    assert kept.device.versions["onnxruntime"]
    assert kept.created
    problem = PlacementProblem(graph_of(found))
    assert problem.size == len(found.units)


@pytest.mark.parametrize("others", [1, 3])
def test_fresh_measures_one_model_and_keeps_the_others(tmp_path: Path, others: int) -> None:
    root = repository(tmp_path)
    before = measured(root)
    known = load_tasks(tasks_path(root))
    added = {f"other{at}": {2: before, 4: replace(before, cores=4)} for at in range(others)}
    mine = {2: before, 4: replace(before, cores=4)}
    save_tasks(tasks_path(root), replace(known, models={"wide": mine, **added}))
    steps: list[str] = []
    after = measured(root, steps, fresh=True)
    assert steps
    assert load_tasks(tasks_path(root)).models == {**added, "wide": {**mine, 2: after}}


@pytest.mark.parametrize(("disturbance", "is_again"), [(1.0, False), (1.1, False), (1.2, True), (7.0, True)])
def test_what_was_measured_on_a_busy_machine_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbance: float, is_again: bool
) -> None:
    root = repository(tmp_path)
    before = measured(root)
    known = load_tasks(tasks_path(root))
    monkeypatch.undo()
    save_tasks(tasks_path(root), replace(known, models={"wide": {2: replace(before, disturbance=disturbance)}}))
    steps: list[str] = []
    measured(root, steps)
    assert bool(steps) == is_again


def test_a_stopped_campaign_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = repository(tmp_path)
    done: list[str] = []

    class StoppedError(Exception):
        pass

    def until(name: str) -> None:
        def step(_: int, __: int, words: str) -> None:
            if name in words:
                raise StoppedError

        with pytest.raises(StoppedError):
            measure_tasks(root, "wide", BOTH, QUICK, on_step=step)

    for name in ("_timed", "_launch_ns", "_rounds", "hand_over_ns"):
        work = getattr(measuring, name)

        def noted(*given: object, name: str = name, work: object = work) -> object:
            done.append(name)
            return work(*given)  # type: ignore[operator]

        monkeypatch.setattr(measuring, name, noted)
    until("segments")
    assert done == ["_timed", "_timed", "_launch_ns", "_launch_ns"]
    measured(root)
    assert done[4:] == ["_rounds", "hand_over_ns"]
    measured(root, fresh=True)
    assert len(done) == 12


def test_another_model_is_measured_anew(tmp_path: Path) -> None:
    root = repository(tmp_path)
    first = measured(root)
    model = wide()
    model.graph.initializer[0].raw_data = bytes(len(model.graph.initializer[0].raw_data))
    write_model(root, "wide", config(), {1: lambda: model})
    assert measured(root).digest != first.digest


def test_a_broken_profile_of_tasks_is_measured_anew_and_named(tmp_path: Path) -> None:
    root = repository(tmp_path)
    measured(root)
    tasks_path(root).write_text("{}")
    with pytest.raises(ProfileError, match="format is None, expected 'cotenant-tasks/1'"):
        load_tasks(tasks_path(root))
    assert measured(root).units


@pytest.mark.parametrize(
    ("name", "words"), [("nothing", "model 'nothing': there is no such directory"), ("one", "has one unit")]
)
def test_models_that_cannot_be_placed_are_refused(tmp_path: Path, name: str, words: str) -> None:
    s = Sketch()
    s.op("Relu", "x", out="y")
    write_model(tmp_path, "one", config(), {1: lambda: s.model([info("x", [1, 4])], [info("y", [1, 4])])})
    with pytest.raises(ConfigError, match=words):
        measure_tasks(tmp_path, name, BOTH, QUICK, on_step=lambda *_: None)


def test_models_on_compiled_kernels_are_refused(tmp_path: Path) -> None:
    found = find_versions(repository(tmp_path), "wide")[-1]
    with SegmentedModel.open(found.path) as model:
        assert placeable(OpenedModel(found, model, (), "digest")) is model
        model.kernels = "some"
        with pytest.raises(ConfigError, match="'wide': runs on compiled kernels"):
            placeable(OpenedModel(found, model, (), "digest"))


def test_tensors_that_cross_are_those_that_other_units_read(tmp_path: Path) -> None:
    path = tmp_path / "wide.onnx"
    onnx.save(wide(), str(path))
    with SegmentedModel.open(path) as model:
        names = model.dfg.unit_names
        assert [int(name.partition(":")[0]) for name in names] == list(range(model.unit_count))
        assert all(name.partition(":")[2] for name in names)
        found = model.dfg.crossing()
        inputs = {"x": np.ones((8, 16), np.float32)}
        for name, (producer, readers) in found.items():
            assert name in model.dfg.units[producer].outputs
            assert readers == tuple(unit.index for unit in model.dfg.units if name in unit.inputs)
            assert all(one < other for one, other in pairwise((producer, *readers)))
        sizes = tensor_bytes(model.graph_path, list(found), inputs)
        values = inputs
        for unit in range(model.unit_count - 1):
            values = model.run(unit, unit + 1, values)
            for name in values:
                assert name not in sizes or sizes[name] == values[name].numpy().nbytes
        assert len(unit_times(model.graph_path, model.dfg, inputs, 2)) == model.unit_count
