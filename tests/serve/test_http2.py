"""HTTP/2 below gRPC: windows both ways, limits of number, size and time, what is hostile, and the end of a server."""

from __future__ import annotations

import gzip
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

import fuzz_h2
from cotenant.serve.frontend.grpc_server import GrpcServer
from cotenant.wire.codec import Limits
from cotenant.wire.oip import MESSAGES
from fake_backend import CountingBackend, FakeBackend
from h2_client import INFER, PREFACE, H2Client, frame, message

STREAM = INFER.replace("ModelInfer", "ModelStreamInfer")
LIVE = "/inference.GRPCInferenceService/ServerLive"
BODY_BYTES = 1 << 20
LIMITS = Limits(
    max_body_bytes=BODY_BYTES, max_header_bytes=4096, max_head_s=1, max_body_s=1, max_unread_s=1, max_connections=30
)


@pytest.fixture(scope="module")
def backend() -> Iterator[CountingBackend]:
    inner = FakeBackend()
    yield CountingBackend(inner)
    inner.close()


@pytest.fixture(scope="module")
def port(backend: CountingBackend) -> Iterator[int]:
    server = GrpcServer(backend, port=0, limits=LIMITS)
    yield server.start()
    server.stop(0.1)
    assert backend.settled()


def request(model: str = "inline", size: int = 4) -> bytes:
    made = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[bytes(4 * size)])
    made.inputs.add(name="x", datatype="FP32", shape=[size // 4, 4])
    data: bytes = made.SerializeToString()
    return data


def is_served(port: int) -> bool:
    """Whether another client is answered at once."""
    with H2Client(port) as client:
        stream = client.send(data=message(request()))
        return client.wait(stream, limit_s=10) and client.status(stream) == 0


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_in_pieces_of_single_bytes(port: int) -> None:
    with H2Client(port) as client:
        stream = client.send()
        for byte in message(request()):
            client.h2.send_data(stream, bytes([byte]))
            client.flush()
        client.h2.end_stream(stream)
        assert client.wait(stream)
        answer = MESSAGES["ModelInferResponse"].FromString(client.data[stream][5:])
        assert (client.status(stream), answer.raw_output_contents[0]) == (0, bytes(16))
        assert client.fields[stream][b"content-type"] == b"application/grpc"


@pytest.mark.parametrize("name", ["gzip", "deflate"])
def test_compressed_requests(port: int, name: str) -> None:
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}[name](request(size=4000))
    bomb = {"gzip": gzip.compress, "deflate": zlib.compress}[name](bytes(2 * BODY_BYTES))
    with H2Client(port) as client:
        streams = [client.send(data=message(data, 1), grpc_encoding=name) for data in (packed, bomb, b"no")]
        streams.append(client.send(data=message(packed, 1), grpc_encoding="br"))
        streams.append(client.send(path=LIVE, data=message(packed[:0] or gzip.compress(b""), 1), grpc_encoding="gzip"))
        assert client.wait(*streams)
        assert [client.status(each) for each in streams] == [0, 8, 3, 12, 0]


def test_compressed_requests_of_the_usual_client(port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}", compression=grpc.Compression.Gzip) as channel:
        answer = channel.unary_unary(INFER)(request(size=4000), timeout=20)
        assert MESSAGES["ModelInferResponse"].FromString(answer).raw_output_contents[0] == bytes(16_000)
        answers = list(channel.stream_stream(STREAM)(iter([request(size=4000)] * 3), timeout=20))
        assert len(answers) == 3


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", 3),
        (b"\0\0\0", 3),
        (b"\2\0\0\0\0", 13),
        (b"\0" + (2 * BODY_BYTES + 1).to_bytes(4, "big"), 8),
        (message(request()) + message(request()), 0),
    ],
)
def test_what_is_no_message_ends_its_call_alone(port: int, data: bytes, code: int) -> None:
    with H2Client(port) as client:
        good, bad = client.send(), client.send(data=data)
        assert client.wait(bad)
        assert client.status(bad) == code
        client.h2.send_data(good, message(request()), end_stream=True)
        assert client.wait(good)
        assert client.status(good) == 0


