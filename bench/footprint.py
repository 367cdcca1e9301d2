"""Footprint: wall time of `import cotenant`, and memory of a server without and with models.

Import: from the start of an interpreter that runs `import cotenant` to its end; the start of Python alone is given
beside it. `cotenant --version`, which loads the whole command line, is timed in the same way. They take turns. Memory:
resident set of the process of `cotenant serve`, HTTP and gRPC listening, shortly after it is ready. The cases are an
empty repository (the goal's figure), one tiny model, and that model after requests over both protocols.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench._server import rss_mb, serving, tiny_repository, without_workers

MODEL = "tiny"
STARTS, QUICK_STARTS = 31, 9
SERVERS, QUICK_SERVERS = 5, 2
SETTLE_S = 1.0
"""From ready until memory is read: threads that start late have started."""
REQUESTS = 200
METRICS = ("import_s", "idle_mb", "interpreter_s", "cli_s", "ready_s", "one_model_mb", "after_requests_mb")
GOALS = {"import_s": "< 0.3 s", "idle_mb": "< 150 MB"}


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. `data_dir` is not used."""
    starts, servers = (QUICK_STARTS, QUICK_SERVERS) if quick else (STARTS, SERVERS)
    rows = _starts(starts)
    for _ in range(servers):
        rows += _memory()
    summary: dict[str, float] = {}
    for metric in METRICS:
        summary[metric] = statistics.median(row["value"] for row in rows if row["metric"] == metric)
    table = Table("metric", "value", "goal")
    for metric, value in summary.items():
        table.add_row(metric, f"{value:.3f}" if metric.endswith("_s") else f"{value:.0f}", GOALS.get(metric, ""))
    console = Console()
    console.print(table)
    console.print(f"medians: {starts} interpreter starts each, {servers} servers each")
    if quick:
        console.print("quick: fewer starts and servers; nothing else is left out")
    return {"summary": summary, "rows": rows}


def _starts(starts: int) -> list[dict[str, Any]]:
    commands = {
        "interpreter_s": ("-c", "pass"),
        "import_s": ("-c", "import cotenant"),
        "cli_s": ("-m", "cotenant", "--version"),
    }
    times: dict[str, list[float]] = {metric: [] for metric in commands}
    for turn in range(starts + 1):
        for metric, arguments in commands.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            if turn:  # the first fills the page cache and writes byte code
                times[metric].append(time.perf_counter() - began)
    return [{"metric": metric, "value": value} for metric, found in times.items() for value in found]


def _memory() -> list[dict[str, Any]]:
    from cotenant.wire.client import infer_once

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as empty:
        began = time.perf_counter()
        with serving(Path(empty)) as server:
            rows.append({"metric": "ready_s", "value": time.perf_counter() - began})
            time.sleep(SETTLE_S)
            rows.append({"metric": "idle_mb", "value": rss_mb(*without_workers(server))})
    with tiny_repository(MODEL) as repository, serving(repository) as server:
        time.sleep(SETTLE_S)
        rows.append({"metric": "one_model_mb", "value": rss_mb(*without_workers(server))})
        inputs = {"x": np.zeros((1, 16), np.float32)}
        for _ in range(REQUESTS):
            infer_once(server.http_url, MODEL, inputs)
        _grpc_requests(f"{server.host}:{server.grpc_port}", inputs)
        rows.append({"metric": "after_requests_mb", "value": rss_mb(*without_workers(server))})
    return rows


def _grpc_requests(target: str, inputs: dict[str, Any]) -> None:
    import grpc

    from cotenant.wire.encode import grpc_request
    from cotenant.wire.oip import SERVICE

    request = grpc_request(MODEL, inputs, {})
    with grpc.insecure_channel(target) as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for _ in range(REQUESTS):
            infer(request)
