"""Front-ends: requests per second and processor time per request of HTTP and gRPC, beside Triton and on one core.

Beside Triton, on all cores: `cotenant serve` as it comes (`processes`), with the front-end in the engine's process
(`here`), and Triton, in turns. Loads: HTTP, gRPC by grpcio's client and gRPC by a cheap client
(`bench/_h2_client.py`). Each has 8 and 64 requests in flight, FP32[1,16] for a model of one Identity. One more load is
8 HTTP requests of 600 kB, answered with 64 bytes. Ratios are medians over the turns, the worse of 8 and 64. Processor
time is that of all processes of a server.

On one core: a server and its worker process on one core, clients on another, eight in flight. A second server, on the
same core, has the model in the engine's process (`--isolation thread`): its metrics end in `_thread`. Processor time is
that of the server's processes without its worker.

Every answer is checked. Rows are kept as they come: a run that was cut short goes on where it was.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import _h2_client
from bench._campaign import timed_rows
from bench._h2_client import h2_load
from bench._registry import BenchError
from bench._server import cpu_by_process, family, serving, tiny_repository, without_workers
from bench.peers import triton_process as triton
from cotenant.serve.server_process import RunningServer
from cotenant.zoo.graph import GraphWriter

CONCURRENCY, MANY = 8, 64
MODEL, LARGE = "identity", "large"
LARGE_COUNT = 150_000
"""Numbers in a request of 600 kB."""
ISOLATIONS = {"process": "", "thread": "_thread"}
"""What `device.isolation` may be, and how the names of its metrics on one core end."""
OURS = {"processes": (), "here": ("--frontends", "0")}
TRITON = "triton"
TURNS = (
    ("http", CONCURRENCY),
    ("http", MANY),
    ("grpc", CONCURRENCY),
    ("grpc", MANY),
    ("grpc_cheap", CONCURRENCY),
    ("grpc_cheap", MANY),
    ("http_600kB", CONCURRENCY),
)
"""The load that all servers get in turns: its kind, and the number of requests in flight."""
ONE_CORE = ("one core", CONCURRENCY)
OVER_TRITON = {
    "http_over_triton": ("http", "processes", "rps"),
    "grpc_over_triton": ("grpc", "processes", "rps"),
    "grpc_cheap_over_triton": ("grpc_cheap", "processes", "rps"),
    "http_600kB_over_triton": ("http_600kB", "processes", "rps"),
    "http_here_over_triton": ("http", "here", "rps"),
    "http_cpu_over_triton": ("http", "processes", "cpu_us"),
    "grpc_cpu_over_triton": ("grpc_cheap", "processes", "cpu_us"),
}
"""Metrics: the load, the server of ours, and what of it is set over Triton's."""
TENSOR = bytes(range(64))
WARM_UP_REQUESTS = 300
REPETITIONS, QUICK_REPETITIONS = 5, 2
WINDOW_S, QUICK_WINDOW_S = 1.2, 0.6
_ALONE_PART = 0.25
_LARGE_CONFIG = f"[tenant]\nslo_ms = 1000\n\n[model]\nmax_batch = 1\n\n[[model.shapes]]\nx = [1, {LARGE_COUNT}]\n"