def test_a_call_that_ends_by_what_its_client_sends_cancels_its_queries(port: int, backend: CountingBackend) -> None:
    inner: Any = backend._backend
    with H2Client(port) as client:
        slow = message(request("slow"))
        calls = [client.send(data=slow, ends=False), client.send(STREAM, slow + slow, ends=False)]
        client.flush()
        numbers = {inner.slow_arrived.get(timeout=10) for _ in range(3)}
        client.h2.send_data(calls[0], slow)
        client.h2.send_data(calls[1], b"\2\0\0\0\0")
        assert client.wait(*calls)
        assert [client.status(each) for each in calls] == [3, 13]
        while numbers:
            numbers.discard(inner.cancelled.get(timeout=10))


def test_a_call_is_answered_whose_client_never_ends_its_request(port: int) -> None:
    with H2Client(port) as client:
        streams = [client.send(data=message(request()), ends=False), client.send(path="/none", data=b"x", ends=False)]
        assert client.wait(*streams)
        assert [client.status(each) for each in streams] == [0, 12]
        assert [client.closed[each] for each in streams] == [0, 0]  # NO_ERROR: send no more


def test_other_requests_of_http_are_refused(port: int) -> None:
    with H2Client(port) as client:
        stream = client.h2.send_request(
            [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"x")], end_stream=True
        )
        assert client.wait(stream)
        assert client.fields[stream][b":status"] == b"415"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while plain.recv(4096):
            pass


# --- sizes and windows ------------------------------------------------------------------------------------------------


def test_sixty_megabytes_both_ways_and_calls_beside(backend: CountingBackend) -> None:
    array = np.arange(15 << 20, dtype=np.float32)
    made = service_pb2.ModelInferRequest(model_name="identity_fp32", raw_input_contents=[array.tobytes()])
    made.inputs.add(name="x", datatype="FP32", shape=[1, array.size])
    server = GrpcServer(backend, port=0)
    options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
    try:
        port = server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            future = channel.unary_unary(INFER).future(made.SerializeToString(), timeout=60)
            beside = 0
            while not future.done():
                assert is_served(port)
                beside += 1
            answer = MESSAGES["ModelInferResponse"].FromString(future.result())
            assert answer.raw_output_contents[0] == made.raw_input_contents[0]
            assert beside > 0
            [streamed] = channel.stream_stream(STREAM)(iter([made.SerializeToString()]), timeout=60)
            found = MESSAGES["ModelStreamInferResponse"].FromString(streamed)
            assert found.infer_response.raw_output_contents[0] == made.raw_input_contents[0]
    finally:
        server.stop(1)


def test_large_requests_that_are_not_complete_have_bounded_room_and_all_end(port: int) -> None:
    data = message(request(size=200_000))
    with H2Client(port) as client:
        streams = [client.send(data=data[:-1], ends=False) for _ in range(40)]
        client.pump(lambda: False, 0.7)
        taken = len(streams) * (len(data) - 1) - client.h2.queued_body_size()
        assert taken <= 40 * 65_535 + 2 * BODY_BYTES + len(data)
        assert taken >= 2 * (len(data) - 1)
        for stream in streams:
            client.h2.send_data(stream, data[-1:], end_stream=True)
        assert client.wait(*streams)
        assert {client.status(each) for each in streams} == {0}


def test_a_client_that_reads_slowly_gets_all_and_holds_no_other_up(backend: CountingBackend) -> None:
    server = GrpcServer(backend, port=0)
    try:
        port = server.start()
        with H2Client(port, acknowledges=False) as client:
            streams = [client.send(data=message(request(size=200_000))) for _ in range(20)]
            streams.append(client.send(STREAM, message(request(size=200_000)) * 20))
            client.pump(lambda: False, 0.5)
            assert sum(map(len, client.data.values())) <= 65_535  # the window of the connection
            assert is_served(port)
            while not all(each in client.closed for each in streams):
                for stream, count in list(client.unacknowledged.items()):
                    client.unacknowledged[stream] = 0
                    if count:
                        client.h2.acknowledge_received_data(count, stream)
                client.flush()
                assert client.pump(lambda: any(client.unacknowledged.values()) or streams[-1] in client.closed)
            assert {client.status(each) for each in streams} == {0}
            assert all(len(client.data[each]) > 800_000 for each in streams[:-1])
            assert len(client.data[streams[-1]]) > 20 * 800_000
    finally:
        server.stop(0.1)


