"""Stopping: how long after `drain_s` a server's process ends, whatever it was doing when the signal came.

Each moment starts `cotenant serve` with `drain_s` of 1 s on four small models and brings it into a situation:

- queries in flight over HTTP or gRPC, loads under way over HTTP or gRPC;
- a launch that computes for ever, in a worker or in a thread of the server; an idle worker that is stopped;
- models that are being opened at the start; imports.

At a random time after that the process gets SIGTERM or SIGINT. Time runs from the signal to the exit. The trace has to
be readable afterwards, and no child of the server may live on.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table

from bench._registry import BenchError
from bench._server import family
from cotenant.errors import CotenantError
from cotenant.repository import trace_path
from cotenant.serve.server_process import RunningServer, await_ready, spawn
from cotenant.trace import read
from cotenant.wire.client import infer_once
from cotenant.wire.oip import MESSAGES
from cotenant.zoo import build

DRAIN_S = 1.0
TINY = ("a", "b", "c")
ENDLESS = "endless"
SITUATIONS = ("http", "grpc", "http-loads", "grpc-loads", "hang", "hang-thread", "stopped", "start", "imports")
MOMENTS, QUICK_MOMENTS = 40, 8
LATEST_S = 0.5
"""The signal comes so long after the situation is there, at most."""
IMPORT_S = 2.0
"""The same where the situation is the start of the process."""
LIMIT_S = 60.0
CLIENTS = 3
SEED = 1
_STATUSES = {0, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM}
"""As before there is a server, a signal ends the process by itself."""
_SERVER = "[server]\ndrain_s = {drain_s}\n\n[device]\nisolation = '{isolation}'\n"
_TENANT = "[tenant]\nslo_ms = 60000\n\n[model]\nmax_batch = {max_batch}\n\n[[model.shapes]]\n{shape}\n"
_INPUT = {"x": np.zeros((1, 16), np.float32)}
_TURNS = {"turns": np.array([1 << 50], np.int64)}


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure; nothing is kept."""
    rng = random.Random(SEED)
    count = QUICK_MOMENTS if quick else MOMENTS
    order = [*SITUATIONS[:7], "start"] if quick else [SITUATIONS[at % len(SITUATIONS)] for at in range(count)]
    rows = []
    for situation in order:
        with tempfile.TemporaryDirectory(prefix="cotenant-stop-") as folder:
            number = rng.choice((signal.SIGTERM, signal.SIGINT))
            rows.append(_moment(Path(folder), situation, number, rng))
    worst = max(row["stop_s"] for row in rows)
    summary = {
        "moments": len(rows),
        "stop_s_over_drain": round(worst - DRAIN_S, 3),
        "traces_cut": sum(row["trace"] == "cut" for row in rows),
        "bad_statuses": sum(row["status"] not in _STATUSES for row in rows),
        "children_left": sum(row["children_left"] for row in rows),
    }
    _show(rows, summary)
    if quick:
        print(f"quick: {QUICK_MOMENTS} moments instead of {MOMENTS}, none of them during imports")
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


