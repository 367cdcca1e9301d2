"""Kernels of models: how long each runs, and how many SMs its blocks need. Table: kernels.csv.

NAME ROWS runs one model once between cudaProfilerStart and cudaProfilerStop, for a profiler around it, and no table.
SMs needed are those that all blocks fill at once, packed by threads, registers and shared memory.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.first._base import NAMES, PRECISIONS, Script, Table

ROWS = (1, 8)
CLASSES = """
conv: conv fprop implicit wgrad winograd nchw nhwc
gemm: gemm gemv cutlass splitk cublas xmma
batchnorm: batch_norm bn_fw
layernorm: layer_norm layernorm
softmax: softmax fmha attention
pool: pool
concat: cat
upsample: upsample
scan_sort: scan sort topk
index: index gather scatter embedding
reduce: reduce
elementwise: elementwise vectorized copy relu add mul
"""
"""The class of a kernel is the first one of which its name has a part."""
_THREADS, _REGISTERS, _SHARED, _BLOCKS = 2048, 65536, 228 << 10, 32
"""What an SM of an H100 holds at once, where torch does not say."""
_RESERVED = 1 << 10
"""Bytes of shared memory that each block takes beside its own (CUDA guide, compute capability 8.0 and newer)."""


def class_of(name: str) -> str:
    """One of CLASSES, or other."""
    lines = (line.partition(": ") for line in CLASSES.split("\n") if line)
    return next((kind for kind, _, parts in lines if any(part in name.lower() for part in parts.split())), "other")


def sm_needed(kernel: Mapping[str, Any], facts: Any = None) -> int:
    """SMs that all blocks of a kernel fill, from the arguments of its event in a trace."""
    threads, blocks = math.prod(kernel["block"]), math.prod(kernel["grid"])
    limits = [_BLOCKS, getattr(facts, "max_threads_per_multi_processor", _THREADS) // (-(-threads // 32) * 32)]
    registers = int(kernel.get("registers per thread", 0))
    if registers:
        a_warp = -(-registers * 32 // 256) * 256  # registers are given to warps by 256
        limits.append(getattr(facts, "regs_per_multiprocessor", _REGISTERS) // (a_warp * -(-threads // 32)))
    shared = int(kernel.get("shared memory", 0))
    limits.append(getattr(facts, "shared_memory_per_multiprocessor", _SHARED) // (shared + _RESERVED))
    return int(-(-blocks // max(1, min(limits))))


def kernels(script: Script, name: str, rows: int) -> list[dict[str, Any]]:
    """Events of the kernels of one run, in order; of the operators on a CPU."""
    work = script.work(name, rows)
    for _ in range(3):
        work()
    script.device.sync()
    kind = ProfilerActivity.CUDA if script.device.is_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as run:
        work()
        script.device.sync()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        run.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    wanted = "kernel" if script.device.is_gpu else "cpu_op"
    return sorted((each for each in events if each.get("cat") == wanted), key=lambda each: float(each["ts"]))


def fill(script: Script, table: Table, name: str, precision: str, rows: int) -> None:
    """The rows of a model; one with the error where it fails."""
    keys = {"model": name, "precision": precision, "batch": rows}
    facts: Any = torch.cuda.get_device_properties(0) if script.device.is_gpu else None
    try:
        events = kernels(script, name + PRECISIONS[precision], rows)
        if not events:
            raise RuntimeError("the profiler saw no kernel")
        for at, event in enumerate(events):
            row = {"kernel": at, "class": class_of(event["name"]), "duration_us": event["dur"]}
            args = event["args"]
            if "grid" in args:
                needed = sm_needed(args, facts)
                row |= {"sm_needed": needed, "sm_needed_capped": min(needed, facts.multi_processor_count)}
                row |= {"blocks": math.prod(args["grid"]), "threads": math.prod(args["block"])}
                row |= {"registers": args["registers per thread"], "shared_bytes": args["shared memory"]}
            table.row(**keys, **row, name=event["name"][:160])
    except Exception as error:
        table.fail(error, **keys)


def once(script: Script, name: str, rows: int) -> None:
    """One run that a profiler around this process sees."""
    work = script.work(name, rows)
    for _ in range(3):
        work()
    script.device.sync()
    with torch.cuda.profiler.profile() if script.device.is_gpu else nullcontext():
        work()
        script.device.sync()
    print(f"{name}, {rows} rows: ran once")


def main() -> None:
    """All models, or one run of one."""
    script = Script(__doc__, 75.0)
    if len(script.given) == 2:
        return once(script, script.open(script.given[:1])[0], int(script.given[1]))
    names = script.open(NAMES, tuple(PRECISIONS.values()))
    columns = "model precision batch kernel class duration_us sm_needed sm_needed_capped blocks threads registers"
    table = script.table("kernels", f"{columns} shared_bytes name")
    for rows, precision, name in product(ROWS, PRECISIONS, names):
        if not script.is_over():
            fill(script, table, name, precision, rows)
    return None


if __name__ == "__main__":
    main()