def test_a_stream_that_is_not_read_is_reset_and_a_connection_that_is_not_read_is_closed(
    port: int, backend: CountingBackend
) -> None:
    inner: Any = backend._backend
    with H2Client(port, acknowledges=False) as client:
        stream = client.send(data=message(request(size=200_000)))
        assert client.wait(stream, limit_s=10)
        assert client.closed[stream] != 0
        stream = client.send(STREAM, message(request(size=200_000)) * 5, ends=False)
        assert client.wait(stream, limit_s=10)
    with H2Client(port, window=2**31 - 1) as deaf:
        deaf.h2.set_local_window_size(2**31 - 1)
        streams = [deaf.send(data=message(request("slow", 200_000))) for _ in range(30)]
        assert deaf.pump(lambda: not deaf.h2.queued_body_size())
        for _ in streams:
            inner.slow_arrived.get(timeout=10)
        inner.release()
        time.sleep(3.5)
        assert not deaf.wait(*streams)
        assert deaf.is_ended
    assert backend.settled()
    assert is_served(port)


def test_metadata_has_a_limit(port: int) -> None:
    with H2Client(port) as client:
        fine, much = client.send(data=message(request())), client.send(data=message(request()), x_much="x" * 4096)
        assert client.wait(fine, much)
        assert (client.status(fine), client.status(much)) == (0, 8)
        client.send(data=message(request()), x_much="x" * 8192)
        assert client.is_closed_by_server()
    assert is_served(port)


# --- number -----------------------------------------------------------------------------------------------------------


def test_a_thousand_calls_at_once(backend: CountingBackend) -> None:
    inner: Any = backend._backend
    server = GrpcServer(backend, port=0, limits=Limits(max_concurrent_rpcs=1000))
    try:
        with H2Client(server.start()) as client:
            assert client.pump(lambda: client.h2.remote_settings[3] >= 1000)
            streams = [client.send(data=message(request("slow"))) for _ in range(1000)]
            client.flush()
            for _ in streams:
                inner.slow_arrived.get(timeout=20)
            beyond = client.send(data=message(request()))
            live = client.send(LIVE, message(b""))
            assert client.wait(beyond, live)
            assert (client.status(beyond), client.status(live)) == (14, 0)
            inner.release()
            assert client.wait(*streams)
            assert {client.status(each) for each in streams} == {0}
    finally:
        server.stop(0.1)


def test_connections_have_a_limit(port: int) -> None:
    clients = []
    try:
        for _ in range(LIMITS.max_connections):
            clients.append(H2Client(port))
            stream = clients[-1].send(LIVE, message(b""))
            if not clients[-1].wait(stream):
                break
        with H2Client(port) as beyond:
            beyond.pump(lambda: beyond.goaway is not None)
            assert b"connections, the limit" in beyond.goaway.debug_data
            assert beyond.is_closed_by_server()
    finally:
        for each in clients:
            each.socket.close()
    deadline = time.monotonic() + 10
    while not is_served(port):
        assert time.monotonic() < deadline


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_deadline_that_passes_ends_the_call_and_its_query(port: int, backend: CountingBackend) -> None:
    inner: Any = backend._backend
    with H2Client(port) as client:
        calls = [client.send(data=message(request("slow")), grpc_timeout="300m")]
        calls.append(client.send(STREAM, message(request("slow")), ends=False, grpc_timeout="300m"))
        client.flush()
        numbers = {inner.slow_arrived.get(timeout=10) for _ in calls}
        assert client.wait(*calls, limit_s=10)
        assert client.status(calls[1]) == 4
        assert client.status(calls[0]) in (4, 14)  # the query's own time-out may be first
        while numbers:
            numbers.discard(inner.cancelled.get(timeout=10)) if client.status(calls[0]) == 4 else numbers.clear()
    inner.release()
    assert backend.settled()


