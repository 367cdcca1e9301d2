"""A load that rises and falls for 3,200 s on eight simulated GPUs, planned every 20 s: SLOs kept and GPUs used.

As GPU-let (ATC 2022), Figure 14: the third scenario's models, with Poisson arrivals. Their rates rise and fall twice,
each model at its own time, the second time higher. Every 20 s a tracker has seen the arrivals up to then. Where they no
longer fit the plan, the number of GPUs and the plan are chosen anew (`plan.scaling`). Getting there takes 10 to 15 s,
in which the old plan serves. A GPU counts from the moment of its request until it is given back. Latencies, padding,
tracker, scaling and runtime are the same for all planners; interference happens to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from rich.console import Console
from rich.table import Table

from bench._bisect import largest_rate
from bench._data import Headline, paper_figure
from bench._registry import BenchError
from bench.papers.gpulet._arrivals import Times, curve_arrivals
from bench.papers.gpulet._data import OURS, Files, Gpu, read_gpu
from bench.papers.gpulet._nexus import SquishyBinPacking
from bench.papers.gpulet._simulate import PlanChange, simulate_plan
from bench.papers.gpulet._wave_page import Line, write_wave
from bench.papers.gpulet._workloads import read_specloads
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.poisson_headroom import with_poisson_headroom
from cotenant.techniques.partitions.plan.scaling import Scaled, ScalingSettings, least_devices, rescale
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.tracking import RateVerdict, Tracker, TrackingSettings, compare_rates
from cotenant.techniques.partitions.plan.types import NS_PER_S, DeviceType, Load, Plan, Planner

NAME = "gpulet-wave"
PAPER_VIOLATIONS = paper_figure("gpu-let", "Fig 14", "scen3, 8 GPUs, 3200 s", "SLO violation, below")
HEADLINES = (
    Headline(
        "missed under changing load, below; the paper's planner",
        "violation_pct_elastic_int",
        "%",
        "reconstructed latencies, simulated",
        PAPER_VIOLATIONS,
    ),
    Headline("the same, ours", "violation_pct", "%", "as above; up to five partitions", PAPER_VIOLATIONS),
    Headline("GPU hours of ours over the paper's planner", "gpu_hours_ours_over_elastic", "x", "as above"),
)
SCENARIO = "scen3"
DEVICES = 8
DURATION_S = 3200
QUICK_S = 600
PERIOD_S = 20
WINDOW_S = 5
STEP_S = 10
"""The rates change so often."""
REORGANISATION_S = (10.0, 15.0)
PEAK = 0.7
"""Of the total rate that elastic_int can plan for on all GPUs."""
SEED = 14
TRACKING = TrackingSettings()
SCALING = ScalingSettings(margin=0.05, patience=1)
GOAL_PCT = 1.0
PROCESSES = 2
PLOT = Path("build") / f"{NAME}.svg"
INT = "elastic_int"


@dataclass(frozen=True, slots=True)
class Followed:
    """What a planner did about the load. `held` are times in s with the number of GPUs from then on."""

    first: Plan
    changes: tuple[PlanChange, ...]
    held: tuple[tuple[float, int], ...]
    short_looks: int


def contenders(gpu: Gpu, quick: bool) -> dict[str, tuple[Planner, DeviceType]]:
    """The planners by name with the device that they may divide."""
    planners = (
        SquishyBinPacking(),
        Elastic(),
        Elastic(with_interference=True),
        Optimal(time_limit_s=0.1 if quick else 0.5),
    )
    return {planner.name: (planner, gpu.device_of(planner.name)) for planner in planners}


def run(
    quick: bool,
    data_dir: Path,
    profile: Path | None = None,
    util: Path | None = None,
    constants: Path | None = None,
) -> dict[str, Any]:
    """Simulate, print the table, draw, return figures."""
    files = (data_dir, profile, util, constants)
    gpu = read_gpu(*files)
    duration_s = QUICK_S if quick else DURATION_S
    names = list(contenders(gpu, quick))
    with ProcessPoolExecutor(PROCESSES) as pool:
        found = list(pool.map(measure, reversed(names), [files] * len(names), [quick] * len(names)))
    rows = list(reversed(found))
    by_name = {row["planner"]: row for row in rows}
    summary = {
        "violation_pct": by_name[OURS]["violation_pct"],
        "gpu_hours_ours_over_elastic": by_name[OURS]["gpu_hours"] / by_name[INT]["gpu_hours"],
    }
    summary |= {f"violation_pct_{name}": row["violation_pct"] for name, row in by_name.items()}
    summary |= {f"gpu_hours_{name}": row["gpu_hours"] for name, row in by_name.items()}
    summary["gpu_hours_all_devices"] = DEVICES * duration_s / 3600
    _print(rows, duration_s, quick)
    curves = rates(gpu, data_dir)
    write_wave(
        PLOT,
        duration_s,
        [Line(name, [(at / NS_PER_S, rate) for at, rate in curve]) for name, curve in curves.items()],
        [Line(row["planner"], row["held"]) for row in rows],
        [Line(row["planner"], row["violations"]) for row in rows],
    )
    Console().print(f"{PLOT} shows rates, GPUs and violations over time")
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


def rates(gpu: Gpu, data_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Rates a second by model over the whole time: two waves, the second one higher, each model a little later."""
    mix = next((each for each in read_specloads(data_dir, gpu) if each.name == SCENARIO), None)
    if mix is None:
        raise BenchError(f"the profile lacks models of {SCENARIO}")
    planner, inventory = Elastic(with_interference=True), [gpu.device] * DEVICES

    def plans(rate: float) -> bool:
        return isinstance(planner.plan(mix.at(rate, gpu)[0], inventory, gpu.costs), Plan)

    most = largest_rate(plans, 1.0, 1e6, 1.01)
    half = DURATION_S / 2
    curves = {}
    for number, (model, share) in enumerate(mix.shares):
        curve = []
        for at in range(0, DURATION_S, STEP_S):
            moved = max(0.0, at - 80.0 * number)
            height = 0.65 if moved < half else 1.0
            wave = 0.15 + (height - 0.15) * math.sin(math.pi * (moved % half) / half) ** 2
            curve.append((at * NS_PER_S, PEAK * most * share * wave))
        curves[model] = curve
    return curves


