"""Pairs of models on a GPU: overlap against fcfs and edf through the engine, open loop, SLO twice the latency alone.

The same step as in `bench/gpu/run.sh`; docs/gpu.md says how it is measured and how the figures are defined.
"""

from __future__ import annotations

from pathlib import Path

from bench.gpu._named import measured
from bench.gpu._serving import SERVING, gains

NAME = "gpu-overlap"


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure, print, return figures; an empty summary where there is no GPU. `data_dir` is not used."""
    found = measured(SERVING, quick)
    if found is None:
        return {"summary": {}, "rows": []}
    journal, versions = found
    rows = journal.rows(SERVING)
    for row in rows:
        load = f"{row['pair']:32} {row['items']:3} rows, load {row['load']:g}"
        figures = f"attainment {row['attainment']:.3f}  {row['goodput_per_s']:8.1f}/s  p99 {row['p99_ms']:8.2f} ms"
        print(f"{load}  {row['contender']:12} {figures}")
    summary = gains(rows)
    if "violation_reduction_vs_edf_pct" in summary:
        summary["violation_reduction_pct"] = summary["violation_reduction_vs_edf_pct"]
    for name, value in summary.items():
        print(f"{name}: {value:+.1f}")
    return {"summary": summary, "rows": rows, "seeds": [1], "versions": versions}
