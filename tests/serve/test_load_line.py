"""Loads that take long, asked for over HTTP and gRPC: other calls are answered, and the line is short."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from itertools import islice
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cotenant.serve.frontend.call_threads import LoopThreads
from cotenant.serve.frontend.load_line import MOST_IN_LINE, LoadLine
from cotenant.wire.api import ServeError, Status
from cotenant.wire.codec import Limits
from fake_backend import FakeBackend, serving

WAIT_S = 60.0
LIMITS = Limits(max_concurrent_rpcs=4)
Ask = Callable[[str, str], tuple[int, str]]
"""Asks for `load` or `unload` of a model; gives the HTTP status, or that which stands for gRPC's, and the sentence."""


class SlowBackend(FakeBackend):
    """Loads begin, and wait to be let go."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.changed = threading.Condition()
        self.gate = threading.Event()

    def load(self, model: str) -> None:
        self._note(f"load {model}")
        assert self.gate.wait(WAIT_S)
        if model == "bad":
            raise ServeError(Status.INVALID_ARGUMENT, "model 'bad' is bad")

    def unload(self, model: str) -> None:
        self._note(f"unload {model}")

    def _note(self, call: str) -> None:
        with self.changed:
            self.calls.append(call)
            self.changed.notify_all()

    def await_calls(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.calls) >= count, WAIT_S)


@contextmanager
def slow() -> Iterator[tuple[SlowBackend, Any]]:
    backend = SlowBackend()
    with serving(backend, LIMITS) as ports:
        try:
            yield backend, ports
        finally:
            backend.gate.set()
    backend.close()


def over_http(ports: Any) -> Ask:
    def ask(kind: str, model: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=WAIT_S)
        connection.request("POST", f"/v2/repository/models/{model}/{kind}")
        answer = connection.getresponse()
        told = json.loads(answer.read())
        connection.close()
        return answer.status, told.get("error", "")

    return ask


def over_grpc(ports: Any) -> Ask:
    def ask(kind: str, model: str) -> tuple[int, str]:
        with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                if kind == "load":
                    stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name=model), timeout=WAIT_S)
                else:
                    request = service_pb2.RepositoryModelUnloadRequest(model_name=model)
                    stub.RepositoryModelUnload(request, timeout=WAIT_S)
            except grpc.RpcError as error:
                codes = {grpc.StatusCode.UNAVAILABLE: 503, grpc.StatusCode.INVALID_ARGUMENT: 400}
                return codes[error.code()], error.details()
        return 200, ""

    return ask


FRONT_ENDS: dict[str, Callable[[Any], Ask]] = {"http": over_http, "grpc": over_grpc}


def in_thread(ask: Ask, kind: str, model: str) -> Future[tuple[int, str]]:
    future: Future[tuple[int, str]] = Future()
    threading.Thread(target=lambda: future.set_result(ask(kind, model)), daemon=True).start()
    return future


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_no_other_call_waits_for_loads_and_a_long_line_is_refused(front_end: str) -> None:
    with slow() as (backend, ports):
        ask = FRONT_ENDS[front_end](ports)
        first = in_thread(ask, "load", "m0")
        backend.await_calls(1)
        more = [in_thread(ask, "load", f"m{1 + number % 20}") for number in range(30)]
        for each in islice(as_completed(more, WAIT_S), 4):  # of 20 models at most MOST_IN_LINE wait
            status, sentence = each.result()
            assert status == 503
            assert f"{MOST_IN_LINE} loads and unloads wait already, the limit; try again later" in sentence
        connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=WAIT_S)
        for path in ("/metrics", "/v2/models/tiny", "/v2/models/tiny/config", "/v2/models/stats", "/v2/health/ready"):
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, path
        connection.close()
        with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for _ in range(8):
                assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=WAIT_S).ready
                stub.ModelStatistics(service_pb2.ModelStatisticsRequest(), timeout=WAIT_S)
                stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=WAIT_S)
        assert backend.calls == ["load m0"]
        backend.gate.set()
        assert first.result(WAIT_S)[0] == 200
        assert {each.result(WAIT_S)[0] for each in more} == {200, 503}
        assert len(backend.calls) <= 1 + MOST_IN_LINE + 4, "a model that waits in line is loaded once"


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_loads_of_one_model_join_the_one_in_line_and_have_its_result(front_end: str) -> None:
    with slow() as (backend, ports):
        ask = FRONT_ENDS[front_end](ports)
        first = in_thread(ask, "load", "bad")
        backend.await_calls(1)
        joined = [in_thread(ask, "load", "bad") for _ in range(12)]
        backend.gate.set()
        assert {each.result(WAIT_S) for each in (first, *joined)} == {(400, "model 'bad' is bad")}


def test_a_load_joins_none_that_has_begun_or_that_an_unload_follows() -> None:
    backend = SlowBackend()
    line = LoadLine(backend, "loads")
    begun = line.load("a")
    backend.await_calls(1)
    second, third, other = line.load("a"), line.load("a"), line.load("b")
    unload, again, last = line.unload("a"), line.load("a"), line.load("a")
    assert second is third is not begun
    assert again is last is not second
    backend.gate.set()
    for each in (begun, second, other, unload, last):
        each.result(WAIT_S)
    assert backend.calls == ["load a", "load a", "load b", "unload a", "load a"]
    line.close()
    backend.close()


def test_what_waits_in_line_is_refused_when_the_line_closes() -> None:
    backend = SlowBackend()
    line = LoadLine(backend, "loads")
    begun, waiting = line.load("a"), line.load("b")
    backend.await_calls(1)
    line.close()
    with pytest.raises(ServeError, match="the server is stopping") as caught:
        waiting.result(WAIT_S)
    assert caught.value.status is Status.UNAVAILABLE
    with pytest.raises(ServeError, match="the server is stopping"):
        line.load("c")
    backend.gate.set()
    begun.result(WAIT_S)
    assert backend.calls == ["load a"]
    backend.close()


def test_threads_of_a_loop_run_what_they_are_given_side_by_side_up_to_the_limit() -> None:
    threads = LoopThreads(3, "test")
    barrier = threading.Barrier(3)
    futures = [threads.submit(lambda: barrier.wait(WAIT_S)) for _ in range(9)]
    assert sorted(each.result(WAIT_S) for each in futures) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    names = {threads.submit(lambda: threading.current_thread()).result(WAIT_S) for _ in range(9)}
    assert all(each.daemon for each in names)
    failing: Future[float] = threads.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(WAIT_S)
    gate = threading.Event()
    held = [threads.submit(lambda: gate.wait(WAIT_S)) for _ in range(5)]
    threads.shutdown()
    gate.set()
    assert all(each.result(WAIT_S) for each in held)
