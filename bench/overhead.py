"""Overhead: what serving adds to a model call, HTTP and gRPC, one request at a time.

The model is one Add, FP32[1,16]. One client with one connection sends binary requests made beforehand to `cotenant
serve` with all its parts (trace, calibration, metrics). It waits for each answer. The same process calls the same ONNX
file through a bare `onnxruntime` session. Rounds of the three take turns. Added = median round trip - median bare call;
the summary is the median over the rounds. It is of the pinned setting (client on the first core, server on the last).
That setting does not depend on where the system happens to put the threads. The rows also hold the unpinned setting,
and `awake`: the pinned one with a loop of idle priority on every core. One request at a time leaves the cores asleep in
between, and in a virtual machine waking them can take longer than the work. `thread` is the pinned setting with the
model in the server's own process.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench._server import awake, serving, tiny_repository
from cotenant.serve.server_process import RunningServer

MODEL = "tiny"
ROUNDS, QUICK_ROUNDS = 15, 5
CALLS, QUICK_CALLS = 1000, 400
WARM_UP_CALLS = 500
GOALS_MS = {"http_added_p50_ms": 0.5, "grpc_added_p50_ms": 0.7}
_NAMES = {"pinned": "", "awake": "awake_", "thread": "thread_"}
_INPUT = np.arange(16, dtype=np.float32).reshape(1, 16)

Call = Callable[[], object]


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure pinned and unpinned. `data_dir` is not used."""
    rounds, calls = (QUICK_ROUNDS, QUICK_CALLS) if quick else (ROUNDS, CALLS)
    cores = sorted(os.sched_getaffinity(0))
    pinned = (cores[:1], cores[-1:])
    settings = {"pinned": pinned, "unpinned": (cores, cores), "awake": pinned, "thread": pinned}
    rows: list[dict[str, Any]] = []
    with tiny_repository(MODEL) as repository:
        for setting, (client_cores, server_cores) in settings.items():
            os.sched_setaffinity(0, client_cores)
            try:
                options = ("--isolation", "thread" if setting == "thread" else "process")
                sleepless = awake(cores if setting == "awake" else ())
                with sleepless, serving(repository, *options, cores=server_cores) as server:
                    rows += _measure(setting, repository, server, rounds, calls)
            finally:
                os.sched_setaffinity(0, cores)
    summary = {
        f"{row['path']}_added_p{percentile}_{_NAMES[row['setting']]}ms": row[f"added_p{percentile}_ms"]
        for row in rows
        for percentile in (50, 99)
        if row["setting"] in _NAMES and row["path"] != "bare"
    }
    _show(rows, summary, quick, rounds, calls)
    return {"summary": summary, "rows": rows}


def _measure(setting: str, repository: Path, server: RunningServer, rounds: int, calls: int) -> list[dict[str, Any]]:
    """One row per path: medians over the rounds of each round's percentiles."""
    times: dict[str, list[tuple[float, float]]] = {}
    with _http(server) as http, _grpc(server) as grpc, _bare(repository) as bare:
        paths = {"bare": bare, "http": http, "grpc": grpc}
        for call in paths.values():
            _timed(call, WARM_UP_CALLS)
        for _ in range(rounds):
            for path, call in paths.items():
                times.setdefault(path, []).append(_timed(call, calls))
    rows = []
    for path, found in times.items():
        added = [
            (found[i][0] - times["bare"][i][0], found[i][1] - times["bare"][i][1]) for i in range(rounds)
        ]  # each round beside its own bare calls
        rows.append(
            {
                "setting": setting,
                "path": path,
                "p50_ms": statistics.median(p50 for p50, _ in found),
                "p99_ms": statistics.median(p99 for _, p99 in found),
                "added_p50_ms": statistics.median(p50 for p50, _ in added),
                "added_p99_ms": statistics.median(p99 for _, p99 in added),
                "rounds": rounds,
                "calls": calls,
            }
        )
    return rows


def _timed(call: Call, calls: int) -> tuple[float, float]:
    """Median and 99th percentile of single calls, in milliseconds."""
    spans = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        call()
        spans.append(time.perf_counter_ns() - began)
    spans.sort()
    return spans[calls // 2] / 1e6, spans[calls * 99 // 100] / 1e6


@contextmanager
def _bare(repository: Path) -> Iterator[Call]:
    """The model in this process, as simply as it gets: one thread, one `run`."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = repository / MODEL / "1" / "model.onnx"
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    yield lambda: session.run(None, {"x": _INPUT})


@contextmanager
def _http(server: RunningServer) -> Iterator[Call]:
    """One kept connection; the answer is read to its end and its status and size are checked."""
    from cotenant.wire.encode import http_request

    body, headers = http_request({"x": _INPUT}, {})
    lines = [f"POST /v2/models/{MODEL}/infer HTTP/1.1", f"Host: {server.host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    request = "\r\n".join((*lines, "", "")).encode() + body
    with socket.create_connection((server.host, server.http_port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def call() -> bytes:
            connection.sendall(request)
            answer = connection.recv(65536)
            while len(answer) < _length(answer):
                answer += connection.recv(65536)
            if not answer.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"wrong answer: {answer[:200]!r}")
            return answer

        yield call


def _length(answer: bytes) -> int:
    """Length of the whole answer; one byte more than there is while that is not known."""
    end = answer.find(b"\r\n\r\n")
    at = answer.find(b"content-length:", 0, end)
    if end < 0 or at < 0:
        return len(answer) + 1
    return end + 4 + int(answer[at + 15 : answer.index(b"\r", at)])


@contextmanager
def _grpc(server: RunningServer) -> Iterator[Call]:
    """One channel, blocking calls with a serialised message; the answer is left serialised."""
    import grpc

    from cotenant.wire.encode import grpc_request
    from cotenant.wire.oip import SERVICE

    request = grpc_request(MODEL, {"x": _INPUT}, {})
    with grpc.insecure_channel(f"{server.host}:{server.grpc_port}") as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")

        def call() -> object:
            answer: bytes = infer(request)
            if len(answer) < _INPUT.nbytes:
                raise RuntimeError(f"wrong answer: {answer!r}")
            return answer

        yield call


def _show(rows: list[dict[str, Any]], summary: dict[str, float], quick: bool, rounds: int, calls: int) -> None:
    table = Table("setting", "path", "p50 ms", "p99 ms", "added p50 ms", "added p99 ms", "goal (p50)")
    for row in rows:
        goal = GOALS_MS.get(f"{row['path']}_added_p50_ms") if row["setting"] == "pinned" else None
        figures = [f"{row[key]:.3f}" for key in ("p50_ms", "p99_ms", "added_p50_ms", "added_p99_ms")]
        table.add_row(row["setting"], row["path"], *figures, f"< {goal}" if goal else "")
    console = Console()
    console.print(table)
    console.print(f"medians of {rounds} rounds of {calls} calls each; the pinned setting is the summary")
    if quick:
        console.print("quick: fewer and shorter rounds; nothing else is left out")
