"""Compile fuzz: compiled kernels on random graphs, compared with onnxruntime, with NaN and infinities in the inputs.

300 graphs of all operators with kernels (`bench/_kernel_graphs.py`), one candidate a layer, every possible unit on
kernels. Each graph is compiled and run in a process of its own, so that a crash costs no other graph. Metrics, in
graphs: `crashes` (the process ended by a signal, an exception or its time limit); `wrong` (an answer is not that of
onnxruntime without its optimiser); `nan_lost` (a NaN became a number). A row is kept under the digest of the code that
makes it: an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnxruntime as ort
from rich.console import Console
from rich.table import Table

import cotenant.techniques.layer_blocks.compile
import cotenant.techniques.layer_blocks.compile.ckernel
import cotenant.techniques.layer_blocks.execute
import cotenant.techniques.layer_blocks.measure.kernel_judge
from bench import _kernel_graphs
from bench._campaign import digest_of, run_all
from bench._kernel_graphs import judge
from cotenant.techniques.layer_blocks.compile.target import this_target
from cotenant.techniques.layer_blocks.compile.toolchain import find_compiler

NAME = "compile-fuzz"
GRAPHS, QUICK_GRAPHS = 300, 30
LIMIT_S = 60
"""Of one graph."""
_SHOWN = 20
_CODE = (
    _kernel_graphs,
    cotenant.techniques.layer_blocks.compile,
    cotenant.techniques.layer_blocks.compile.ckernel,
    cotenant.techniques.layer_blocks.execute,
    cotenant.techniques.layer_blocks.measure.kernel_judge,
)


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Compile and compare. `data_dir` is not used. Raises CompileError where there is no compiler."""
    began = time.monotonic()
    seeds = list(range(QUICK_GRAPHS if quick else GRAPHS))
    made_by = (this_target().name, find_compiler().version, ort.__version__)
    key = "-".join((digest_of(_CODE, [Path(__file__)]), *made_by))
    rows = run_all(NAME, key, seeds, _row, lambda made: f"graph {made[0]['seed']}: {made[0]['said'] or 'right'}")
    summary = {
        "graphs": len(rows),
        "answers": sum(row["answers"] for row in rows),
        "units": sum(row["units"] for row in rows),
        "units_on_kernels": sum(row["on_kernels"] for row in rows),
        "crashes": sum(row["crashed"] for row in rows),
        "wrong": sum(row["wrong"] > 0 for row in rows),
        "nan_lost": sum(row["nan_lost"] > 0 for row in rows),
    }
    console = Console()
    bad = [row for row in rows if row["said"]]
    if bad:
        table = Table("graph", "wrong answers", "answers that lost a NaN", "first")
        for row in bad[:_SHOWN]:
            table.add_row(str(row["seed"]), str(row["wrong"]), str(row["nan_lost"]), row["said"])
        console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in summary.items()))
    console.print(f"{time.monotonic() - began:.0f} s")
    if quick:
        console.print(f"quick: the first {QUICK_GRAPHS} of {GRAPHS} graphs")
    return {"summary": summary, "rows": rows, "seeds": seeds}


def _row(seed: int) -> list[dict[str, Any]]:
    """What became of the graph of this seed."""
    with tempfile.TemporaryDirectory(prefix="cotenant-fuzz-") as folder:
        made, end = in_child(lambda: asdict(judge(seed, Path(folder), find_compiler())), LIMIT_S)
    if made is None:
        made = {"units": 0, "on_kernels": 0, "answers": 0, "wrong": 0, "nan_lost": 0, "first": ""}
    return [{"seed": seed, **made, "crashed": bool(end), "said": end or made["first"]}]


def in_child(call: Callable[[], dict[str, Any]], limit_s: int) -> tuple[dict[str, Any] | None, str]:
    """The result of a call in a forked process, or None and how that process ended: in words, also of an exception."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reader)
            signal.alarm(limit_s)
            try:
                said = {"made": call()}
            except Exception as error:
                said = {"error": {"text": f"{type(error).__name__}: {error}"}}
            with os.fdopen(writer, "w", encoding="utf-8") as file:
                json.dump(said, file)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None, f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    if status or not text:
        return None, f"ended with status {os.waitstatus_to_exitcode(status)}"
    said = json.loads(text)
    return (said["made"], "") if "made" in said else (None, said["error"]["text"])
