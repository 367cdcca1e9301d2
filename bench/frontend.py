"""Front-ends: requests per second and processor time per request of HTTP and gRPC on one core.

The server is `cotenant serve` with all its parts (trace, calibration, metrics), kept on one core with its worker
process; the clients are on another one. A second server, on the same core, has the model in its own process
(`--isolation thread`): its metrics end in `_thread`. Eight connections (HTTP) or calls (gRPC) are kept busy with a tiny
binary request, FP32[1,16], for a model of one Identity; every answer is checked. Servers and protocols take turns,
medians count. Processor time is that of the server's process, without its worker.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench._server import serving, tiny_repository

CONCURRENCY = 8
MODEL = "identity"
ISOLATIONS = {"process": "", "thread": "_thread"}
"""What `device.isolation` may be, and how the names of its metrics end."""
TENSOR = bytes(range(64))
WARM_UP_REQUESTS = 500
REPETITIONS = 5
QUICK_REPETITIONS = 3
WINDOW_S = 4.0
QUICK_WINDOW_S = 1.5


@dataclass(frozen=True, slots=True)
class Window:
    """What one repetition saw. Latencies are those of single requests at full load, in nanoseconds."""

    protocol: str
    requests: int
    wall_ns: int
    cpu_us: float
    latencies_ns: Sequence[int]

    def row(self) -> dict[str, object]:
        ordered = sorted(self.latencies_ns)
        return {
            "protocol": self.protocol,
            "requests": self.requests,
            "rps": round(self.requests / self.wall_ns * 1e9, 1),
            "cpu_us": round(self.cpu_us, 1),
            "p50_us": round(ordered[len(ordered) // 2] / 1e3, 1),
            "p99_us": round(ordered[len(ordered) * 99 // 100] / 1e3, 1),
        }


def _cpu_us(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1e6 / os.sysconf("SC_CLK_TCK")


def _http_request() -> bytes:
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "shape": [1, 16], "datatype": "FP32", "parameters": {"binary_data_size": len(TENSOR)}}
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return (
        (
            f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {len(head) + len(TENSOR)}\r\n"
            f"Inference-Header-Content-Length: {len(head)}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        + head
        + TENSOR
    )


def http_load(port: int, concurrency: int, stop: Callable[[int], bool]) -> list[int]:
    """Keep `concurrency` connections busy from one thread until `stop(requests answered)`; return latencies in ns."""
    request = _http_request()
    latencies: list[int] = []
    started: dict[socket.socket, int] = {}
    expected = 0
    with selectors.DefaultSelector() as selector:
        for _ in range(concurrency):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(connection, selectors.EVENT_READ, bytearray())
            started[connection] = time.perf_counter_ns()
            connection.sendall(request)
        running = True
        while started:
            for key, _ in selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                answer: bytearray = key.data
                piece = connection.recv(65536)
                answer += piece
                if not piece:
                    raise RuntimeError("the server closed a connection")
                if not expected:
                    expected = _answer_length(answer)
                if not expected or len(answer) < expected:
                    continue
                if not answer.startswith(b"HTTP/1.1 200 ") or not answer.endswith(TENSOR):
                    raise RuntimeError(f"wrong answer: {bytes(answer[:200])!r}")
                answer.clear()
                now = time.perf_counter_ns()
                latencies.append(now - started[connection])
                running = running and not stop(len(latencies))
                if running:
                    started[connection] = now
                    connection.sendall(request)
                else:
                    del started[connection]
                    selector.unregister(connection)
                    connection.close()
    return latencies


def _answer_length(answer: bytearray) -> int:
    """Length of a whole answer, 0 while its headers are incomplete. All answers of a run are of one length."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return 0
    headers = bytes(answer[:end]).lower().split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in headers if line.startswith(b"content-length:"))
    return end + 4 + length


