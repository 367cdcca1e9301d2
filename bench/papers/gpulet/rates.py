"""The largest rate of each scenario and application that four GPUs serve with at most 1 % of violations, by planner.

As GPU-let (ATC 2022), Figure 12: the mix stays, its total rate grows. A rate counts when the planner has a plan for it
that passes a simulation with Poisson arrivals and with interference. There at most 1 % of all queries are late or
dropped. All planners get the same latencies, padded as the artifact pads them. They get the same runtime:
work-conserving rounds, with hopeless queries dropped. All find the rates to plan for in the same way
(`plan_simulated`). They plan, simulate, add where queries were late, and plan again. The rate is confirmed with other
seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from rich.console import Console
from rich.table import Table

from bench._bisect import largest_rate
from bench._data import Headline, paper_figure
from bench._registry import BenchError
from bench.papers.gpulet._data import OURS, Files, Gpu, read_gpu
from bench.papers.gpulet._headroom import Trial, Tried, plan_simulated
from bench.papers.gpulet._ideal import Ideal
from bench.papers.gpulet._planners import baselines
from bench.papers.gpulet._simulate import simulate_plan
from bench.papers.gpulet._workloads import Workload, read_specloads
from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.planners import is_blind
from cotenant.techniques.partitions.plan.poisson_headroom import with_poisson_headroom
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.table_costs import WithoutInterference
from cotenant.techniques.partitions.plan.types import (
    NS_PER_S,
    DevicePlan,
    DeviceType,
    PartitionPlan,
    Plan,
    Planner,
    Slot,
)
from cotenant.work import Work

NAME = "gpulet-rates"
DEVICES = 4
PROCESSES = 2
TARGET = 0.01
STEP = 1.01
"""The rate is found to this ratio."""
QUICK = ("scen1", "scen3", "game")
TRIAL_S, QUICK_TRIAL_S, CONFIRM_S = 30, 10, 60
"""Seconds of arrivals that a plan is tried with, and then confirmed with, for each of the seeds."""
SEEDS = (11, 12, 13)
GOAL_INT_OVER_SBP = 1.6
GOAL_OURS_OVER_INT = 1.15
PAPER_SBP, PAPER_GREEDY = (
    paper_figure("gpu-let", "Fig 12", f"glet+int vs {other}", "maximum achievable throughput gain, average")
    for other in ("SBP", "greedy best-fit")
)
PAPER_BLIND = paper_figure(
    "gpu-let", "Fig 12", "glet vs glet+int", "throughput gain attributed to interference awareness"
)
PAPER_IDEAL = paper_figure("gpu-let", "Fig 16", "glet+int vs ideal", "maximum schedulable rate, average")
HEADLINES = (
    Headline(
        "largest rate over time sharing (sbp), the paper's planner",
        "elastic_int_over_sbp",
        "x",
        "reconstructed latencies, simulated arrivals; the paper's sbp is a weaker one",
        PAPER_SBP,
    ),
    Headline(
        "the same over greedy best-fit",
        "elastic_int_over_greedy",
        "x",
        "as above",
        PAPER_GREEDY,
    ),
    Headline(
        "ours over the paper's planner, two partitions a GPU",
        "ours_two_over_elastic_int",
        "x",
        "as above",
    ),
    Headline(
        "ours over the paper's planner, up to five partitions",
        "ours_over_elastic_int",
        "x",
        "as above; finer splits than the paper allows",
    ),
    Headline(
        "rate that the paper's planner plans for, of ideal's",
        "planned_elastic_int_of_ideal_pct",
        "%",
        "reconstructed latencies",
        PAPER_IDEAL,
    ),
)
OURS_TWO, IDEAL = "ours_two", "ideal"
IDEAL_LOADS = 4
"""For so many loads the exhaustive search is affordable, and only to plan: it takes seconds a plan."""
_LOWER = 0.96


def contenders(gpu: Gpu, quick: bool) -> dict[str, tuple[Planner, DeviceType]]:
    """The planners by name with the device that they may divide, in the order of the table."""
    limit = 0.3 if quick else 1.0
    planners: list[Planner] = list(baselines())
    if not quick:
        planners.append(Optimal(time_limit_s=limit, label=OURS_TWO))
    planners.append(Optimal(time_limit_s=limit))
    return {planner.name: (planner, gpu.device_of(planner.name)) for planner in planners}


def run(
    quick: bool,
    data_dir: Path,
    profile: Path | None = None,
    util: Path | None = None,
    constants: Path | None = None,
) -> dict[str, Any]:
    """Find the rates, print the tables, return figures."""
    files = (data_dir, profile, util, constants)
    gpu = read_gpu(*files)
    workloads = _tried(read_specloads(data_dir, gpu), quick)
    names = list(contenders(gpu, quick))
    tasks = [(name, workload.name) for name in reversed(names) for workload in workloads]
    if not quick:
        tasks += [(IDEAL, workload.name) for workload in workloads if len(workload.at(1.0, gpu)[0]) <= IDEAL_LOADS]
    with ProcessPoolExecutor(PROCESSES, initializer=_prepare, initargs=(files, quick)) as pool:
        found = list(pool.map(measure, *zip(*tasks, strict=True)))
    rows = [row for name in (*names, IDEAL) for row in found if row["planner"] == name]
    summary = _summary(rows, names, [workload.name for workload in workloads])
    curve = headroom(gpu, quick)
    _print(rows, names, [workload.name for workload in workloads], summary, curve, quick)
    return {"summary": summary, "rows": rows + curve, "seeds": list(SEEDS)}


def _tried(workloads: Sequence[Workload], quick: bool) -> Sequence[Workload]:
    chosen = [workload for workload in workloads if workload.name in QUICK]
    return chosen if quick and chosen else workloads


_state: tuple[Gpu, dict[str, Workload], bool] | None = None


def _prepare(files: Files, quick: bool) -> None:
    global _state
    gpu = read_gpu(*files)
    _state = gpu, {workload.name: workload for workload in read_specloads(files[0], gpu)}, quick


def measure(name: str, workload: str) -> dict[str, Any]:
    """The largest rates of one workload under one planner: planned for even arrivals, and kept with Poisson ones."""
    if _state is None:
        raise BenchError("the tables were not read in this process")
    gpu, workloads, quick = _state
    if name == IDEAL:
        return _ideal(workloads[workload], gpu)
    planner, device = contenders(gpu, quick)[name]
    mix = workloads[workload]
    inventory = [device] * DEVICES

    def plans(rate: float) -> bool:
        loads, _ = mix.at(rate, gpu)
        return isinstance(planner.plan(loads, inventory, gpu.costs), Plan)

    tried: dict[float, Tried] = {}

    def keeps(rate: float) -> bool:
        loads, apps = mix.at(rate, gpu)
        trial = Trial(target=TARGET, duration_s=QUICK_TRIAL_S if quick else TRIAL_S, rounds=5 if quick else 10)
        tried[rate] = plan_simulated(planner, loads, inventory, gpu.costs, applications=apps, trial=trial)
        return tried[rate].is_met

    planned = largest_rate(plans, 1.0, _doubled(plans), STEP)
    rate = planned
    while rate > 1 and not keeps(rate):
        rate *= _LOWER
    rate = largest_rate(keeps, rate, rate / _LOWER, STEP) if rate < planned else rate
    seeds = SEEDS[:1] if quick else SEEDS
    while rate > 1:
        if rate not in tried:
            keeps(rate)
        confirmed = _confirm(mix, rate, tried[rate], inventory, gpu, seeds) if tried[rate].is_met else None
        if confirmed is not None and confirmed["violation_pct"] <= 100 * TARGET:
            break
        rate /= STEP
    else:
        confirmed = {"violation_pct": 100.0, "worst_tenant_pct": 100.0, "checked_violations": 0}
    return {"workload": workload, "planner": name, "rate": rate, "planned_rate": planned, **(confirmed or {})}


def _ideal(mix: Workload, gpu: Gpu) -> dict[str, Any]:
    """The largest rate that the exhaustive search plans for, not simulated."""
    inventory = [gpu.device] * DEVICES

    def plans(planner: Planner, rate: float) -> bool:
        return isinstance(planner.plan(mix.at(rate, gpu)[0], inventory, gpu.costs), Plan)

    least = largest_rate(partial(plans, Elastic(with_interference=True)), 1.0, 1e6, STEP)
    most = largest_rate(partial(plans, Ideal()), least, 2 * least, STEP)
    return {"workload": mix.name, "planner": IDEAL, "rate": math.nan, "planned_rate": most}


def _doubled(works: Callable[[float], bool]) -> float:
    rate = 64.0
    while works(rate) and rate < 1e7:
        rate *= 2
    return rate


def _confirm(
    mix: Workload, rate: float, tried: Tried, inventory: Sequence[DeviceType], gpu: Gpu, seeds: Sequence[int]
) -> dict[str, Any]:
    """What the plan does under arrivals that it was not made with, and whether it holds in the planner's own view."""
    loads, apps = mix.at(rate, gpu)
    assert isinstance(tried.plan, Plan)
    shares, worst = [], []
    for seed in seeds:
        found = simulate_plan(
            tried.plan,
            loads,
            inventory,
            gpu.costs,
            applications=apps,
            duration_ns=CONFIRM_S * NS_PER_S,
            warmup_ns=NS_PER_S,
            seed=seed,
        )
        shares.append(found.violation_share)
        worst.append(max(outcome.violation_share for outcome in found.outcomes))
    believed = WithoutInterference(gpu.costs) if is_blind(tried.plan.planner) else gpu.costs
    return {
        "violation_pct": 100 * fmean(shares),
        "worst_tenant_pct": 100 * fmean(worst),
        "checked_violations": len(check_plan(tried.plan, tried.planned, inventory, believed)),
    }


