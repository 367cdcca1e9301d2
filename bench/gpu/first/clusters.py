"""Whether products of matrices can be captured in shares. Table: clusters-NAME.csv.

cuBLASLt chooses kernels with clusters of blocks; a share may be too small for them. NAME says under which environment
it runs: try it as it is, and with `DISABLE_ADDMM_CUDA_LT=1`, `CUBLASLT_HEURISTICS_CACHE_CAPACITY=0`.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch

from bench.gpu.first._base import Script
from cotenant.execute.gpu.cuda_driver import GpuError

LAYERS = ((768, 3072), (3072, 768), (768, 768), (2048, 1000))
TOKENS = (1, 8, 32, 128, 256, 384, 512, 768, 1024, 2048, 4096)
GROUPS = (1, 2, 4, 7, 8)
KINDS = {"tf32": torch.float32, "fp16": torch.float16}


def measure(script: Script, layer: torch.nn.Module, given: torch.Tensor, stream: Any) -> dict[str, Any]:
    """Eager and captured runs of one layer on a stream: time, and the largest difference from what the host has."""
    expected = layer(given)
    work = script.device.capture(lambda: layer(given), stream)
    with script.device.on(stream):
        found = script.timed(work, 0.002)
    difference = (work()[1] - expected).abs().max().item()
    return {"ms": found["ms"], "difference": difference}


def state(script: Script) -> dict[str, Any]:
    """How many failed captures torch's allocator was left in; an error if it is broken since."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return {"ms": script.device.left_open}


def main() -> None:
    """All layers, rows, precisions and shares, in both orders."""
    script = Script(__doc__, 40.0)
    table = script.table(
        "clusters-" + "-".join(script.given or ["plain"]), "order precision layer tokens sms ms difference"
    )
    try:
        parts = script.device.parts([(0, end) for end in (*GROUPS, 0)])
    except GpuError as error:
        print(f"left out: shares, {error}")
        return
    if not script.device.is_gpu:
        return
    with torch.inference_mode():
        for order, (kind, dtype) in product(("shares first", "whole first"), KINDS.items()):
            shares = parts if order == "shares first" else parts[::-1]
            for (into, out), tokens in product(LAYERS, TOKENS):
                # other sizes in the second order: the kernel chosen for a product may be remembered
                tokens += order == "whole first"
                layer = torch.nn.Linear(into, out, device=script.device.name, dtype=dtype)
                given = torch.randn(tokens, into, device=script.device.name, dtype=dtype)
                for share, _, stream in shares:
                    keys = {"order": order, "precision": kind, "layer": f"{into}x{out}", "tokens": tokens}
                    table.point(partial(measure, script, layer, given, stream), **keys, sms=share.size)
    table.point(partial(state, script), order="allocator afterwards")


if __name__ == "__main__":
    main()
