"""Cost of running a model as segments instead of whole: ResNet-50 and MobileNetV2 per block, BERT-base per layer.

One thread, pinned to one core; whole and cut runs alternate, and the ratio is the median over pairs of runs. Both go
through the same call (`SegmentedModel.run`), the whole on onnxruntime's ordinary session of the original file.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench._server import cache_folder
from cotenant import zoo
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.runner import to_numpy
from cotenant.graph.datatypes import numpy_type
from cotenant.graph.dfg import Dfg

SEED = 1
SEQUENCE = 128
"""Tokens a text: dynamic dimensions other than the first get this size."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, where it is cut, the goal for the ratio, and pairs of runs in a full and a quick measurement."""

    name: str
    cuts: str
    goal: float | None
    pairs: int
    quick_pairs: int


CASES = (
    Case("resnet50", "per block", 1.12, 150, 30),
    Case("mobilenet_v2", "per block", None, 600, 150),
    Case("bert_base", "per layer", 1.05, 50, 8),
)


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure all cases; models are kept in the user's cache folder. `data_dir` is not used."""
    rows: list[dict[str, Any]] = []
    folder = build_folder()
    with _pinned():
        for case in CASES:
            rows.extend(_measure(case, folder, case.quick_pairs if quick else case.pairs))
    table = Table("model", "cuts", "parts", "whole ms", "cut ms", "ratio", "goal", "max error")
    for row in rows:
        figures = (f"{row['whole_ms']:.2f}", f"{row['cut_ms']:.2f}", f"{row['ratio']:.3f}")
        goal = "" if row["goal"] is None else f"<= {row['goal']}"
        table.add_row(row["model"], row["cuts"], str(row["segments"]), *figures, goal, f"{row['max_abs_error']:.1e}")
    console = Console()
    console.print(table)
    if quick:
        console.print("quick: fewer pairs of runs; nothing else is left out")
    summary = {f"{row['model'].removesuffix('_base')}_ratio": row["ratio"] for row in rows if row["cuts"] != "per unit"}
    summary["max_abs_error"] = max(row["max_abs_error"] for row in rows)
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


def block_ends(dfg: Dfg) -> tuple[int, ...]:
    """Cheap cuts behind a residual sum or at a bottleneck (fewer live bytes than on either side)."""
    size = [b.live_bytes for b in dfg.boundaries]
    return tuple(
        cut
        for cut in dfg.cheap_cuts
        if len(dfg.units[cut - 1].inputs) > 1 or (size[cut] < size[cut - 1] and size[cut] < size[cut + 1])
    )


def layer_ends(dfg: Dfg) -> tuple[int, ...]:
    """Behind every second matrix product that ends in a normalisation: a transformer layer has two."""
    kinds = [[dfg.operators[i].op_type for i in unit.operators] for unit in dfg.units]
    norms = [i + 1 for i, k in enumerate(kinds) if "MatMul" in k and k[-1].endswith("LayerNormalization")]
    return tuple(cut for cut in norms[1::2] if cut < len(dfg.units))


def _measure(case: Case, folder: Path, pairs: int) -> list[dict[str, Any]]:
    path = folder / f"{case.name}.onnx"
    if not path.exists():
        zoo.build(case.name, path)
    with SegmentedModel.open(path, cache_dir=folder / "cache") as model:
        feeds = _feeds(model)
        end = model.unit_count
        inner = block_ends(model.dfg) if case.cuts == "per block" else layer_ends(model.dfg)
        plans = {case.cuts: (0, *inner, end), "per unit": tuple(range(end + 1))}
        calls = {name: _cut_run(model, feeds, cuts) for name, cuts in plans.items()}
        calls["whole"] = _cut_run(model, feeds, (0, end))
        model.prepare(itertools.chain(*(itertools.pairwise(cuts) for cuts in plans.values()), [(0, end)]), 1)
        expected = to_numpy(calls["whole"]())
        errors = {name: _error(to_numpy(call()), expected) for name, call in calls.items()}
        times = _interleaved(calls, pairs)
    whole = times["whole"]
    return [
        {
            "model": case.name,
            "cuts": name,
            "segments": len(cuts) - 1,
            "whole_ms": statistics.median(whole) / 1e6,
            "cut_ms": statistics.median(times[name]) / 1e6,
            "ratio": statistics.median(cut / base for cut, base in zip(times[name], whole, strict=True)),
            "goal": case.goal if name == case.cuts else None,
            "max_abs_error": errors[name],
            "pairs": pairs,
        }
        for name, cuts in plans.items()
    ]


def _cut_run(model: SegmentedModel, feeds: dict[str, Any], cuts: Sequence[int]) -> Callable[[], dict[str, Any]]:
    def call() -> dict[str, Any]:
        tensors: dict[str, Any] = feeds
        for start, end in itertools.pairwise(cuts):
            tensors = model.run(start, end, tensors, 1)
        return tensors

    return call


def _interleaved(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, list[int]]:
    """Durations in nanoseconds; each turn runs every call once, in an order drawn anew."""
    names = list(calls)
    times: dict[str, list[int]] = {name: [] for name in names}
    order = np.random.default_rng(SEED)
    for _ in range(turns):
        for name in order.permutation(names).tolist():
            start = time.perf_counter_ns()
            calls[name]()
            times[name].append(time.perf_counter_ns() - start)
    return times


def _feeds(model: SegmentedModel) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    feeds: dict[str, Any] = {}
    for tensor in model.inputs:
        dims = tensor.shape or ()
        shape = [d if isinstance(d, int) else (SEQUENCE if axis else 1) for axis, d in enumerate(dims)]
        dtype = numpy_type(tensor.dtype)
        if dtype is not None and dtype.kind == "i":
            feeds[tensor.name] = np.ones(shape, dtype) if "ids" not in tensor.name else rng.integers(0, 2, shape)
        else:
            feeds[tensor.name] = rng.standard_normal(shape).astype(dtype)
    return feeds


def _error(got: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(float(np.max(np.abs(got[name] - value), initial=0)) for name, value in expected.items())


def build_folder() -> Path:
    """Where models are built, and their graphs kept: a data folder is read and never written."""
    folder = cache_folder() / "segments"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _pinned() -> Iterator[None]:
    """Keep the calling thread on the last core it may use."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
