"""SIR+: latency and p99 against load, and peak throughput, of the wide detectors in drawn worlds of a GPU and a CPU.

As Figures 4 and 5 and Tables 6 and 7, in simulation. Queries arrive at random, and several are in flight. The GPU and
the lanes of the CPU take ready tasks, of the oldest query first (`_stream.py`). Graphs and worlds are those of
`sirplus-strategies` (lanes as drawn, copy engines); ResNet-50 is the linear control. Plans are made on predicted times.
In the world every task takes a random factor of its prediction on each device, and another one in each query. Both are
log-normal, 10 % each. The same arrivals and times meet all plans. *Ours* is the best plan at that load by a simulation
with predicted times and other arrivals. Candidates are the plans that are not slower than the sequential one
when alone, with Comm+SD's and the sequential one among them. Load is a share of the rate of one query after the other
on the GPU. The paper's 6 and 15 queries a second on PF1 are 0.38 and 0.96 of its baseline's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench._data import Headline, paper_figure, read_rows
from bench.papers.sirplus._detectors import WIDE, DetectorWorld, task_graph
from bench.papers.sirplus._stream import QueryStream
from cotenant.inner_loop import has_compiler
from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.overflow import Goal, OverflowSearch, PlacementGoal
from cotenant.techniques.placement.plan.strategies import CommSlowdown, Sequential, makespan_ns, sequential_ns
from cotenant.techniques.placement.plan.task_graph import TransferMode

NAME = "sirplus-load"
HEADLINES = (
    Headline(
        "less mean latency at low load, worst detector",
        "latency_gain_pct",
        "%",
        "simulated, drawn worlds, median; the server runs one placed query at a time in a share",
        paper_figure("SIR+", "Table 6", "FasterRCNN, PF1, low 6 RPS", "mean latency saving over ORT"),
    ),
    Headline(
        "more peak throughput, worst detector",
        "throughput_gain_pct",
        "%",
        "as above",
        paper_figure("SIR+", "7.2", "FasterRCNN, PF1 1 GPU", "peak throughput gain"),
    ),
)
WORLDS, QUICK_WORLDS = 48, 1
FIRST_SEED = 801
QUERIES, QUICK_QUERIES = 80, 10
STEPS, QUICK_STEPS = 60_000, 2_000
LOW, HIGH = 0.38, 0.96
LOADS = (0.2, LOW, 0.6, 0.8, HIGH)
QUICK_LOADS = (LOW, HIGH)
ERROR = NOISE = 0.1
"""Coefficients of variation: of the predicted time of a task, and of a task's times from query to query."""
SEQUENTIAL, COMM_SD, OURS = "sequential", "comm_sd", "ours"
OURS_LATENCY, OURS_LOADED = "ours, for latency", "ours, for throughput"
PRINTED = {"faster_rcnn": "FasterRCNN", "mask_rcnn": "MaskRCNN", "ssd": "SSD"}
_WIDTH = 120


def run(quick: bool, data_dir: Path) -> dict[str, Any]:
    """Simulate, print the tables, return figures."""
    seeds = [FIRST_SEED + number for number in range(QUICK_WORLDS if quick else WORLDS)]
    loads, queries, steps = (QUICK_LOADS, QUICK_QUERIES, QUICK_STEPS) if quick else (LOADS, QUERIES, STEPS)
    rows = [
        row for seed in seeds for model in (*WIDE, "resnet50") for row in measure(model, seed, loads, queries, steps)
    ]
    console = Console(width=max(_WIDTH, Console().width))
    _show_latencies(console, rows, loads)
    _show_throughput(console, rows)
    savings = {
        (row["model"], row["load"]): row["savings_pct"]
        for row in read_rows(data_dir / "sirplus" / "table6_mean_latency_savings.csv", "model")
        if row["platform"] == "PF1"
    }
    peaks = {
        (row["model"], row["scheme"]): float(row["throughput_rps"])
        for row in read_rows(data_dir / "sirplus" / "table7_peak_throughput.csv", "model")
        if row["platform"] == "PF1"
    }
    console.print(
        "the paper's Comm+SD on PF1: "
        + "; ".join(
            f"{name} {savings[name, 'low']} % less mean latency at low load, {savings[name, 'high']} % at high, "
            f"{100 * (peaks[name, 'SIR+'] / peaks[name, 'ORT'] - 1):.1f} % more throughput"
            for name in (PRINTED[model] for model in WIDE)
        )
        + " (Tables 6 and 7)"
    )
    if quick:
        console.print(f"quick: {len(seeds)} of {WORLDS} worlds, {queries} of {QUERIES} queries, shorter searches")
    if not has_compiler():
        console.print("numba is not installed: the searches looked at a hundredth of the plans")
    return {"summary": summary_of(rows), "rows": [_without_samples(row) for row in rows], "seeds": seeds}