def measure(name: str, files: Files, quick: bool) -> dict[str, Any]:
    """One planner against the whole wave."""
    gpu = read_gpu(*files)
    planner, device = contenders(gpu, quick)[name]
    duration_s = QUICK_S if quick else DURATION_S
    curves = rates(gpu, files[0])
    arrivals = curve_arrivals(curves, duration_s * NS_PER_S, SEED)
    loads = tuple(gpu.load(model, max(rate for _, rate in curve)) for model, curve in curves.items())
    inventory = [device] * DEVICES
    followed = follow(planner, loads, inventory, gpu, {m: c[0][1] for m, c in curves.items()}, arrivals, duration_s)
    found = simulate_plan(
        followed.first, loads, inventory, gpu.costs, arrivals=arrivals, changes=followed.changes, seed=SEED
    )
    windows = [answers.by_window(PERIOD_S * NS_PER_S, duration_s * NS_PER_S) for answers in found.answers.values()]
    offered, missed = (sum(each[at] for each in windows) for at in (0, 1))
    held = [*followed.held, (float(duration_s), followed.held[-1][1])]
    gpu_s = sum(count * (after - at) for (at, count), (after, _) in pairwise(held))
    return {
        "planner": name,
        "queries": sum(outcome.offered for outcome in found.outcomes),
        "violation_pct": 100 * found.violation_share,
        "worst_tenant_pct": 100 * max(outcome.violation_share for outcome in found.outcomes),
        "worst_window_pct": 100 * float(np.max(missed / np.maximum(1, offered))),
        "gpu_hours": gpu_s / 3600,
        "most_gpus": max(count for _, count in held),
        "changes": len(followed.changes),
        "short_looks": followed.short_looks,
        "held": held,
        "violations": [
            (float(at * PERIOD_S), 100 * float(bad) / max(1, int(all_)))
            for at, (bad, all_) in enumerate(zip(missed, offered, strict=True))
        ],
    }