def test_a_message_that_does_not_come_ends_its_call(port: int) -> None:
    with H2Client(port) as client:
        begun = client.send(data=message(request())[:-1], ends=False)
        streamed = client.send(STREAM, message(request())[:-1], ends=False)
        empty = client.send()
        between = client.send(STREAM, message(request()), ends=False)
        assert client.wait(begun, streamed, empty, limit_s=10)
        assert {client.status(each) for each in (begun, streamed, empty)} == {4}
        assert between not in client.closed  # a stream may be silent between its requests
        client.h2.end_stream(between)
        assert client.wait(between)
        assert client.status(between) == 0


def test_a_connection_without_a_word_is_closed(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as silent:
        while silent.recv(4096):
            pass


# --- hostile ----------------------------------------------------------------------------------------------------------


def test_rapid_reset_ends_the_connection_and_no_query_is_lost(port: int, backend: CountingBackend) -> None:
    accepted = backend.accepted
    with H2Client(port) as client:
        client.pump(lambda: bool(client.h2.remote_settings[3]), 1)
        try:
            for _ in range(100):
                for _ in range(50):
                    stream = client.send(data=message(request("slow")))
                    client.flush()
                    client.h2.reset_stream(stream)
                client.flush()
        except OSError:
            pass
        assert client.is_closed_by_server()
    assert backend.settled()
    assert backend.accepted - accepted < 4000
    assert is_served(port)


def test_a_flood_of_continuations_ends_the_connection(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as flood:
        flood.sendall(PREFACE + frame(4, 0, 0, b"") + frame(1, 0, 1, b"\x83"))
        with pytest.raises(ConnectionError):  # noqa: PT012 (whichever of the two notices)
            for _ in range(10_000):
                flood.sendall(frame(9, 0, 1, b"\x00\x01a\x01b" * 10))
            while flood.recv(4096):
                pass
            raise ConnectionResetError
    assert is_served(port)


@pytest.mark.parametrize("kind", ["ping", "settings"])
def test_floods_of_control_frames_by_clients_that_read_nothing_end_the_connection(port: int, kind: str) -> None:
    flood = frame(6, 0, 0, bytes(8)) if kind == "ping" else frame(4, 0, 0, b"\0\3\0\0\0\1")
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(PREFACE + frame(4, 0, 0, b""))
        with pytest.raises((ConnectionError, TimeoutError)):  # noqa: PT012 (some sendall of many)
            for _ in range(20_000):
                client.sendall(flood * 100)
    assert is_served(port)


def test_damaged_frames() -> None:
    assert fuzz_h2.run(20261127, 1000) > 300


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_stop_ends_calls_in_progress_well_and_tells_clients_before(backend: CountingBackend) -> None:
    inner: Any = backend._backend
    server = GrpcServer(backend, port=0)
    with H2Client(server.start()) as client:
        stream = client.send(data=message(request("slow")))
        client.flush()
        inner.slow_arrived.get(timeout=10)
        stopping = threading.Thread(target=server.stop, args=[60], daemon=True)
        stopping.start()
        assert client.pump(lambda: client.goaway is not None)
        assert client.goaway.last_stream_id == stream
        assert stopping.is_alive()
        inner.release()
        assert client.wait(stream)
        assert client.status(stream) == 0
        assert client.is_closed_by_server()
        stopping.join(10)
        assert not stopping.is_alive()


def test_a_stop_without_time_answers_what_it_has_and_cancels_the_queries(backend: CountingBackend) -> None:
    inner: Any = backend._backend
    server = GrpcServer(backend, port=0)
    with H2Client(server.start()) as client:
        streams = [
            client.send(data=message(request("slow"))),
            client.send(STREAM, message(request("slow")), ends=False),
        ]
        client.flush()
        numbers = {inner.slow_arrived.get(timeout=10) for _ in streams}
        server.stop(0.05)
        assert client.wait(*streams)
        assert {client.status(each) for each in streams} == {14}
        while numbers:
            numbers.discard(inner.cancelled.get(timeout=10))
    assert backend.settled()
