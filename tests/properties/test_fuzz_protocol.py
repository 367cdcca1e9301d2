"""Thousands of damaged requests over both protocols: no crash, no hang, no leak, and always a sentence.

`target` is the backend under test; any Backend that serves the model of a Target can be added to its parameters.
"""

from __future__ import annotations

import json
import logging
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

import fuzz_http
from cotenant.serve.frontend import http_server
from cotenant.serve.frontend.http_connection import HttpConnection
from cotenant.wire.api import Backend
from fake_backend import CountingBackend, FakeBackend, Ports, serving
from fuzz import (
    CLEAN_CODES,
    CLEAN_STATUSES,
    LIMITS,
    RawHttp,
    Target,
    grpc_message,
    grpc_outcome,
    grpc_request,
    http_request,
)

SEED = 20261121
HTTP_REQUESTS = 5000
GRPC_REQUESTS = 3000
HEADS = 2000


@contextmanager
def fake_target() -> Iterator[Target]:
    backend = FakeBackend()
    array = np.arange(8, dtype=np.int32).reshape(2, 4)
    yield Target(CountingBackend(backend), "add_sub", {"a": ("INT32", array), "b": ("INT32", array)})
    backend.close()


TARGETS: dict[str, Callable[[], Any]] = {"fake": fake_target}


@pytest.fixture(scope="module", params=sorted(TARGETS))
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with TARGETS[request.param]() as target:
        yield target


@pytest.fixture(scope="module")
def ports(target: Target) -> Iterator[Ports]:
    backend: Backend = target.backend
    with serving(backend, LIMITS) as ports:
        yield ports


def test_http(target: Target, ports: Ports) -> None:
    rng = random.Random(SEED)
    call = RawHttp(ports.http)
    statuses: Counter[int] = Counter()
    for number in range(HTTP_REQUESTS):
        request = http_request(rng, target)
        status, body = call(request)
        statuses[status] += 1
        assert status in CLEAN_STATUSES | {0}, (number, status, body, request)
        assert b"Traceback" not in body, (number, body)
        if status not in (0, 200):
            assert len(json.loads(body)["error"]) > 5, (number, body)
        if not body:
            call.close()
    status, body = call(http_request(rng, target, damage=False))
    call.close()
    assert status == 200, body
    assert target.backend.settled()
    assert statuses[200] > 100, statuses
    assert statuses[400] > 1000, statuses
    assert statuses[0] < HTTP_REQUESTS / 20, statuses


class Watched:
    """The protocol of the connection that is open, and what it still waits for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        watched = self
        self.protocol: Any = None
        self.received = 0

        class Protocol(HttpConnection):
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                watched.protocol, watched.received = self, 0

            def buffer_updated(self, count: int) -> None:
                super().buffer_updated(count)
                watched.received += count

        patch.setattr(http_server, "HttpConnection", Protocol)

    def is_waiting(self, sent: int) -> bool:
        """Whether all that was sent has been parsed, and only a request that is not complete is left."""
        protocol = self.protocol
        if protocol is None:  # the connection has not been taken yet
            return False
        return self.received == sent and protocol._exchange is None and not protocol._is_soon


def test_http_heads_and_frames(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged request between two good ones: these get their own answers or none, and the connection can be used
    again or says that it ends."""
    rng = random.Random(SEED + 3)
    watched = Watched(monkeypatch)
    statuses: Counter[int] = Counter()
    ends: Counter[str] = Counter()
    connection: socket.socket | None = None
    sent = 0
    with fake_target() as target, serving(target.backend, LIMITS) as ports:
        for case in range(HEADS):
            if connection is None:
                watched.protocol = None
                connection, sent = socket.create_connection(("127.0.0.1", ports.http), timeout=60), 0
            before, after = 10 * case + 1, 10 * case + 2
            wrong = fuzz_http.damaged(rng)
            requests = fuzz_http.good(before) + wrong + fuzz_http.good(after)
            sent += len(requests)
            total = sent
            found = fuzz_http.exchange(connection, rng, requests, 3, lambda total=total: watched.is_waiting(total))
            told = case, wrong, found
            ids: list[str] = []
            for status, fields, body in found.answers:
                statuses[status] += 1
                assert status in CLEAN_STATUSES, told
                assert b"Traceback" not in body, told
                if status != 200 and body:
                    assert len(json.loads(body)["error"]) > 5, told
                if fields.get(b"x-cotenant-outcome") == b"answered" and body.startswith(b"{"):
                    answer = json.loads(body.partition(b"}]}")[0] + b"}]}")
                    ids.append(answer.get("id", "m"))
                    if ids[-1] in (str(before), str(after)):
                        [output] = [each for each in answer["outputs"] if each["name"] == "sum"]
                        assert output["data"] == [each + 1 for each in fuzz_http.numbers_of(int(ids[-1]))], told
            assert ids[:1] == [str(before)], told
            assert ids.count(str(before)) == 1, told
            assert ids.count(str(after)) <= 1, told
            if found.is_open:
                assert ids[-1] == str(after), told
                ends["open"] += 1
                continue
            is_said = found.answers[-1][1].get(b"connection") == b"close"
            assert is_said or watched.is_waiting(sent), told
            ends["closed" if is_said else "waiting"] += 1
            connection.close()
            connection = None
        if connection is not None:
            connection.close()
        assert target.backend.settled()
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR or each.exc_info]
    assert min(ends["open"], ends["closed"]) > 300, ends
    assert ends["waiting"] > 0, ends
    assert min(statuses[200], statuses[400]) > 500, statuses


def test_grpc(target: Target, ports: Ports) -> None:
    rng = random.Random(SEED + 1)
    codes: Counter[Any] = Counter()
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for number in range(GRPC_REQUESTS):
            data = grpc_request(rng, target)
            code, details = grpc_outcome(call, data)
            codes[code] += 1
            assert code in CLEAN_CODES, (number, code, details, data)
            assert "Traceback" not in details, (number, details)
            assert details or code is grpc.StatusCode.OK, (number, code)
        answer = service_pb2.ModelInferResponse.FromString(call(grpc_message(target).SerializeToString(), timeout=10))
        assert answer.id == "q"
    assert target.backend.settled()
    assert codes[grpc.StatusCode.OK] > 50, codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 1000, codes


def test_grpc_stream(target: Target, ports: Ports) -> None:
    rng = random.Random(SEED + 2)
    good = grpc_message(target).SerializeToString()
    requests = [grpc_request(rng, target) for _ in range(500)] + [good]
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = [service_pb2.ModelStreamInferResponse.FromString(data) for data in call(iter(requests), timeout=20)]
    assert len(answers) == len(requests)
    failed = [answer.error_message for answer in answers if answer.error_message]
    assert 250 < len(failed) < len(requests)
    assert not any("Traceback" in text or "internal error" in text for text in failed)
    assert target.backend.settled()
