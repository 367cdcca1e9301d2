"""Loads side by side: what takes its time holds no other model up, and what happens meanwhile is seen."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from client import WAIT_S, Client, started, until
from cotenant.config import DeviceSection, ServerConfig
from cotenant.execute.worker.process import ChildProcess
from cotenant.execute.worker.supervisor import WorkerSupervisor
from cotenant.measure import loader_process
from cotenant.measure.loader_process import Loader
from cotenant.policies.registry import make_policy
from cotenant.serve.server import Server
from cotenant.types import Outcome
from cotenant.wire.api import ServeError, Status
from cotenant.work import Share
from fake_backend import serving
from repositories import X, config, scaled, write_model
from stubborn_models import looping

LOOPING = "[[model.shapes]]\nx = [4]\n"
TWO = DeviceSection(cores=(0, 1), isolation="thread")


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[ChildProcess]:
    """Gets the process of a load that asks whether it may measure."""
    asked: SimpleQueue[ChildProcess] = SimpleQueue()
    real = loader_process._Child._wait_to_measure

    def note(self: Any, *arguments: Any) -> None:
        asked.put(self._process)
        real(self, *arguments)

    monkeypatch.setattr(loader_process._Child, "_wait_to_measure", note)
    monkeypatch.setattr(loader_process, "_MEASURING_S", 0.1)
    return asked


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that serves `plain`."""
    write_model(tmp_path, "plain", config(max_batch=4), {1: lambda: scaled(1.0)})
    loader = Loader(600.0)
    made = started(tmp_path, loader=loader, device=TWO)
    yield made
    made.stop()
    loader.close()


def reason_of(server: Server, name: str) -> str:
    """Why a model is unavailable, to a server and to its front-ends."""
    with pytest.raises(ServeError) as caught:
        server.metadata(name, "")
    assert caught.value.status is Status.UNAVAILABLE
    with pytest.raises(ServeError) as told:
        server.directory().find(name, "")
    assert told.value.message == caught.value.message
    return caught.value.message


@pytest.mark.usefixtures("turns")
def test_a_start_is_not_held_up_by_a_model_that_never_ends(tmp_path: Path) -> None:
    write_model(tmp_path, "a_loop", config(more="priority = 1") + LOOPING, {1: looping})
    write_model(tmp_path, "plain", config(max_batch=4), {1: lambda: scaled(1.0)})
    write_model(tmp_path, "with_plain", config("plain", max_batch=4), {1: lambda: scaled(1.0)})
    server = Server(tmp_path, ServerConfig(device=TWO))
    assert reason_of(server, "nobody") == "model 'nobody': the server is starting or stopping; try again later"
    start = threading.Thread(target=server.start)
    start.start()
    until(lambda: server.names.get("plain").is_served, os.sched_yield)
    assert start.is_alive()
    assert server.metadata("plain", "").name == "plain"
    assert_serves_before_it_is_ready(server, "plain")
    waits = "model 'with_plain' is not served: it is starting: it waits to be loaded, 2 models before it"
    assert reason_of(server, "with_plain") == waits
    assert "'a_loop' is not served: it is starting: " in reason_of(server, "a_loop")
    assert {each.name: each.reason for each in server.index(ready_only=False)}["with_plain"] in waits
    for find in (server.metadata, server.directory().find):
        with pytest.raises(ServeError, match="'nobody' is unknown") as caught:
            find("nobody", "")
        assert caught.value.status is Status.NOT_FOUND
    server.cancel_loads()
    start.join(WAIT_S)
    assert not start.is_alive()
    assert not server.names.get("a_loop").is_served
    assert not server.model_ready("plain", "")
    [line] = [each for each in server.index(ready_only=False) if each.name == "plain"]
    assert (line.state, line.reason) == ("UNAVAILABLE", "the server is stopping")
    assert server.stop()


def assert_serves_before_it_is_ready(server: Server, name: str) -> None:
    """Unmodified clients of both protocols find a model READY and get its answers; the server itself is not ready."""
    with serving(server) as ports:
        for triton, port in ((triton_http, ports.http), (triton_grpc, ports.grpc)):
            client = triton.InferenceServerClient(f"127.0.0.1:{port}")
            assert client.is_model_ready(name)
            assert not client.is_server_ready()
            given = triton.InferInput("x", list(X["x"].shape), "FP32")
            given.set_data_from_numpy(X["x"])
            assert client.infer(name, [given]).as_numpy("y").shape == X["x"].shape
            client.close()
    directory = server.directory()
    assert (directory.is_ready(name, ""), directory.is_open) == (True, False)
    assert name in {each.name for each in server.index(ready_only=True)}
    with pytest.raises(ServeError, match="is not served: it is starting"):
        Client(server).submit("a_loop", {})


