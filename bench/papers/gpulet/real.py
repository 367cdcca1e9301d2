"""A plan on this machine: ours against an equal split and no partition, for five tenants, planned beside measured.

Five quick-start models, one query a request over HTTP, open loop, Poisson. Each tenant demands the same share of work.
The SLO is twice the time of four rows on one core, as the paper sets it for its largest batch. Rates are shares of the
largest for which our planner finds a plan at all, so that at 1 the plan is full. At 2 twice as much comes as any plan
can promise to serve, and the plans are those for 1. `ours` is the plan for the rates with headroom for bursts. `equal`
divides the cores equally. It deals the tenants out in their order, with the largest batches that half the SLO allows.
Both are served in rounds (`cotenant serve --plan`). Without partitions all tenants share one lane of all cores under
edf; edf with a lane a core is shown, too. All servers drop hopeless queries, and take turns with the same arrivals. The
planned figures come from a simulation of the plan before any server runs. It uses the profiled latencies, as noisy as
they were, and the measured interference.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from bench._data import Headline
from bench._registry import BenchError
from bench._server import cache_folder
from bench._tenants import Contender, Inputs, ours, prepare, sample_all, set_slo, warm_up, workload
from bench.papers.gpulet._simulate import simulate_plan
from cotenant.config import NS_PER_MS, load_model_config
from cotenant.load import run_load_process
from cotenant.profiles.profile_file import load_profile
from cotenant.repository import coruns_path, profile_path
from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.file import PlanFile, Request, plan_text
from cotenant.techniques.partitions.plan.planners import make_planner
from cotenant.techniques.partitions.plan.poisson_headroom import with_poisson_headroom
from cotenant.techniques.partitions.plan.rounds import Demand, RoundCache
from cotenant.techniques.partitions.plan.sources import CostBasis, costs_of_repository
from cotenant.techniques.partitions.plan.types import (
    NS_PER_S,
    Costs,
    DevicePlan,
    DeviceType,
    Infeasible,
    Load,
    PartitionPlan,
    Plan,
    Planner,
    Slot,
)
from cotenant.work import Work
from cotenant.workload import for_capacity

NAME = "gpulet-real"
MODELS = ("resnet50", "minilm", "ocr_recognition", "ocr_detection", "magika")
FACTORS, QUICK_FACTORS = (0.7, 1.0, 2.0), (1.0,)
SEEDS, QUICK_SEEDS = (1, 2), (1,)
SECONDS, QUICK_SECONDS = 12.0, 2.0
WARM_UP_S = 1.0
CORUN_S, QUICK_CORUN_S = 60, 3
MEMORY_BYTES = 8 << 30
SLO_ROWS, SLO_TIMES = 4, 2.0
_SERVER = '[device]\nlanes = "single"\n\n[policy]\nname = "overlap"\n'
"""Overlap has partitions of one core and of all: the profile is measured at both."""
_PLANNED = ("ours", "equal")
_STEPS = 12
_Z99 = 2.326
GOAL_POINTS = 3.0
HEADLINES = (
    Headline(
        "share answered in time by a plan, largest load that can be promised",
        "attainment_ours_1x",
        "",
        "measured on the cores of this machine, real models",
    ),
    Headline(
        "the same, an equal split",
        "attainment_equal_split_1x",
        "",
        "as above",
    ),
)


def run(
    quick: bool,
    data_dir: Path,
    profile: Path | None = None,
    util: Path | None = None,
    constants: Path | None = None,
) -> dict[str, Any]:
    """Measure. Models are kept in the user's cache folder; files of other devices and `data_dir` are not used."""
    console = Console(width=150)
    if profile or util or constants:
        console.print("figures of other devices are not used: this benchmark profiles and serves on this machine")
    root, service_ns = _prepared(quick, console)
    device = _device()
    basis = costs_of_repository(root, [device])
    mix = for_capacity(service_ns, 1, 1.0)
    most = _most(mix, root, basis)
    console.print(
        f"the planner's limit: {most * sum(mix.values()):.0f} queries/s, {most:.2f} of what one core does, on "
        f"{device.whole} cores"
    )
    inputs = sample_all(root, MODELS)
    rows: list[dict[str, Any]] = []
    for factor in QUICK_FACTORS if quick else FACTORS:
        loads = _loads(root, mix, most * factor)
        planned = _loads(root, mix, most * min(1.0, factor))
        plans = {"ours": _ours(planned, basis), "equal": _equal(planned, basis, device)}
        for name, plan in plans.items():
            text = plan_text(PlanFile(Request(planned, (device,)), plan, 0.0, basis.fingerprint))
            (root / f"{name}.toml").write_text(text, encoding="utf-8")
            _say(console, name, plan, planned, basis)
        rows += _measured(root, factor, loads, plans, basis, inputs, quick)
    summary = _summary(rows)
    _show(console, rows, summary)
    if quick:
        console.print("quick: one load, one seed, short runs, a coarse profile, few co-runs, and no lane a core")
    return {"summary": summary, "rows": rows, "seeds": list(QUICK_SEEDS if quick else SEEDS)}


