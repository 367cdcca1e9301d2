"""A tenant with placement = "auto": its launches on all cores run by its placement, where that is no slower."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from client import Client, LoaderHere, started
from cotenant.config import DeviceSection, ServerConfig
from cotenant.core.events import Event, TenantResumed
from cotenant.execute.open_model import open_model
from cotenant.measure.opened_model import open_version
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.profiles.profile_file import ProfileError
from cotenant.repository import find_versions, graphs_path, placement_path
from cotenant.serve.server import Server
from cotenant.techniques.placement.execute.kept_placements import follow, kept_placements
from cotenant.techniques.placement.execute.placeable import digest_of
from cotenant.techniques.placement.execute.placed_model import PlacedModel
from cotenant.techniques.placement.measure import placed
from cotenant.techniques.placement.unit_placement import UnitPlacement, save_placement
from onnx_samples import Sketch, info
from placed_samples import placement
from repositories import SLO_MS, write_model

TEXT = f'[tenant]\nslo_ms = {SLO_MS}\n[model]\nmax_batch = 2\nplacement = "auto"\n'
PLACES = ["cpu:0-1", "cpu:0", "cpu:1", "cpu:0-1"]
X = np.linspace(-1, 1, 4, dtype=np.float32)[None]


def fork() -> onnx.ModelProto:
    """A stem, two branches, and what reads both."""
    s = Sketch(1)
    stem = s.op("MatMul", "x", s.weight(4, 4))
    ends = [s.op("MatMul", stem, s.weight(4, 4)) for _ in range(2)]
    s.op("Concat", *ends, out="y", axis=1)
    return s.model([info("x", ["batch", 4])], [info("y", ["batch", 8])])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a placement, which counts as fast: what is as small as this is never."""
    folder = tmp_path / "models"
    write_model(folder, "fork", TEXT, {1: fork})
    monkeypatch.setattr(placed, "KEPT_UP_TO", 1e9)
    keep_placement(folder, PLACES)
    return folder


def keep_placement(root: Path, places: list[str]) -> UnitPlacement:
    found = find_versions(root, "fork")[0]
    with open_version(root, found, placed=False).runner as model:
        assert isinstance(model, PlacedModel)
        made = placement(model, list(zip(model.dfg.unit_names, places, strict=True)))
    save_placement(placement_path(graphs_path(root), made.graph, 2), made)
    return made


@contextmanager
def serving(root: Path, isolation: Any, watch: Any = None) -> Iterator[Server]:
    device = DeviceSection(cores=(0, 1), lanes="all", isolation=isolation)
    server = started(root, watch, LoaderHere(1.0), device=device)
    try:
        yield server
    finally:
        server.stop()


def ask(server: Server) -> Any:
    answer = Client(server).ask("fork", {"x": X})
    assert answer.reason == ""
    return answer.outputs["y"]


def launches(server: Server) -> tuple[float, float]:
    """Of whole models by a placement, and all."""
    lines = dict(line.rsplit(" ", 1) for line in server.metrics().decode().splitlines() if line[:1] != "#")
    names = ('cotenant_placed_launches_total{tenant="fork"}', 'nv_inference_exec_count{model="fork"}')
    return float(lines[names[0]]), float(lines[names[1]])


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_it_runs_by_its_placement(root: Path, isolation: str, caplog: pytest.LogCaptureFixture) -> None:
    before = {each.ident for each in threading.enumerate()}
    with caplog.at_level(logging.INFO), serving(root, isolation) as server:
        with open_model(root / "fork/1/model.onnx") as alone:
            np.testing.assert_array_equal(ask(server), alone.run(0, alone.unit_count, {"x": X})["y"])
        assert launches(server) == (1, 1)
        lanes = [each.name for each in threading.enumerate() if each.ident not in before]
        assert ("cotenant-lane-1" in lanes) == (isolation == "thread")
        parameters = server.config("fork", "")["parameters"]
        assert parameters["on_2_cores"]["string_value"].endswith("of the time of a sequential run")
    assert "model fork runs by placement: " in caplog.text
    assert "on 2 cores, 4 tasks" in caplog.text


