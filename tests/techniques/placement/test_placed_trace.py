"""What ran on which core of a placed launch: from the lanes into the trace, which replays as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client import Client, LoaderHere, started
from cotenant.config import DeviceSection
from cotenant.core.actions import Action
from cotenant.core.events import Event, LaunchEnded
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.protocol import Timing
from cotenant.repository import graphs_path, placement_path
from cotenant.techniques.placement.measure import placed
from cotenant.techniques.placement.unit_placement import save_placement
from cotenant.trace.trace_log import encode
from cotenant.work import TaskTime
from onnx_samples import random_dag
from placed_samples import open_placed, placement, random_placement
from repositories import SLO_MS, write_model

X = np.ones((1, 8), np.float32)
INPUTS = {"x0": X, "x1": X}
STEPS = [(kind, kind, 3 * kind + 1) for kind in range(9)]


def kept(root: Path, model: SegmentedModel) -> int:
    made = random_placement(model, 3, 2)
    save_placement(placement_path(graphs_path(root), made.graph, 2), made)
    return sum(len(run.units) for run in made.runs)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_pieces_come_with_the_end_of_their_launch(
    tmp_path: Path, isolation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f'[tenant]\nslo_ms = {SLO_MS}\n[model]\nplacement = "auto"\n'
    write_model(tmp_path, "net", text, {1: lambda: random_dag(STEPS, range(3, 9))})
    monkeypatch.setattr(placed, "KEPT_UP_TO", 1e9)
    with open_placed(tmp_path / "net/1/model.onnx", cache_dir=graphs_path(tmp_path), name="net") as model:
        units = kept(tmp_path, model)
    seen: list[LaunchEnded] = []

    def watch(time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> None:
        if isinstance(event, LaunchEnded):
            seen.append(event)

    device = DeviceSection(cores=(0, 1), lanes="all", isolation=isolation)
    server = started(tmp_path, watch, LoaderHere(1.0), device=device)  # type: ignore[arg-type]
    try:
        assert Client(server).ask("net", INPUTS).reason == ""
    finally:
        server.stop()
    [ended] = seen
    pieces = ended.task_times
    assert isinstance(pieces, tuple)
    assert sum(piece.units for piece in pieces) == units
    assert {core for piece in pieces for core in piece.cores} == {0, 1}
    for piece in pieces:
        assert 0 <= piece.start_ns <= piece.end_ns
        for other in pieces:  # a core runs one at a time
            if other is not piece and set(other.cores) & set(piece.cores):
                assert other.end_ns <= piece.start_ns or piece.end_ns <= other.start_ns
    assert b'"task_times":[[[' in encode(1, ended, [])


def test_pieces_are_those_of_the_last_run_on_the_thread_and_told_once(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(random_dag(STEPS, range(3, 9)).SerializeToString())
    with open_placed(path) as model:
        whole = (0, model.unit_count)
        assert model.take_task_times() == ()
        model.place(
            placement(
                model,
                [(name, "cpu:0-1" if at < 2 else f"cpu:{at % 2}") for at, name in enumerate(model.dfg.unit_names)],
            )
        )
        model.run(*whole, INPUTS, (0, 1))
        pieces = model.take_task_times()
        assert len(pieces) == len(model.tasks(2))
        assert all(isinstance(piece, TaskTime) for piece in pieces)
        assert model.take_task_times() == ()
        model.run(*whole, INPUTS, 1)
        assert model.take_task_times() == ()