def _prepared(quick: bool, console: Console) -> tuple[Path, dict[str, float]]:
    """Models, profile and co-runs, afresh in a full run; the time of one query of each on one core."""
    root, service_ns = prepare(
        cache_folder() / ("gpulet-real-quick" if quick else "gpulet-real"), MODELS, _SERVER, quick
    )
    for model, points in _on_one_core(root).items():
        rows = max(each for each in points if each <= SLO_ROWS)
        set_slo(root, model, max(1, round(SLO_TIMES * points[rows] * SLO_ROWS / rows / NS_PER_MS)))
    if not quick:
        coruns_path(root).unlink(missing_ok=True)
    single = ",".join(["1"] * len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "cotenant", "profile", str(root), "--partitions", single, "--corun", "--json"]
    command += ["--budget-s", str(QUICK_CORUN_S if quick else CORUN_S)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"co-runs cannot be measured: {done.stderr.strip().splitlines()[-1:]}")
    console.print("profiled, alone and beside each other")
    return root, service_ns


def _on_one_core(root: Path) -> dict[str, dict[int, int]]:
    """Median latency in ns by model and rows."""
    profile = load_profile(profile_path(root))
    return {
        name: {point.items: point.p50_ns for point in model.points if point.cores == 1}
        for name, model in profile.models.items()
    }


