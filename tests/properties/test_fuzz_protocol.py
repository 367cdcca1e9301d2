"""Thousands of damaged requests over both protocols: no crash, no hang, no leak, and always a sentence.

`target` is the backend under test; any Backend that serves the model of a Target can be added to its parameters.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

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
