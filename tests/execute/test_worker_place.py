"""Where a worker's lanes compute: on the cores of their partition, or on a stream of a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cotenant.config import DeviceSection
from cotenant.core.actions import Launch
from cotenant.errors import ConfigError
from cotenant.execute.batches import Batches
from cotenant.execute.errors import ModelError
from cotenant.execute.gpu.mps import MpsDaemon
from cotenant.execute.gpu.mps_executor import MpsExecutor
from cotenant.execute.launch_runner import LaunchRunner
from cotenant.execute.place import lane_place
from cotenant.execute.registry import open_executor
from cotenant.execute.runner import open_model
from cotenant.work import Share, Work
from fake_mps import WAIT_S, told, write_control
from repositories import scaled


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return write_control(tmp_path)


def in_thread(work: Callable[[], Any]) -> Any:
    """What work gives on a thread of its own, which it may bind and make nice."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return found[0]


def test_on_the_cpu_a_lane_is_bound_to_its_first_core() -> None:
    core = max(os.sched_getaffinity(0))

    def settled() -> Any:
        with lane_place(Share((core, 7)), 3):
            return os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    cores, nice = in_thread(settled)
    assert cores == {core}
    assert nice >= 3


@pytest.mark.parametrize(
    ("share", "threads"), [(Share((4,)), 1), (Share((4, 2)), (4, 2)), (Share((4, 2), "cuda:0"), 1)], ids=str
)
def test_models_run_with_the_cores_of_a_share_where_it_has_several(share: Share, threads: Any) -> None:
    found: list[Any] = []

    class Model:
        def run(self, start: int, end: int, tensors: Any, threads: Any) -> Any:
            found.append(threads)
            return tensors

    model: Any = Model()
    batches = Batches()
    batches.put(0, {})
    launch = Launch(0, 0, (0,), Work("a", 0, 1, 0, 1), True, share, 0, 0)
    ends: list[str | None] = []
    LaunchRunner(batches).run(
        launch, share, model, batches.begin(launch), batches.finish, lambda _, error, timing: ends.append(error)
    )
    assert (found, ends) == ([threads], [None])


def test_on_a_gpu_a_lane_has_a_stream_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    log: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            log.append(f"made on {device}")

        def synchronize(self) -> None:
            log.append("waited")

    @contextmanager
    def stream(chosen: Stream) -> Any:
        log.append("in")
        yield chosen
        log.append("out")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)

    def settled() -> Any:
        with lane_place(Share(tuple(range(64)), "cuda:1"), 0) as wait:
            assert wait is not None
            wait()
        return os.sched_getaffinity(0)

    cores = in_thread(settled)
    assert cores == os.sched_getaffinity(0), "the slots of SMs are no cores"
    assert log == ["made on cuda:1", "in", "waited", "out"]


def test_models_that_need_a_cpu_are_refused_on_a_gpu(control: Path, tmp_path: Path) -> None:
    path = tmp_path / "scaled.onnx"
    path.write_bytes(scaled(2.0).SerializeToString())
    executor = MpsExecutor(
        MpsDaemon.start(str(control), WAIT_S), DeviceSection(kind="cuda", sharing="mps", shares=(50.0, 50.0))
    )
    try:
        model = open_model(path, cache_dir=tmp_path / "cache", name="a")
        with pytest.raises(ModelError, match=r"onnxruntime runs it on cpu alone\. Export it as \.pt2 for cuda:0"):
            executor.load("a", model, [(1, [(0, model.unit_count)])])
    finally:
        executor.close()
    assert told(control)[-1] == "quit -t 5"


def test_a_server_starts_the_daemon_and_stops_it(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = DeviceSection(kind="cuda", index=1, sharing="mps", shares=(40.0, 40.0))
    monkeypatch.setenv("PATH", str(control.parent.parent))
    with pytest.raises(ConfigError, match="sharing is 'mps', but there is no nvidia-cuda-mps-control in PATH"):
        open_executor(section)
    monkeypatch.setenv("PATH", f"{control.parent}:/usr/bin:/bin")
    executor = open_executor(section)
    assert isinstance(executor, MpsExecutor)
    assert executor._device == "cuda:1"
    assert executor._environment("any")["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert told(control)[0].startswith("start ")
    executor.close()
    assert told(control)[-1] == "quit -t 5"
