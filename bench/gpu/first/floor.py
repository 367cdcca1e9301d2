"""What everything costs at least: copies, waits, launches, graphs, shares. Table: floor.csv.

A row is a figure, its unit, and `p99` where it is one of many. SECONDS bounds it.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from bench.gpu._stats import plain
from bench.gpu.first._base import Script
from bench.gpu.first._shares import divisions, split, two_in_one
from cotenant.execute.gpu.cuda_driver import GpuError, call, load_driver
from cotenant.execute.gpu.sm_groups import ask_grid

SIZES = [4 << (10 + 2 * step) for step in range(8)]
_RUNS, _HOPS = 30, 50
_WAIT_CYCLES = 2_000_000
"""About a millisecond of an H100."""
_cuda: Any = torch.cuda
_cudnn: Any = torch.backends.cudnn


def _spread(samples: Sequence[float], unit: str) -> dict[str, Any]:
    p50, p99 = np.percentile(samples, [50, 99])
    return {"value": plain(p50), "p99": plain(p99), "unit": unit}


def copies(script: Script, size: int, pinned: bool, up: bool) -> dict[str, Any]:
    """From the call to the end of the wait for it."""
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    there = script.device.put(np.zeros(size, np.uint8))
    samples = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        (there if up else host).copy_(host if up else there, non_blocking=True)
        script.device.sync()
        samples.append(1e6 * (time.perf_counter() - began))
    return _spread(samples[3:], "us")


def waits(how: str) -> dict[str, Any]:
    """Time from the call to the return of the wait, beyond what the device says it took."""
    samples = []
    for _ in range(_RUNS):
        marks = [_cuda.Event(enable_timing=True, blocking=how == "blocking") for _ in range(2)]
        start = time.perf_counter()
        marks[0].record()
        _cuda._sleep(_WAIT_CYCLES)
        marks[1].record()
        if how == "sleeping, then polling":
            time.sleep(0.0004)
        while "polling" in how and not marks[1].query():
            pass
        marks[1].synchronize()
        waited = time.perf_counter() - start
        samples.append(1e6 * waited - 1e3 * marks[0].elapsed_time(marks[1]))
    return _spread(samples, "us")


def hops(script: Script, by_host: bool) -> dict[str, Any]:
    """One small kernel on each of two streams in turn: what the order costs by the host, and by events."""
    numbers, streams = script.device.put(np.zeros(1, np.float32)), [script.device.stream() for _ in range(2)]
    samples = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        for at in range(_HOPS):
            with script.device.on(streams[at % 2]):
                numbers.add_(1)
            if by_host:
                streams[at % 2].synchronize()
            else:
                streams[(at + 1) % 2].wait_stream(streams[at % 2])
        script.device.sync()
        samples.append(1e6 * (time.perf_counter() - start) / _HOPS)
    return _spread(samples, "us")


def models(script: Script, name: str, how: str) -> dict[str, Any]:
    """A whole model, or the smallest kernel: device time, and of the host until it is submitted."""
    device = script.device
    numbers = device.put(np.zeros(1, np.float32))
    work = script.work(name, 1) if name else lambda: numbers.add_(1)
    stream, told, before = device.stream(), "", _cuda.memory_reserved() if device.is_gpu else 0
    if how == "graph":
        began = time.perf_counter()
        work = device.capture(work, stream)
        held = (_cuda.memory_reserved() - before) >> 20 if device.is_gpu else 0
        told = f", captured in {time.perf_counter() - began:.3f} s, {held} MiB with warm-ups"
    with device.on(stream):
        found = script.timed(work)
    return {"value": found["ms"], "unit": "ms", "detail": f"{how}, host {found['host_us']} us{told}"}


def main() -> None:
    """Everything, what needs no model first."""
    script = Script(__doc__, 85.0)
    names = script.open(("resnet50", "bert_base"))
    table, is_gpu = script.table("floor", "what detail value p99 unit granted"), script.device.is_gpu
    versions: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
    }
    if is_gpu:
        facts = _cuda.get_device_properties(0)
        versions |= {"gpu": f"{facts.name}, {facts.multi_processor_count} SMs", "cuda": torch.version.cuda}
        versions |= {"cudnn": _cudnn.version(), "driver": call(load_driver(), "cuDriverGetVersion")}
        versions |= {"cuda-bindings": version("cuda-bindings")}
    for what, value in versions.items():
        table.row(what="version", detail=what, value=value)
    if is_gpu:
        try:
            for groups in divisions(ask_grid(0, "green").groups):
                table.point(partial(split, script.device, groups), what="split", detail=str(groups))
        except GpuError as error:
            table.fail(error, what="split")
        for on_plain in (False, True):
            what = f"graph over two shares, replayed on {'a plain stream' if on_plain else 'its own'}"
            table.point(partial(two_in_one, script.device, on_plain), what=what)
        for how in ("blocking", "spinning", "polling", "sleeping, then polling"):
            table.point(partial(waits, how), what="wait beyond the device", detail=how)
        for by_host in (False, True):
            detail = "by the host" if by_host else "by events"
            table.point(partial(hops, script, by_host), what="two streams in turn", detail=detail)
    else:
        table.row(what="left out", detail="shares, waits and streams: they need a GPU")
    for name in ("", *names):
        for how in ("eager", "graph"):
            table.point(partial(models, script, name, how), what=name or "smallest kernel", detail=how)
    for size in SIZES[: 2 if script.quick else None]:
        for pinned in (True, False) if is_gpu else (False,):
            for up in (True, False):
                what = f"copy {'up' if up else 'down'}, {'pinned' if pinned else 'pageable'}"
                table.point(partial(copies, script, size, pinned, up), what=what, detail=f"{size} bytes")


if __name__ == "__main__":
    main()
