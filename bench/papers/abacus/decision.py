"""How long the overlap policy takes to choose a group: eight tenants, 64 queries waiting, a fitted predictor.

The next group is chosen while the present one runs, again after every arrival. Every such call of `Engine.handle` is
timed on its own with the monotonic clock. So is the call that ends a group and starts the next one. Tenants are those
of the benchmark `decision`, with batches. The predictor is fitted to groups of a made-up device, which only decides
which members win. As in the server, likely groups are predicted ahead of time, and the last column has the time for it.
The collector of cyclic garbage is frozen and off.

The machine is slower for a second now and then. Choices are taken in parts of a ninth of them, some half a second each.
The 99th percentile is that of the median part; that of all together is shown beside it.
"""

from __future__ import annotations

import gc
from pathlib import Path
from random import Random
from time import perf_counter_ns
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench._data import Headline, paper_figure
from bench.decision import WAITING, setting
from cotenant.core.actions import Action, Launch
from cotenant.core.engine import Engine
from cotenant.core.events import Event, LaunchEnded, LookAheadDue, QueryArrived
from cotenant.predict.grouped import GroupedPredictor
from cotenant.predict.table import TablePredictor
from cotenant.techniques.overlap.group_samples import GroupSample
from cotenant.techniques.overlap.measure.group_sampler import sample_groups
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.techniques.overlap.predict.overlap_features import TenantFacts
from cotenant.techniques.overlap.predict.overlap_fit import FitSettings, fit_overlap
from cotenant.types import Query, Tenant
from cotenant.work import Machine, Share

NAME = "decision-overlap"
SEED = 1
GOAL_P99_US = 150.0
_LANES = (Share((0,)), Share((1,)))
_CASES = {"no merging": 1, "batches up to 8": 8}
MAIN = "batches up to 8"
_KEYS = ("p50_us", "p99_us", "p99_of_all_us", "start_p50_us", "start_p99_us")
PAPER = paper_figure("Abacus", "7.7", "4-way search", "overall prediction latency")
HEADLINES = (
    Headline(
        "choosing a group, 99th percentile",
        "p99_us",
        "us",
        "measured on this processor; eight tenants, 64 queries waiting; the paper's time is of predictions alone",
        PAPER,
    ),
)
_PARTS = 9


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure, print the table, return figures. `data_dir` is not used."""
    count = 5_000 if quick else 50_000
    rows = [measure(case, largest, count) for case, largest in _CASES.items()]
    table = Table(title=f"One decision of the overlap policy: 8 tenants, {WAITING} queries inside, 2 lanes")
    for column in (
        "case",
        "choosing p50 us",
        "p99 us, median part",
        "of all",
        "starting the chosen group p50 us",
        "p99 us",
        "members",
        "ahead of time ms",
    ):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        figures = [f"{row[key]:.0f}" for key in _KEYS]
        table.add_row(str(row["case"]), *figures, f"{row['mean_members']:.2f}", f"{row['ahead_ms']:.0f}")
    console = Console()
    console.print(table)
    console.print(f"goal: p99 < {GOAL_P99_US:.0f} us for choosing, with batches; the paper reports {PAPER.text}")
    if quick:
        console.print("quick: a tenth of the decisions; nothing else is left out")
    main = next(row for row in rows if row["case"] == MAIN)
    return {"summary": {key: main[key] for key in (*_KEYS, "ahead_ms")}, "rows": rows, "seeds": [SEED]}


def measure(case: str, largest: int, count: int) -> dict[str, Any]:
    """Time `count` choices in steady state: for each query that left one arrives, while a group runs."""
    policy = Overlap(_LANES)
    tenants, tables = setting(policy, largest)
    predictor = _predictor(tenants, tables, largest)
    began = perf_counter_ns()
    sum(predictor.prefetch(policy.likely_groups(tenants)))
    foreseen = perf_counter_ns() - began
    engine = Engine(tenants, policy, predictor, Machine.cpu((0, 1)))
    random = Random(SEED)
    now, number = 0, 0
    running: list[Launch] = []
    choosing: list[int] = []
    starting: list[int] = []
    members: list[int] = []

    def handle(event: Event) -> list[Action]:
        began = perf_counter_ns()
        actions = engine.handle(event, now)
        taken = perf_counter_ns() - began
        started = [action for action in actions if isinstance(action, Launch)]
        if type(event) is LookAheadDue:
            choosing.append(taken)
        elif started:
            starting.append(taken)
            members.append(len(started))
        running.extend(started)
        return actions

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        while len(choosing) < count:
            while engine.live < WAITING:
                tenant = tenants[random.randrange(len(tenants))]
                handle(QueryArrived(Query(number, tenant.name, now, now + tenant.slo_ns)))
                number += 1
            handle(LookAheadDue())
            ended = list(running)
            running.clear()
            now += ended[0].predicted_ns
            for launch in ended:
                handle(LaunchEnded(launch.id))
    finally:
        gc.enable()
        gc.unfreeze()
    steady = np.array(choosing[count // 10 : count // 10 * 10]) / 1e3
    p50, p99_of_all = np.percentile(steady, (50, 99)).tolist()
    p99 = float(np.median(np.percentile(steady.reshape(_PARTS, -1), 99, axis=1)))
    start_p50, start_p99 = np.percentile(np.array(starting[count // 10 :]) / 1e3, (50, 99)).tolist()
    return {
        "case": case,
        "p50_us": p50,
        "p99_us": p99,
        "p99_of_all_us": p99_of_all,
        "start_p50_us": start_p50,
        "start_p99_us": start_p99,
        "mean_members": float(np.mean(members)),
        "decisions": count,
        "ahead_ms": foreseen / 1e6,
    }


def _predictor(tenants: list[Tenant], tables: TablePredictor, largest: int) -> GroupedPredictor:
    """What a server would believe. On the made-up device a group takes its longest member and a third of the others."""
    facts = [TenantFacts(name, table) for name, table in tables.tables.items()]
    sizes = {tenant.name: tuple(sorted({1, largest})) for tenant in tenants}
    samples = []
    for group in sample_groups(tenants, sizes, (1, 1), 1500, SEED, repeat=True):
        alone = [tables.latency_ns(*member) for member in group]
        samples.append(GroupSample(group, (max(alone) + (sum(alone) - max(alone)) // 3,)))
    fitted = fit_overlap(samples, facts, seed=SEED, settings=FitSettings(steps=400, hidden_steps=50)).at(0.95)
    return GroupedPredictor(tables.tables, None, fitted)