@dataclass(frozen=True, slots=True)
class Window:
    """What one repetition saw. Latencies are those of single requests at full load, in nanoseconds."""

    requests: int
    wall_ns: int
    cpu_us: float
    latencies_ns: Sequence[int]

    def row(self) -> dict[str, Any]:
        ordered = sorted(self.latencies_ns)
        return {
            "requests": self.requests,
            "rps": round(self.requests / self.wall_ns * 1e9, 1),
            "cpu_us": round(self.cpu_us, 1),
            "p50_us": round(ordered[len(ordered) // 2] / 1e3, 1),
            "p99_us": round(ordered[len(ordered) * 99 // 100] / 1e3, 1),
        }


# --- clients ----------------------------------------------------------------------------------------------------------


def http_request(model: str, tensor: bytes) -> bytes:
    """A request with one row of FP32 numbers, in binary both ways."""
    parameters = {"binary_data_size": len(tensor)}
    head = json.dumps(
        {
            "inputs": [{"name": "x", "shape": [1, len(tensor) // 4], "datatype": "FP32", "parameters": parameters}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return (
        (
            f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {len(head) + len(tensor)}\r\n"
            f"Inference-Header-Content-Length: {len(head)}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        + head
        + tensor
    )


def http_load(request: bytes, port: int, concurrency: int, stop: Callable[[int], bool]) -> list[int]:
    """Keep `concurrency` connections busy from one thread until `stop(requests answered)`; return latencies in ns."""
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


def grpc_request(model: str) -> bytes:
    """The message of a call with one row of FP32 numbers."""
    from cotenant.wire.oip import MESSAGES

    request = MESSAGES["ModelInferRequest"](model_name=model, raw_input_contents=[TENSOR])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 16])
    data: bytes = request.SerializeToString()
    return data


def grpc_load(port: int, concurrency: int, stop: Callable[[int], bool]) -> list[int]:
    """Keep `concurrency` blocking callers busy, each in a thread, until `stop(calls answered)`; latencies in ns."""
    import grpc

    data = grpc_request(MODEL)
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


def grpc_cheap_load(port: int, concurrency: int, stop: Callable[[int], bool]) -> list[int]:
    """Keep `concurrency` calls of the cheap client busy until `stop(calls answered)`; latencies in ns."""
    return h2_load(port, grpc_request(MODEL), TENSOR, concurrency, stop)


LOADS: dict[str, Callable[[int, int, Callable[[int], bool]], list[int]]] = {
    "http": partial(http_load, http_request(MODEL, TENSOR)),
    "grpc": grpc_load,
    "grpc_cheap": grpc_cheap_load,
    "http_600kB": partial(http_load, http_request(LARGE, TENSOR + bytes(4 * LARGE_COUNT - len(TENSOR)))),
}


# --- servers ----------------------------------------------------------------------------------------------------------


@contextmanager
def _repository() -> Iterator[Path]:
    """A repository with both models."""
    with tiny_repository(MODEL) as root:
        (root / LARGE).mkdir()
        (root / LARGE / "config.toml").write_text(_LARGE_CONFIG, encoding="utf-8")
        graph = GraphWriter(LARGE)
        given = graph.input("x", np.float32, ("batch", LARGE_COUNT))
        ends = graph.int64(0), graph.int64(16), graph.int64(1)
        graph.output("y", ("batch", 16), graph.op("Slice", [given, *ends], "first"))
        graph.write(root / LARGE / "1" / "model.onnx", {})
        yield root


def _start(stack: ExitStack, with_triton: bool) -> dict[str, RunningServer]:
    """All servers, until the stack ends, each with a repository of its own; all loads have been sent to each of them.

    Raises BenchError where Triton does not start.
    """
    last = sorted(os.sched_getaffinity(0))[-1:]
    servers = {}
    for name, options in OURS.items():
        servers[name] = stack.enter_context(serving(stack.enter_context(_repository()), *options))
    if with_triton:
        root = stack.enter_context(_repository())
        paths = {model: root / model / "1" / "model.onnx" for model in (MODEL, LARGE)}
        models = {
            model: triton.Served(path, CONCURRENCY if model == MODEL else 1, 0, 0.0) for model, path in paths.items()
        }
        servers[TRITON] = stack.enter_context(triton.serving(models, triton.Tuning()))
    for isolation in ISOLATIONS:
        root = stack.enter_context(_repository())
        servers[isolation] = stack.enter_context(serving(root, "--isolation", isolation, cores=last))
    for server in servers.values():
        for load in LOADS:
            LOADS[load](_port(server, load), CONCURRENCY, lambda answered: answered >= WARM_UP_REQUESTS)
    return servers


def _port(server: RunningServer, load: str) -> int:
    return server.http_port if load.startswith("http") else server.grpc_port


def _find_triton(quick: bool) -> str:
    """Why Triton is missing; nothing where it can be started. A full run installs it."""
    if quick and not triton.ENVIRONMENT.is_installed:
        return "quick: Triton is left out, since it is not installed yet; a full run installs it"
    try:
        triton.ENVIRONMENT.install()
    except BenchError as error:
        return f"Triton is left out: {error}"
    return ""


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(load: str, pids: Iterable[int], port: int, window_s: float, concurrency: int = CONCURRENCY) -> Window:
    """Send one load for `window_s` seconds; the processor time is that of `pids`."""
    before = cpu_by_process(pids)
    begin = time.perf_counter_ns()
    end = begin + int(window_s * 1e9)
    latencies = LOADS[load](port, concurrency, lambda _: time.perf_counter_ns() >= end)
    wall_ns = time.perf_counter_ns() - begin
    cpu_us = sum(after - before[pid] for pid, after in cpu_by_process(before).items())
    return Window(len(latencies), wall_ns, cpu_us / len(latencies), latencies)


def _turn(
    servers: Mapping[str, RunningServer], load: str, clients: int, window_s: float, repetition: int
) -> list[dict[str, Any]]:
    """One window of a load on each server; which one is first changes with the repetition."""
    names = [name for name in (*OURS, TRITON) if name in servers]
    at = repetition % len(names)
    rows = []
    for name in (*names[at:], *names[:at]):
        server = servers[name]
        window = measure(load, family(server.process.pid), _port(server, load), window_s, clients)
        rows.append({"repetition": repetition, "load": load, "clients": clients, "server": name, **window.row()})
    return rows


def _on_one_core(servers: Mapping[str, RunningServer], window_s: float, repetition: int) -> list[dict[str, Any]]:
    """HTTP and gRPC on the servers that have one core, from another core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    try:
        rows = []
        for isolation in ISOLATIONS:
            server = servers[isolation]
            for protocol in ("http", "grpc"):
                place = without_workers(server), _port(server, protocol)
                row = measure(protocol, *place, window_s).row()
                alone = measure(protocol, *place, window_s * _ALONE_PART, concurrency=1).row()
                told = {"repetition": repetition, "isolation": isolation, "protocol": protocol}
                rows.append({**told, **row, "alone_p50_us": alone["p50_us"]})
    finally:
        os.sched_setaffinity(0, set(cores))
    return rows


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure all servers in turns. `data_dir` is not used; rows are kept in the user's cache folder meanwhile."""
    window_s, repetitions = (QUICK_WINDOW_S, QUICK_REPETITIONS) if quick else (WINDOW_S, REPETITIONS)
    missing = _find_triton(quick)
    with ExitStack() as stack:

        @cache
        def started() -> dict[str, RunningServer]:
            return _start(stack, with_triton=not missing)

        def rows_of(task: tuple[int, str, int]) -> list[dict[str, Any]]:
            repetition, load, clients = task
            if load == ONE_CORE[0]:
                return _on_one_core(started(), window_s, repetition)
            return _turn(started(), load, clients, window_s, repetition)

        tasks = [(repetition, *turn) for repetition in range(repetitions) for turn in (*TURNS, ONE_CORE)]
        sources = [sys.modules[__name__], _h2_client, triton]
        rows = timed_rows("frontend", sources, tasks, rows_of, _said, quick=quick)
    summary = over_triton(rows) | _one_core_summary(rows)
    _show(rows, summary)
    print(f"FP32[1,16], medians of {repetitions} windows of {window_s} s")
    if len(os.sched_getaffinity(0)) == 1:
        print("servers and clients share one core")
    if missing:
        print(missing)
    versions = {} if missing else triton.ENVIRONMENT.versions("nvidia-pytriton")
    return {"summary": summary, "rows": rows, "versions": versions}


# --- results ----------------------------------------------------------------------------------------------------------


def over_triton(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Our figures over Triton's of the same turn: medians over the turns, the worse of the numbers in flight."""
    found = {(row["server"], row["load"], row["clients"], row["repetition"]): row for row in rows if "server" in row}
    summary = {}
    for name, (load, server, key) in OVER_TRITON.items():
        ratios: dict[int, list[float]] = defaultdict(list)
        for (other, *turn), row in found.items():
            theirs = found.get((TRITON, *turn))
            if (other, turn[0]) == (server, load) and theirs is not None:
                ratios[turn[1]].append(row[key] / theirs[key])
        if ratios:
            worse = max if key == "cpu_us" else min
            summary[name] = round(worse(statistics.median(each) for each in ratios.values()), 3)
    return summary


def _one_core_summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over the repetitions."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if "isolation" in row:
            for key in ("rps", "cpu_us", "p50_us", "p99_us", "alone_p50_us"):
                values[f"{row['protocol']}_{key}{ISOLATIONS[row['isolation']]}"].append(row[key])
    return {name: statistics.median(each) for name, each in values.items()}


def _said(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{row.get('server') or row['isolation']} {row['rps']:.0f}/s" for row in rows)


def _show(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, float]) -> None:
    columns = ("requests/s", "CPU us", "p50 us", "p99 us")
    print(f"{'all cores':12}{'load':12}{'in flight':>10}" + "".join(f"{name:>17}" for name in columns))
    for load, clients in TURNS:
        for server in (*OURS, TRITON):
            of = load, clients, server
            mine = [row for row in rows if (row.get("load"), row.get("clients"), row.get("server")) == of]
            if mine:
                keys = ("rps", "cpu_us", "p50_us", "p99_us")
                cells = [statistics.median(row[key] for row in mine) for key in keys]
                print(f"{server:12}{load:12}{clients:10}" + "".join(f"{cell:17.0f}" for cell in cells))
    print(
        f"{'one core':12}{'protocol':12}{'in flight':>10}"
        + "".join(f"{name:>17}" for name in (*columns, "one client, p50"))
    )
    for isolation, ending in ISOLATIONS.items():
        for protocol in ("http", "grpc"):
            keys = ("rps", "cpu_us", "p50_us", "p99_us", "alone_p50_us")
            cells = [summary[f"{protocol}_{key}{ending}"] for key in keys]
            print(f"{isolation:12}{protocol:12}{CONCURRENCY:10}" + "".join(f"{cell:17.0f}" for cell in cells))
    for name in OVER_TRITON:
        if name in summary:
            print(f"{name}: {summary[name]:g}")
