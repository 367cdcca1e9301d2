"""A resource that the system does not give costs the call that needed it: every call has one end, later ones are
served.

For each kind of resource the n-th wish of a scenario with real clients is refused, for each n.
"""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from client import assert_balanced, feeds, sample, started
from cotenant import shortages
from cotenant.config import DeviceSection, ServerConfig
from cotenant.core.actions import Launch
from cotenant.errors import CotenantError
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.execute.worker.limits import WorkerLimits
from cotenant.serve.frontend.call_threads import LoopThreads
from cotenant.serve.server import Server
from cotenant.shortages import Resource
from fake_backend import CountingBackend, FakeBackend, Ports, serving
from repositories import write_good

WAIT_S = 60.0
MOST = 40
ENDS = {200, 400, 500, 503}
CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
}


class Short:
    """Refuses the n-th wish for one resource, from when it is armed on, and those after it where it `lasts`."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self._error = error
        self._left = -1
        self._lasts = False
        self.refused = 0

    def arm(self, number: int, *, lasts: bool = False) -> None:
        self._left, self._lasts, self.refused = number, lasts, 0

    def disarm(self) -> None:
        self._left = -1

    def look(self) -> None:
        if self._left < 0:
            return
        if self._left == 0:
            self.refused += 1
            if not self._lasts:
                self._left = -1
            raise self._error()
        self._left -= 1


def _wrapped(patch: pytest.MonkeyPatch, owner: Any, name: str, short: Short) -> None:
    real = getattr(owner, name)

    def wish(*args: Any, **kwargs: Any) -> Any:
        short.look()
        return real(*args, **kwargs)

    patch.setattr(owner, name, wish)


def _of_threads(patch: pytest.MonkeyPatch) -> Short:
    short = Short(lambda: RuntimeError("can't start new thread"))
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("cotenant") or isinstance(thread, threading.Timer):
            short.look()
        real(thread)

    patch.setattr(threading.Thread, "start", start)
    return short


def _of_calls(owner: Any, name: str, code: int) -> Callable[[pytest.MonkeyPatch], Short]:
    def make(patch: pytest.MonkeyPatch) -> Short:
        short = Short(lambda: OSError(code, os.strerror(code)))
        _wrapped(patch, owner, name, short)
        return short

    return make


KINDS: dict[str, tuple[Callable[[pytest.MonkeyPatch], Short], Resource]] = {
    "threads": (_of_threads, Resource.THREAD),
    "processes": (_of_calls(subprocess, "Popen", errno.EAGAIN), Resource.PROCESS),
    "files": (_of_calls(os, "open", errno.EMFILE), Resource.DESCRIPTOR),
    "sockets": (_of_calls(socket, "socketpair", errno.EMFILE), Resource.DESCRIPTOR),
    "buffers": (_of_calls(os, "memfd_create", errno.EMFILE), Resource.DESCRIPTOR),
    "pages": (_of_calls(os, "posix_fallocate", errno.ENOMEM), Resource.MEMORY),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = write_good(tmp_path_factory.mktemp("short") / "models", "two", "add_sub")
    made = Server(root, ServerConfig())
    assert isinstance(made._executor, ProcessExecutor)
    made._executor._limits = WorkerLimits(backoff_s=0.01, backoff_most_s=0.05)  # replaced at once
    made.start()
    yield made
    made.stop()


def body_of(model: str) -> bytes:
    inputs = [
        {"name": name, "shape": list(array.shape), "datatype": {"i": "INT32", "f": "FP32"}[array.dtype.kind]}
        | {"data": array.ravel().tolist()}
        for name, array in feeds(model).items()
    ]
    return json.dumps({"inputs": inputs, "parameters": {"timeout": 50_000_000}}).encode()


def message_of(model: str) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model, id=model)
    for name, array in feeds(model).items():
        datatype = {"i": "INT32", "f": "FP32"}[array.dtype.kind]
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return message


class Clients:
    """One round of calls over both protocols; each gives how it ended."""

    def __init__(self, server: Server, ports: Ports) -> None:
        self._server = server
        self._ports = ports

    def http(self, method: str, path: str, body: bytes = b"", **fields: str) -> int:
        connection = HTTPConnection("127.0.0.1", self._ports.http, timeout=WAIT_S)
        try:
            connection.request(method, path, body, fields)
            answer = connection.getresponse()
            told = answer.read()
            assert answer.status == 200 or len(json.loads(told)["error"]) > 5
            return answer.status
        finally:
            connection.close()

    def calls(self, *, loads: bool, kills: bool) -> tuple[list[int], list[Any]]:
        """Inferences at once, a stream, a compressed body, a scrape, a load, and some with a worker that was killed."""
        statuses: list[int] = []
        codes: list[Any] = []
        target = f"127.0.0.1:{self._ports.grpc}"
        with grpc.insecure_channel(target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            under_way = [infer.future(message_of("add_sub").SerializeToString(), timeout=WAIT_S) for _ in range(8)]
            codes += [each.code() for each in under_way]
            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            sent = [message_of("add_sub").SerializeToString()] * 3
            call = stream(iter(sent), timeout=WAIT_S)
            try:
                for data in call:
                    found = service_pb2.ModelStreamInferResponse.FromString(data)
                    codes.append(grpc.StatusCode.INTERNAL if found.error_message else grpc.StatusCode.OK)
            except grpc.RpcError:
                pass
            codes.append(call.code())
        packed = gzip.compress(body_of("two"))
        statuses.append(self.http("POST", "/v2/models/two/infer", packed, **{"Content-Encoding": "gzip"}))
        if loads:
            statuses.append(self.http("POST", "/v2/repository/models/add_sub/load"))
        assert isinstance(self._server._executor, ProcessExecutor)
        [pid] = [each.pid for each in self._server._executor.workers() if each.tenant == "Owner of two"]
        if pid and kills:
            os.kill(pid, signal.SIGKILL)
        statuses += [self.http("POST", "/v2/models/two/infer", body_of("two")) for _ in range(3)]
        statuses.append(self.http("GET", "/metrics"))
        return statuses, codes


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_whatever_wish_is_refused_every_call_ends_once_and_later_ones_are_served(
    server: Server, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, resource = KINDS[kind]
    short = make(monkeypatch)
    refused = 0
    for number in range(MOST):
        backend = CountingBackend(server)
        loads = kind in ("threads", "processes", "files")
        with serving(backend) as ports:
            clients = Clients(server, ports)
            counted = shortages.counts()[resource]
            short.arm(number)
            statuses, codes = clients.calls(loads=loads, kills=kind != "threads")
            short.disarm()
            assert set(statuses) <= ENDS, (number, statuses)
            assert set(codes) <= CODES, (number, codes)
            if short.refused and kind != "files":  # what fails to remove a file goes on
                assert shortages.counts()[resource] > counted, (number, statuses, codes)
            assert clients.http("POST", "/v2/models/two/infer", body_of("two")) == 200
            assert clients.http("POST", "/v2/models/add_sub/infer", body_of("add_sub")) == 200
            assert (
                statuses.count(200) == len(statuses)
                or not loads
                or clients.http("POST", "/v2/repository/models/add_sub/load") == 200
            )
            page = server.metrics().decode()
            assert sample(page, "cotenant_shortages_total", resource=resource) == shortages.counts()[resource]
        assert backend.settled(WAIT_S)
        assert server.driver.wait_idle(WAIT_S)
        assert_balanced(server)
        assert not [each for each in caplog.records if each.exc_info], number
        refused += short.refused
        if not short.refused:
            break
    assert refused == number > 0


def test_grpc_infers_without_threads_and_controls_by_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """No further thread at all, as a limit of processes has it: calls, streams and control calls are answered."""
    short = _of_threads(monkeypatch)
    inner = FakeBackend()
    backend = CountingBackend(inner)
    message = service_pb2.ModelInferRequest(model_name="add_sub")
    for name in ("a", "b"):
        message.inputs.add(name=name, datatype="INT32", shape=[1, 4])
        message.raw_input_contents.append(np.arange(4, dtype=np.int32).tobytes())
    with serving(backend) as ports, grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        index = channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")
        slow = [infer.future(message_of_slow(), timeout=WAIT_S) for _ in range(12)]
        for _ in slow:
            inner.slow_arrived.get(timeout=WAIT_S)  # all at once
        short.arm(0, lasts=True)
        under_way = [infer.future(message.SerializeToString(), timeout=WAIT_S) for _ in range(40)]
        assert {each.code() for each in under_way} == {grpc.StatusCode.OK}
        assert len(list(stream(iter([message.SerializeToString()]), timeout=WAIT_S))) == 1
        assert short.refused == 0
        lists = [index.future(b"", timeout=WAIT_S) for _ in range(20)]
        assert {each.code() for each in lists} == {grpc.StatusCode.OK}
        inner.release()
        assert {each.code() for each in slow} == {grpc.StatusCode.OK}
    assert backend.settled()
    inner.close()


def message_of_slow() -> bytes:
    message = service_pb2.ModelInferRequest(model_name="slow")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(np.arange(4, dtype=np.float32).tobytes())
    data: bytes = message.SerializeToString()
    return data


def test_a_pool_without_any_thread_says_so_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    short = _of_threads(monkeypatch)
    short.arm(0, lasts=True)
    with pytest.raises(CotenantError, match="no thread can be started"):
        LoopThreads(4, "cotenant-test")


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_launch_that_cannot_be_started_leaves_the_rest_of_its_decision(
    tmp_path: Path, isolation: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The n-th start of a launch raises, for each n: whatever else was decided at that instant is carried out."""
    made = started(write_good(tmp_path / "models", "two", "add_sub"), device=DeviceSection(isolation=isolation))
    backend = CountingBackend(made)
    short = Short(lambda: RuntimeError("can't start new thread"))
    real = type(made._executor)._start  # type: ignore[attr-defined]

    def start(self: Any, launch: Launch, on_end: Any) -> None:
        short.look()
        real(self, launch, on_end)

    monkeypatch.setattr(type(made._executor), "_start", start)
    try:
        with serving(backend) as ports:
            for number in itertools.count():
                short.arm(number)
                with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
                    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                    messages = [message_of(("two", "add_sub")[at % 2]).SerializeToString() for at in range(10)]
                    codes = [each.code() for each in [infer.future(data, timeout=WAIT_S) for data in messages]]
                assert set(codes) <= CODES
                assert codes.count(grpc.StatusCode.OK) >= 8  # a merged one runs again
                short.disarm()
                assert backend.settled(WAIT_S)
                if not short.refused:
                    break
        assert made.driver.wait_idle(WAIT_S)
        assert_balanced(made)
        assert not [each for each in caplog.records if each.exc_info]
    finally:
        made.stop()


def test_shortages_are_logged_now_and_then_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    before = shortages.counts()[Resource.DISK]
    shortages._logged_s.pop(Resource.DISK, None)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            shortages.report_error(OSError(errno.ENOSPC, "full"), "nothing is kept")
        shortages.report_error(OSError(errno.ECONNRESET, "gone"), "nothing")
    assert shortages.counts()[Resource.DISK] == before + 50
    assert caplog.text.count("the system has no further disk: nothing is kept") == 1
