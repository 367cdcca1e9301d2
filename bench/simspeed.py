"""How fast the simulator runs: whole models around capacity, and ResNet-50 cut at each of its 54 units.

Both figures cover everything from drawing the arrivals to the last outcome: arrivals, admission, decisions,
launches, ends. The collector of cyclic garbage is frozen and off, as in the server: nothing here makes cycles.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
from rich.console import Console
from rich.table import Table

from cotenant.core.actions import Respond
from cotenant.core.engine import Engine
from cotenant.core.snapshot import DropRule
from cotenant.policies import policy_class
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.driver import simulate
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share
from cotenant.world.simulated import TableWorld

SEED = 1
GOAL_QUERIES_PER_S = 50_000
GOAL_SEGMENTS_S = 30.0
RESNET50_UNITS = 54
RESNET50_NS = 57_000_000
_MS = 1_000_000
_BLOCK = 8192
_LATENCIES_MS = (1, 2, 3, 5, 6, 8, 10, 15)
_SLO_PER_LATENCY = 10
_LANE = Share((0, 1))


def poisson_queries(tenants: list[Tenant], rate_per_s: float, count: int, seed: int) -> Iterator[Query]:
    """Poisson arrivals of `count` queries at `rate_per_s`, each of a tenant drawn with equal chances."""
    rng = np.random.default_rng(seed)
    names = [tenant.name for tenant in tenants]
    slos = [tenant.slo_ns for tenant in tenants]
    now, number = 0, 0
    while number < count:
        times = now + np.cumsum(rng.exponential(1e9 / rate_per_s, _BLOCK)).astype(np.int64)
        now = int(times[-1])
        owners = rng.integers(len(tenants), size=_BLOCK).tolist()
        for arrival, owner in zip(times.tolist()[: count - number], owners, strict=False):
            yield Query(number, names[owner], arrival, arrival + slos[owner])
            number += 1


def table(latency_ns: int, units: int = 1) -> LatencyTable:
    return LatencyTable((LatencyRow(0, 1, _LANE.size, latency_ns),), tuple(1.0 for _ in range(units)))


def _run(engine: Engine, predictor: TablePredictor, queries: Iterator[Query]) -> tuple[float, float, Counter[Outcome]]:
    outcomes: list[Outcome] = []
    append = outcomes.append

    def on_respond(respond: Respond, now_ns: int) -> None:
        append(respond.outcome)

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        began, began_cpu = perf_counter(), process_time()
        simulate(engine, TableWorld(predictor, noise=0.05, seed=SEED), queries, on_respond)
        return perf_counter() - began, process_time() - began_cpu, Counter(outcomes)
    finally:
        gc.enable()
        gc.unfreeze()


def whole_models(policy: str, count: int, load: float) -> dict[str, object]:
    """Eight tenants of 1 to 15 ms, SLO ten times the latency, hopeless queries dropped."""
    tenants = [Tenant(f"t{ms}", ms * _SLO_PER_LATENCY * _MS) for ms in _LATENCIES_MS]
    predictor = TablePredictor({f"t{ms}": table(ms * _MS) for ms in _LATENCIES_MS})
    engine = Engine(tenants, policy_class(policy)((_LANE,), DropRule.HOPELESS), predictor, Machine.cpu(_LANE.cores))
    rate = load * 1000 * len(_LATENCIES_MS) / sum(_LATENCIES_MS)
    seconds, cpu_s, outcomes = _run(engine, predictor, poisson_queries(tenants, rate, count, SEED))
    return {
        "case": "whole models, 8 tenants",
        "policy": policy,
        "load": load,
        "queries": count,
        "launches": count - outcomes[Outcome.REJECTED] - outcomes[Outcome.DROPPED],
        "in_time_pct": 100 * outcomes[Outcome.ANSWERED] / count,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "queries_per_s": count / seconds,
        "queries_per_cpu_s": count / cpu_s,
    }


def segments(count: int) -> dict[str, object]:
    """ResNet-50 as 54 segments, left and chosen again at every cut (slack share 0), 90 % load."""
    tenant = Tenant("resnet50", 10 * RESNET50_NS, cuts=tuple(range(RESNET50_UNITS + 1)))
    predictor = TablePredictor({"resnet50": table(RESNET50_NS, RESNET50_UNITS)})
    engine = Engine(
        [tenant], Edf((_LANE,), DropRule.HOPELESS, preempt=True, slack_share=0.0), predictor, Machine.cpu(_LANE.cores)
    )
    seconds, cpu_s, outcomes = _run(engine, predictor, poisson_queries([tenant], 0.9e9 / RESNET50_NS, count, SEED))
    done = outcomes[Outcome.ANSWERED] + outcomes[Outcome.LATE]
    return {
        "case": f"ResNet-50, {RESNET50_UNITS} segments",
        "policy": "edf, preempt",
        "load": 0.9,
        "queries": count,
        "launches": done * RESNET50_UNITS,
        "in_time_pct": 100 * outcomes[Outcome.ANSWERED] / count,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "queries_per_s": count / seconds,
        "queries_per_cpu_s": count / cpu_s,
    }


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Simulate, print the table, return figures. `data_dir` is not used: nothing here is compared with a paper."""
    whole, cut = (60_000, 3_000) if quick else (300_000, 30_000)
    rows = [whole_models("edf", whole, load) for load in (1.0, 0.7, 1.3)]
    rows += [whole_models(policy, whole, 1.0) for policy in ("fcfs", "sjf")]
    rows.append(segments(cut))
    segments_30k_s = rows[-1]["seconds"] * 30_000 / cut  # type: ignore[operator]
    view = Table(title="Speed of the simulator")
    for column in ("case", "policy", "load", "queries", "launches", "in time %", "s", "CPU s", "queries/s"):
        view.add_column(column, justify="left" if column in ("case", "policy") else "right")
    for row in rows:
        view.add_row(
            str(row["case"]),
            str(row["policy"]),
            f"{row['load']:.1f}",
            f"{row['queries']:,}",
            f"{row['launches']:,}",
            f"{row['in_time_pct']:.1f}",
            f"{row['seconds']:.2f}",
            f"{row['cpu_s']:.2f}",
            f"{row['queries_per_s']:,.0f}",
        )
    console = Console()
    console.print(view)
    console.print(
        f"whole models, edf at capacity: {rows[0]['queries_per_s']:,.0f} queries/s (goal {GOAL_QUERIES_PER_S:,}), "
        f"{rows[0]['queries_per_cpu_s']:,.0f} a second of CPU time; "
        f"30,000 x {RESNET50_UNITS} segments: {segments_30k_s:.1f} s (goal {GOAL_SEGMENTS_S:.0f} s)"
    )
    if quick:
        console.print(f"quick: {whole:,} instead of 300,000 queries a row; {cut:,} segmented queries, time scaled up")
    return {
        "summary": {
            "queries_per_s": rows[0]["queries_per_s"],
            "queries_per_cpu_s": rows[0]["queries_per_cpu_s"],
            "segments_30k_s": segments_30k_s,
            "segments_per_s": 30_000 * RESNET50_UNITS / segments_30k_s,
        },
        "rows": rows,
    }