def test_workers_load_their_models_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, real = threading.Barrier(2), WorkerSupervisor.load

    def load(self: WorkerSupervisor) -> None:
        both.wait(WAIT_S)
        real(self)

    monkeypatch.setattr(WorkerSupervisor, "load", load)
    for name in ("left", "right"):
        write_model(tmp_path, name, config(max_batch=4), {1: lambda: scaled(2.0)})
    server = started(tmp_path, device=DeviceSection(cores=(0, 1)))
    try:
        assert [Client(server).ask(name, X).outcome for name in ("left", "right")] == [Outcome.ANSWERED] * 2
    finally:
        server.stop()


def test_while_a_worker_loads_its_model_others_come_go_and_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, real = threading.Event(), WorkerSupervisor.load
    go_on = threading.Event()

    def load(self: WorkerSupervisor) -> None:
        if self.tenant == "slow":
            begun.set()
            assert go_on.wait(WAIT_S)
        real(self)

    monkeypatch.setattr(WorkerSupervisor, "load", load)
    write_model(tmp_path, "plain", config(max_batch=4), {1: lambda: scaled(1.0)})
    server = started(tmp_path, device=DeviceSection(cores=(0, 1)))
    write_model(tmp_path, "slow", config(max_batch=4), {1: lambda: scaled(2.0)})
    try:
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(server.load, "slow")
            assert begun.wait(WAIT_S)
            server.unload("plain")
            server.load("plain")
            assert Client(server).ask("plain", X).outcome is Outcome.ANSWERED
            server.change_policy(make_policy("edf", {}, (Share((0, 1)),)))
            go_on.set()
            slow.result(WAIT_S)
            assert {point.cores for point in server.names.models["slow"][""].profile.points} >= {2}
            assert Client(server).ask("slow", X).outcome is Outcome.ANSWERED
            begun.clear()
            go_on.clear()
            server.unload("slow")
            slow = pool.submit(server.load, "slow")
            assert begun.wait(WAIT_S)
            server.cancel_loads()
            go_on.set()
            with pytest.raises(ServeError) as caught:
                slow.result(WAIT_S)
            assert caught.value.status is Status.UNAVAILABLE
    finally:
        go_on.set()
        assert server.stop()
    assert not server._busy


def test_other_models_are_loaded_and_unloaded_meanwhile_and_the_same_one_is_not(
    server: Server, turns: SimpleQueue[ChildProcess]
) -> None:
    write_model(server.root, "loop", config() + LOOPING, {1: looping})
    write_model(server.root, "more", config(max_batch=4), {1: lambda: scaled(2.0)})
    with ThreadPoolExecutor(2) as pool:
        server.model_loader.loader_process.rest()  # what kills a new child is not tried again
        endless = pool.submit(server.load, "loop")
        child = turns.get(timeout=WAIT_S)
        server.load("more")
        server.unload("plain")
        assert Client(server).ask("more", X).outcome is Outcome.ANSWERED
        again = pool.submit(server.unload, "loop")
        server.load("plain")
        assert not again.done()
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ServeError, match="killed by signal 9"):
            endless.result(WAIT_S)
        with pytest.raises(ServeError, match="'loop' is not loaded"):
            again.result(WAIT_S)
    assert not server._busy


def test_of_two_models_with_one_tenant_one_is_served(server: Server) -> None:
    for name in ("left", "right"):
        write_model(server.root, name, config("both", max_batch=4), {1: lambda: scaled(2.0)})
    with ThreadPoolExecutor(2) as pool:
        ended = [each.exception(WAIT_S) for each in [pool.submit(server.load, name) for name in ("left", "right")]]
    [error] = filter(None, ended)
    assert "tenant 'both' already owns model" in str(error)
    assert sum(server.names.get(name).is_served for name in ("left", "right")) == 1


def test_a_model_is_opened_anew_where_lanes_change_meanwhile(
    server: Server, turns: SimpleQueue[ChildProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_process, "_MEASURING_S", WAIT_S)
    write_model(server.root, "more", config(max_batch=4), {1: lambda: scaled(2.0)})
    both = (Share((0, 1)),)
    assert server.policy.spec.shares != both
    with ThreadPoolExecutor(1) as pool:
        with server.model_loader.loader_process._measuring:
            load = pool.submit(server.load, "more")
            turns.get(timeout=WAIT_S)
            server.change_policy(make_policy("edf", {}, both))
        load.result(WAIT_S)
    points = server.names.models["more"][""].profile.points
    assert {point.cores for point in points} >= {2}
    assert Client(server).ask("more", X).outcome is Outcome.ANSWERED
