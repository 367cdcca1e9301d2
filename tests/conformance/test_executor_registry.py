"""Which executor a configuration gets, and executors of other packages: served like our own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client import Client
from cotenant.config import DeviceSection, ServerConfig
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.execute import registry
from cotenant.execute.protocol import ModelExecutor
from cotenant.execute.registry import EXECUTORS, ExecutorKind, executor_kind, open_executor, register
from cotenant.execute.threads.executor import ThreadExecutor
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.serve.server import Server
from cotenant.types import Outcome
from cotenant.work import Share
from repositories import config, scaled, write_model

CORE = (min(os.sched_getaffinity(0)),)


class Elsewhere(ThreadExecutor):
    """An executor of somebody else's."""

    opened: tuple[Any, ...] = ()


def open_elsewhere(section: DeviceSection, partitions: Sequence[Share], lane_nice: int) -> ModelExecutor:
    Elsewhere.opened = section.isolation, tuple(partitions)
    return Elsewhere(lane_nice)


ELSEWHERE = ExecutorKind("elsewhere", "cpu", ("elsewhere",), f"{__name__}:open_elsewhere")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with an executor, as an installation leaves it."""
    info = tmp_path / "site" / "elsewhere-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[cotenant.executors]\nelsewhere = {__name__}:ELSEWHERE\n")
    monkeypatch.syspath_prepend(str(info.parent))
    before = dict(EXECUTORS)
    registry._join.cache_clear()
    yield
    EXECUTORS.clear()
    EXECUTORS.update(before)
    registry._join.cache_clear()


@pytest.mark.parametrize(
    ("section", "name"),
    [
        (DeviceSection(), "workers"),
        (DeviceSection(isolation="thread"), "threads"),
        (DeviceSection(kind="cuda"), "streams"),
        (DeviceSection(kind="cuda", isolation="thread", sharing="streams"), "streams"),
    ],
)
def test_a_configuration_gets_its_executor(section: DeviceSection, name: str) -> None:
    assert executor_kind(section).name == name


def test_what_nobody_runs_is_told_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="isolation is 'vm', expected one of process, thread"):
        open_executor(DeviceSection(isolation="vm"))


def test_lanes_change_on_cores_alone() -> None:
    kinds = (ThreadExecutor, ProcessExecutor, TorchExecutor)
    assert [kind.lanes_change for kind in kinds] == [True, True, False]


@pytest.mark.usefixtures("installed")
def test_an_executor_of_another_package_serves(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root, "twice", config(), {1: lambda: scaled(2.0)})
    server = Server(root, ServerConfig(device=DeviceSection(cores=CORE, isolation="elsewhere")))
    assert Elsewhere.opened == ("elsewhere", (Share(CORE),))
    server.start()
    try:
        result = Client(server).ask("twice", {"x": np.zeros((1, 8), np.float32)})
        assert result.outcome is Outcome.ANSWERED, result.reason
        assert not result.outputs["y"].any()
    finally:
        server.stop()
    register(ELSEWHERE)
    with pytest.raises(InvalidValueError, match="name is 'threads', expected one that no other executor has"):
        register(ExecutorKind("threads", "cpu", ("vm",), "other:open"))
