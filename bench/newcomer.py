"""First use: from bare model files to answers within their SLOs, and restarts that refuse no query.

The files are built by scripts, as exporters write them (bench/_newcomer_models.py). After that only `cotenant init`,
`serve` and `infer` run, as commands; no file is edited.

- `seconds_to_first_answer`: from a bare file to the first answer within the SLO that `init` found. The largest of three
  models, each from nothing: a scikit-learn pipeline, a detector of about 10 MB and an archive of torch.export. Goal 20.
- `own_models_ready_of_13`: models of one folder that one `init` and one `serve` make READY, with correct outputs.
  Outputs are compared with those of scikit-learn, LightGBM, torch and onnxruntime. Goal 13.
- `ready_s_8_models`: from `cotenant serve` to READY of the quick start's models and one more, with a stored profile, on
  two cores. Goal 6.
- `restart_refused`: queries at 100 a second that got no answer while a second server takes over the ports of the
  first (`server.replace`). The first one gets SIGTERM once the second one is ready. Goal 0.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench._newcomer_models import KINDS, Case
from bench._registry import BenchError
from bench._server import TINY_CONFIG, cache_folder, tiny_repository
from cotenant.config import load_server_config
from cotenant.errors import CotenantError
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.repository import CONFIG_FILE, SERVER_FILE
from cotenant.serve.server_process import StartError, await_ready, running
from cotenant.wire.client import infer_once
from cotenant.zoo import QUICK_START, build, build_repository

FIRST = ("iris", "body_detector", "cnn_pt2")
QUICK_KINDS = ("iris", "forest", "tfidf", "table", "text_reader")
ONE_MORE = "tiny"
RATE, RESTART_S, QUICK_RESTART_S = 100.0, 6.0, 1.0
"""Queries a second, and the time before and after a restart in which they are sent."""
CORES = 2
LIMIT_S = 300.0
_TOLERANCE = 2e-3
"""Largest difference of an output from its reference, relative to the largest value."""
_INPUT = {"x": np.zeros((1, 16), np.float32)}


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure; nothing is kept but the models of the quick start with their profile."""
    kinds = QUICK_KINDS if quick else tuple(KINDS)
    rows = [_attempt("first answer", name, partial(first_answer, name)) for name in (FIRST[:1] if quick else FIRST)]
    rows += own_models(kinds)
    if quick:
        print(f"quick: 1 of {len(FIRST)} first answers, {len(kinds)} of {len(KINDS)} kinds, no start of 8 models")
    else:
        rows.append(_attempt("start of 8 models", "", start_of_eight))
    rows.append(_attempt("restart", ONE_MORE, partial(restart, QUICK_RESTART_S if quick else RESTART_S)))
    summary = summary_of(rows)
    _show(rows, summary)
    return {"summary": summary, "rows": rows}


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures; one that no row has is left out."""
    done = {
        what: [row for row in rows if row["what"] == what and not row["problem"]] for what in {r["what"] for r in rows}
    }
    summary: dict[str, float] = {"edited_files": 0}
    first = done.get("first answer", [])
    if first and len(first) == sum(row["what"] == "first answer" for row in rows):
        summary["seconds_to_first_answer"] = max(row["seconds"] for row in first)
    summary[f"own_models_ready_of_{len(KINDS)}"] = len(done.get("own model", []))
    for what, key, figure in (
        ("start of 8 models", "ready_s_8_models", "seconds"),
        ("restart", "restart_refused", "refused"),
    ):
        if done.get(what):
            summary[key] = done[what][0][figure]
    return summary


def _attempt(what: str, model: str, measure: Any) -> dict[str, Any]:
    """A row; with the reason where the figure cannot be had."""
    row = {"what": what, "model": model, "problem": ""}
    try:
        return row | measure()
    except (CotenantError, OSError, subprocess.TimeoutExpired) as error:
        return row | {"problem": str(error)}


# --- own models -------------------------------------------------------------------------------------------------------


def first_answer(name: str) -> dict[str, Any]:
    """From a bare file to its first answer, which is to be correct and within the SLO. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="cotenant-newcomer-") as folder:
        bare, root = Path(folder) / "bare", Path(folder) / "models"
        case = _made(name, bare)
        words = case.arguments(Path(folder) / "inputs")
        file = bare / f"{name}{KINDS[name].suffix}"
        began = time.monotonic()
        made = _command("init", str(file), "-r", str(root), "--json")
        init_s = time.monotonic() - began
        with running("serve", str(root), log=Path(folder) / "log", cores=_cores()) as server:
            serve_s = time.monotonic() - began - init_s
            answer = _command("infer", name, *words, "--http", server.http_url, "-r", str(root), "--json")
            seconds = time.monotonic() - began
        slo_ms = made["models"][0]["slo_ms"]
        row = {"source": case.source, "slo_ms": slo_ms, "ms": round(answer["ms"], 1)}
        problem = fault_of(answer, case) or ("" if answer["ms"] <= slo_ms else "its first answer is later than its SLO")
        times = {"init_s": round(init_s, 2), "serve_s": round(serve_s, 2), "seconds": round(seconds, 2)}
        return {**row, **times, "problem": problem}


