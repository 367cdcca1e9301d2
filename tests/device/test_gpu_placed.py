"""A model placed over a GPU and cores, with the CPU's streams in the place of a GPU: measured, planned and served."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from client import Client, LoaderHere, Watch, started
from commands import Run
from cotenant.config import DeviceSection
from cotenant.core.events import LaunchEnded
from cotenant.execute.gpu import configured
from cotenant.execute.gpu.sm_ladder import SmGrid
from cotenant.execute.gpu.streams import CpuStreams
from cotenant.execute.registry import open_executor
from cotenant.measure.opened_model import open_version
from cotenant.measure.solo import Effort
from cotenant.repository import find_versions, graphs_path, placement_path, tasks_path
from cotenant.techniques.placement import task_profile
from cotenant.techniques.placement.execute.placed_torch import PlacedTorch
from cotenant.techniques.placement.measure import placed
from cotenant.techniques.placement.measure import tasks as measuring
from cotenant.techniques.placement.measure.tasks import measure_tasks
from cotenant.techniques.placement.plan.flat import PLAIN, PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.profiled import graph_of
from cotenant.techniques.placement.task_profile import CopyTimes, DeviceTimes, ModelTasks, load_tasks, save_tasks
from cotenant.techniques.placement.unit_placement import GPU_LANE, UnitPlacement, load_placement, save_placement
from cotenant.trace.explain import LaunchHistory
from cotenant.work import Share, TaskTime
from placed_torch_samples import BRANCHES, SHARE, WIDTH, on_cores, save_wide
from repositories import SLO_MS

SECTION = DeviceSection(kind="cuda", isolation="thread")
TINY = Effort(0.0, 3, 3, 1)
WAIT_S = 30.0
INPUTS = {name: np.full((1, WIDTH), at, np.float32) for at, name in enumerate("ab", 1)}


class Gpu(CpuStreams):
    """The CPU's streams on core 0, whatever share of the GPU they are for."""

    def __init__(self, section: DeviceSection, partitions: Sequence[Share]) -> None:
        super().__init__()

    def lane(self, share: Share) -> Any:
        return super().lane(Share((0,)))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wide(tmp_path_factory.mktemp("wide") / "wide.pt2")