def headroom(gpu: Gpu, quick: bool) -> list[dict[str, Any]]:
    """How full a partition with one tenant may be for 1 % of violations, simulated and by the rule of thumb."""
    rows = []
    for model, facts in gpu.models.items():
        for size in (gpu.device.whole,) if quick else (gpu.device.sizes[0], gpu.device.whole):
            batch, capacity, ns = 0, 0.0, 0
            for tried in gpu.costs.batches(model):
                its = gpu.costs.latency_ns(Work(model, 0, tried), size, gpu.device.name)
                if 2 * its <= facts.slo_ns and tried * NS_PER_S / its > capacity:
                    batch, capacity, ns = tried, tried * NS_PER_S / its, its
            if not batch:
                continue
            plan = Plan((DevicePlan(gpu.device.name, (PartitionPlan(size, ns, (Slot(model, batch, capacity),)),)),))

            def keeps(rate: float, plan: Plan = plan, model: str = model) -> bool:
                duration = round((5_000 if quick else 20_000) / rate * NS_PER_S)
                found = simulate_plan(
                    plan, [gpu.load(model, rate)], [gpu.device], gpu.costs, duration_ns=duration, seed=SEEDS[0]
                )
                return found.violation_share <= TARGET

            def covers(rate: float, capacity: float = capacity, model: str = model) -> bool:
                return with_poisson_headroom([gpu.load(model, rate)])[0].rate_per_s <= capacity

            most = largest_rate(keeps, capacity / 20, capacity * 1.5, STEP)
            rows.append(
                {
                    "headroom": model,
                    "size": size,
                    "capacity": capacity,
                    "slo_over_latency": facts.slo_ns / ns,
                    "rows_per_slo": capacity * facts.slo_ns / NS_PER_S,
                    "bearable_share": most / capacity,
                    "rule_share": largest_rate(covers, capacity / 20, capacity, STEP) / capacity,
                }
            )
    return rows