def own_models(names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each model: one `init` over the folder of bare files, one `serve`, one `infer` for each."""
    rows: dict[str, dict[str, Any]] = {name: {"what": "own model", "model": name, "problem": ""} for name in names}
    cases: dict[str, Case] = {}
    with tempfile.TemporaryDirectory(prefix="cotenant-newcomer-") as folder:
        root = Path(folder) / "models"
        for name in names:
            try:
                cases[name] = _made(name, root)
            except BenchError as error:
                rows[name]["problem"] = str(error)
        made = _command("init", str(root), "--json", may_fail=True)
        for each in made["models"]:
            rows[each["model"]] |= {"slo_ms": each["slo_ms"], "max_batch": each["max_batch"]}
        for name, reason in made["errors"].items():
            rows[name]["problem"] = reason
        with running("serve", str(root), log=Path(folder) / "log", cores=_cores()) as server:
            for name, case in cases.items():
                row = rows[name] | {"source": case.source}
                if not row["problem"] and (state := server.models.get(name)) != "READY":
                    row["problem"] = f"it is {state}"
                if not row["problem"]:
                    words = case.arguments(Path(folder) / "inputs" / name)
                    try:
                        answer = _command("infer", name, *words, "--http", server.http_url, "-r", str(root), "--json")
                        row |= {"ms": round(answer["ms"], 1), "problem": fault_of(answer, case)}
                    except BenchError as error:
                        row["problem"] = str(error)
                rows[name] = row
    return list(rows.values())


def fault_of(answer: dict[str, Any], case: Case) -> str:
    """The first difference of an answer of `cotenant infer --json` from the reference; "" without one."""
    found = answer["outputs"]
    if len(found) != len(case.outputs):
        return f"it answers {len(found)} outputs, expected {len(case.outputs)}"
    for (name, output), expected in zip(found.items(), map(np.asarray, case.outputs), strict=True):
        values = np.array(output["values"])
        if values.shape != expected.shape:
            return f"output {name!r} has the shape {list(values.shape)}, expected {list(expected.shape)}"
        if expected.dtype.kind == "f":
            is_same = np.abs(values - expected).max(initial=0) <= _TOLERANCE * np.abs(expected).max(initial=1e-9)
        else:
            is_same = (values.astype(str) == expected.astype(str)).all()
        if not is_same:
            return f"output {name!r} differs from its reference"
    return ""


def _made(name: str, folder: Path) -> Case:
    missing = KINDS[name].missing()
    if missing:
        raise BenchError(f"skipped: {', '.join(missing)} not installed")
    return KINDS[name].make(name, folder)


def _command(*words: str, may_fail: bool = False) -> dict[str, Any]:
    """The JSON that a command of cotenant prints. Raises BenchError with its last line of errors."""
    command = [sys.executable, "-m", "cotenant", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if ended.returncode and not (may_fail and ended.stdout):
        raise BenchError((ended.stderr.strip() or "no reason").splitlines()[-1])
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))[:CORES]


# --- starts -----------------------------------------------------------------------------------------------------------


def start_of_eight() -> dict[str, Any]:
    """From `cotenant serve` to READY of the quick start's models and one more, on two cores, with a profile."""
    root = cache_folder() / "newcomer"
    models = [*QUICK_START, ONE_MORE]
    build_repository(root, models=list(QUICK_START))
    build(ONE_MORE, root / ONE_MORE / "1" / "model.onnx")
    (root / ONE_MORE / CONFIG_FILE).write_text(TINY_CONFIG, encoding="utf-8")
    _, errors = profile_repository(
        root, load_server_config(root / SERVER_FILE), Effort(0.25), fresh=False, on_step=_unseen
    )
    if errors:
        raise BenchError(f"skipped: no profile of {', '.join(errors)}: {next(iter(errors.values()))}")
    with tempfile.TemporaryDirectory(prefix="cotenant-newcomer-") as folder:
        began = time.monotonic()
        with running("serve", str(root), log=Path(folder) / "log", cores=_cores()) as server:
            seconds = time.monotonic() - began
            states = Counter(server.models.values())
    problem = "" if states == {"READY": len(models)} else f"states are {dict(states)}"
    return {"seconds": round(seconds, 2), "models": len(models), "problem": problem}


def _unseen(*_: object) -> None:
    """No progress bar."""


def restart(around_s: float) -> dict[str, Any]:
    """Queries that got no answer around a restart at the same ports. `around_s`: before and after, in seconds.

    The second server has `server.replace`. One that cannot start beside the first one starts after it; the row says so.
    """
    with ExitStack() as stack:
        root = stack.enter_context(tiny_repository(ONE_MORE))
        ports = _free_ports(2)
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        url = f"http://127.0.0.1:{ports[0]}"
        processes.append(_serve(root, ports, 0))
        await_ready(processes[0], _log(root, 0))
        clients = _Clients(url)
        stack.callback(clients.stop)
        clients.start()
        time.sleep(around_s)
        way = "side by side"
        try:
            processes.append(_serve(root, ports, 1, "--set", "server.replace=true"))
            await_ready(processes[1], _log(root, 1))
            if processes[0].poll() is None:
                processes[0].send_signal(signal.SIGTERM)
            processes[0].wait(LIMIT_S)
        except StartError as error:
            way = f"one after the other: {error}"
            processes[0].send_signal(signal.SIGTERM)
            processes[0].wait(LIMIT_S)
            processes.append(_serve(root, ports, 2))
            await_ready(processes[2], _log(root, 2))
        time.sleep(around_s)
        clients.stop()
    return {"sent": clients.sent, "refused": sum(clients.failed.values()), "by": dict(clients.failed), "way": way}


def _serve(root: Path, ports: Sequence[int], number: int, *options: str) -> subprocess.Popen[bytes]:
    words = ["serve", str(root), "--json", "--http-port", str(ports[0]), "--grpc-port", str(ports[1]), *options]
    with _log(root, number).open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "cotenant", *words], stdout=subprocess.PIPE, stderr=log)


def _log(root: Path, number: int) -> Path:
    return root.parent / f"{number}.log"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(LIMIT_S / 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class _Clients:
    """Sends queries at RATE, each by a connection of its own, and counts those without an answer by their error."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.sent = 0
        self.failed: Counter[str] = Counter()

    def start(self, threads: int = 4) -> None:
        """Begin to send."""
        began = time.monotonic()
        for number in range(threads):
            thread = threading.Thread(target=self._send, args=(began, number, threads), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Send no more, and wait for the last answers."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _send(self, began: float, number: int, step: int) -> None:
        while not self._is_over.wait(max(0.0, began + number / RATE - time.monotonic())):
            failure = ""
            try:
                infer_once(self._url, ONE_MORE, _INPUT)
            except (CotenantError, OSError) as error:
                failure = str(error)
            with self._lock:
                self.sent += 1
                if failure:
                    self.failed[failure] += 1
            number += step


def _show(rows: Sequence[dict[str, Any]], summary: dict[str, float]) -> None:
    console = Console()
    names = ("what", "model", "source", "slo_ms", "ms", "seconds", "refused", "problem")
    table = Table(*names, title="From bare files to answers")
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in names))
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {value}")