def grpc_load(port: int, concurrency: int, stop: Callable[[int], bool]) -> list[int]:
    """Keep `concurrency` blocking callers busy, each in a thread, until `stop(calls answered)`; latencies in ns."""
    import grpc

    from cotenant.wire.oip import MESSAGES

    request = MESSAGES["ModelInferRequest"](model_name=MODEL, raw_input_contents=[TENSOR])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 16])
    data = request.SerializeToString()
    latencies: list[int] = []
    failures: list[BaseException] = []

    def caller(call: grpc.UnaryUnaryMultiCallable) -> None:
        try:
            while not failures:
                begin = time.perf_counter_ns()
                answer = call(data)
                latencies.append(time.perf_counter_ns() - begin)
                if not answer.endswith(TENSOR):
                    raise RuntimeError(f"wrong answer: {answer[:200]!r}")
                if stop(len(latencies)):
                    return
        except BaseException as error:
            failures.append(error)

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        threads = [threading.Thread(target=caller, args=(call,)) for _ in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return latencies


LOADS: dict[str, Callable[[int, int, Callable[[int], bool]], list[int]]] = {"http": http_load, "grpc": grpc_load}


def measure(protocol: str, pid: int, port: int, window_s: float, concurrency: int = CONCURRENCY) -> Window:
    """Load one protocol for `window_s` seconds."""
    load = LOADS[protocol]
    cpu_us = _cpu_us(pid)
    begin = time.perf_counter_ns()
    end = begin + int(window_s * 1e9)
    latencies = load(port, concurrency, lambda _: time.perf_counter_ns() >= end)
    wall_ns = time.perf_counter_ns() - begin
    return Window(protocol, len(latencies), wall_ns, (_cpu_us(pid) - cpu_us) / len(latencies), latencies)


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure both servers and protocols in turn; `summary` holds medians over the repetitions, `rows` all of them."""
    cores = sorted(os.sched_getaffinity(0))
    window_s, repetitions = (QUICK_WINDOW_S, QUICK_REPETITIONS) if quick else (WINDOW_S, REPETITIONS)
    rows: list[dict[str, object]] = []
    with ExitStack() as servers:
        places: dict[tuple[str, str], tuple[int, int]] = {}
        for isolation in ISOLATIONS:
            repository = servers.enter_context(tiny_repository(MODEL))
            server = servers.enter_context(serving(repository, "--isolation", isolation, cores=cores[-1:]))
            places[isolation, "http"] = server.process.pid, server.http_port
            places[isolation, "grpc"] = server.process.pid, server.grpc_port
        os.sched_setaffinity(0, {cores[0]})
        try:
            for (_, protocol), (_, port) in places.items():
                LOADS[protocol](port, CONCURRENCY, lambda answered: answered >= WARM_UP_REQUESTS)
            for repetition in range(repetitions):
                for (isolation, protocol), (pid, port) in places.items():
                    row = measure(protocol, pid, port, window_s).row()
                    alone = measure(protocol, pid, port, window_s / 4, concurrency=1).row()
                    told = {"repetition": repetition, "isolation": isolation}
                    rows.append({**told, **row, "alone_p50_us": alone["p50_us"]})
        finally:
            os.sched_setaffinity(0, set(cores))
    summary: dict[str, float] = {}
    columns = ("requests/s", "CPU us", "p50 us", "p99 us", "one client, p50")
    print(f"{'models in':10}{'protocol':10}" + "".join(f"{name:>17}" for name in columns))
    for isolation, protocol in places:
        found = {}
        for metric in ("rps", "cpu_us", "p50_us", "p99_us", "alone_p50_us"):
            mine = [row for row in rows if (row["isolation"], row["protocol"]) == (isolation, protocol)]
            found[metric] = statistics.median(float(str(row[metric])) for row in mine)
            summary[f"{protocol}_{metric}{ISOLATIONS[isolation]}"] = found[metric]
        print(f"{isolation:10}{protocol:10}" + "".join(f"{value:17.0f}" for value in found.values()))
    shared = "; server and clients share one core" if len(cores) == 1 else ""
    print(f"{CONCURRENCY} clients, FP32[1,16], medians of {repetitions} windows of {window_s} s{shared}")
    return {"summary": summary, "rows": rows}