@dataclass(frozen=True, slots=True)
class Clients:
    """Threads that ask until the server is gone."""

    ask: Callable[[RunningServer, int], object]

    @contextmanager
    def asking(self, server: RunningServer) -> Iterator[None]:
        """Ask inside; returns once each has had its first answer, or its query is under way for half a second."""
        begun = [threading.Event() for _ in range(CLIENTS)]
        is_over = threading.Event()

        def go_on(number: int) -> None:
            while not is_over.is_set():
                with suppress(CotenantError, grpc.RpcError, OSError):
                    self.ask(server, number)
                begun[number].set()

        threads = [threading.Thread(target=go_on, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 0.5
        for each in begun:
            each.wait(max(0.0, until - time.monotonic()))
        try:
            yield
        finally:
            is_over.set()


def _infer_grpc(server: RunningServer, number: int) -> None:
    request = MESSAGES["ModelInferRequest"](model_name="a", raw_input_contents=[_INPUT["x"].tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 16])
    _call(server, "ModelInfer", request, "ModelInferResponse")


def _load_grpc(server: RunningServer, number: int) -> None:
    request = MESSAGES["RepositoryModelLoadRequest"](model_name=TINY[number])
    _call(server, "RepositoryModelLoad", request, "RepositoryModelLoadResponse")


def _call(server: RunningServer, method: str, request: Any, answer: str) -> None:
    with grpc.insecure_channel(server.grpc_url) as channel:
        path = f"/inference.GRPCInferenceService/{method}"
        form = type(request).SerializeToString, MESSAGES[answer].FromString
        channel.unary_unary(path, *form)(request, timeout=LIMIT_S)


def _load_http(server: RunningServer, number: int) -> None:
    url = f"{server.http_url}/v2/repository/models/{TINY[number]}/load"
    urllib.request.urlopen(url, b"", timeout=LIMIT_S).close()


def _hang(server: RunningServer, number: int) -> None:
    infer_once(server.http_url, ENDLESS, _TURNS, timeout_s=LIMIT_S)


CLIENTS_OF = {
    "http": Clients(lambda server, _: infer_once(server.http_url, "a", _INPUT)),
    "grpc": Clients(_infer_grpc),
    "http-loads": Clients(_load_http),
    "grpc-loads": Clients(_load_grpc),
    "hang": Clients(_hang),
    "hang-thread": Clients(_hang),
    "stopped": Clients(lambda server, _: infer_once(server.http_url, "b", _INPUT)),
}


def _moment(folder: Path, situation: str, number: signal.Signals, rng: random.Random) -> dict[str, Any]:
    root, log = _repository(folder / "models", situation), folder / "log"
    process = spawn("serve", str(root), log=log)
    latest_s = IMPORT_S if situation in ("imports", "start") else LATEST_S
    try:
        with ExitStack() as stack:
            if situation in CLIENTS_OF:
                server = await_ready(process, log)
                stack.enter_context(CLIENTS_OF[situation].asking(server))
            elif situation == "start":
                _await_line(log, b"is measured quickly", process)
            children = set(family(process.pid)[1:])
            if situation == "stopped":  # of a model without clients
                os.kill(_worker_of(children, "a"), signal.SIGSTOP)
            time.sleep(rng.random() * latest_s)
            children |= set(family(process.pid)[1:])
            began = time.monotonic()
            process.send_signal(number)
            status = process.wait(LIMIT_S)
            stop_s = time.monotonic() - began
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    left = [pid for pid in children if not _is_gone(pid)]
    row = {"situation": situation, "signal": number.name, "stop_s": round(stop_s, 3), "status": status}
    return {**row, "trace": _trace(root), "children_left": len(left)}


# --- models -----------------------------------------------------------------------------------------------------------


def _repository(root: Path, situation: str) -> Path:
    for name in TINY:
        build("tiny", root / name / "1" / "model.onnx")
        (root / name / "config.toml").write_text(_TENANT.format(max_batch=8, shape="x = [1, 16]"))
    (root / ENDLESS / "1").mkdir(parents=True)
    (root / ENDLESS / "config.toml").write_text(_TENANT.format(max_batch=1, shape="turns = [1]"))
    onnx.save(_endless(), root / ENDLESS / "1" / "model.onnx")
    isolation = "thread" if situation == "hang-thread" else "process"
    (root / "cotenant.toml").write_text(_SERVER.format(drain_s=DRAIN_S, isolation=isolation))
    return root


def _endless() -> onnx.ModelProto:
    """A loop that counts the turns that its input asks for: of the sample value few, of `_TURNS` for months."""
    int64, flag = TensorProto.INT64, TensorProto.BOOL
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["state", "one"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info(*each)
            for each in (("turn", int64, []), ("go", flag, []), ("state", int64, [1]))
        ],
        [helper.make_tensor_value_info(*each) for each in (("go_on", flag, []), ("next", int64, [1]))],
    )
    nodes = [
        helper.make_node("ReduceMax", ["turns"], ["count"], keepdims=0),
        helper.make_node("Loop", ["count", "", "zero"], ["y"], body=body),
    ]
    constants = [helper.make_tensor(name, int64, [1], [value]) for name, value in (("one", 1), ("zero", 0))]
    turns, y = (helper.make_tensor_value_info(name, int64, [1]) for name in ("turns", "y"))
    graph = helper.make_graph(nodes, "endless", [turns], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# --- processes --------------------------------------------------------------------------------------------------------


def _worker_of(children: set[int], tenant: str) -> int:
    for pid in children:
        with suppress(OSError):
            if tenant.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
    raise BenchError(f"the server has no worker of {tenant!r}")


def _is_gone(pid: int) -> bool:
    """Whether a child has ended; the kernel takes a moment after the end of its parent."""
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


def _await_line(log: Path, words: bytes, process: Popen[bytes]) -> None:
    until = time.monotonic() + LIMIT_S
    while not log.exists() or words not in log.read_bytes():
        if time.monotonic() > until or process.poll() is not None:
            raise BenchError(f"the server did not log {words.decode()!r}")
        time.sleep(0.01)


def _trace(root: Path) -> str:
    """Whether the trace is there, and ends with a whole line."""
    path = trace_path(root)
    if not path.exists():
        return "none"
    with suppress(CotenantError):
        _, records = read(path)
        if list(records) is not None and path.read_bytes().endswith(b"\n"):
            return "whole"
    return "cut"


def _show(rows: list[dict[str, Any]], summary: dict[str, float]) -> None:
    console = Console()
    names = ("situation", "signal", "stop_s", "status", "trace", "children_left")
    table = Table(*names, title=f"SIGTERM or SIGINT; drain_s = {DRAIN_S:g}")
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {value}")
