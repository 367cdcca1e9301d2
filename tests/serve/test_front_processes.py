"""Front-ends in processes of their own: whichever process dies is replaced, and every query has one outcome."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cotenant.config import ServerConfig, ServerSection
from cotenant.repository import trace_path
from cotenant.serve import processes
from cotenant.serve.link.arena import Arena
from cotenant.serve.link.messages import EndedQuery, QueryRequest
from cotenant.serve.processes import ServerProcesses, loads_folder
from cotenant.types import Outcome
from cotenant.wire.client import infer_once
from cotenant.wire.encode import ClientError
from processes import COMMAND, WAIT_S, Process, cotenant, processes_of, serving, workers_of
from repositories import X, config, scaled, write_good, write_model
from stubborn_models import looping

pytestmark = pytest.mark.skipif(
    not Path("/proc/thread-self/children").exists(), reason="the kernel does not list children"
)
ENGINE, FRONT_END = "serve.engine_process", "serve.frontend_process"


def until_true(is_so: object, what: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end_s, what
        os.sched_yield()


def answers(process: Process) -> bool:
    try:
        return infer_once(process.url, "two", X)["y"].shape == (1, 8)
    except (ClientError, OSError):
        return False


def is_ready(process: Process) -> bool:
    try:
        with urllib.request.urlopen(f"{process.url}/v2/health/ready", timeout=WAIT_S):
            return True
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def told(process: Process, word: str) -> bool:
    return any(word in line["message"] for line in process.logs)


def test_a_front_end_that_dies_is_replaced_and_others_go_on(tmp_path: Path) -> None:
    with serving(write_good(tmp_path / "models", "two"), "--frontends", "2") as process:
        first, second = processes_of(process.popen.pid, FRONT_END)
        [engine] = processes_of(process.popen.pid, ENGINE)
        workers = workers_of(process.popen.pid)
        assert answers(process)
        os.kill(first, signal.SIGKILL)
        until_true(lambda: answers(process), "the other one answers")
        until_true(lambda: told(process, "is up again"), "another one is started")
        assert second in processes_of(process.popen.pid, FRONT_END)
        assert len(processes_of(process.popen.pid, FRONT_END)) == 2
        os.kill(second, signal.SIGKILL)
        until_true(lambda: answers(process), "the new one answers")
        assert (processes_of(process.popen.pid, ENGINE), workers_of(process.popen.pid)) == ([engine], workers)
        assert process.end(signal.SIGTERM) == 0


def test_a_new_front_end_refuses_nothing_that_the_engine_would_answer(tmp_path: Path) -> None:
    """Connections that come while there is none wait for it, and it accepts them once it has its link."""
    with serving(write_good(tmp_path / "models", "two"), "--frontends", "1") as process:
        for _ in range(2):
            [front_end] = processes_of(process.popen.pid, FRONT_END)
            os.kill(front_end, signal.SIGKILL)
            until_true(lambda front_end=front_end: is_gone(front_end), "it is killed")
            assert infer_once(process.url, "two", X)["y"].shape == (1, 8)
        assert process.end(signal.SIGTERM) == 0


def test_without_an_engine_clients_are_told_at_once_and_another_one_serves_them(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "two")
    with serving(root) as process:
        [engine] = processes_of(process.popen.pid, ENGINE)
        [front_end] = processes_of(process.popen.pid, FRONT_END)
        workers = workers_of(process.popen.pid)
        assert answers(process)
        os.kill(engine, signal.SIGKILL)
        until_true(lambda: is_gone(engine), "the engine is killed")
        until_true(lambda: not is_ready(process), "clients are told")
        with pytest.raises(ClientError, match=r"engine is starting|starting or stopping"):
            infer_once(process.url, "two", X)
        until_true(lambda: answers(process), "another engine serves")
        assert workers_of(process.popen.pid) == workers
        assert processes_of(process.popen.pid, FRONT_END) == [front_end]
        assert told(process, "engine was killed by signal 9")
        assert process.end(signal.SIGTERM) == 0


def killed_engine(process: Process) -> int:
    """Kill the engine, and wait until it is gone and another one answers; gives its number."""
    [engine] = processes_of(process.popen.pid, ENGINE)
    os.kill(engine, signal.SIGKILL)
    until_true(lambda: is_gone(engine), "the engine is killed")
    until_true(lambda: not is_ready(process), "clients get to know")
    until_true(lambda: answers(process), "another engine serves")
    return engine


def scaling(root: Path, by: float) -> Path:
    write_model(root, "two", config(), {1: lambda: scaled(by)})
    return root


def factor(process: Process) -> float:
    """By which the model "two" multiplies."""
    y = infer_once(process.url, "two", X)["y"]
    return float((y * (1 + abs(X["x"])) / X["x"])[0, 0])


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process are of, without numbers."""
    links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    return sorted(Path(each.partition(":")[0]).name for each in links)


