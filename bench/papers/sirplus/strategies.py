"""SIR+: latency and throughput of every strategy on the wide detectors, in drawn worlds of a GPU and a CPU.

Graphs are those of our own files, and times are calibrated to the paper's on one GPU. Launch cost, PCIe, speed and
lanes of the CPU are drawn (`bench/papers/sirplus/_detectors.py`). Two ways to copy are shown. *lane*: a copy keeps the
GPU's queue, as in the engine of the paper. With one lane on the CPU this is the setting of Tables 1 to 3. *engine*: a
copy engine a direction, lanes as drawn; gains are taken there, for all strategies alike.

Latency is the makespan of one query, against the sequential execution of all on the GPU. Throughput is that of the
busiest resource under load, against queries one after the other. Only plans with no worse latency count. `noise`: the
same plans, in the same order, when every task takes its own random factor of its time (log-normal, 10 % and 30 %).
Last, how many units can ever pay on the CPU, by launch and crossing cost (`_break_even.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench._data import Headline, paper_figure, read_rows
from bench.papers.sirplus._break_even import break_even, show_break_even
from bench.papers.sirplus._detectors import WIDE, DetectorWorld, task_graph
from cotenant.techniques.placement.plan import plan_loop
from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.overflow import Goal, OverflowSearch, PlacementGoal, noisy, usual_plans
from cotenant.techniques.placement.plan.strategies import Sequential, queueing_delays_ns, sequential_ns
from cotenant.techniques.placement.plan.task_graph import TransferMode

NAME = "sirplus-strategies"
HEADLINES = (
    Headline(
        "less latency by a placement, worst detector",
        "ours_latency_gain_lane_pct",
        "%",
        "simulated, median of drawn worlds; one CPU lane, copies on the GPU's queue as in the paper's tables; free "
        "hand-overs",
        paper_figure("SIR+", "Fig 3", "four platforms", "average execution time saving"),
    ),
    Headline(
        "the same with copy engines and up to four CPU lanes",
        "ours_latency_gain_pct",
        "%",
        "as above but for the copies",
    ),
    Headline(
        "more throughput, no latency lost, worst detector",
        "ours_throughput_gain_pct",
        "%",
        "as the second figure, of the busiest resource",
        paper_figure("SIR+", "7.2", "FasterRCNN, PF1 1 GPU", "peak throughput gain"),
    ),
)
WORLDS = 48
QUICK_WORLDS = 1
FIRST_SEED = 501
STEPS, QUICK_STEPS = 120_000, 2_000
NOISES = (0.1, 0.3)
_DRAWS = 10
RCNNS = WIDE[:2]
SHOWN = ("qd_all", "qd", "sd", "comm_sd_published", "comm_sd", "heft")
_WIDTH = 120


def run(quick: bool, data_dir: Path) -> dict[str, Any]:
    """Measure, print the tables, return figures."""
    worlds = QUICK_WORLDS if quick else WORLDS
    seeds = [FIRST_SEED + number for number in range(worlds)]
    OverflowSearch(steps=50).solve(PlacementProblem(task_graph("resnet50", DetectorWorld.draw(1))))  # compiles
    rows = [
        row
        for seed in seeds
        for model in (*WIDE, "resnet50")
        for row in measure(model, DetectorWorld.draw(seed), seed, QUICK_STEPS if quick else STEPS)
    ]
    console = Console(width=max(_WIDTH, Console().width))
    _show(console, rows, "lane", "One lane on the CPU, copies on the GPU's lane (Tables 1 to 3)")
    _show(console, rows, "engine", "Lanes as drawn, copy engines")
    printed = {row["scheme"]: row for row in read_rows(data_dir / "sirplus" / "table1_queueing.csv", "scheme")}
    console.print(
        "the paper's Faster R-CNN: "
        + ", ".join(f"{name} {row['time_overall_printed']} ms" for name, row in printed.items())
        + "; Comm+SD 9.5 % below the baseline, SD above it (Tables 1 to 3, section 4.3)"
    )
    even = [row for model in (*WIDE, "resnet50") for row in break_even(model)]
    show_break_even(console, even)
    if quick:
        console.print(f"quick: {worlds} of {WORLDS} worlds, shorter searches")
    return {"summary": summary_of(rows), "rows": rows, "break_even": even, "seeds": seeds}


def measure(model: str, world: DetectorWorld, seed: int, steps: int) -> list[dict[str, Any]]:
    """A model in a world: a row for every strategy and way to copy."""
    rows = []
    for mode in (TransferMode.LANE, TransferMode.ENGINE):
        is_lane = mode is TransferMode.LANE
        here = replace(world, transfers=mode, lanes=1 if is_lane else world.lanes)
        problem = PlacementProblem(task_graph(model, here))
        base = Sequential().place(problem)
        alone = sequential_ns(problem, base.place)
        assert alone is not None
        common = {"model": model, "seed": seed, "copies": mode.value, "lanes": here.lanes, "launch_us": here.launch_us}
        rows.append(_row(problem, common, "sequential", base, alone, alone))
        plans = dict(usual_plans(problem))
        rows += [_row(problem, common, name, plans[name], alone) for name in SHOWN]
        found = OverflowSearch(steps=steps, noise=0.0 if is_lane else NOISES[-1]).solve(problem)
        rows.append(_row(problem, common, "ours", found.plan, alone))
        rows[-1]["gap_pct"] = found.gap_pct
        if not is_lane:
            loaded = OverflowSearch(PlacementGoal(Goal.PERIOD, "", alone), steps=steps // 2).solve(problem)
            rows.append(_row(problem, common, "ours, for throughput", loaded.plan, alone))
            rows.append(_row(problem, common, "ours, for memory", _small(problem, alone, steps // 4), alone))
    return rows


def _small(problem: PlacementProblem, alone_ns: int, steps: int) -> TaskPlan:
    """Least memory on the GPU among plans that are no slower than the sequential execution."""
    goal = PlacementGoal(Goal.MEMORY, "gpu", alone_ns)
    return OverflowSearch(goal, steps=steps).solve(problem).plan


def _row(
    problem: PlacementProblem,
    common: dict[str, Any],
    name: str,
    plan: TaskPlan,
    alone_ns: int,
    total_ns: int | None = None,
) -> dict[str, Any]:
    line = problem.evaluate(plan)
    assert line is not None
    took = total_ns or line.makespan_ns
    period = total_ns or line.period_ns
    waits = queueing_delays_ns(problem, plan)
    gpu = [i for i, d in enumerate(plan.place) if d == 0]
    row = common | {
        "strategy": name,
        "tasks": problem.size,
        "to_cpu": problem.size - len(gpu),
        "ms": took / 1e6,
        "latency_gain_pct": 100 * (1 - took / alone_ns),
        "throughput_gain_pct": 100 * (alone_ns / period - 1),
        "wait_us": mean(waits) / 1e3,
        "gpu_mb": line.used_bytes[0] / 1e6,
        "copied_ms": _copied_ns(problem, plan) / 1e6,
    }
    for noise in NOISES if name == "ours" or name.startswith("comm_sd") else ():
        row[f"gain_noise_{100 * noise:.0f}_pct"] = _noisy_gain_pct(problem, plan, noise)
    return row


def _copied_ns(problem: PlacementProblem, plan: TaskPlan) -> int:
    copies = {
        (t, problem.space[plan.place[i]]): problem.copy_ns(
            t, problem.space[plan.place[problem.producer[t]]], problem.space[plan.place[i]]
        )
        for i, tensors in enumerate(problem.inputs)
        for t in tensors
    }
    return sum(copies.values())


def _noisy_gain_pct(problem: PlacementProblem, plan: TaskPlan, noise: float) -> float:
    """Mean gain over the sequential execution of the same query."""
    base = Sequential().place(problem).place
    ints = problem.loops.ints
    gains = []
    for draw in range(_DRAWS):
        service = noisy(problem, noise, 7000 + draw)
        flat = problem.flat._replace(service=ints(service))
        took = problem.loops[plan_loop].evaluate(flat, problem.scratch, ints(plan.order), ints(plan.place))
        times = np.array(service).reshape(problem.size, -1)
        exact = sequential_ns(problem, base)
        assert exact is not None
        alone = (
            exact
            + int(times[np.arange(problem.size), base].sum())
            - sum(problem.service[i][d] for i, d in enumerate(base))
        )
        gains.append(100 * (1 - took / alone))
    return mean(gains)


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over worlds; of the three detectors the worst."""

    def picked(model: str, strategy: str, copies: str, key: str) -> list[float]:
        return [row[key] for row in rows if (row["model"], row["strategy"], row["copies"]) == (model, strategy, copies)]

    def worst(strategy: str, key: str) -> float:
        return min(median(picked(model, strategy, "engine", key)) for model in WIDE)

    ms = {
        (model, name): picked(model, name, "lane", "ms")
        for model in RCNNS
        for name in ("sequential", "comm_sd", "sd", "qd", "qd_all")
    }
    worlds = range(len(ms[RCNNS[0], "sd"]))

    def share(order: Sequence[str]) -> float:
        held = [
            all(ms[model, a][world] < ms[model, b][world] for a, b in pairwise(order))
            for model in RCNNS
            for world in worlds
        ]
        return sum(held) / len(held)

    linear = [row["latency_gain_pct"] for row in rows if row["model"] == "resnet50" and row["strategy"] == "ours"]
    return {
        "comm_sd_latency_gain_pct": worst("comm_sd", "latency_gain_pct"),
        "ours_latency_gain_pct": worst("ours", "latency_gain_pct"),
        "ours_latency_gain_lane_pct": min(median(picked(m, "ours", "lane", "latency_gain_pct")) for m in WIDE),
        "comm_sd_latency_gain_lane_pct": min(median(picked(m, "comm_sd", "lane", "latency_gain_pct")) for m in WIDE),
        "ours_throughput_gain_pct": worst("ours, for throughput", "throughput_gain_pct"),
        "sd_worse_than_comm_sd_rcnn": share(("comm_sd", "sd")),
        "published_order_rcnn": share(("comm_sd", "sequential", "sd", "qd_all")),
        "linear_change_pct": max(map(abs, linear)),
        "gain_noise_10_pct": worst("ours", "gain_noise_10_pct"),
        "gain_noise_30_pct": worst("ours", "gain_noise_30_pct"),
        "comm_sd_gain_noise_30_pct": worst("comm_sd", "gain_noise_30_pct"),
        "gpu_memory_saved_pct": min(
            100
            * (
                1
                - median(picked(m, "ours, for memory", "engine", "gpu_mb"))
                / median(picked(m, "sequential", "engine", "gpu_mb"))
            )
            for m in WIDE
        ),
    }


