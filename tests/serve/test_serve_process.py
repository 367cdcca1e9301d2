"""`cotenant serve` as users run it: a process, its ready line, its logs, signals, crashes and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.repository import trace_path
from cotenant.serve.frontend import front_ends
from cotenant.trace import read
from cotenant.wire.client import infer_once
from cotenant.wire.encode import ClientError
from onnx_samples import residual_cnn
from processes import COMMAND, WAIT_S, cotenant, serving, workers_of
from repositories import X, config, write_good, write_model


def test_serve_answers_drains_and_leaves_a_trace_that_replays(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "two")
    write_model(root, "bad", "[model]\n", {})
    with serving(root) as process:
        assert process.ready["models"] == {"bad": "UNAVAILABLE", "two": "READY"}
        assert process.ready["policy"] == "shares (drop: hopeless, tail-aware)"
        assert process.ready["http_port"] != process.ready["grpc_port"]
        for _ in range(20):
            assert infer_once(process.url, "two", X)["y"].shape == (1, 8)
        assert process.end(signal.SIGTERM) == 0
        assert {entry["level"] for entry in process.logs} <= {"info", "warning", "error"}
        assert all({"time", "level", "logger", "message"} <= entry.keys() for entry in process.logs)
        [refusal] = [entry for entry in process.logs if entry["level"] == "error"]
        assert "slo_ms is missing" in refusal["message"]
    replayed = cotenant("replay", str(root), "--json")
    assert (replayed.returncode, replayed.stderr) == (0, "")
    result = json.loads(replayed.stdout)
    assert result["same"] is True
    assert result["events"] >= 40
    told = cotenant("explain", "3", str(root))
    assert told.returncode == 0
    assert told.stdout.startswith("Query 3 of 'Owner of two' was answered after ")
    missing = cotenant("explain", "999", str(root))
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("cotenant: query 999 is not in this trace")


class Part:
    """A server or a front-end whose stop takes as long as it is told, by a clock of the test."""

    now_s = 100.0

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.graces_s: list[float] = []

    def stop(self, grace_s: float = 0.0) -> None:
        self.graces_s.append(grace_s)
        Part.now_s += self.takes_s


@pytest.mark.parametrize(
    ("drain_s", "takes_s", "graces_s"),
    [
        (10.0, (0.0, 0.0, 0.0), [10.0, 10.0]),
        (10.0, (4.0, 0.0, 0.0), [6.0, 6.0]),
        (60.0, (4.0, 0.0, 0.0), [56.0, 56.0]),
        (10.0, (20.0, 0.0, 0.0), [0.7, 0.7]),
        (0.0, (0.0, 0.0, 0.0), [0.7, 0.7]),
    ],
)
def test_readers_of_answers_have_the_drain_time_too(
    monkeypatch: pytest.MonkeyPatch, drain_s: float, takes_s: tuple[float, ...], graces_s: list[float]
) -> None:
    monkeypatch.setattr(front_ends.time, "monotonic", lambda: Part.now_s)
    server, http, grpc = map(Part, takes_s)
    until_s = Part.now_s + drain_s
    server.stop(until_s)
    front_ends.stop_front_ends((http, grpc), until_s)  # type: ignore[arg-type]
    assert [*http.graces_s, *grpc.graces_s] == graces_s


def test_queries_in_flight_are_answered_while_it_drains(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root, "cnn", config(), {1: residual_cnn})
    image = {"x": np.zeros((1, 3, 16, 16), np.float32)}
    answered: list[int] = []
    refused: list[str] = []
    started = threading.Event()

    with serving(root) as process:

        def client() -> None:
            while True:
                try:
                    infer_once(process.url, "cnn", image)
                    answered.append(1)
                    started.set()
                except ClientError as error:
                    refused.append(str(error))
                    return

        threads = [threading.Thread(target=client, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert started.wait(WAIT_S)
        assert process.end(signal.SIGTERM) == 0
        for thread in threads:
            thread.join(WAIT_S)
    assert len(refused) == 4
    assert all("shutting down" in text or "stopp" in text or "no answer" in text for text in refused), refused
    _, records = read(trace_path(root))
    ended = [action["outcome"] for record in records for kind, action in record.actions if kind == "Respond"]
    assert ended.count("answered") + ended.count("late") == len(answered)  # each was answered, and its client got it
    assert "failed" not in ended
    assert "cancelled" not in ended


def test_interrupt_stops_it_as_well(tmp_path: Path) -> None:
    with serving(write_good(tmp_path / "models", "chooser"), "--no-trace", "--policy", "fcfs") as process:
        assert process.ready["policy"] == "fcfs (drop: hopeless)"
        assert process.end(signal.SIGINT) == 0
    assert not trace_path(tmp_path / "models").exists()


def test_a_killed_server_leaves_a_readable_trace(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "two")
    with serving(root) as process:
        for _ in range(10):
            infer_once(process.url, "two", X)
        path = trace_path(root)
        deadline = time.monotonic() + WAIT_S
        while path.read_bytes().count(b'"Respond"') < 10 and time.monotonic() < deadline:
            os.sched_yield()  # the trace follows the answers a tenth of a second later
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
    _, records = read(path)
    assert sum(kind == "Respond" for record in records for kind, _ in record.actions) == 10
    whole = path.read_bytes()
    path.write_bytes(whole[:-25])  # as the kill of a busy server leaves it
    replayed = cotenant("replay", str(path), "--json")
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads(replayed.stdout)["same"] is True
    assert cotenant("explain", "4", str(path), "--json").returncode == 0
    timeline = tmp_path / "timeline.json"
    assert cotenant("replay", str(path), "--perfetto", str(timeline)).returncode == 0
    assert json.loads(timeline.read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.skipif(not Path("/proc/thread-self/children").exists(), reason="the kernel does not list children")
def test_a_worker_that_dies_is_replaced_and_the_trace_tells_it(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "chooser")
    with serving(root) as process:
        index = {"index": np.array([1])}
        infer_once(process.url, "chooser", index)
        [pid] = workers_of(process.popen.pid)
        os.kill(pid, signal.SIGKILL)
        started_too_soon: list[str] = []
        while True:
            try:
                infer_once(process.url, "chooser", index)  # waits for the new worker
                break
            except ClientError as error:  # started before the loss was noticed
                started_too_soon.append(str(error))
        assert all("the worker of 'chooser' was killed by signal 9" in text for text in started_too_soon)
        [other] = workers_of(process.popen.pid)
        assert other != pid
        assert process.end(signal.SIGINT) == 0
        messages = [entry["message"] for entry in process.logs]
        assert "the worker of 'chooser' was killed by signal 9" in messages
        assert any(text.startswith("the worker of 'chooser' is up again: replaced in ") for text in messages)
    _, records = read(trace_path(root))
    kinds = [record.kind for record in records]
    assert kinds.index("TenantSuspended") < kinds.index("TenantResumed")
    replayed = cotenant("replay", str(root), "--json")
    assert json.loads(replayed.stdout)["same"] is True


def test_isolation_thread_starts_no_process(tmp_path: Path) -> None:
    with serving(write_good(tmp_path / "models", "chooser"), "--isolation", "thread") as process:
        assert infer_once(process.url, "chooser", {"index": np.array([1])})["y"].tolist() == [[2.0, 3.0]]
        assert workers_of(process.popen.pid) == []
        assert process.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_taken_port_is_one_sentence_and_leaves_the_trace_of_the_other_alone(tmp_path: Path, option: str) -> None:
    root = write_good(tmp_path / "models", "chooser")
    path = trace_path(root)
    path.parent.mkdir()
    path.write_bytes(b"the trace of the server that is running\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"--http-port": "0", "--grpc-port": "0", option: str(taken.getsockname()[1])}
        ended = cotenant("serve", str(root), *[word for pair in ports.items() for word in pair])
    assert ended.returncode == 2
    assert ended.stdout == ""
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("cotenant: ")
    assert f"port {ports[option]}" in last
    assert "0 takes any free one" in last
    assert "Traceback" not in ended.stderr
    assert path.read_bytes() == b"the trace of the server that is running\n"


@pytest.mark.parametrize(
    ("make", "arguments", "sentence"),
    [
        (lambda root: None, (), "is not a directory"),
        (lambda root: write_good(root, "chooser"), ("--policy", "zzz"), "name is 'zzz', expected one of"),
        (lambda root: write_good(root, "chooser"), ("--lanes", "977"), "lanes is ((977,),), expected disjoint lists"),
        (lambda root: write_good(root, "chooser"), ("--isolation", "vm"), "'vm', expected one of process, thread"),
        (lambda root: write_good(root, "chooser"), ("--host", "no such host"), "cannot listen on host"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    tmp_path: Path, make: Any, arguments: tuple[str, ...], sentence: str
) -> None:
    root = tmp_path / "models"
    make(root)
    ended = cotenant("serve", str(root), "--http-port", "0", "--grpc-port", "0", *arguments)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert sentence in ended.stderr.splitlines()[-1]
    assert not (root / ".cotenant").exists()


def test_an_empty_repository_is_served_and_filled_later(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    with serving(root) as process:
        assert process.ready["models"] == {}
        with pytest.raises(ClientError, match="is unknown"):
            infer_once(process.url, "two", X)
        write_good(root, "two")
        load = urllib.request.Request(f"{process.url}/v2/repository/models/two/load", data=b"{}", method="POST")
        with urllib.request.urlopen(load, timeout=WAIT_S) as answer:
            assert answer.status == 200
        assert infer_once(process.url, "two", X)["y"].shape == (1, 8)
        assert process.end(signal.SIGTERM) == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are read from /proc")
def test_a_niced_server_serves(tmp_path: Path) -> None:
    """Lanes of a process that is nicer than they should be stay so; taking it back is the superuser's."""
    root = write_good(tmp_path / "models", "two")
    process = subprocess.Popen(
        ["nice", "-n", "15", *COMMAND, "serve", str(root), "--json", "--http-port", "0", "--grpc-port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        infer_once(f"http://127.0.0.1:{ready['http_port']}", "two", X)
        threads = {
            (entry / "comm").read_text().strip(): os.getpriority(os.PRIO_PROCESS, int(entry.name))
            for entry in Path(f"/proc/{process.pid}/task").iterdir()
        }
        assert min(threads.values()) >= 15
    finally:
        process.terminate()
        assert process.wait(WAIT_S) == 0
        process.stdout.close()
