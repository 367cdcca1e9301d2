"""What one HTTP connection may make the server keep and do, and the corners of the protocol around it."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from cotenant.serve.frontend import http_connection
from cotenant.serve.frontend.http_head import Head, HeadParser
from cotenant.wire.codec import Limits
from fake_backend import CountingBackend, FakeBackend, serving

LIMITS = Limits(max_malformed=1 << 30, max_body_bytes=1 << 20, max_header_bytes=4096)
WAIT_S = 60.0
BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": np.arange(4.0).tolist()}]}
).encode()


@pytest.fixture(scope="module")
def backend() -> Iterator[CountingBackend]:
    inner = FakeBackend()
    yield CountingBackend(inner)
    inner.close()


@pytest.fixture(scope="module")
def port(backend: CountingBackend) -> Iterator[int]:
    with serving(backend, LIMITS) as ports:
        yield ports.http


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    try:
        while piece := connection.recv(1 << 16):
            received += piece
    except ConnectionResetError:
        pass
    return received


def chunked(pieces: list[bytes], extension: bytes = b"", trailers: bytes = b"", model: bytes = b"inline") -> bytes:
    head = b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" % model
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return head + chunks + b"0\r\n" + trailers + b"\r\n"


LAST = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
LONG = LIMITS.max_header_bytes + 1000


@pytest.mark.parametrize("size", [1, 100, 4096, 1 << 16])
@pytest.mark.parametrize(
    "request_bytes",
    [
        chunked([BODY], trailers=b"X-1: v\r\n" * (LONG // 8)),
        chunked([BODY], trailers=b"X: " + b"v" * LONG + b"\r\n"),
        chunked([BODY], trailers=b"y" * LONG + b": v\r\n"),
        chunked([BODY], extension=b";a=" + b"b" * LONG),
        chunked([BODY[at : at + 1] for at in range(len(BODY))], extension=b";a=" + b"b" * 60),
        b"\r\n" * LONG,
        b"GET /" + b"a" * LONG,
    ],
    ids=["trailers", "a trailer", "name of a trailer", "extension", "extensions", "blank lines", "path"],
)
def test_what_is_no_body_counts_against_the_limit(port: int, request_bytes: bytes, size: int) -> None:
    with connect(port) as connection:
        try:
            data = request_bytes + LAST if size > 1 else request_bytes[: 2 * LIMITS.max_header_bytes]
            for at in range(0, len(data), size):
                connection.sendall(data[at : at + size])
        except OSError:
            pass
        answer = rest_of(connection)
    assert b"200 OK" not in answer
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")  # a reset may overtake the answer


def test_frames_of_chunks_and_few_trailers_are_free(port: int) -> None:
    shape = [1, 20_000]
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [0.5] * 20_000}
    body = json.dumps({"inputs": [tensor]}).encode()
    pieces = [body[at : at + 5] for at in range(0, len(body), 5)]
    message = chunked(pieces, b";q=1", b"X-Checksum: 12\r\nExpect: 100-continue\r\n", b"identity_fp32")
    with connect(port) as connection:
        connection.sendall(message * 2 + LAST)
        answer = rest_of(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 3


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Head]:
    """Heads of the requests that were begun."""
    found: list[Head] = []

    class Watched(HeadParser):
        def parse(self, data: bytes) -> Head:
            found.append(super().parse(data))
            return found[-1]

    monkeypatch.setattr(http_connection, "HeadParser", Watched)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_what_a_client_sends_ahead_stays_bytes(parsed: list[Head], seed: int) -> None:
    rng = random.Random(seed)
    inner = FakeBackend()
    backend = CountingBackend(inner)

    def posted(model: bytes, number: int) -> bytes:
        body = b'{"id": "%d", %b' % (number, BODY[1:])
        if rng.random() < 0.3:
            cut = rng.randrange(1, len(body))
            return chunked([body[:cut], body[cut:]], model=model)
        fields = b"Content-Length: %d\r\nX-Number: %d" % (len(body), number)
        return b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n%b" % (model, fields, body)

    count = 600
    requests = [posted(b"slow", 0)] + [posted(b"inline", number) for number in range(1, count)]
    with serving(backend, LIMITS) as ports, connect(ports.http) as connection:
        connection.sendall(b"".join(requests) + LAST)
        inner.slow_arrived.get(timeout=WAIT_S)
        with connect(ports.http) as other:  # parsing yields to others
            other.sendall(LAST)
            assert b"200 OK" in rest_of(other)
        assert len(parsed) == 1 + 1  # the first one, and the other's
        inner.release()
        answer = rest_of(connection)
    inner.close()
    assert answer.count(b"HTTP/1.1 200 OK") == count + 1
    ids = [int(piece.split(b'"')[0]) for piece in answer.split(b'"id":"')[1:]]
    assert ids == list(range(count))
    assert backend.settled()


GETS = [
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/tiny",
    "/v2/models/tiny/versions/1",
    "/v2/models/tiny/ready",
    "/v2/models/tiny/config",
    "/v2/models/tiny/stats",
    "/v2/models/stats",
    "/metrics",
    "/v2/models/nope",
    "/nope",
]


def test_head_is_answered_as_get_without_a_body(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    for path in GETS:
        found = []
        for method in ("GET", "HEAD", "GET"):
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
            found.append((answer.status, answer.getheaders()))
            assert bool(body) is (method == "GET")
        assert found[0] == found[1] == found[2], path
    for path in ("/v2/repository/index", "/v2/models/tiny/infer"):
        connection.request("HEAD", path)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (405, b"")
    connection.close()


@pytest.mark.parametrize(
    "line",
    [
        b"POST /v2/models/nope/infer",
        b"POST /v2/models/tiny/nope",
        b"GET /v2/models/tiny/infer",
        b"POST /v2/health/live",
    ],
)
@pytest.mark.parametrize("framing", [b"Content-Length: 9000000", b"Content-Length: 30", b"Transfer-Encoding: chunked"])
def test_a_body_that_is_not_asked_for_ends_the_connection(port: int, line: bytes, framing: bytes) -> None:
    """Who waits for `100 Continue` may or may not send the body after an error: nothing of it may be a request."""
    with connect(port) as connection:
        connection.sendall(line + b" HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n" + framing + b"\r\n\r\n")
        answer = connection.recv(1 << 16)
        if answer.startswith(b"HTTP/1.1 100 "):  # the body is wanted: an error comes after it
            assert (line, framing) == (b"POST /v2/models/nope/infer", framing)
            return
        answer += rest_of(connection)
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 405", b"HTTP/1.1 413"))
    assert b"connection: close" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_client_that_closes_its_side_has_left(backend: CountingBackend, port: int) -> None:
    """A FIN of a client that died looks the same: its query is withdrawn, and nothing is answered."""
    while not backend.cancelled.empty():
        backend.cancelled.get()
    with connect(port) as connection:
        head = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(BODY)
        connection.sendall(head + BODY)
        number = backend.slow_arrived.get(timeout=WAIT_S)
        connection.shutdown(socket.SHUT_WR)
        assert backend.cancelled.get(timeout=WAIT_S) == number
        assert rest_of(connection) == b""
    assert backend.settled()


@pytest.mark.parametrize("first", [b"", b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"])
@pytest.mark.parametrize(
    "last",
    [
        b"no http\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /v2/health/live HTTP/1.0\r\n\r\n",
        b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"200000\r\n" + bytes(0x200000) + b"\r\n",
    ],
)
def test_the_last_answer_arrives_though_the_client_sends_on(port: int, first: bytes, last: bytes) -> None:
    """The system answers bytes that the server leaves unread with a reset, which takes answers away from the client."""
    with connect(port) as connection:
        connection.sendall(first + last)
        heard = connection.recv(1, socket.MSG_PEEK)  # the server has ended, or is about to
        for _ in range(50):
            connection.sendall(bytes(10_000))
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    assert answer.startswith(heard)
    assert len(re.findall(rb"HTTP/1.1 \d{3} ", answer)) == 1 + bool(first)
    assert b"connection: close" in answer


def test_connections_are_counted_by_address_and_all_together() -> None:
    inner = FakeBackend()
    limits = Limits(max_connections=5, max_connections_per_address=3)
    ask = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"

    def ask_from(address: str) -> tuple[socket.socket, bytes]:
        connection = socket.create_connection(("127.0.0.1", ports.http), timeout=WAIT_S, source_address=(address, 0))
        connection.sendall(ask)
        return connection, connection.recv(1 << 16)

    with serving(inner, limits) as ports:
        held = [ask_from("127.0.0.1") for _ in range(3)]
        assert all(answer.startswith(b"HTTP/1.1 200 ") for _, answer in held)
        refused, answer = ask_from("127.0.0.1")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"127.0.0.1 has 3 connections, the limit for one address" in answer
        held += [ask_from("127.0.0.2")]
        assert held[-1][1].startswith(b"HTTP/1.1 200 ")
        refused.close()
        others = [ask_from(f"127.0.0.{number}") for number in (3, 4, 5)]
        assert b"the server has 5 connections, the limit" in others[-1][1]
        for connection, _ in [*held, *others]:
            connection.close()
    inner.close()
