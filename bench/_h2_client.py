"""A cheap client of gRPC: one connection of HTTP/2 on `ngh2`, driven by one thread, with several calls in flight.

It costs a third of grpcio's client or less, so that the server limits the rate. Header blocks are those that nghttp2
makes: every field of a call but its first ones is an index into the table of the connection.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from ngh2 import Connection, ConnectionClosed, DataReceived, ResponseReceived, Role, Setting, StreamClosed
from ngh2 import TrailersReceived as Trailers

PATH = b"/inference.GRPCInferenceService/ModelInfer"
_WINDOW_BYTES = (1 << 31) - 1
_READ_BYTES = 1 << 18
_PATIENCE_S = 60.0


def h2_load(port: int, request: bytes, tail: bytes, concurrency: int, stop: Callable[[int], bool]) -> list[int]:
    """Keep `concurrency` calls busy until `stop(calls answered)`; latencies in ns.

    `request` is the serialised message of each call, `tail` the end of every right answer. Raises RuntimeError at a
    wrong answer, a status other than 0, or the end of the connection.
    """
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", PATH), (b":authority", b"localhost")]
    headers += [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
    body = b"\0" + len(request).to_bytes(4, "big") + request
    latencies: list[int] = []
    started: dict[int, int] = {}
    answers: dict[int, bytes] = {}
    statuses: dict[int, bytes | None] = {}
    h2 = Connection(Role.CLIENT)
    h2.initiate_connection({Setting.INITIAL_WINDOW_SIZE: 1 << 20})
    h2.set_local_window_size(_WINDOW_BYTES)

    def ask() -> None:
        number = h2.send_request(headers)
        h2.send_data(number, body, end_stream=True)
        started[number] = time.perf_counter_ns()

    with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(concurrency):
            ask()
        is_running = True
        while started:
            connection.sendall(h2.data_to_send())
            received = connection.recv(_READ_BYTES)
            if not received:
                raise RuntimeError("the server closed the connection")
            h2.receive_data(received)
            for event in h2.events():
                if isinstance(event, DataReceived):
                    answers[event.stream_id] = answers.get(event.stream_id, b"") + event.data
                elif isinstance(event, Trailers | ResponseReceived):  # a refusal has headers alone
                    statuses[event.stream_id] = dict(event.headers).get(b"grpc-status")
                elif isinstance(event, StreamClosed):
                    number = event.stream_id
                    status, answer = statuses.pop(number, None), answers.pop(number, b"")
                    if status != b"0" or not answer.endswith(tail):
                        raise RuntimeError(f"wrong answer: status {status!r}, {answer[:200]!r}")
                    latencies.append(time.perf_counter_ns() - started.pop(number))
                    is_running = is_running and not stop(len(latencies))
                    if is_running:
                        ask()
                elif isinstance(event, ConnectionClosed):
                    raise RuntimeError("the server ended the connection")
    return latencies
