"""What is refused before a body is read: by the backend's word, and for want of room; and what is counted meanwhile."""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from cotenant.serve.engine.loop import ServeLoop
from cotenant.serve.frontend.grpc_server import GrpcServer
from cotenant.serve.frontend.http_server import HttpServer
from cotenant.serve.frontend.off_loop import OffLoop
from cotenant.serve.frontend.pending_bytes import Held, PendingBytes
from cotenant.types import LossCause, Outcome
from cotenant.wire.api import ServeError, Status
from cotenant.wire.codec import Limits
from cotenant.wire.ending import Ending
from cotenant.wire.skim import model_of
from fake_backend import CountingBackend, FakeBackend
from h2_client import H2Client, message

WAIT_S = 20.0
LIMITS = Limits(max_body_bytes=128 << 10, max_pending_bytes=512 << 10)
LARGE = 100 << 10
FULL = ServeError(
    Status.UNAVAILABLE, "the queue of 'tiny' is full (2 waiting)", Ending(Outcome.REJECTED), LossCause.OWN_RATE
)
FAST = ServeError(Status.TOO_MANY, "tenant 'tiny' sends too many", cause=LossCause.RATE_LIMIT)


class Edge:
    """Both front-ends over one loop, as `cotenant serve` has them."""

    def __init__(self) -> None:
        self.inner = FakeBackend()
        self.backend = CountingBackend(self.inner)
        self.loop = ServeLoop()
        self.loop.start()
        self._servers = (
            HttpServer(self.backend, port=0, limits=LIMITS, loop=self.loop),  # type: ignore[arg-type]
            GrpcServer(self.backend, port=0, limits=LIMITS, loop=self.loop),  # type: ignore[arg-type]
        )
        self.http, self.grpc = (each.start() for each in self._servers)

    @property
    def pending(self) -> int:
        return self.loop.shared(OffLoop).pending.total

    def close(self) -> None:
        for each in self._servers:
            each.stop(0.1)
        self.loop.stop()
        self.inner.close()


@pytest.fixture(scope="module")
def edge() -> Iterator[Edge]:
    made = Edge()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def settled(edge: Edge) -> Iterator[None]:
    edge.inner.shut.clear()
    edge.inner.told.clear()
    yield
    edge.inner.release()
    assert comes_true(lambda: edge.pending == 0)
    assert edge.backend.settled()


