"""Stopping is bounded: whatever hangs, the deadline of the stop ends it. No limit of normal running helps here."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client import SHARED, Client, SharedLoader, started
from cotenant.config import DeviceSection, ServerConfig
from cotenant.execute.errors import WorkerLostError
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.protocol import LoadSpec
from cotenant.execute.worker import supervisor as supervisor_module
from cotenant.execute.worker.limits import WorkerLimits
from cotenant.execute.worker.process import WorkerProcess
from cotenant.measure.load_spec import LoadReport, VersionSpec
from cotenant.measure.loader_process import LoadCancelledError
from cotenant.repository import trace_path
from cotenant.serve.server import Server
from cotenant.trace import read
from cotenant.types import Outcome
from cotenant.wire.api import ServeError, Status
from cotenant.work import Share
from processes import COMMAND, serving, workers_of
from repositories import X, config, scaled, write_model
from workers import Host, gone

WAIT_S = 60.0
PATIENT = WorkerLimits(hang_floor_s=3600.0, load_limit_s=3600.0)
"""Nothing that hangs is found by these limits."""


class StoppedWorker(WorkerProcess):
    """A worker that never says anything."""

    made: threading.Semaphore = threading.Semaphore(0)

    def __init__(self, tenant: str, nice: int) -> None:
        super().__init__(tenant, nice)
        os.kill(self.pid, signal.SIGSTOP)
        self.made.release()


def in_thread(work: Callable[[], object]) -> Future[object]:
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def now() -> float:
    return time.monotonic()


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, PATIENT)
    yield made
    made.close()


def test_workers_in_every_state_are_gone_at_the_deadline(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in ("idle", "stopped", "hangs", "removed"):
        host.load(tenant, lambda: scaled(2.0))
    model = SegmentedModel.open(tmp_path / "idle.onnx", cache_dir=tmp_path / "graphs")
    monkeypatch.setattr(supervisor_module, "WorkerProcess", StoppedWorker)
    loading = in_thread(lambda: host.executor.load("loading", model, LoadSpec((Share((0,)),), (0, 2))))
    assert StoppedWorker.made.acquire(timeout=WAIT_S)
    pids = {tenant: host.pid(tenant) for tenant in ("idle", "stopped", "hangs", "removed")}
    for tenant in ("stopped", "hangs", "removed"):
        os.kill(pids[tenant], signal.SIGSTOP)
    launches = [host.start(tenant, number, X) for number, tenant in enumerate(("hangs", "removed"))]
    removed = host.executor._supervisors["removed"]
    host.executor.remove_model("removed")
    removed.close()
    host.executor.close(now())
    assert all("was killed by signal 9" in str(reason) for reason in host.wait(*launches))
    with pytest.raises(WorkerLostError):
        loading.result(WAIT_S)
    for pid in pids.values():
        gone(pid)
    with pytest.raises(WorkerLostError, match=r"is not needed any more$"):
        host.executor.load("late", SegmentedModel.open(tmp_path / "idle.onnx"), LoadSpec((Share((0,)),), (0, 2)))
    for number in launches:
        host.executor.discard(number)


# --- a server ---------------------------------------------------------------------------------------------------------


class Held(SharedLoader):
    """Holds the load of one model up until the server stops, or until it is let go."""

    def __init__(self, model: str) -> None:
        super().__init__(60.0)
        self._model = model
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.is_cancelled_now = False

    @property
    def is_cancelled(self) -> bool:
        return self.is_cancelled_now

    def cancel(self) -> None:
        self.is_cancelled_now = True
        self.gate.set()

    def load(self, spec: VersionSpec) -> LoadReport:
        if spec.found.model == self._model:
            self.begun.set()
            assert self.gate.wait(WAIT_S)
            if self.is_cancelled_now:
                raise LoadCancelledError("the server is stopping")
        return SHARED.load(spec)


def server_of(root: Path, loader: Any = SHARED) -> Server:
    server = Server(root, ServerConfig())
    server.model_loader.loader_process = loader
    executor: Any = server._executor
    executor._limits = replace(PATIENT)
    return server


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        write_model(tmp_path, name, config(), {1: lambda: scaled(2.0)})
    return tmp_path


def is_ready_logged(caplog: pytest.LogCaptureFixture) -> bool:
    return any(record.message.startswith("ready:") for record in caplog.records)


def test_queries_of_workers_that_hang_fail_at_the_deadline(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cotenant.server")
    server = server_of(root)
    server.start()
    assert is_ready_logged(caplog)
    client = Client(server)
    pids = {each.tenant: each.pid for each in server._executor.workers()}
    os.kill(pids["a"], signal.SIGSTOP)
    os.kill(pids["b"], signal.SIGSTOP)
    asked = [client.submit("a", X) for _ in range(3)]
    server.stop(now())
    results = client.wait(*asked)
    assert {each.outcome for each in results} <= {Outcome.FAILED, Outcome.REJECTED}
    assert client.twice == 0
    assert server.driver.read(lambda engine: (engine.live, engine.running)) == (0, 0)
    for pid in pids.values():
        gone(pid)


def test_a_thread_that_computes_for_ever_is_told_of_and_not_waited_for(root: Path) -> None:
    server = started(root, device=DeviceSection(isolation="thread"))
    client = Client(server)
    begun, gate = threading.Event(), threading.Event()
    launches: Any = server._executor._launches  # type: ignore[attr-defined]
    run = launches.run

    def hang(*arguments: Any) -> None:
        begun.set()
        assert gate.wait(WAIT_S)
        run(*arguments)

    launches.run = hang
    asked = client.submit("a", X)
    assert begun.wait(WAIT_S)
    assert not server.stop(now())
    gate.set()
    client.wait(asked)


@pytest.mark.parametrize("held", ["a", "b", "c"])
@pytest.mark.parametrize("where", ["loader", "worker"])
def test_a_stop_while_the_nth_model_is_opened_ends_the_start(
    root: Path, held: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cotenant.server")
    loader = Held(held)
    server = server_of(root, loader)
    if where == "worker":
        loader.gate.set()
        real = WorkerProcess

        def start(tenant: str, nice: int) -> WorkerProcess:
            return (StoppedWorker if tenant == held else real)(tenant, nice)

        monkeypatch.setattr(supervisor_module, "WorkerProcess", start)
    starting = in_thread(server.start)
    if where == "worker":
        assert StoppedWorker.made.acquire(timeout=WAIT_S)
    assert loader.begun.wait(WAIT_S)
    server.cancel_loads()
    starting.result(WAIT_S)
    server.stop(now())
    assert not is_ready_logged(caplog)
    assert not server.ready()
    assert server.names.models == {}


@pytest.mark.parametrize("where", ["loader", "worker"])
def test_a_load_under_way_is_refused_and_nothing_is_put_in_service(
    root: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Held("late")
    server = server_of(root, loader)
    server.start()
    write_model(root, "late", config(), {1: lambda: scaled(3.0)})
    if where == "worker":
        loader.gate.set()
        monkeypatch.setattr(supervisor_module, "WorkerProcess", StoppedWorker)
    loading = in_thread(lambda: server.load("late"))
    assert loader.begun.wait(WAIT_S)
    if where == "worker":
        assert StoppedWorker.made.acquire(timeout=WAIT_S)
    server.stop(now())
    with pytest.raises(ServeError) as caught:
        loading.result(WAIT_S)
    assert caught.value.status is Status.UNAVAILABLE
    assert server.names.models == {}
    assert all(entry.state == "UNAVAILABLE" for entry in server.index(ready_only=False))
    with pytest.raises(ServeError, match="the server is stopping") as late:
        server.load("a")
    assert late.value.status is Status.UNAVAILABLE


def test_a_load_whose_worker_is_killed_is_unavailable_and_what_ran_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_of(root)
    server.start()
    client = Client(server)
    made: list[StoppedWorker] = []

    def start(tenant: str, nice: int) -> WorkerProcess:
        made.append(StoppedWorker(tenant, nice))
        return made[-1]

    monkeypatch.setattr(supervisor_module, "WorkerProcess", start)
    loading = in_thread(lambda: server.load("a"))
    assert StoppedWorker.made.acquire(timeout=WAIT_S)
    os.kill(made[0].pid, signal.SIGKILL)
    with pytest.raises(ServeError, match=r"the worker of 'a' was killed by signal 9$") as caught:
        loading.result(WAIT_S)
    assert caught.value.status is Status.UNAVAILABLE
    assert client.ask("a", X).outcome is Outcome.ANSWERED
    server.stop()


# --- signals ----------------------------------------------------------------------------------------------------------

OF_PROCESSES = "cotenant.serve.processes"
"""Imported by a server whose front-ends run in processes of their own."""
MOMENTS = (
    "typer",
    "msgspec",
    "cotenant.cli.profile",
    "cotenant.cli.app",
    "numpy",
    "ngh2",
    "cotenant.wire.codec",
)


def at_import(root: Path, moment: str, number: int) -> tuple[int, str]:
    """Send a signal to `cotenant serve` as soon as it has imported a module; gives its status and what it wrote."""
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "serve", str(root), "--http-port", "0"]
    command += ["--frontends", "1" if moment == OF_PROCESSES else "0"]
    process = subprocess.Popen(
        [*command, "--grpc-port", "0", "--no-trace"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell in the background ignores it
    )
    assert process.stderr is not None
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.split("|")[-1].strip() == moment:
                process.send_signal(number)
                break
        reading = in_thread(process.stderr.read)
        if number == signal.SIGHUP:
            assert process.stdout.readline().startswith("Serving 0 of 0 models")
            process.send_signal(signal.SIGTERM)
        status = process.wait(WAIT_S)
        return status, "".join(lines) + str(reading.result(WAIT_S))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGINT, 130, "cotenant: interrupted"), (signal.SIGTERM, 143, "cotenant: terminated")],
)
def test_a_signal_during_imports_ends_the_command_without_a_traceback(
    tmp_path: Path, moment: str, number: int, status: int, word: str
) -> None:
    found, text = at_import(tmp_path, moment, number)
    assert (found, "Traceback" in text) == (status, False), text[-2000:]
    assert word in text


@pytest.mark.parametrize("moment", ["msgspec", "cotenant.wire.codec", OF_PROCESSES])
def test_a_hangup_never_ends_a_server_that_starts(tmp_path: Path, moment: str) -> None:
    status, text = at_import(tmp_path, moment, signal.SIGHUP)
    assert (status, "Traceback" in text) == (0, False), text[-2000:]


HANGS = """
import os, signal, sys, threading
from cotenant.cli.signals import StopSignals