def _device() -> DeviceType:
    cores = len(os.sched_getaffinity(0))
    splits = {(cores,), *[(size,) * (cores // size) for size in range(1, cores)]}
    return DeviceType("cpu", tuple(sorted(splits)), MEMORY_BYTES)


def _loads(root: Path, mix: Mapping[str, float], factor: float) -> tuple[Load, ...]:
    found = []
    for model, rate in mix.items():
        slo_ms = load_model_config(root / model / "config.toml").tenant.slo_ms
        found.append(Load(model, model, rate * factor, round(slo_ms * NS_PER_MS)))
    return tuple(found)


def _planner() -> Planner:
    return make_planner("ours")


def _most(mix: Mapping[str, float], root: Path, basis: CostBasis) -> float:
    """The largest common factor of the rates for which there is a plan, by bisection."""
    low, high = 0.0, 2.0 * len(os.sched_getaffinity(0))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        found = _planner().plan(_loads(root, mix, middle), basis.devices, basis.costs)
        low, high = (low, middle) if isinstance(found, Infeasible) else (middle, high)
    if not low:
        raise BenchError(f"no plan for any rate: {found}")
    return low


def _ours(loads: Sequence[Load], basis: CostBasis) -> Plan:
    """The plan with headroom for bursts, with as much of it as there is room for."""
    wanted = with_poisson_headroom(loads)
    for step in range(_STEPS + 1):
        share = 1 - step / _STEPS
        asked = [
            replace(load, rate_per_s=load.rate_per_s + share * (more.rate_per_s - load.rate_per_s))
            for load, more in zip(loads, wanted, strict=True)
        ]
        found = _planner().plan(asked, basis.devices, basis.costs)
        if isinstance(found, Plan):
            return found
    raise BenchError(f"no plan: {found}")


def _equal(loads: Sequence[Load], basis: CostBasis, device: DeviceType) -> Plan:
    """Partitions of one core, tenants dealt out in their order; where no round holds, batches within half the SLO."""
    cache = RoundCache(basis.costs)
    parts = []
    for core in range(device.whole):
        mine = loads[core :: device.whole]
        fitted = cache.fit(
            tuple(Demand(load.model, load.slo_ns, load.rate_per_s) for load in mine), 1, basis.devices[0].name
        )
        if fitted is not None:
            duty_ns, batches = fitted.duty_ns, list(fitted.batches)
        else:
            batches = [max(1, cache.best_batch(load.model, load.slo_ns, 1, basis.devices[0].name)) for load in mine]
            duty_ns = sum(
                basis.costs.latency_ns(Work(load.model, 0, batch), 1, basis.devices[0].name)
                for load, batch in zip(mine, batches, strict=True)
            )
        slots = [Slot(load.tenant, batch, load.rate_per_s) for load, batch in zip(mine, batches, strict=True)]
        parts.append(PartitionPlan(1, duty_ns, tuple(slots)))
    return Plan((DevicePlan(device.name, tuple(parts)),), "equal")


def _say(console: Console, name: str, plan: Plan, loads: Sequence[Load], basis: CostBasis) -> None:
    problems = check_plan(plan, loads, basis.devices, basis.costs)
    parts = [
        f"{part.size} core: " + ", ".join(f"{slot.tenant} x{slot.batch}" for slot in part.slots)
        for part in plan.devices[0].partitions
    ]
    verdict = "holds" if not problems else f"{len(problems)} violations"
    console.print(f"{name} ({verdict}): " + " | ".join(parts))


def _measured(
    root: Path,
    factor: float,
    loads: Sequence[Load],
    plans: Mapping[str, Plan],
    basis: CostBasis,
    inputs: Inputs,
    quick: bool,
) -> list[dict[str, Any]]:
    seeds, seconds = (QUICK_SEEDS, QUICK_SECONDS) if quick else (SEEDS, SECONDS)
    contenders = [
        *(ours(name, root, "--plan", str(root / f"{name}.toml"), "--no-trace") for name in _PLANNED),
        ours("none", root, "--policy", "edf", "--lanes", "all", "--no-trace"),
    ]
    if not quick:
        contenders.append(ours("edf", root, "--policy", "edf", "--lanes", "single", "--no-trace"))
    rates = {load.tenant: load.rate_per_s for load in loads}
    median, spread = costs_of_repository(root, basis.devices, "p50").costs, _spread(root)
    rows = []
    for seed in seeds:
        turn = seed % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            with _warm(contender, inputs) as url:
                result = run_load_process(
                    workload(root, "", rates, seed, seconds, WARM_UP_S), http_url=url, inputs=inputs
                )
            total = result.summary.total
            row = {
                "load": factor,
                "contender": contender.name,
                "seed": seed,
                "offered_per_s": total.offered_per_s,
                "attainment": total.attainment or 0.0,
                "worst": min(each.attainment or 0.0 for each in result.summary.tenants),
                "failed": total.failed,
                "p99_ms": total.p99_ms,
                **{f"attainment_{each.tenant}": each.attainment for each in result.summary.tenants},
            }
            if contender.name in plans:
                row["planned"] = _planned(plans[contender.name], loads, basis, median, spread, seed)
            rows.append(row)
    return rows


@contextmanager
def _warm(contender: Contender, inputs: Inputs) -> Iterator[str]:
    with ExitStack() as stack:
        url = stack.enter_context(contender.start())
        asyncio.run(warm_up(url, contender.prefix, inputs, strict=False))
        yield url


def _planned(plan: Plan, loads: Sequence[Load], basis: CostBasis, median: Costs, spread: float, seed: int) -> float:
    """Attainment in the simulation, with medians and the spread of the profile as what happens."""
    found = simulate_plan(
        plan,
        loads,
        basis.devices,
        basis.costs,
        actual=median,
        noise=spread,
        seed=seed,
        duration_ns=round(60 * NS_PER_S),
        warmup_ns=round(WARM_UP_S * NS_PER_S),
    )
    return 1.0 - found.violation_share


def _spread(root: Path) -> float:
    """The spread of the logarithm of latency: the median over all points of the profile of p99 over p50."""
    points = [point for model in load_profile(profile_path(root)).models.values() for point in model.points]
    ratios = [point.p99_ns / point.p50_ns for point in points]
    return max(0.0, statistics.median(ratios) - 1) / _Z99


def _mean(rows: Sequence[Mapping[str, Any]], contender: str, key: str, load: float | None = None) -> float:
    """The mean over the runs of a contender; nan where there are none."""
    found = [row[key] for row in rows if row["contender"] == contender and (load is None or row["load"] == load)]
    return statistics.mean(found) if found else math.nan


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    loads = list(dict.fromkeys(row["load"] for row in rows))
    gaps = [
        100 * (_mean(rows, "ours", "planned", load) - _mean(rows, "ours", "attainment", load))
        for load in loads
        if load <= 1
    ]
    summary = {
        "planned_minus_measured_points": max(gaps, key=abs),
        "attainment_ours": _mean(rows, "ours", "attainment"),
        "attainment_equal_split": _mean(rows, "equal", "attainment"),
        "attainment_no_partition": _mean(rows, "none", "attainment"),
        "attainment_edf_lanes": _mean(rows, "edf", "attainment"),
    }
    for load in loads:
        label = f"{load:g}x".replace(".", "_")
        for name, key in (("ours", "ours"), ("equal", "equal_split"), ("none", "no_partition"), ("edf", "edf_lanes")):
            summary[f"attainment_{key}_{label}"] = _mean(rows, name, "attainment", load)
            summary[f"worst_{key}_{label}"] = _mean(rows, name, "worst", load)
    return summary


def _show(console: Console, rows: Sequence[dict[str, Any]], summary: Mapping[str, float]) -> None:
    table = Table(
        title="Answered within the SLO, as a share of the offered queries; of the worst tenant (means of the seeds)"
    )
    heads = ("load", "offered/s", "ours planned", "ours", "equal planned", "equal", "none, edf", "lane a core, edf")
    for head in heads:
        table.add_column(head, justify="right")
    for load in dict.fromkeys(row["load"] for row in rows):
        offered = statistics.mean(row["offered_per_s"] for row in rows if row["load"] == load)
        cells = []
        for name in (*_PLANNED, "none", "edf"):
            if name in _PLANNED:
                cells.append(f"{_mean(rows, name, 'planned', load):.3f}" if load <= 1 else "-")
            mean, worst = (_mean(rows, name, key, load) for key in ("attainment", "worst"))
            cells.append("-" if math.isnan(mean) else f"{mean:.3f} ({worst:.3f})")
        table.add_row(f"{load:g} x", f"{offered:.0f}", *cells)
    console.print(table)
    gap = summary["planned_minus_measured_points"]
    console.print(f"planned less measured, ours, at the worst load: {gap:+.1f} points (goal within {GOAL_POINTS:g})")