def test_a_lost_worker_comes_back_with_its_placement(root: Path) -> None:
    is_back = threading.Event()

    def watch(_: int, event: Event, *__: object) -> None:
        if isinstance(event, TenantResumed):
            is_back.set()

    with serving(root, "process", watch) as server:
        expected = ask(server)
        [worker] = server._executor.workers()
        os.kill(worker.pid, signal.SIGKILL)
        assert is_back.wait(30)
        np.testing.assert_array_equal(ask(server), expected)
        assert launches(server) == (2, 2)


def test_what_is_slower_is_left_aside(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = find_versions(root, "fork")[0]
    with open_version(root, found).runner as model:
        assert [cores for cores, _ in getattr(model, "placed", ())] == [2]
    checks = list(graphs_path(root).glob("placements/*.check.json"))
    assert len(checks) == 1
    monkeypatch.setattr(placed, "in_turns", None)  # what is known is not measured again
    monkeypatch.setattr(placed, "KEPT_UP_TO", 0.0)
    monkeypatch.setattr(placed, "MOST_OTHERS", 1.0)  # however busy the machine was
    digests = {open_version(root, found, placed=each).digest for each in (True, False)}
    assert len(digests) == 1
    assert "model fork: placement not used: " in caplog.text
    with serving(root, "thread") as server:
        ask(server)
        assert launches(server) == (0, 1)


def test_profiles_are_of_a_placement(root: Path) -> None:
    def digest() -> str:
        opened = open_version(root, find_versions(root, "fork")[0])
        opened.runner.close()
        return opened.digest

    first = digest()
    assert first == digest()
    keep_placement(root, ["cpu:0", "cpu:0", "cpu:1", "cpu:0"])
    second = digest()
    assert second != first
    (root / "fork/config.toml").write_text(TEXT.replace('placement = "auto"', ""))
    assert digest() not in (first, second)


def test_a_profile_is_measured_through_it_and_serves(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = DeviceSection(cores=(0, 1), lanes="all", isolation="thread")
    effort = Effort(budget_s=0.0, min_runs=2, max_runs=2, warm_up=0)
    profile, errors = profile_repository(root, ServerConfig(device=device), effort, fresh=True, on_step=lambda *_: None)
    assert errors == {}
    assert {point.cores for point in profile.models["fork"].points} == {1, 2}
    with serving(root, "thread") as server:
        ask(server)
        assert launches(server) == (1, 1)
    assert "has no valid profile" not in caplog.text


def test_without_a_placement_that_holds_it_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = find_versions(root, "fork")[0]
    path = next(graphs_path(root).glob("placements/*-2.json"))
    text = path.read_text()
    path.write_text(text.replace("cpu:1", "cpu:7"))
    assert not open_version(root, found).gains
    assert "its placement on 2 cores is not used" in caplog.text
    path.write_text("{}")
    assert not open_version(root, found).gains
    assert f"{path}" in caplog.text
    path.unlink()
    assert not open_version(root, found).gains
    assert "'cotenant place REPOSITORY fork' searches one" in caplog.text


def test_a_worker_follows_what_its_server_found_and_nothing_else(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    graphs = graphs_path(root)
    with open_model(find_versions(root, "fork")[0].path, cache_dir=graphs) as model:
        assert isinstance(model, PlacedModel)
        [kept] = kept_placements(graphs, model.graph_path.parent.name, 8)
        follow(model, graphs, [(2, digest_of(kept))])
        assert model.placed == ((2, digest_of(kept)),)
        model.place()
        follow(model, graphs, [(2, "another")])
        assert model.placed == ()
        assert "its placement changed after loading" in caplog.text
        with pytest.raises(ProfileError):
            model.place(placement(model, [("0:x", "cpu:0")]))
