"""Measured kernels as tables of models: in the form of Orion's file, or in similar ones.

A file has a line for each kernel of a model at a batch, in order: `duration_us` alone, `sm_needed` (the SMs that its
blocks fill, above the card's where they come in waves) and `bound` (compute, memory or unknown). `flops` and `bytes`
are read where they are there, and `splits` (0 where a kernel mixes rows).

Values that were not measured are as in `_models.py`. With r of the measured rows a kernel needs as many SMs less. It
takes its waves where operations bound it, and its bytes where bandwidth does. A part of that does not shrink where
there are few blocks. Without `flops` and `bytes` a kernel with full waves draws what one kernel gets of its bounding
resource. Of the other resource it draws a tenth of the operations or three tenths of the bandwidth. With an unknown
bound it draws half of both. A copy that joins rows takes the time of the median memory-bound kernel of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench._csv_rows import csv_rows
from bench._registry import BenchError
from bench.papers.gacer._gpus import Gpu
from bench.papers.gacer._worlds import Drawn
from cotenant.techniques.granularity.kernel_table import Column, KernelTable, runs_of

_COLUMNS = ("model", "batch", "kernel", "duration_us", "sm_needed", "bound")
_DRAWS = {"compute": (1.0, 0.3), "memory": (0.1, 1.0), "unknown": (0.5, 0.5)}
"""Parts of what one kernel gets of operations and of bandwidth, where neither was counted."""
_FEWEST = 0.25
"""Part of an SM's blocks below which those that are left are no quicker."""


@dataclass(frozen=True, slots=True)
class MeasuredKernel:
    """A line of the file. `flops` and `moved` (bytes) are None where the file has no such column."""

    name: str
    us: float
    sms: float
    bound: str
    flops: float | None
    moved: float | None
    splits: bool


Measured = Mapping[str, Mapping[int, Sequence[MeasuredKernel]]]
"""Kernels by model and batch."""


def read_kernels(path: Path) -> Measured:
    """The models of a file. Raises BenchError, with the line, for a file of another form."""
    found: dict[str, dict[int, list[MeasuredKernel]]] = {}
    for line, cells in csv_rows(path, _COLUMNS, BenchError):
        where = f"{path}, line {line}"
        if not cells["model"] or cells["bound"] not in _DRAWS:
            raise BenchError(
                f"{where}: model {cells['model']!r}, bound {cells['bound']!r}: expected a name and one of "
                f"{', '.join(_DRAWS)}"
            )
        kernel = MeasuredKernel(
            cells["kernel"],
            _number(where, cells, "duration_us", 1e7, above=0.0),
            _number(where, cells, "sm_needed", 1e9, above=0.0),
            cells["bound"],
            _number(where, cells, "flops", 1e18) if cells.get("flops") else None,
            _number(where, cells, "bytes", 1e15) if cells.get("bytes") else None,
            cells.get("splits", "1").strip() != "0",
        )
        batch = _number(where, cells, "batch", 65536, above=0.0)
        if batch != int(batch):
            raise BenchError(f"{where}: batch is {cells['batch']!r}, expected a whole number from 1")
        found.setdefault(cells["model"], {}).setdefault(int(batch), []).append(kernel)
    return found


def _number(where: str, cells: Mapping[str, str], column: str, most: float, above: float = -1.0) -> float:
    try:
        value = float(cells[column])
    except ValueError:
        value = float("nan")
    if not above < value <= most:
        raise BenchError(
            f"{where}: {column} is {cells[column]!r}, expected a number above {max(above, 0):g}, up to {most:g}"
        )
    return value


def measured_table(known: Measured, model: str, batch: int, gpu: Gpu, drawn: Drawn) -> KernelTable:
    """A model for 1 to `batch` rows, from its kernels at the nearest batch that was measured. Raises BenchError for a
    model that the file does not have."""
    if model not in known:
        raise BenchError(f"there is no model {model!r} in the file of kernels, expected one of {', '.join(known)}")
    measured = min(known[model], key=lambda each: (abs(np.log(each / batch)), each))
    kernels = known[model][measured]
    rows = np.arange(1, batch + 1)
    columns = [_columns(kernel, rows / measured, gpu, drawn) for kernel in kernels]
    duration_ns, need, compute, bandwidth = [np.array(each) for each in zip(*columns, strict=True)]
    middle = float(np.median([kernel.us for kernel in kernels if kernel.bound == "memory"] or [drawn.ramp_us]))
    join_ns = np.full(len(kernels), 1000 * middle * batch / measured if drawn.copies else 0.0)
    names = tuple(f"{number}:{kernel.name}" for number, kernel in enumerate(kernels))
    return KernelTable(
        model,
        batch,
        names,
        duration_ns,
        need,
        compute,
        bandwidth,
        join_ns,
        runs_of([kernel.splits for kernel in kernels]),
    )


def _columns(kernel: MeasuredKernel, part: Column, gpu: Gpu, drawn: Drawn) -> tuple[Column, Column, Column, Column]:
    """Duration in ns, need, and shares of operations and bandwidth, by parts of the measured rows."""
    need, whole = (np.maximum(1.0, kernel.sms * each) / gpu.sms for each in (part, np.ones(1)))
    ramp = min(drawn.ramp_us, kernel.us / 2)
    length = _length(need, kernel, drawn)
    ns = 1000 * (ramp + (kernel.us - ramp) * length / _length(whole, kernel, drawn))
    if kernel.flops is None or kernel.moved is None:
        full = np.minimum(1.0, need / length) * (1 - 1000 * ramp / ns) / drawn.mixed
        compute, bandwidth = (full * share for share in _DRAWS[kernel.bound])
    else:
        compute = kernel.flops * part / (ns * gpu.tflops * 1000 * drawn.product * drawn.mixed)
        bandwidth = kernel.moved * part / (ns * gpu.gbps * drawn.memory * drawn.mixed)
    return ns, need, np.minimum(1.0, compute), np.minimum(1.0, bandwidth)


def _length(need: Column, kernel: MeasuredKernel, drawn: Drawn) -> Column:
    """How long it takes with so much need, beside a full wave."""
    if kernel.bound == "memory":
        return np.maximum(need, drawn.enough)
    waves = np.ceil(need - 1e-9) if drawn.waves else np.maximum(1.0, need)
    length: Column = np.where(need < 1, np.maximum(need, _FEWEST) ** drawn.fill, waves)
    return length