def _summary(rows: Sequence[dict[str, Any]], names: Sequence[str], workloads: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {"checked_violations": sum(row.get("checked_violations", 0) for row in rows)}
    pairs = [("elastic_int", "sbp"), ("elastic_int", "greedy"), ("elastic_int", "elastic"), (OURS, "elastic_int")]
    if OURS_TWO in names:
        pairs.append((OURS_TWO, "elastic_int"))
    for metric, prefix in (("rate", ""), ("planned_rate", "planned_")):
        known = {(row["planner"], row["workload"]): row[metric] for row in rows}
        for over, under in pairs:
            ratios = [known[over, workload] / known[under, workload] for workload in workloads]
            found[f"{prefix}{over}_over_{under}"] = fmean(ratios)
            found[f"{prefix}{over}_over_{under}_geometric"] = geometric_mean(ratios)
    planned = {(row["planner"], row["workload"]): row["planned_rate"] for row in rows}
    ideal = [name for name in workloads if (IDEAL, name) in planned]
    if ideal:
        confirmed = {row["workload"]: row["rate"] for row in rows if row["planner"] == "sbp"}
        shares = [planned["elastic_int", name] / planned[IDEAL, name] for name in ideal]
        found["planned_elastic_int_of_ideal_pct"] = 100 * fmean(shares)
        found["planned_ideal_over_confirmed_sbp"] = fmean([planned[IDEAL, name] / confirmed[name] for name in ideal])
    return found


def _print(
    rows: Sequence[dict[str, Any]],
    names: Sequence[str],
    workloads: Sequence[str],
    summary: dict[str, float],
    curve: Sequence[dict[str, Any]],
    quick: bool,
) -> None:
    console = Console(width=140)
    known = {(row["planner"], row["workload"]): row for row in rows}
    table = Table(
        title=f"Queries/s on {DEVICES} GPUs with 1 % of violations at most (in brackets: planned, even arrivals)"
    )
    table.add_column("workload")
    for name in names:
        table.add_column(name, justify="right")
    for workload in workloads:
        cells = [known[name, workload] for name in names]
        table.add_row(workload, *(f"{cell['rate']:.0f} ({cell['planned_rate']:.0f})" for cell in cells))
    console.print(table)
    console.print(f"{OURS} may divide a GPU into more than two partitions, the others may not")
    ratios = Table(title="Mean of the ratios over the workloads (as in the paper, arithmetic)")
    for head in ("ratio", "paper", "here", "here, geometric", "here, planned", "goal"):
        ratios.add_column(head, justify="left" if head == "ratio" else "right")
    gains = {
        "elastic_int_over_sbp": PAPER_SBP,
        "elastic_int_over_greedy": PAPER_GREEDY,
        "elastic_int_over_elastic": PAPER_BLIND,
    }
    goals = {"elastic_int_over_sbp": GOAL_INT_OVER_SBP, "ours_over_elastic_int": GOAL_OURS_OVER_INT}
    for key, value in summary.items():
        if "_over_" in key and not key.startswith("planned_") and not key.endswith("_geometric"):
            paper = gains.get(key)
            ratios.add_row(
                key.replace("_over_", " / "),
                f"{1 + float(paper.value) / 100:.3f}" if paper else "-",
                f"{value:.3f}",
                f"{summary[key + '_geometric']:.3f}",
                f"{summary['planned_' + key]:.3f}",
                f"{goals[key]:.2f}" if key in goals else "-",
            )
    console.print(ratios)
    if "planned_elastic_int_of_ideal_pct" in summary:
        here = f"{summary['planned_elastic_int_of_ideal_pct']:.1f} %"
        console.print(f"elastic_int plans for this share of ideal's rate: paper {PAPER_IDEAL.value} % | here {here}")
        most = summary["planned_ideal_over_confirmed_sbp"]
        console.print(f"ideal / sbp would be {most:.3f} if not a query of its plans were lost to Poisson arrivals")
    spare = Table(title="How full one tenant's partition may be for 1 % of violations")
    for head in ("model", "size", "capacity/s", "SLO / batch's latency", "rows per SLO", "simulated", "rule"):
        spare.add_column(head, justify="left" if head == "model" else "right")
    for row in curve:
        spare.add_row(
            row["headroom"],
            str(row["size"]),
            f"{row['capacity']:.0f}",
            f"{row['slo_over_latency']:.1f}",
            f"{row['rows_per_slo']:.0f}",
            f"{row['bearable_share']:.2f}",
            f"{row['rule_share']:.2f}",
        )
    console.print(spare)
    if quick:
        console.print(
            f"quick: only {', '.join(QUICK)}; shorter simulations, one seed, less search, whole GPUs in the last table"
        )
