"""Shares of a GPU: the time to divide it anew without a new process, and the SMs that shares are really given.

The same step as in `bench/gpu/run.sh`; docs/gpu.md says how it is measured.
"""

from __future__ import annotations

from pathlib import Path

from bench.gpu._named import measured
from bench.gpu._sharing import RESPLIT, resplit_figures

NAME = "gpu-partition"
_PROFILES = Path(__file__).resolve().parents[2] / "profiles"


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure, print, return figures; an empty summary where there is no GPU. `data_dir` is not used."""
    found = measured((RESPLIT,), quick, _PROFILES)
    if found is None:
        return {"summary": {}, "rows": []}
    journal, versions = found
    rows = journal.rows(RESPLIT)
    for row in rows:
        sms = f"{row['shares']} shares, {row['asked_sms']} SMs asked, {row['granted_sms']} granted"
        print(f"{sms}: split {row['resplit_ms']:.3f} ms {row['problems']}")
    return {"summary": resplit_figures(rows), "rows": rows, "versions": versions}
