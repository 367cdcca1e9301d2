"""Cost of running a torch.export archive as segments instead of whole: ResNet-50 in 4, 16 and all units.

On one core of the CPU and, where there is one, on a GPU (there without graphs, the host waiting once at the end).
Whole and cut runs alternate; the ratio is the median over pairs of runs. For context, onnxruntime runs the same module
beside them. Its time is in the table, not in the ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.gpu._models import even_cuts
from bench.segments import SEED, _interleaved, _pinned, build_folder

NAME = "torch-segments"
MODEL = "resnet50"
SEGMENTS = (4, 16, 0)
"""0 stands for one segment a unit."""
_SUMMARY = 16
"""The number of segments of which the ratio is the figure of the benchmark."""
_TURNS, _QUICK_TURNS = 40, 8
_GPU_TURNS = 200
_WARM_UP = 2


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure; models are kept in the user's cache folder. `data_dir` is not used."""
    from bench.zoo import examples, make, save_onnx, save_pt2

    console = Console()
    rows: list[dict[str, Any]] = []
    folder = build_folder()
    with _pinned():
        model = make(MODEL, SEED)
        archive, onnx = folder / f"torch-{MODEL}.pt2", folder / f"torch-{MODEL}.onnx"
        for path, save in ((archive, save_pt2), (onnx, save_onnx)):
            if not path.exists():
                save(model, path)
        feeds = {name: tensor.numpy() for name, tensor in examples(model, 1, SEED).items()}
        rows += _measure("cpu", archive, feeds, _onnx_call(onnx, feeds), _QUICK_TURNS if quick else _TURNS)
        reason = _no_gpu()
        if reason:
            console.print(f"cuda: left out, {reason}")
        else:
            rows += _measure("cuda:0", archive, feeds, None, _QUICK_TURNS if quick else _GPU_TURNS)
    _show(console, rows)
    if quick:
        console.print("quick: fewer pairs of runs; nothing else is left out")
    summary = {"max_abs_error": max(row["max_abs_error"] for row in rows)}
    for row in rows:
        label = f"{row['device'].partition(':')[0]}_ratio_resnet50"
        if row["asked"] == _SUMMARY:
            summary[label] = row["ratio"]
        else:
            summary[f"{label}_{'units' if row['asked'] == 0 else row['asked']}"] = row["ratio"]
    return {"summary": summary, "rows": rows, "seeds": [SEED], "versions": _versions()}


def _measure(
    device: str, archive: Path, feeds: dict[str, Any], other: Callable[[], Any] | None, turns: int
) -> list[dict[str, Any]]:
    import torch

    from cotenant.execute.torch.model import TorchModel

    is_gpu = device != "cpu"
    with TorchModel.open(archive, name=MODEL, device=device) as model:
        given = {name: torch.from_numpy(array).to(device) for name, array in feeds.items()}
        plans = {count: _cuts(model, count) for count in SEGMENTS}
        runs = {str(count): _cut_run(model, given, cuts, is_gpu) for count, cuts in plans.items()}
        runs["whole"] = _cut_run(model, given, (0, model.unit_count), is_gpu)
        expected = {name: tensor.cpu().numpy() for name, tensor in runs["whole"]().items()}
        errors = {}
        for count in plans:
            got = {name: tensor.cpu().numpy() for name, tensor in runs[str(count)]().items()}
            errors[count] = max(float(np.max(np.abs(got[name] - value))) for name, value in expected.items())
        calls: dict[str, Callable[[], object]] = dict(runs)
        if other is not None:
            calls["onnxruntime"] = other
            first = next(iter(expected.values()))
            errors[1] = float(np.max(np.abs(np.asarray(other()[0]) - first)))
        for call in calls.values():
            for _ in range(_WARM_UP):
                call()
        times = _interleaved(calls, turns)
    whole = times["whole"]
    return [
        {
            "device": device,
            "model": MODEL,
            "asked": count,
            "segments": len(cuts) - 1,
            "whole_ms": statistics.median(whole) / 1e6,
            "cut_ms": statistics.median(times[str(count)]) / 1e6,
            "ratio": statistics.median(cut / base for cut, base in zip(times[str(count)], whole, strict=True)),
            "onnxruntime_ms": statistics.median(times["onnxruntime"]) / 1e6 if other is not None else None,
            "max_abs_error": errors[count],
            "max_abs_error_onnxruntime": errors.get(1),
            "pairs": turns,
        }
        for count, cuts in plans.items()
    ]


def _cuts(model: Any, count: int) -> tuple[int, ...]:
    return even_cuts(model.dfg, count) if count else tuple(range(model.unit_count + 1))


def _cut_run(model: Any, feeds: dict[str, Any], cuts: Sequence[int], is_gpu: bool) -> Callable[[], dict[str, Any]]:
    import torch

    def call() -> dict[str, Any]:
        tensors: dict[str, Any] = feeds
        for start, end in pairwise(cuts):
            tensors = model.run(start, end, tensors, 1)
        if is_gpu:
            torch.cuda.synchronize()
        return tensors

    return call


def _onnx_call(path: Path, feeds: dict[str, Any]) -> Callable[[], Any]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def _no_gpu() -> str:
    from bench.gpu._named import why_not

    return why_not()


def _versions() -> dict[str, str]:
    import torch

    return {"torch": str(torch.__version__)}


def _show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table("device", "segments", "whole ms", "cut ms", "ratio", "max error", "onnxruntime ms (whole)")
    for row in rows:
        peer = "" if row["onnxruntime_ms"] is None else f"{row['onnxruntime_ms']:.2f}"
        figures = (f"{row['whole_ms']:.2f}", f"{row['cut_ms']:.2f}", f"{row['ratio']:.3f}")
        table.add_row(row["device"], str(row["segments"]), *figures, f"{row['max_abs_error']:.1e}", peer)
    console.print(table)