def measure(model: str, seed: int, loads: Sequence[float], queries: int, steps: int) -> list[dict[str, Any]]:
    """A model in a world: a row for every plan."""
    world = replace(DetectorWorld.draw(seed), transfers=TransferMode.ENGINE)
    problem = PlacementProblem(task_graph(model, world))
    base = Sequential().place(problem)
    alone = sequential_ns(problem, base.place)
    assert alone is not None
    plans = {SEQUENTIAL: base, COMM_SD: CommSlowdown().place(problem)} | our_plans(problem, alone, steps)
    rng = np.random.default_rng(seed)
    shape = (problem.size, len(problem.device_names))
    factors = _factors(rng, ERROR, (1, *shape)) * _factors(rng, NOISE, (queries, problem.size, 1))
    exact = np.ones((queries, *shape))
    waits, believed = (rng.exponential(alone, queries) for _ in range(2))
    stream = QueryStream(problem, queries)
    rows = {}
    for name, plan in plans.items():
        row: dict[str, Any] = {"model": model, "seed": seed, "strategy": name, "lanes": world.lanes}
        row["peak_per_s"] = stream.queries_per_s(plan, factors)
        row["believed_peak_per_s"] = stream.queries_per_s(plan, exact)
        for load in loads:
            latencies = stream.latencies_ns(plan, _gaps_ns(waits, load), factors)
            row[f"mean_ms_{load:g}"] = float(latencies.mean()) / 1e6
            row[f"samples_{load:g}"] = (latencies / alone).tolist()
            row[f"believed_ms_{load:g}"] = (
                float(stream.latencies_ns(plan, _gaps_ns(believed, load), exact).mean()) / 1e6
            )
        rows[name] = row
    eligible = [row for name, row in rows.items() if makespan_ns(problem, plans[name]) <= alone]
    return [*rows.values(), _chosen(eligible, loads)]


def _gaps_ns(waits: NDArray[np.float64], load: float) -> list[int]:
    gaps: list[int] = np.rint(waits / load).astype(np.int64).tolist()
    return gaps


def _chosen(rows: Sequence[dict[str, Any]], loads: Sequence[float]) -> dict[str, Any]:
    """What becomes of the plan that is believed to be best, at each load and at the peak."""
    most = max(rows, key=lambda row: row["believed_peak_per_s"])
    made = most | {"strategy": OURS, "chosen_peak": most["strategy"]}
    for load in loads:
        best = min(rows, key=lambda row: row[f"believed_ms_{load:g}"])
        made |= {key: best[key] for key in (f"mean_ms_{load:g}", f"samples_{load:g}", f"believed_ms_{load:g}")}
        made[f"chosen_{load:g}"] = best["strategy"]
    return made


