"""The clients of the front-end benchmark check their answers, and its ratios are of turns."""

from __future__ import annotations

from typing import Any

import pytest

from bench._h2_client import h2_load
from bench.frontend import TENSOR, grpc_request, http_load, http_request, over_triton
from fake_backend import CountingBackend, FakeBackend, identity_name, serving

MODEL = identity_name("FP32")


def test_the_clients_keep_as_many_requests_in_flight_as_they_are_told() -> None:
    inner = FakeBackend()
    backend = CountingBackend(inner)
    with serving(backend) as ports:
        for clients in (1, 8, 64):
            over_http = http_load(http_request(MODEL, TENSOR), ports.http, clients, lambda count: count >= 200)
            over_grpc = h2_load(ports.grpc, grpc_request(MODEL), TENSOR, clients, lambda count: count >= 200)
            assert len(over_http) == len(over_grpc) == 199 + clients
        large = http_request(MODEL, bytes(600_000 - len(TENSOR)) + TENSOR)
        assert len(http_load(large, ports.http, 2, lambda count: count >= 4)) == 5
    assert backend.settled()
    inner.close()


@pytest.mark.parametrize(
    ("model", "tail", "what"), [(MODEL, b"other", "status b'0'"), ("fail", b"", "status b'3'"), ("none", b"", "b'5'")]
)
def test_the_cheap_client_takes_no_wrong_answer(model: str, tail: bytes, what: str) -> None:
    backend = FakeBackend()
    with serving(backend) as ports, pytest.raises(RuntimeError, match=what):
        h2_load(ports.grpc, grpc_request(model), tail, 4, lambda count: count >= 100)
    backend.close()


def row(repetition: int, load: str, clients: int, server: str, rps: float, cpu_us: float = 1.0) -> dict[str, Any]:
    return {
        "repetition": repetition,
        "load": load,
        "clients": clients,
        "server": server,
        "rps": rps,
        "cpu_us": cpu_us,
    }


def test_ratios_are_medians_of_turns_and_the_worse_of_the_numbers_in_flight() -> None:
    made = [{"repetition": 0, "isolation": "process", "protocol": "http", "rps": 9.0}]
    for repetition, (ours, theirs) in enumerate([(10.0, 10.0), (30.0, 10.0), (40.0, 20.0)]):
        made += [row(repetition, "http", 8, "processes", ours, 3.0), row(repetition, "http", 8, "triton", theirs, 2.0)]
        made += [row(repetition, "http", 64, "processes", 3.0), row(repetition, "http", 64, "triton", 2.0)]
        made += [row(repetition, "http", 8, "here", 5.0), row(repetition, "grpc", 8, "processes", 5.0)]
    assert over_triton(made) == {
        "http_over_triton": 1.5,
        "http_here_over_triton": 0.5,
        "http_cpu_over_triton": 1.5,
    }
    assert over_triton([each for each in made if each.get("server") != "triton"]) == {}
