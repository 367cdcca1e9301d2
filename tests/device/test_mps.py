"""The MPS daemon, started, asked and stopped: over a control program that writes down what it is told."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant.errors import InvalidValueError
from cotenant.execute.gpu.cuda_driver import GpuError
from cotenant.execute.gpu.mps import LOGS, PERCENTAGE, PIPES, MpsDaemon, environment_of, find_control, is_running
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.execute.worker.limits import WorkerLimits
from fake_mps import WAIT_S, told, write_control
from repositories import scaled


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return write_control(tmp_path)


@pytest.fixture
def daemon(control: Path) -> Iterator[MpsDaemon]:
    with MpsDaemon.start(str(control), WAIT_S) as started:
        yield started


def pids(started: MpsDaemon) -> list[int]:
    return [int(word) for word in (started.pipes / "pids").read_text(encoding="utf-8").split()]


def assert_gone(handles: list[int]) -> None:
    """Every process ends within the time, seen through descriptors of them, which are closed."""
    for handle in handles:
        assert select.select([handle], [], [], WAIT_S)[0], "a process is still there"
        os.close(handle)


def test_a_daemon_has_directories_of_its_own_and_takes_them_along(control: Path) -> None:
    with MpsDaemon.start(str(control), WAIT_S) as started:
        assert started.is_alive
        assert started.pipes.is_dir()
        assert told(control)[0] == f"start {started.pipes} {started.logs}"
        assert is_running_at(started.pipes, control)
        with MpsDaemon.start(str(control), WAIT_S) as other:
            assert other.pipes != started.pipes
        handles = [os.pidfd_open(pid) for pid in pids(started)]
    assert_gone(handles)
    assert not started.is_alive
    assert not started.pipes.parent.exists()
    assert told(control)[-1] == "quit -t 5"
    assert not is_running_at(started.pipes, control)
    started.stop()
    with pytest.raises(GpuError, match="the MPS daemon has ended"):
        started.servers()


def is_running_at(pipes: Path, control: Path) -> bool:
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{control.parent}:{before}"
    try:
        return is_running(pipes)
    finally:
        os.environ["PATH"] = before


def test_percentages_are_set_and_asked(daemon: MpsDaemon, control: Path) -> None:
    (server,) = daemon.servers()
    assert server == pids(daemon)[1]
    assert daemon.percentage == 100
    daemon.set_percentage(37.5)
    assert daemon.percentage == 37.5
    assert daemon.percentage_of(server) == 37.5
    assert "set_default_active_thread_percentage 37.5" in told(control)
    assert f"set_active_thread_percentage {server} 37.5" in told(control)
    for wrong in (0, -1, 100.5, float("nan")):
        with pytest.raises(InvalidValueError, match="above 0 and at most 100 %"):
            daemon.set_percentage(wrong)
    with pytest.raises(GpuError, match="refused 'get_active_thread_percentage 1': cat:"):
        daemon.percentage_of(1)
    with pytest.raises(GpuError, match="refused 'hello': Unknown command"):
        daemon.ask("hello")


def test_the_environment_of_a_client(daemon: MpsDaemon) -> None:
    assert daemon.environment() == {PIPES: str(daemon.pipes)}
    assert daemon.environment(50) == {PIPES: str(daemon.pipes), PERCENTAGE: "50"}
    assert environment_of(Path("/x"), 33.3) == {PIPES: "/x", PERCENTAGE: "33.3"}
    with pytest.raises(InvalidValueError, match="percentage is 0"):
        environment_of(Path("/x"), 0)


def test_a_daemon_that_cannot_start_says_why(control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (control.parent / "broken").touch()
    with pytest.raises(GpuError, match="ended with status 3 when it was started: no GPU for MPS"):
        MpsDaemon.start(str(control), WAIT_S)
    with pytest.raises(GpuError, match=r"there is no .*/nowhere in PATH"):
        MpsDaemon.start(str(tmp_path / "nowhere"), WAIT_S)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpuError, match="there is no nvidia-cuda-mps-control in PATH"):
        MpsDaemon.start()
    monkeypatch.setenv("PATH", str(control.parent))
    assert find_control() == str(control)


def test_a_daemon_that_does_not_want_to_end_is_killed_with_its_servers(
    control: Path,
) -> None:
    (control.parent / "stubborn").touch()
    started = MpsDaemon.start(str(control), WAIT_S, quit_s=0.1)
    handles = [os.pidfd_open(pid) for pid in pids(started)]
    started.stop()
    assert_gone(handles)
    assert not started.pipes.exists()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(3)", "raise KeyError", "pass"])
def test_the_daemon_ends_with_the_process_that_started_it(control: Path, end: str) -> None:
    code = f"""
import os, sys
from cotenant.execute.gpu.mps import MpsDaemon
daemon = MpsDaemon.start({str(control)!r}, {WAIT_S})
print(daemon.pipes, daemon._guard.pid, (daemon.pipes / "pids").read_text(), flush=True)
sys.stdin.read()
{end}
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pipes, *numbers = process.stdout.readline().split()
        handles = [os.pidfd_open(int(pid)) for pid in numbers]
        process.stdin.close()
        assert_gone(handles)
    assert not Path(pipes).parent.exists()
    assert told(control)[-1] == "quit -t 5"


def test_signals_for_the_server_do_not_end_the_daemon(daemon: MpsDaemon) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(daemon._guard.pid, number)
    assert daemon.percentage == 100
    assert daemon.is_alive


def test_workers_get_what_their_tenant_needs(daemon: MpsDaemon, tmp_path: Path) -> None:
    path = tmp_path / "scaled.onnx"
    path.write_bytes(scaled(2.0).SerializeToString())
    shares = {"a": 25.0, "b": 75.0}
    executor = ProcessExecutor(0, WorkerLimits(), lambda tenant: daemon.environment(shares[tenant]))
    try:
        for tenant in shares:
            model = SegmentedModel.open(path, cache_dir=tmp_path / "cache", name=tenant)
            executor.add_model(tenant, executor.load(tenant, model, [(1, [(0, model.unit_count)])]))
        for worker in executor.workers():
            variables = Path(f"/proc/{worker.pid}/environ").read_text(encoding="utf-8").split("\0")
            assert f"{PERCENTAGE}={shares[worker.tenant]:g}" in variables
            assert f"{PIPES}={daemon.pipes}" in variables
            assert f"PATH={os.environ['PATH']}" in variables
            assert not [each for each in variables if each.startswith(LOGS)]
    finally:
        executor.close()
    assert PERCENTAGE not in os.environ


@pytest.mark.device
def test_a_real_daemon_answers_and_ends() -> None:
    try:
        started = MpsDaemon.start()
    except GpuError as error:
        pytest.skip(f"no MPS here: {error}")
    with started:
        started.set_percentage(50)
        assert started.percentage == 50
        assert started.servers() == ()
    assert not started.is_alive


@pytest.mark.device
def test_a_client_of_a_real_daemon_has_its_share_of_the_sms() -> None:
    try:
        started = MpsDaemon.start()
    except GpuError as error:
        pytest.skip(f"no MPS here: {error}")
    code = (
        "import torch; torch.zeros(1, device='cuda'); print(torch.cuda.get_device_properties(0).multi_processor_count)"
    )
    with started:
        counts = []
        for percentage in (100, 50):
            variables = {**os.environ, **started.environment(percentage)}
            done = subprocess.run(
                [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
            )
            counts.append(int(done.stdout))
        assert len(started.servers()) == 1
        assert counts[0] * 0.4 < counts[1] < counts[0] * 0.6
