"""What everything costs at least: copies, waits, launches, graphs, shares. Table: floor.csv.

A row is a figure with its unit; `p99` where it is one of many.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bench.gpu.first._base import Script

# isort: split
import numpy as np
import torch

from bench.gpu._sm_probe import LENGTH, further_of, probing, survey
from bench.gpu._stats import median, plain
from cotenant.execute.gpu.cuda_driver import call, load_driver

SIZES = [4 << (10 + 2 * step) for step in range(8)]
_RUNS, _HOPS = 30, 50
_WAIT_CYCLES = 2_000_000
"""About a millisecond of an H100."""
Rows = Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]
_cuda: Any = torch.cuda


def figures(script: Script) -> Rows:
    """What is measured, in this order: (what, detail, measure)."""
    packages = ("cuda-bindings", "numpy", "msgspec")
    yield "version", "python", lambda: {"value": platform.python_version()}
    yield "version", "torch", lambda: {"value": torch.__version__}
    for name in packages:
        yield "version", name, lambda name=name: {"value": version(name)}  # type: ignore[misc]
    if script.device.is_gpu:
        facts = _cuda.get_device_properties(0)
        yield "version", "cuda", lambda: {"value": torch.version.cuda}
        yield "version", "cudnn", lambda: {"value": torch.backends.cudnn.version()}
        yield "version", "driver", lambda: {"value": call(load_driver(), "cuDriverGetVersion")}
        yield "version", "gpu", lambda: {"value": f"{facts.name}, {facts.multi_processor_count} SMs"}
    for size in SIZES[: 2 if script.quick else None]:
        for kind in ("pinned", "pageable") if script.device.is_gpu else ("pageable",):
            for way in ("up", "down"):
                yield f"copy {way}, {kind}", f"{size} bytes", lambda *given: _copy(script, *given)  # bound by `run`
    if script.device.is_gpu:
        yield from _waits(script)
        yield from _shares(script)
    yield from _models(script)