def follow(
    planner: Planner,
    loads: Sequence[Load],
    inventory: Sequence[DeviceType],
    gpu: Gpu,
    before: Mapping[str, float],
    arrivals: Mapping[str, Times],
    duration_s: int,
) -> Followed:
    """Look at the arrivals every period and change the plan where they ask for it; `before` are the rates until then.

    Where not all GPUs are enough, the old plan stays (`short_looks` counts those).
    """
    random = np.random.default_rng([SEED, 2])

    def wanted(asked: Mapping[str, float]) -> tuple[Load, ...]:
        more = tuple(structs.replace(load, rate_per_s=max(1.0, asked[load.tenant])) for load in loads)
        return with_poisson_headroom(
            [structs.replace(load, rate_per_s=load.rate_per_s * (1 + TRACKING.headroom)) for load in more]
        )

    tracker = Tracker(TRACKING)
    served = dict(before)
    now = least_devices(planner, wanted(served), inventory, gpu.costs)
    if not isinstance(now.plan, Plan):
        raise BenchError(f"{planner.name} has no plan for the beginning: {now.plan.detail}")
    first, running, devices = now.plan, now.plan, now.devices
    planned = {load.tenant: load.rate_per_s for load in loads} | _served(served)
    changes: list[PlanChange] = []
    held: list[tuple[float, int]] = [(0.0, devices)]
    calm = short = 0
    for at in range(WINDOW_S, duration_s, WINDOW_S):
        tracker = tracker.after(_counts(arrivals, at - WINDOW_S, at), WINDOW_S * NS_PER_S)
        if at % PERIOD_S:
            continue
        asked = tracker.demand()
        action, calm = compare_rates(asked, planned, TRACKING, calm)
        if action is RateVerdict.KEEP:
            continue
        calm = 0
        scaled = rescale(planner, wanted(asked), inventory, gpu.costs, Scaled(running, devices), SCALING)
        if not isinstance(scaled.plan, Plan):
            short += 1
            continue
        takes_s = float(random.uniform(*REORGANISATION_S))
        ready = at + takes_s
        held.append((float(at) if scaled.devices > devices else ready, scaled.devices))
        changes.append(PlanChange(round(ready * NS_PER_S), scaled.plan))
        running, devices, planned = scaled.plan, scaled.devices, _served(asked)
    return Followed(first, tuple(changes), tuple(held), short)


def _served(asked: Mapping[str, float]) -> dict[str, float]:
    """Rates that a plan for these was made for, with the headroom of the tracker but without that for bursts."""
    return {tenant: rate * (1 + TRACKING.headroom) for tenant, rate in asked.items()}


def _counts(arrivals: Mapping[str, Times], start_s: int, end_s: int) -> dict[str, int]:
    edges = (start_s * NS_PER_S, end_s * NS_PER_S)
    return {tenant: int(np.diff(np.searchsorted(times, edges))[0]) for tenant, times in arrivals.items()}


def _print(rows: Sequence[dict[str, Any]], duration_s: int, quick: bool) -> None:
    console = Console(width=130)
    table = Table(title=f"{duration_s} s of {SCENARIO} on up to {DEVICES} GPUs")
    heads = (
        "planner",
        "queries",
        "violations %",
        "worst tenant %",
        "worst 20 s %",
        "GPU hours",
        "most GPUs",
        "changes",
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "planner" else "right")
    table.add_row("paper (gpu-let+int)", "-", f"< {PAPER_VIOLATIONS.value}", "-", "-", "-", "-", "-")
    for row in rows:
        table.add_row(
            row["planner"],
            str(row["queries"]),
            f"{row['violation_pct']:.2f}",
            f"{row['worst_tenant_pct']:.2f}",
            f"{row['worst_window_pct']:.1f}",
            f"{row['gpu_hours']:.3f}",
            str(row["most_gpus"]),
            str(row["changes"]),
        )
    console.print(table)
    console.print(
        f"all {DEVICES} GPUs all the time: {DEVICES * duration_s / 3600:.2f} GPU hours; "
        f"goal: {OURS} below {GOAL_PCT:g} % with fewer GPU hours than {INT}"
    )
    if quick:
        console.print(f"quick: the first {QUICK_S} of {DURATION_S} s, and less search")
