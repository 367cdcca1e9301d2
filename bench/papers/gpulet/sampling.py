"""How few co-runs suffice: error of the predicted slowdown against measurements, chosen by the sampler and at random.

Pairs of models in two MPS partitions of one GPU, measured by others in the manner of GPU-let (ATC'22). They fitted to
1,750 random pairs and tested on 750. 30 % are held out here, and ours is fitted to some of the others. These are taken
in the order of the sampler of `cotenant profile --corun` or in a random one. A measurement tells one factor here, as
the data have the latency of one side only, and costs as much as any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench._data import Headline
from bench._judge_coruns import ACTIVE, RANDOM, CurvePoint, learning_curve, needed
from bench._judge_coruns_page import curve_table, write_corun_report
from bench.papers.gpulet._interference_csv import read_coruns, read_solo

NAME = "gpulet-sampling"
SEEDS = (1, 2, 3, 4, 5)
COUNTS = (50, 75, 105, 150, 200, 250, 300, 350, 400, 450, 500, 600, 700, 800, 900, 1000, 1100, 1200, 1400, 1600, 1800)
QUICK_COUNTS = tuple(count for count in COUNTS if count <= 600)
HEADLINES = (
    Headline(
        "co-runs saved by choosing them, for the 90 % error of a quarter of all",
        "saved_quarter_p90_pct",
        "%",
        "co-runs that others measured on another GPU; against choice at random",
    ),
)
METRICS = (("median", "median_error_pct"), ("90 %", "p90_error_pct"))
_ROUND_OFF = 1e-4
"""All co-runs are the same ones in any order, but a sum of them is not."""
PAGE = Path("build") / f"{NAME}.html"


def run(quick: bool, data_dir: Path, profile: Path | None = None) -> dict[str, object]:
    """Take, fit, print the tables, write the page, return figures. `profile` holds latencies alone."""
    console = Console(width=130)
    folder = data_dir / "mps_measured"
    coruns = read_coruns(folder / "corun_latency_train.csv", read_solo(profile or folder / "solo_latency.csv"))
    seeds = SEEDS[:2] if quick else SEEDS
    least = round(0.7 * len(coruns))
    counts = sorted({min(count, least) for count in (QUICK_COUNTS if quick else COUNTS)})
    began = time.process_time()
    curve = learning_curve([[each] for each in coruns], counts, seeds)
    cpu_s = time.process_time() - began
    title = f"Error on {round(0.3 * len(coruns))} co-runs that no fit saw, means over {len(seeds)} seeds"
    console.print(curve_table(curve, title))
    heads, cells, summary = _savings(curve, counts)
    table = Table(*heads, title="Co-runs that the sampler needs for the error of random choice", title_justify="left")
    for row in cells:
        table.add_row(*row)
    console.print(table)
    lead = (
        "How well the slowdown beside a co-runner is predicted on a GPU, against how many co-runs were measured: "
        "chosen by the sampler, and at random."
    )
    write_corun_report(PAGE, "How few co-runs suffice", lead, curve, [("What the sampler saves", heads, cells)])
    console.print(f"{PAGE} shows the curves. Choosing and fitting took {cpu_s:.0f} s of processor time in all.")
    if quick:
        console.print(f"quick: two seeds instead of five, up to {max(counts)} co-runs")
    return {"summary": summary, "rows": [_row(point) for point in curve], "seeds": list(seeds)}


def _savings(curve: Sequence[CurvePoint], counts: Sequence[int]) -> tuple[list[str], list[list[str]], dict[str, float]]:
    """For the errors that random choice reaches with some counts: how many the sampler needs; as text, and figures."""
    at = {(point.order, point.count): point for point in curve}
    most = counts[-1]
    levels = {"sixth": most / 6, "quarter": most / 4, "half": most / 2, "all": most}
    cells, summary = [], {}
    for name, share in levels.items():
        count = min(counts, key=lambda each: abs(each - share))
        for title, metric in METRICS:
            error = getattr(at[RANDOM, count], metric)
            found = needed(curve, ACTIVE, metric, error * (1 + _ROUND_OFF))
            text = "more than all" if found is None else str(found)
            cells.append([name, str(count), title, f"{error:.1f} %", text])
            key = metric.removesuffix("_error_pct")
            summary[f"random_{name}_{key}_error_pct"] = error
            if found is not None:
                summary[f"active_needs_{name}_{key}"] = found
                summary[f"saved_{name}_{key}_pct"] = 100 * (1 - found / count)
    return ["of all", "random", "error", "of random", "active needs"], cells, summary


def _row(point: CurvePoint) -> dict[str, object]:
    return {
        "order": point.order,
        "measured": point.count,
        "median_error_pct": point.median_error_pct,
        "p90_error_pct": point.p90_error_pct,
    }
