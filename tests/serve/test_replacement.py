"""A server that takes the place of another one: no request is refused, on new connections and on kept ones."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from cotenant.repository import trace_path
from cotenant.wire.client import infer_once
from cotenant.wire.oip import MESSAGES
from processes import WAIT_S, Process, cotenant, serving
from repositories import X, config, scaled, write_good, write_model

REPLACE = "--set", "server.replace=true"
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "data": X["x"].ravel().tolist()}]})


def ports_of(process: Process) -> tuple[str, ...]:
    return "--http-port", str(process.ready["http_port"]), "--grpc-port", str(process.ready["grpc_port"])


def post(connection: http.client.HTTPConnection) -> str:
    """Why a request got no answer, or ""; also for a connection that the server closed without saying so before."""
    try:
        connection.request("POST", "/v2/models/two/infer", BODY)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    return "" if answer.status == 200 else f"{answer.status} {text!r}"


class Clients:
    """Clients that send requests one after another until they are stopped; `failed` says what was not answered."""

    def __init__(self, process: Process) -> None:
        self.http, self.grpc = process.ready["http_port"], process.ready["grpc_port"]
        self.failed: list[str] = []
        self.answered = {"new": 0, "kept": 0, "grpc": 0}
        self._is_over = threading.Event()
        kept = http.client.HTTPConnection("127.0.0.1", self.http, timeout=WAIT_S)
        channel = grpc.insecure_channel(f"127.0.0.1:{self.grpc}")
        request, response = MESSAGES["ServerReadyRequest"], MESSAGES["ServerReadyResponse"]
        ready = channel.unary_unary(
            "/inference.GRPCInferenceService/ServerReady",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )

        def new() -> str:
            connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=WAIT_S)
            try:
                return post(connection)
            finally:
                connection.close()

        def call() -> str:
            try:
                return "" if ready(request(), timeout=WAIT_S).ready else "it is not ready"
            except grpc.RpcError as error:
                return repr(error)

        sends = {"new": new, "kept": lambda: post(kept), "grpc": call}
        self._threads = [threading.Thread(target=self._run, args=each, daemon=True) for each in sends.items()]
        for thread in self._threads:
            thread.start()

    def _run(self, name: str, send: Callable[[], str]) -> None:
        while not self._is_over.wait(0.005):  # 100 requests a second and more, together
            if error := send():
                self.failed.append(f"{name}: {error}")
            else:
                self.answered[name] += 1

    def go_on(self) -> None:
        """Wait until each client has had further answers."""
        before = dict(self.answered)
        end_s = time.monotonic() + WAIT_S
        while not self.failed and any(self.answered[name] < before[name] + 20 for name in before):
            assert time.monotonic() < end_s, self.answered
            time.sleep(0.01)

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(WAIT_S)


@contextmanager
def clients_of(process: Process) -> Iterator[Clients]:
    clients = Clients(process)
    try:
        yield clients
    finally:
        clients.end()


@pytest.mark.parametrize("frontends", ["0", "1"])
def test_a_replaced_server_refuses_nothing(tmp_path: Path, frontends: str) -> None:
    root = write_good(tmp_path / "models", "two")
    old_root = tmp_path / "old"
    old_root.symlink_to(root)  # the same models, with a log of its own
    with serving(old_root, "--frontends", frontends) as old, clients_of(old) as clients:
        clients.go_on()
        with serving(root, "--frontends", frontends, *REPLACE, *ports_of(old)) as new:
            assert new.ready["http_port"] == old.ready["http_port"]
            assert old.popen.wait(WAIT_S) == 0
            clients.go_on()
            with serving(old_root, "--frontends", frontends, *REPLACE, *ports_of(new)) as third:
                assert new.popen.wait(WAIT_S) == 0
                clients.go_on()
                clients.end()
                assert clients.failed == []
                assert third.end(signal.SIGTERM) == 0
    assert trace_path(root).with_name("trace-2.jsonl").exists()


def test_another_server_at_the_ports_is_refused_unless_it_replaces(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "two")
    with serving(root) as process:
        ended = cotenant("serve", str(root), *ports_of(process))
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "add --set server.replace=true" in ended.stderr
        assert infer_once(process.url, "two", X)["y"].shape == (1, 8)


def test_a_server_that_does_not_serve_all_models_replaces_none(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "two")
    with serving(root) as process:
        worse = tmp_path / "worse"
        write_model(worse, "two", config(), {1: lambda: scaled(2.0)})
        write_model(worse, "bad", "[model]\n", {})
        ended = cotenant("serve", str(worse), *REPLACE, *ports_of(process))
        assert ended.returncode == 2
        assert "is not replaced, as this one does not serve all models of the repository: 'bad'" in ended.stderr
        assert infer_once(process.url, "two", X)["y"].shape == (1, 8)
        with serving(root, *REPLACE, *ports_of(process)) as new:
            assert process.popen.wait(WAIT_S) == 0
            assert infer_once(new.url, "two", X)["y"].shape == (1, 8)
            assert new.end(signal.SIGTERM) == 0