def _show(console: Console, rows: Sequence[dict[str, Any]], copies: str, title: str) -> None:
    table = Table(title=f"{title}: median, 10th to 90th percentile of worlds")
    for head in ("model", "strategy", "to CPU", "ms", "gain %", "throughput %", "wait us", "copies ms", "GPU MB"):
        table.add_column(head, justify="left" if head in ("model", "strategy") else "right", no_wrap=True)
    names = dict.fromkeys((row["model"], row["strategy"]) for row in rows if row["copies"] == copies)
    for model, strategy in names:
        mine = [r for r in rows if (r["model"], r["strategy"], r["copies"]) == (model, strategy, copies)]
        low, high = np.percentile([row["latency_gain_pct"] for row in mine], (10, 90))
        keys = ("to_cpu", "ms", "throughput_gain_pct", "wait_us", "copied_ms", "gpu_mb")
        to_cpu, ms, throughput, wait, copied, held = (median(row[key] for row in mine) for key in keys)
        gain = median(row["latency_gain_pct"] for row in mine)
        table.add_row(
            *(model, strategy, f"{to_cpu:.0f}", f"{ms:.1f}", f"{gain:.1f} ({low:.1f} to {high:.1f})"),
            *(f"{throughput:.0f}", f"{wait:.0f}", f"{copied:.1f}", f"{held:.0f}"),
        )
    console.print(table)
