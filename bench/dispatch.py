"""Dispatch: from the command to launch to its completion, for a model that does next to nothing, process and thread.

One launch runs at a time. As in the driver, the thread that reports the end of a launch starts the next one. The time
runs from the call of `start` until the executor calls back, with the tensors of FP32[1, 16] carried both ways
("small"). "awake" does the same beside a loop of idle priority on every core. Without such loops, cores sleep while
they wait, and waking them in a virtual machine can take longer than the work. "paused" leaves the executor alone for
2 ms before each launch. "large" carries FP32[9408, 16] (600 kB, an image of ResNet-50) there and back. Executors take
turns in windows; the summary has medians over the windows, as other work on the machine hits single ones.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench._registry import BenchError
from bench._server import awake
from cotenant.core.actions import Launch
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.protocol import LoadSpec, Timing
from cotenant.execute.threads.executor import ThreadExecutor
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.work import Share, Work
from cotenant.zoo import build

LAUNCHES = {"small": 3_000, "awake": 3_000, "paused": 500, "large": 500}
"""In one window."""
WINDOWS, QUICK_WINDOWS = 15, 5
WARM_UP = 200
PAUSE_S = 0.002
COLUMNS, LARGE_ROWS = 16, 9408
TENANT = "identity"
_PATIENCE_S = 60.0
EXECUTORS = {"process": ProcessExecutor, "thread": ThreadExecutor}
AnyExecutor = ProcessExecutor | ThreadExecutor


class Chain:
    """Runs launches one after the other and keeps how long each took, in nanoseconds."""

    def __init__(self, executor: AnyExecutor, core: int, inputs: dict[str, Any]) -> None:
        self._executor = executor
        self._partition = Share((core,))
        self._inputs = inputs
        self._ended = threading.Event()
        self._left = 0
        self._began = 0
        self._next = 0
        self.latencies: list[int] = []
        self.errors: list[str] = []

    def run(self, launches: int) -> list[int]:
        """So many in a row, each started where the last one ended. Raises BenchError when one failed."""
        self.latencies = []
        self._left = launches
        self._ended.clear()
        self._start()
        if not self._ended.wait(_PATIENCE_S) or self.errors:
            raise BenchError(f"a launch did not end well: {self.errors or 'no answer'}")
        return self.latencies

    def run_paused(self, launches: int) -> list[int]:
        """So many, with a pause before each."""
        found = []
        for _ in range(launches):
            time.sleep(PAUSE_S)
            found += self.run(1)
        return found

    def _start(self) -> None:
        number = self._next
        self._next += 1
        self._executor.put(number, self._inputs)
        launch = Launch(number, number, (number,), Work(TENANT, 0, 1, 0, 1), True, self._partition, 1_000_000)
        self._began = time.perf_counter_ns()
        self._executor.start(launch, self._end)

    def _end(self, launch: int, error: str | None, timing: Timing) -> None:
        self.latencies.append(time.perf_counter_ns() - self._began)
        if error is not None:
            self.errors.append(error)
            self._ended.set()
            return
        self._executor.take(launch)
        self._left -= 1
        if self._left:
            self._start()
        else:
            self._ended.set()


@contextmanager
def loaded(kind: str, folder: Path) -> Iterator[AnyExecutor]:
    """An executor of this kind with the model."""
    executor = EXECUTORS[kind](0)
    model = SegmentedModel.open(folder / "model.onnx", cache_dir=folder / "graphs", name=TENANT)
    try:
        executor.add_model(TENANT, executor.load(TENANT, model, LoadSpec((Share((0,)),), (0, 1))))
        yield executor
    finally:
        executor.close()
        model.close()


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. `summary` has the round trip through a worker process, idle, as `round_trip_p50_us` and `_p99_us`."""
    core = sorted(os.sched_getaffinity(0))[-1]
    windows = QUICK_WINDOWS if quick else WINDOWS
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as name:
        folder = Path(name)
        build(TENANT, folder / "model.onnx")
        with loaded("process", folder) as processes, loaded("thread", folder) as threads:
            for window in range(windows):
                for kind, executor in (("process", processes), ("thread", threads)):
                    rows += [{"window": window, **_measure(kind, mode, executor, core)} for mode in LAUNCHES]
    summary = {}
    for kind in EXECUTORS:
        for mode in LAUNCHES:
            prefix = ("" if kind == "process" else f"{kind}_") + ("" if mode == "small" else f"{mode}_")
            for key in ("p50_us", "p99_us"):
                summary[f"{prefix}round_trip_{key}"] = _median(rows, kind, mode, key)
    _show(rows)
    if quick:
        print(f"quick: {QUICK_WINDOWS} windows instead of {WINDOWS}; nothing is left out")
    return {"summary": summary, "rows": rows}


def _measure(kind: str, mode: str, executor: AnyExecutor, core: int) -> dict[str, Any]:
    launches = LAUNCHES[mode]
    rows = LARGE_ROWS if mode == "large" else 1
    chain = Chain(executor, core, {"x": np.ones((rows, COLUMNS), np.float32)})
    chain.run(WARM_UP)
    with awake(sorted(os.sched_getaffinity(0)) if mode == "awake" else ()):
        latencies = chain.run_paused(launches) if mode == "paused" else chain.run(launches)
    p50, p90, p99, worst = np.percentile(latencies, (50, 90, 99, 100)) / 1e3
    figures = {"p50_us": p50, "p90_us": p90, "p99_us": p99, "max_us": worst}
    return {
        "executor": kind,
        "mode": mode,
        "launches": launches,
        **{key: round(float(value), 1) for key, value in figures.items()},
    }


def _median(rows: list[dict[str, Any]], kind: str, mode: str, key: str) -> float:
    return float(statistics.median(row[key] for row in rows if (row["executor"], row["mode"]) == (kind, mode)))


def _show(rows: list[dict[str, Any]]) -> None:
    keys = ("p50_us", "p90_us", "p99_us", "max_us")
    table = Table("executor", "mode", *(key.replace("_", " ") for key in keys))
    table.title = "Medians over the windows"
    for kind in EXECUTORS:
        for mode in LAUNCHES:
            table.add_row(kind, mode, *(f"{_median(rows, kind, mode, key):.1f}" for key in keys))
    Console().print(table)
