"""Clients that send malformed requests again and again are slowed, and their connections closed; others are not."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from cotenant.serve.frontend.open_connections import OpenConnections
from cotenant.wire.codec import Limits
from fake_backend import FakeBackend, Ports, serving
from h2_client import H2Client, message

MOST = 5
WAIT_S = 20.0
LIMITS = Limits(max_malformed=MOST, max_body_bytes=1 << 20, max_json_bytes=1 << 20)
BAD = b"POST /v2/models/inline/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n{"
GOOD = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def ports() -> Iterator[Ports]:
    inner = FakeBackend()
    with serving(inner, LIMITS) as made:
        yield made
    inner.close()


def test_answers_are_delayed_beyond_the_limit_by_address_and_window() -> None:
    connections: OpenConnections[object] = OpenConnections(LIMITS)
    assert [connections.malformed_delay_s("a", 100.0) for _ in range(MOST)] == [0.0] * MOST
    delays = [connections.malformed_delay_s("a", 101.0) for _ in range(30)]
    assert delays[0] == 0.05
    assert delays == sorted(delays)
    assert delays[-1] == 1.0
    assert connections.malformed_delay_s("b", 101.0) == 0.0
    assert connections.malformed_delay_s("a", 111.0) == 0.0


def test_an_http_connection_with_too_many_malformed_requests_is_closed_after_the_answer(ports: Ports) -> None:
    with socket.create_connection(("127.0.0.1", ports.http), timeout=WAIT_S) as connection:
        received = b""
        for number in range(MOST + 1):
            connection.sendall(BAD)
            while received.count(b'{"error"') <= number:
                piece = connection.recv(1 << 16)
                assert piece
                received += piece
        assert received.count(b"HTTP/1.1 400 ") == MOST + 1
        assert received.count(b"connection: close") == 1
        assert connection.recv(1) == b""
    began_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", ports.http), timeout=WAIT_S) as connection:
        connection.sendall(b"no HTTP at all\r\n\r\n")
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    assert received.startswith(b"HTTP/1.1 400 ")
    assert time.monotonic() - began_s >= 0.05
    with socket.create_connection(("127.0.0.1", ports.http), timeout=WAIT_S) as connection:
        connection.sendall(GOOD)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_grpc_connection_with_too_many_malformed_requests_is_told_to_go(ports: Ports) -> None:
    with H2Client(ports.grpc) as client:
        streams = [client.send(data=message(b"\xff\xff")) for _ in range(MOST + 1)]
        assert client.pump(lambda: all(b"grpc-status" in client.fields[each] for each in streams))
        assert {client.fields[each][b"grpc-status"] for each in streams} == {b"3"}
        assert client.pump(lambda: client.goaway is not None)


def test_a_client_that_leaves_before_its_delayed_answer_harms_nothing(ports: Ports) -> None:
    for _ in range(3 * MOST):
        with socket.create_connection(("127.0.0.1", ports.http), timeout=WAIT_S) as connection:
            connection.sendall(BAD)
        with H2Client(ports.grpc) as client:
            client.send(data=message(b"\xff\xff"))
            client.flush()
    with socket.create_connection(("127.0.0.1", ports.http), timeout=WAIT_S) as connection:
        connection.sendall(GOOD)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":' + b"[" * 400_000,
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        b'{"id":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b',"inputs":[]}',
        b'{"unknown":' + b"[" * 100_000 + b"]" * 100_000 + b',"inputs":[]}',
        json.dumps({"inputs": [{"name": f"x{i}", "datatype": "FP32", "shape": [0]} for i in range(10_000)]}).encode(),
        b'{"inputs":[' + b",".join([b"{}"] * 200_000) + b"]}",
    ],
    ids=["open arrays", "nested data", "nested id", "nested unknown key", "many inputs", "many empty inputs"],
)
def test_nested_and_huge_json_is_a_bad_request(ports: Ports, body: bytes) -> None:
    head = b"POST /v2/models/inline/infer HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", ports.http), timeout=WAIT_S) as connection:
        connection.sendall(head % len(body) + body)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    assert received.startswith(b"HTTP/1.1 400 ")
    assert len(received) < 1000