@pytest.fixture
def root(tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one model on a GPU of four SMs, with two cores beside it."""
    monkeypatch.setattr(configured, "_ask_driver", lambda *_: SmGrid(4, 4))
    monkeypatch.setattr(configured, "open_streams", Gpu)
    monkeypatch.setattr(configured, "device_cores", lambda _: (0, 1, 2))
    monkeypatch.setattr(measuring, "_HAND_OVERS", 3)
    monkeypatch.setattr(measuring, "TASK_EFFORT", TINY)
    monkeypatch.setattr(placed, "_EFFORT", TINY)
    monkeypatch.setattr(task_profile, "MOST_DISTURBANCE", 1e9)  # however busy the machine is
    monkeypatch.setattr("cotenant.techniques.placement.plan.flat.best_loops", lambda *_: PLAIN)
    made = tmp_path / "models"
    (made / "wide" / "1").mkdir(parents=True)
    (made / "wide" / "1" / "model.pt2").write_bytes(archive.read_bytes())
    text = f'[tenant]\nslo_ms = {SLO_MS}\n[model]\nmax_batch = 2\nplacement = "auto"\n'
    (made / "wide" / "config.toml").write_text(text)
    (made / "cotenant.toml").write_text('[device]\nkind = "cuda"\nisolation = "thread"\n')
    return made


def measured(root: Path, said: list[str] | None = None, model: str = "wide") -> ModelTasks:
    steps = [] if said is None else said
    with closing(open_executor(SECTION)) as executor:
        on_step = lambda *each: steps.append(each[2])  # noqa: E731
        return measure_tasks(root, model, SHARE, TINY, on_step=on_step, target=executor.target)[1]


def test_units_are_measured_on_both_sides_and_copies_between_them(root: Path) -> None:
    steps: list[str] = []
    tasks = measured(root, steps)
    assert len(steps) == 8
    assert (tasks.sms, tasks.cores) == (4, 2)
    assert len(tasks.units) == len(tasks.core.unit_ns) == len(tasks.whole.unit_ns)
    assert sum(tasks.whole.unit_ns) + tasks.whole.launch_ns == pytest.approx(tasks.whole.whole_ns, abs=len(tasks.units))
    stem = max(tasks.tensors, key=lambda tensor: len(tensor.readers))
    assert (len(stem.readers), stem.size_bytes) == (5, 4 * WIDTH)
    assert tasks.down is not None
    assert tasks.up is not None
    steps.clear()
    assert measured(root, steps) == tasks
    assert steps == []
    problem = PlacementProblem(graph_of(tasks), PLAIN)
    assert problem.device_names == (GPU_LANE, "cpu:0", "cpu:1")
    assert problem.space_names == ("gpu", "host")
    assert len(problem.resources) == 5
    order = tuple(range(problem.size))
    line = problem.evaluate(TaskPlan((0,) * problem.size, order))
    assert line is not None
    assert line.makespan_ns == sum(tasks.whole.unit_ns)  # and nothing for calls, or to be handed over


def keep_placement(root: Path) -> UnitPlacement:
    with open_version(root, find_versions(root, "wide")[0], placed=False).runner as model:
        assert isinstance(model, PlacedTorch)
        made = on_cores(model, *BRANCHES)
    save_placement(placement_path(graphs_path(root), made.graph, made.cores, made.sms), made)
    return made


def test_a_server_follows_a_placement_over_the_stream_and_cores(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed, "KEPT_UP_TO", 1e9)  # what is as small as this never gains
    made, seen = keep_placement(root), Watch()
    server = started(root, seen, LoaderHere(limit_s=120.0), device=SECTION)
    try:
        result = Client(server).ask("wide", INPUTS)
        text = server.metrics().decode()
        assert "of a sequential run" in json.dumps(server.config("wide", "")["parameters"])
    finally:
        server.stop()
    with open_version(root, find_versions(root, "wide")[0], placed=False).runner as model:
        expected = model.run(0, model.unit_count, INPUTS)
    assert result.reason == ""
    for name, value in expected.items():
        np.testing.assert_allclose(result.outputs[name], value.numpy(), rtol=1e-5, atol=1e-6)
    assert 'cotenant_placed_launches_total{tenant="wide"} 1.0' in text
    [ended] = seen.events(LaunchEnded)
    assert sum(piece.units for piece in ended.task_times) == len(made.units)
    assert {core for piece in ended.task_times for core in piece.cores} == {0, 1, 2}


def test_what_is_slower_is_left_aside(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placed, "KEPT_UP_TO", 0.0)
    keep_placement(root)
    with closing(open_executor(SECTION)) as executor, caplog.at_level(logging.WARNING):
        opened = open_version(root, find_versions(root, "wide")[0], executor.target, (SHARE,))
        with opened.runner:
            assert not opened.gains
            assert opened.runner.placed == ()  # type: ignore[attr-defined]
    assert "placement not used: " in caplog.text
    assert "on 4 SMs and 2 cores" in caplog.text


def test_the_command_places_it_and_checks_the_plan(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On made-up times: a core is as fast as the GPU, and copies are quick."""
    monkeypatch.setattr(placed, "KEPT_UP_TO", 1e9)
    tasks = measured(root)
    even = DeviceTimes((1_000_000,) * len(tasks.units), 0, 1_000_000 * len(tasks.units))
    quick = CopyTimes(1e10, 1_000)
    made = msgspec.structs.replace(tasks, core=even, whole=even, down=quick, up=quick, disturbance=1.0)
    profile = load_tasks(tasks_path(root))
    save_tasks(tasks_path(root), msgspec.structs.replace(profile, models={"wide": {SHARE.size: made}}))
    plan = tmp_path / "plan.toml"
    status, out, err = run("place", root, "wide", "--budget-s", "0.5", "-o", plan)
    assert status == 0, err
    assert "cuda:0 │" in out
    assert "cpu:1 " in out
    assert "of the time of a sequential run on 4 SMs" in out.replace("\n", " ")
    kept = load_placement(placement_path(graphs_path(root), tasks.graph, 2, 4))
    assert {GPU_LANE, "cpu:0"} <= {device for _, device in kept.units}
    assert kept.latency_ns < kept.sequential_ns
    status, out, err = run("plan", "--check", plan, "--profiles", root)
    assert status == 0, out + err
    assert "wide placed on 4 SMs and 2 cores" in out


def test_explain_names_the_gpu_and_the_cores_beside_it() -> None:
    pieces = (TaskTime((0,), 3, 0, 10_000_000), TaskTime((2,), 2, 5_000_000, 10_000_000))
    launch = LaunchHistory(0, 0, 10_000_000, (0, 5), 1, (0, 1, 2, 3), 1, 0, device="cuda:1", task_times=pieces)
    gpu, core = launch.lanes()
    assert gpu.startswith("    cuda:1 │████")
    assert core.startswith("    cpu:1 │····")
