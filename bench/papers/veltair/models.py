"""Whole models on compiled units: how much of each, whether it answers as onnxruntime does, and in what time.

Every unit that kernels can run does so here, also where onnxruntime is faster (`cotenant compile` leaves it those).
Times are lower quartiles of alternating runs on one core: CPU time. Models come from the zoo with seeded weights;
kernels are the fastest of a few candidates, kept in the user's cache.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import zoo as networks
from bench._server import cache_folder
from cotenant import zoo
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.runner import to_numpy
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import SearchEffort
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.compile.toolchain import find_compiler
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.execute.loaded_kernels import runtime_of, store_of, version_of

NAME = "veltair-models"
SEED = 1
_TOKENS = 384
_BERT = "bert_large"
MODELS = (
    "resnet50",
    "googlenet",
    "mobilenet_v2",
    "efficientnet_b0",
    "ssd_mobilenet",
    "tiny_yolov2",
    "ssd_vgg16",
    _BERT,
)
_QUICK = ("mobilenet_v2",)
_CANDIDATES = 5
_ROUNDS, _SLACK_S = 9, 15.0


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Compile, then measure. `data_dir` is not used."""
    folder = cache_folder() / NAME
    rows = [_row(name, folder) for name in (_QUICK if quick else MODELS)]
    summary = {
        "models": len(rows),
        "worst_error": max(row["error"] for row in rows),
        "least_macs_on_kernels": min(row["macs_on_kernels"] for row in rows),
        "geomean_over_ort_1": float(np.exp(np.mean([np.log(row["over_ort_1"]) for row in rows]))),
        "load_average": os.getloadavg()[0],
    }
    table = Table(
        "model", "units on kernels", "of", "their share of MACs", "layers", "ms", "onnxruntime ms", "over it", "error"
    )
    for row in rows:
        times = (f"{row['ms']:.1f}", f"{row['ort_ms']:.1f}", f"{row['over_ort_1']:.2f}", f"{row['error']:.0e}")
        share = f"{row['macs_on_kernels']:.3f}"
        table.add_row(row["model"], str(row["units"]), str(row["of_units"]), share, str(row["layers"]), *times)
    console = Console()
    console.print(table)
    console.print(", ".join(f"{name} {value:.3g}" for name, value in summary.items()))
    if quick:
        console.print(f"quick: {', '.join(_QUICK)} alone")
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


def _inputs(name: str, path: Path) -> dict[str, Any]:
    """Inputs of a model, which is built where it is not there."""
    rng = np.random.default_rng(SEED)
    if name == _BERT:
        if not path.exists():
            zoo.build(name, path)
        ids = rng.integers(0, 30_000, (1, _TOKENS))
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    if not path.exists():
        networks.save_onnx(networks.make(name), path)
    given = networks.define(name).inputs
    return {key: rng.standard_normal(shape, np.float32) for key, (_, shape) in given.items()}


def _row(name: str, folder: Path) -> dict[str, Any]:
    path, cache = folder / f"{name}.onnx", folder / "graphs"
    inputs = _inputs(name, path)
    shapes = {key: each.shape for key, each in inputs.items()}
    store, backend = store_of(cache), CKernel(find_compiler())
    effort = SearchEffort(_CANDIDATES, workers=len(os.sched_getaffinity(0)))
    with CompiledModel.open(path, cache_dir=cache) as ours, SegmentedModel.open(path, cache_dir=cache) as plain:
        asked = ours.planner(shapes, store.target.lanes).problems()
        problems = dict.fromkeys(each for unit in asked.values() for each in unit)
        kernels = {each: [version_of(store, search(each, store, backend, effort)[0])] for each in problems}
        ours.use(kernels, runtime_of(store), store.target.lanes)
        plan = ours.prepared(shapes).plan
        got, right = (to_numpy(each.run(0, each.unit_count, inputs)) for each in (ours, plain))
        error = max(float(np.max(np.abs(got[key] - each)) / np.max(np.abs(each))) for key, each in right.items())
        samples: tuple[list[int], list[int]] = ([], [])
        began = time.monotonic()
        while len(samples[0]) < _ROUNDS and (len(samples[0]) < 2 or time.monotonic() - began < _SLACK_S):
            for model, into in zip((ours, plain), samples, strict=True):
                start = time.thread_time_ns()
                model.run(0, model.unit_count, inputs)
                into.append(time.thread_time_ns() - start)
        first, second = (float(np.quantile(each, 0.25, method="lower")) / 1e6 for each in samples)
        macs = [unit.macs for unit in ours.dfg_at(shapes).units]
        on_kernels = sum(each for each, is_ours in zip(macs, plan.ours, strict=True) if is_ours)
        return {
            "model": name,
            "units": sum(plan.ours),
            "of_units": ours.unit_count,
            "layers": len(kernels),
            "macs_on_kernels": on_kernels / sum(macs),
            "giga_macs": sum(macs) / 1e9,
            "ms": first,
            "ort_ms": second,
            "over_ort_1": first / second,
            "error": error,
        }