def test_workers_outlive_engines_and_nothing_piles_up(tmp_path: Path) -> None:
    root = scaling(tmp_path / "models", 2.0)
    with serving(root) as process:
        pid = process.popen.pid
        [worker] = workers_of(pid)
        assert factor(process) == pytest.approx(2.0, rel=1e-3)
        seen = []
        for _ in range(2):
            killed_engine(process)
            assert factor(process) == pytest.approx(2.0, rel=1e-3)
            assert workers_of(pid) == [worker]
            until_true(lambda: not processes_of(pid, "measure.loader_process"), "loaders end")
            children = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/children")]
            seen.append((open_files(worker), open_files(pid), sum(map(len, children))))
        assert seen[0] == seen[1]
        with urllib.request.urlopen(f"{process.url}/v2/repository/models/two/unload", b"", timeout=WAIT_S):
            until_true(lambda: is_gone(worker), "a worker ends with its model")
        assert process.end(signal.SIGTERM) == 0


def test_workers_start_anew_when_engines_die_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers may be the cause."""
    made = ServerProcesses(
        write_good(tmp_path / "models"),
        ServerConfig(server=ServerSection(http_port=0, grpc_port=0)),
        frontends=0,
        records=False,
        stale=False,
    )
    found = []
    monkeypatch.setattr(processes, "ChildProcess", lambda *_: SimpleNamespace(kill=lambda: None))
    monkeypatch.setattr(made._keeper, "kill", lambda: found.append(losses))
    folder = loads_folder(made._start.path)
    for losses in range(5):
        folder.mkdir(exist_ok=True)
        made._all[0].losses = losses
        made._begin(made._all[0])
        assert folder.exists() == (losses <= 2)
        assert made._all[0].control is not None
        made._selector.unregister(made._all[0].control)
        made._all[0].control.close()
    assert found == [3, 4]
    made._let_go()


def test_an_engine_takes_over_the_worker_that_still_runs_a_launch_of_the_engine_before(tmp_path: Path) -> None:
    root = scaling(tmp_path / "models", 2.0)
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "data": X["x"].ravel().tolist()}]})
    with serving(root) as process:
        [worker] = workers_of(process.popen.pid)
        [engine] = processes_of(process.popen.pid, ENGINE)
        os.kill(worker, signal.SIGSTOP)
        with socket.create_connection(("127.0.0.1", process.ready["http_port"])) as client:
            head = f"POST /v2/models/two/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(f"{head}{body}".encode())
            until_true(lambda: b'"QueryArrived"' in trace_path(root).read_bytes(), "the query arrives")
            os.kill(engine, signal.SIGKILL)
            client.settimeout(WAIT_S)
            assert client.recv(64).startswith(b"HTTP/1.1 503")
        os.kill(worker, signal.SIGCONT)
        until_true(lambda: answers(process), "another engine serves")
        assert factor(process) == pytest.approx(2.0, rel=1e-3)
        assert workers_of(process.popen.pid) == [worker]


def test_a_model_with_another_file_is_loaded_anew_by_the_next_engine(tmp_path: Path) -> None:
    root = scaling(write_good(tmp_path / "models", "chooser"), 2.0)
    with serving(root) as process:
        workers = workers_of(process.popen.pid)
        before = {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[4]: pid for pid in workers}
        assert sorted(before) == [b"chooser", b"two"]
        scaling(root, 3.0)
        killed_engine(process)
        assert factor(process) == pytest.approx(3.0, rel=1e-3)
        assert before[b"chooser"] in workers_of(process.popen.pid)
        until_true(lambda: is_gone(before[b"two"]), "the worker of the old file is ended")
        below = [*processes_of(process.popen.pid, ENGINE), *workers_of(process.popen.pid)]
        process.popen.kill()
        process.popen.wait(WAIT_S)
        for each in below:
            until_true(lambda each=each: is_gone(each), "it ends")


def test_all_end_with_the_process_that_looks_after_them(tmp_path: Path) -> None:
    with serving(write_good(tmp_path / "models", "two"), "--frontends", "2") as process:
        pid = process.popen.pid
        below = [*processes_of(pid, ENGINE), *processes_of(pid, FRONT_END), *workers_of(pid)]
        assert len(below) == 5
        process.popen.kill()
        process.popen.wait(WAIT_S)
        for each in below:
            until_true(lambda each=each: is_gone(each), "it ends")


def test_a_drain_answers_what_is_inside(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "two")
    (root / "cotenant.toml").write_text("[server]\ndrain_s = 20\n")
    body = json.dumps(
        {"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "data": X["x"].ravel().tolist()}]}
    ).encode()
    head = f"POST /v2/models/two/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving(root) as process:
        workers = workers_of(process.popen.pid)
        for each in workers:
            os.kill(each, signal.SIGSTOP)
        with socket.create_connection(("127.0.0.1", process.ready["http_port"])) as client:
            client.sendall(head + body)
            path = trace_path(root)
            until_true(lambda: b'"QueryArrived"' in path.read_bytes(), "the query arrives")
            process.popen.send_signal(signal.SIGTERM)
            until_true(lambda: not is_ready(process), "no query is taken any more")
            for each in workers:
                os.kill(each, signal.SIGCONT)
            client.settimeout(WAIT_S)
            assert client.recv(64).startswith(b"HTTP/1.1 200")
        assert process.popen.wait(WAIT_S) == 0


def test_an_engine_that_cannot_serve_says_so_as_a_server_of_one_process_does(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "two")
    words = "serve", str(root), "--http-port", "0", "--grpc-port", "0", "--plan", str(tmp_path / "none.toml")
    ended = [cotenant(*words, "--frontends", each) for each in ("0", "1")]
    assert [each.returncode for each in ended] == [2, 2]
    assert ended[0].stdout == ended[1].stdout == ""
    assert ended[0].stderr == ended[1].stderr != ""


def test_loads_metrics_and_reloads_go_through_front_ends(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "two")
    with serving(root, "--frontends", "2") as process:

        def post(path: str) -> int:
            with urllib.request.urlopen(f"{process.url}/v2/repository/{path}", b"", timeout=WAIT_S) as answer:
                return int(answer.status)

        write_model(root, "late", config(), {})
        with pytest.raises(urllib.error.HTTPError):
            post("models/late/load")
        for _ in range(3):
            assert post("models/two/load") == 200
            assert answers(process)
        assert post("models/two/unload") == 200
        with pytest.raises(ClientError, match="is not served: it was unloaded"):
            infer_once(process.url, "two", X)
        assert post("models/two/load") == 200
        assert answers(process)
        with urllib.request.urlopen(f"{process.url}/metrics", timeout=WAIT_S) as page:
            assert b"cotenant_queries_total" in page.read()


def test_a_query_crosses_in_at_most_512_bytes() -> None:
    """Whatever its tensors hold: they lie in shared memory."""
    arena = Arena("test", 1 << 22)
    for size in (1, 16, 100_000):
        few = {name: np.zeros((1, size), np.float32) for name in ("input_ids", "attention_mask")}
        place = arena.write(few)
        ask = QueryRequest(
            1 << 40, "a-model-with-a-long-name-0123456789", "12", place, ("logits",), 3, 1 << 50, 1 << 60
        )
        assert len(msgspec.msgpack.encode(ask)) <= 512
        ended = EndedQuery(1 << 40, Outcome.ANSWERED, 1 << 40, "12", place, "", 1 << 60)
        assert len(msgspec.msgpack.encode(ended)) <= 512
    arena.close()


def test_a_model_answers_while_another_is_loaded_and_a_stop_then_loses_nothing(tmp_path: Path) -> None:
    """Clients of a start that lasts: the model that is loaded answers them, until the server is told to stop."""
    root = write_good(tmp_path / "models", "two")
    write_model(root, "a_loop", config(max_batch=4, more="priority = 1"), {1: lambda: looping(["batch"])})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = "serve", str(root), "--json", "--http-port", str(port), "--grpc-port", "0", "--frontends", "1"
    process: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}")
    with (tmp_path / "log").open("wb") as log, subprocess.Popen([*COMMAND, *words], stderr=log, stdout=log) as popen:
        try:
            until_true(lambda: answers(process), "the model that is loaded answers")
            assert not is_ready(process)
            with urllib.request.urlopen(f"{process.url}/v2/models/two/ready", timeout=WAIT_S) as found:
                assert json.load(found)["ready"]
            with pytest.raises(ClientError, match="model 'a_loop' is not served: it is starting"):
                infer_once(process.url, "a_loop", X)
            popen.send_signal(signal.SIGTERM)
            assert popen.wait(WAIT_S) == 0
        finally:
            popen.kill()
    replayed = cotenant("replay", str(root), "--json")
    assert replayed.returncode == 0, replayed.stderr
    assert trace_path(root).read_bytes().count(b'"QueryArrived"') == 1


def test_the_worker_starts_while_its_model_is_tried_and_ends_with_a_load_that_fails(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "two")
    with serving(root, "--set", "server.load_limit_s=600") as process:
        before = workers_of(process.popen.pid)
        write_model(root, "a_loop", config(max_batch=4), {1: lambda: looping(["batch"])})
        load = threading.Thread(target=fail_to_load, args=(process, "a_loop"))
        load.start()
        until_true(lambda: len(workers_of(process.popen.pid)) > len(before), "a worker waits for the model")
        [waiting] = {*workers_of(process.popen.pid)} - {*before}

        def is_over() -> bool:
            for each in processes_of(
                process.popen.pid, "measure.loader_process"
            ):  # what kills an old one is tried again
                os.kill(each, signal.SIGKILL)
            return is_gone(waiting)

        until_true(is_over, "the load has failed")
        load.join(WAIT_S)
        assert answers(process)
        assert process.end(signal.SIGTERM) == 0


def fail_to_load(process: Process, model: str) -> None:
    url = f"{process.url}/v2/repository/models/{model}/load"
    failed = (urllib.error.URLError, ConnectionError)  # the answer, or the end of a server that a test has killed
    with pytest.raises(failed), urllib.request.urlopen(url, b"", timeout=WAIT_S):
        pass
