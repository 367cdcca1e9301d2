"""Shares of a GPU: the time to divide it anew without a new process, and the SMs that shares are really given.

`bench/gpu/first/floor.py` asks the same beside much else; docs/gpu.md says how.
"""

from __future__ import annotations

from pathlib import Path

from bench.gpu._named import why_not

NAME = "gpu-partition"


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure, print, return figures; an empty summary where there is no GPU. `data_dir` is not used."""
    reason = why_not()
    if reason:
        print(f"there is no GPU to measure: {reason}")
        return {"summary": {}, "rows": []}
    from bench.gpu.first._device import Cuda
    from bench.gpu.first._shares import divisions, split
    from cotenant.execute.gpu.sm_groups import ask_grid

    device = Cuda()
    rows = [split(device, groups) for groups in divisions(ask_grid(0, "green").groups)]
    for row in rows:
        print(f"{row['detail']}: split in {row['value']:.3f} ms {row['error']}")
    summary = {"resplit_ms": sorted(row["value"] for row in rows)[len(rows) // 2]}
    summary |= {"granted_sms": max(row["granted"] for row in rows)}
    summary |= {"shares_verified": float(not any(row["error"] for row in rows))}
    return {"summary": summary, "rows": rows}