def comes_true(is_so: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + WAIT_S
    while not is_so() and time.monotonic() < until_s:
        time.sleep(0.005)
    return is_so()


def head(model: str, framing: bytes, *fields: bytes) -> bytes:
    lines = (b"POST /v2/models/%b/infer HTTP/1.1" % model.encode(), b"Host: a", framing, *fields)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def opened(edge: Edge, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", edge.http), timeout=WAIT_S)
    connection.sendall(data)
    return connection


def answered(connection: socket.socket) -> tuple[int, bytes]:
    """The next answer, whole."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    fields, _, body = received.partition(b"\r\n\r\n")
    length = int(re.findall(rb"content-length: (\d+)", fields)[0])
    while len(body) < length:
        body += connection.recv(1 << 16)
    return int(fields[9:12]), fields + body


def json_body(nbytes: int) -> bytes:
    rows = 1
    while len(made := _json(rows)) < nbytes:
        rows = max(rows + 1, rows * nbytes // len(made))
    return made


def _json(rows: int) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 4], "data": [0.5] * (4 * rows)}
    return json.dumps({"inputs": [tensor]}).encode()


def raw_message(model: str, nbytes: int) -> bytes:
    made = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[bytes(nbytes)])
    made.inputs.add(name="x", datatype="FP32", shape=[nbytes // 16, 4])
    data: bytes = made.SerializeToString()
    return data


# --- by the backend's word ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "error", "status"),
    [("inline", FULL, 503), ("inline", FAST, 429), ("nowhere", None, 404)],
    ids=["full", "rate", "unknown"],
)
@pytest.mark.parametrize("framing", [b"Content-Length: 100000", b"Transfer-Encoding: chunked"])
def test_a_refusal_does_not_wait_for_the_body(
    edge: Edge, model: str, error: ServeError | None, status: int, framing: bytes
) -> None:
    if error is not None:
        edge.inner.shut[model] = error
    with opened(edge, head(model, framing)) as connection:
        got, text = answered(connection)
        assert got == status
        assert b"connection: close" in text
        assert (b"retry-after: 1\r\n" in text) == (status != 404)
        assert connection.recv(1) == b""
    assert [name for name, _ in edge.inner.told] == [model]


def test_a_small_body_is_read_and_the_connection_stays(edge: Edge) -> None:
    edge.inner.shut["inline"] = FULL
    body = json_body(2000)
    with opened(edge, head("inline", b"Content-Length: %d" % len(body)) + body[:100]) as connection:
        connection.settimeout(0.05)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(WAIT_S)
        connection.sendall(body[100:])
        assert answered(connection)[0] == 503
        edge.inner.shut.clear()
        connection.sendall(head("inline", b"Content-Length: %d" % len(body)) + body)
        assert answered(connection)[0] == 200
    assert len(edge.inner.told) == 1


@pytest.mark.parametrize(("error", "code"), [(FULL, 14), (FAST, 8)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_over_grpc_the_first_bytes_of_a_message_say_its_model(
    edge: Edge, error: ServeError, code: int, is_packed: bool
) -> None:
    edge.inner.shut["inline"] = error
    data = raw_message("inline", LARGE)
    if is_packed:
        noise = np.random.default_rng(1).integers(0, 256, LARGE, np.uint8).tobytes()
        data = gzip.compress(raw_message("inline", 16) + noise)
    with H2Client(edge.grpc) as client:
        begin = message(data, int(is_packed))[:4000]
        stream = client.send(data=begin, ends=False, **({"grpc_encoding": "gzip"} if is_packed else {}))
        assert client.pump(lambda: b"grpc-status" in client.fields[stream])
        assert client.fields[stream][b"grpc-status"] == b"%d" % code
        assert client.fields[stream][b"x-cotenant-outcome"] == b"rejected"
    assert [name for name, _ in edge.inner.told] == ["inline"]


def test_over_grpc_small_requests_and_those_of_streams_are_refused_and_the_stream_goes_on(edge: Edge) -> None:
    edge.inner.shut["inline"] = FULL
    with grpc.insecure_channel(f"127.0.0.1:{edge.grpc}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            infer(raw_message("inline", 16), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        names = ["inline", "identity_fp32", "inline"]
        answers = list(stream(iter([raw_message(name, LARGE) for name in names]), timeout=WAIT_S))
        assert sum("is full" in each.error_message for each in answers) == 2
        assert sum(each.infer_response.model_name == "identity_fp32" for each in answers) == 1
    assert [name for name, _ in edge.inner.told] == ["inline"] * 3


@given(st.text(max_size=20), st.text(max_size=20), st.binary(max_size=40))
def test_the_model_is_read_from_the_start_of_a_message(model: str, version: str, rest: bytes) -> None:
    whole = service_pb2.ModelInferRequest(model_name=model, model_version=version, id="x" * 200).SerializeToString()
    if model:
        assert model_of(whole) == (model, version)
        assert model_of(whole[:250]) == (model, version)
    for end in range(len(model.encode()) + 2):
        assert model_of(whole[:end] if model else b"") is None
    model_of(rest)  # raises nothing


# --- room -------------------------------------------------------------------------------------------------------


def test_a_model_has_as_much_room_as_is_free_and_another_one_still_gets_some(edge: Edge) -> None:
    framing = b"Content-Length: %d" % LARGE
    first, second = (opened(edge, head("inline", framing)) for _ in range(2))
    assert comes_true(lambda: edge.pending == 2 * LARGE)
    with opened(edge, head("inline", framing)) as third:
        status, text = answered(third)
        assert status == 503
        assert b"retry-after: 1\r\n" in text
        assert b"requests of model 'inline' hold 204800 bytes of memory for bodies" in text
    [(_, error)] = edge.inner.told
    assert error.cause is LossCause.FRONT_END
    body = json_body(LARGE)
    with opened(edge, head("identity_fp32", b"Content-Length: %d" % len(body)) + body) as other:
        assert answered(other)[0] == 200
    first.close()
    assert comes_true(lambda: edge.pending == LARGE)
    with opened(edge, head("inline", b"Content-Length: %d" % len(body)) + body) as again:
        assert answered(again)[0] == 200
    second.close()


def test_a_body_in_chunks_is_counted_as_it_comes(edge: Edge) -> None:
    chunk = b"%x\r\n%b\r\n" % (70 << 10, bytes(70 << 10))
    held = [opened(edge, head("inline", b"Transfer-Encoding: chunked") + chunk) for _ in range(3)]
    assert comes_true(lambda: edge.pending == 3 * (70 << 10))
    with opened(edge, head("inline", b"Transfer-Encoding: chunked") + chunk) as one_more:
        assert answered(one_more)[0] == 503
    for each in held:
        each.close()


def test_bodies_belong_to_their_queries_until_these_are_answered(edge: Edge) -> None:
    data = raw_message("slow", LARGE)
    with grpc.insecure_channel(f"127.0.0.1:{edge.grpc}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        live = [infer.future(data, timeout=WAIT_S) for _ in range(2)]
        for _ in live:
            edge.inner.slow_arrived.get(timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            infer(data, timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        body = json_body(LARGE)
        with opened(edge, head("slow", b"Content-Length: %d" % len(body))) as connection:
            assert answered(connection)[0] == 503  # front-ends of a loop have one budget
        edge.inner.release()
        assert all(each.result(WAIT_S) for each in live)


def test_what_a_compressed_body_has_become_is_counted(edge: Edge) -> None:
    body = gzip.compress(json_body(LARGE))
    fields = head("slow", b"Content-Length: %d" % len(body), b"Content-Encoding: gzip")
    held = []
    for _ in range(2):
        held.append(opened(edge, fields + body))
        edge.inner.slow_arrived.get(timeout=WAIT_S)
    assert edge.pending >= 2 * LARGE
    with opened(edge, fields + body) as connection:
        assert answered(connection)[0] == 503
    for each in held:
        each.close()


def test_a_message_that_names_no_model_yet_has_room_of_its_own(edge: Edge) -> None:
    with H2Client(edge.grpc) as client:
        for _ in range(2):
            client.send(data=message(bytes(LARGE))[:5], ends=False)
        third = client.send(data=message(bytes(LARGE))[:5], ends=False)
        assert client.pump(lambda: b"grpc-status" in client.fields[third])
        assert client.fields[third][b"grpc-status"] == b"14"
        assert b"name no model" in client.fields[third][b"grpc-message"]


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "grow", "move", "keep", "let go"]),
        st.sampled_from("abc"),
        st.integers(0, 70),
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(_STEPS)
def test_what_is_held_is_what_was_taken_and_leaves_as_much_free(steps: list[tuple[str, str, int, int]]) -> None:
    budget, pending = 100, PendingBytes()
    live: list[tuple[Held, dict[str, Any]]] = []
    for kind, model, nbytes, which in steps:
        before = [dict(each) for _, each in live]
        at = which % len(live) if live else None
        refused, is_beyond = None, True
        try:
            if kind == "hold":
                live.append((pending.hold(model, nbytes, budget), {"model": model, "nbytes": nbytes, "keepers": 1}))
            elif at is None:
                continue
            elif kind == "grow":
                live[at][0].grow(nbytes)
                live[at][1]["nbytes"] += nbytes
            elif kind == "move":
                live[at][0].move(model)
                live[at][1]["model"] = model
            elif kind == "keep":
                live[at][0].keep()
                live[at][1]["keepers"] += 1
            else:
                live[at][0].release()
                live[at][1]["keepers"] -= 1
                live = [each for each in live if each[1]["keepers"]]
        except ServeError:
            refused = [each for _, each in live]
            if kind != "move":
                whose = before[at]["model"] if kind == "grow" and at is not None else model
                of_model = sum(each["nbytes"] for each in before if each["model"] == whose)
                is_beyond = of_model + nbytes > budget - sum(each["nbytes"] for each in before) - nbytes
        if refused is not None:
            assert refused == before
            assert is_beyond
        assert pending.total == sum(each["nbytes"] for _, each in live) <= budget
    for held, each in live:
        for _ in range(each["keepers"]):
            held.release()
    assert pending.total == 0
    assert not pending._by_model