with StopSignals() as signals:
    heard = threading.Event()
    signals.on_hangup = lambda: print("hangup", flush=True)
    signals.guard(0.0, lambda: print("stop", flush=True), lambda: print("last words", flush=True))
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    threading.Event().wait()
"""


def test_a_process_that_hangs_beyond_its_deadline_is_ended_after_its_last_words() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ended.returncode, ended.stdout.split("\n")) == (1, ["hangup", "stop", "last words", ""])
    assert "the process exits" in ended.stderr


def test_a_server_whose_worker_hangs_ends_with_its_trace_closed(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root, "a", config(), {1: lambda: scaled(2.0)})
    (root / "cotenant.toml").write_text("[server]\ndrain_s = 0.5\n")
    with serving(root) as process:
        [pid] = workers_of(process.popen.pid)
        os.kill(pid, signal.SIGSTOP)
        asked = in_thread(lambda: ask(process.url))
        path = trace_path(root)
        until = now() + WAIT_S
        while b'"QueryArrived"' not in path.read_bytes() and now() < until:
            os.sched_yield()
        process.popen.send_signal(signal.SIGHUP)  # of two signals at once, the later may be handled first
        while b"SIGHUP ignored: no plan is served" not in process.log.read_bytes() and now() < until:
            os.sched_yield()
        assert process.end(signal.SIGTERM) == 0
        assert any("SIGHUP ignored: no plan is served" in line["message"] for line in process.logs)
        assert asked.result(WAIT_S) in ("500", "503")
        gone(pid)
    _, records = read(path)
    [ended] = [action["outcome"] for record in records for kind, action in record.actions if kind == "Respond"]
    assert ended == "failed"


def ask(url: str) -> str:
    body = b'{"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6, 7, 8]}]}'
    try:
        with urllib.request.urlopen(f"{url}/v2/models/a/infer", body, timeout=WAIT_S) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