def our_plans(problem: PlacementProblem, alone_ns: int, steps: int) -> dict[str, TaskPlan]:
    """Our plan for latency, and that for throughput which is no slower than one after the other."""
    quick = OverflowSearch(steps=steps, noise=NOISE).solve(problem)
    loaded = OverflowSearch(PlacementGoal(Goal.PERIOD, "", alone_ns), steps=steps // 2).solve(problem)
    return {OURS_LATENCY: quick.plan, OURS_LOADED: loaded.plan}


def _factors(rng: np.random.Generator, cv: float, shape: tuple[int, ...]) -> NDArray[np.float64]:
    sigma = np.sqrt(np.log1p(cv * cv))
    return rng.lognormal(-sigma * sigma / 2, sigma, shape)


def _picked(rows: Sequence[dict[str, Any]], model: str, strategy: str, key: str) -> list[float]:
    return [row[key] for row in rows if (row["model"], row["strategy"]) == (model, strategy)]


def latency_gains(rows: Sequence[dict[str, Any]], model: str, strategy: str, load: float) -> list[float]:
    """By how much the mean latency is below that of one after the other, in %, by world."""
    key = f"mean_ms_{load:g}"
    pairs = zip(_picked(rows, model, strategy, key), _picked(rows, model, SEQUENTIAL, key), strict=True)
    return [100 * (1 - ours / theirs) for ours, theirs in pairs]


def throughput_gains(rows: Sequence[dict[str, Any]], model: str, strategy: str) -> list[float]:
    """By how much the peak is above that of one after the other, in %, by world."""
    key = "peak_per_s"
    pairs = zip(_picked(rows, model, strategy, key), _picked(rows, model, SEQUENTIAL, key), strict=True)
    return [100 * (ours / theirs - 1) for ours, theirs in pairs]


def p99(rows: Sequence[dict[str, Any]], model: str, strategy: str, load: float) -> float:
    """Of the queries of all worlds, each as a multiple of its world's sequential execution."""
    return float(np.quantile(np.concatenate(_picked(rows, model, strategy, f"samples_{load:g}")), 0.99))


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over worlds; of the three detectors the worst."""

    def worst_latency(strategy: str, load: float) -> float:
        return min(median(latency_gains(rows, model, strategy, load)) for model in WIDE)

    def worst_peak(strategy: str) -> float:
        return min(median(throughput_gains(rows, model, strategy)) for model in WIDE)

    linear = [median(latency_gains(rows, "resnet50", OURS, load)) for load in (LOW, HIGH)]
    linear.append(median(throughput_gains(rows, "resnet50", OURS)))
    return {
        "latency_gain_pct": worst_latency(OURS, LOW),
        "latency_gain_high_pct": worst_latency(OURS, HIGH),
        "throughput_gain_pct": worst_peak(OURS),
        "comm_sd_latency_gain_pct": worst_latency(COMM_SD, LOW),
        "comm_sd_latency_gain_high_pct": worst_latency(COMM_SD, HIGH),
        "comm_sd_throughput_gain_pct": worst_peak(COMM_SD),
        "p99_gain_high_pct": min(
            100 * (1 - p99(rows, model, OURS, HIGH) / p99(rows, model, SEQUENTIAL, HIGH)) for model in WIDE
        ),
        "resnet50_change_pct": max(linear, key=abs),
    }


def _without_samples(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith("samples_")}


def _spread(values: Sequence[float]) -> str:
    low, high = np.percentile(values, (10, 90))
    return f"{median(values):.1f} ({low:.1f} to {high:.1f})"


def _show_latencies(console: Console, rows: Sequence[dict[str, Any]], loads: Sequence[float]) -> None:
    table = Table(title="Mean latency below sequential, %: median (10th to 90th percentile of worlds); p99 / alone")
    for head in ("model", "strategy", *(f"load {load:g}" for load in loads)):
        table.add_column(head, justify="left" if head in ("model", "strategy") else "right")
    for model, strategy in dict.fromkeys((row["model"], row["strategy"]) for row in rows):
        cells = [
            f"{_spread(latency_gains(rows, model, strategy, load))}; {p99(rows, model, strategy, load):.2f}"
            for load in loads
        ]
        table.add_row(model, strategy, *cells)
    console.print(table)


def _show_throughput(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="Peak throughput: median (10th to 90th percentile of worlds)")
    for head in ("model", "strategy", "queries/s", "gain %"):
        table.add_column(head, justify="left" if head in ("model", "strategy") else "right")
    for model, strategy in dict.fromkeys((row["model"], row["strategy"]) for row in rows):
        peaks = _picked(rows, model, strategy, "peak_per_s")
        table.add_row(model, strategy, _spread(peaks), _spread(throughput_gains(rows, model, strategy)))
    console.print(table)
