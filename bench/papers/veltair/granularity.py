"""How fine to cut models: 30,000 ResNet-50 queries at several rates, as in figures 3 and 5 of VELTAIR.

Figures are satisfaction, latency and conflicts, a query and a launch. Policies are whole models, layers, blocks of 6
and 11, dynamic blocks (FULL, and AS without versions) and ours. Arrivals are Poisson and evenly spaced. Every policy is
judged at its own best target, the one with the highest satisfaction at that rate on other arrivals. Predictions, drop
rule and merging are the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench._campaign import run_all
from bench.papers.veltair import _loop
from bench.papers.veltair._campaign import key_of
from bench.papers.veltair._capacity import PAPER_TARGETS, TARGETS
from bench.papers.veltair._models import REFERENCE, TABLE_2, Efficiency, Model, read_models
from bench.papers.veltair._play import Arrivals, Stage, arrivals, warm_up
from bench.papers.veltair._worlds import Drawn, kept_worlds, tables_of
from bench.papers.veltair.qps import CONTENDERS, FIRST_WORLD, OURS
from cotenant.techniques.layer_blocks.policy.block_policy import BlockPolicy

NAME = "veltair-granularity"
RATES = (50, 100, 150, 200, 250, 300)
POLICIES = ("model_wise", "layer_wise", "blocks_6", "blocks_11", "AS", "FULL", OURS)
WORLDS, QUERIES = 12, 30_000
QUICK_WORLDS, QUICK_QUERIES = 2, 4_000
_TUNE_SEED, _TUNE_QUERIES = 1_000_000, 2_000


@dataclass(frozen=True, slots=True)
class GrainTask:
    """One way of arriving in one world."""

    drawn: Drawn
    is_uniform: bool
    queries: int


def run(quick: bool, data_dir: Path, *, profile: Path | None = None, worlds: int | None = None) -> dict[str, object]:
    """Judge all granularities. `profile` has other measurements, `worlds` is how many there are."""
    models, made = read_models(data_dir, profile)
    kept = kept_worlds(data_dir, FIRST_WORLD, worlds or (QUICK_WORLDS if quick else WORLDS))
    warm_up(kept[0], models, made)
    queries = QUICK_QUERIES if quick else QUERIES
    tasks = [GrainTask(drawn, is_uniform, queries) for drawn in kept for is_uniform in (False, True)]
    rows = run_all(NAME, key_of(data_dir, profile), tasks, partial(judge, models, made), _said)
    summary = summarise(rows)
    _print(rows, summary)
    if quick:
        Console().print(f"quick: {len(kept)} worlds, {QUICK_QUERIES:,} queries")
    return {"summary": summary, "rows": rows, "seeds": [drawn.seed for drawn in kept]}


def judge(models: Sequence[Model], made: Efficiency, task: GrainTask) -> list[dict[str, Any]]:
    """A row for each policy and rate."""
    model = next(model for model in models if TABLE_2[model.name] == REFERENCE)
    stage = Stage(task.drawn, [tables_of(task.drawn, model, made)])
    given = arrivals(1, task.queries, [1.0], uniform=task.is_uniform)
    trained = arrivals(_TUNE_SEED, _TUNE_QUERIES, [1.0], uniform=task.is_uniform)
    rows = []
    for name in POLICIES:
        for rate in RATES:
            chosen, printed = (_best(stage, CONTENDERS[name], trained, rate, some) for some in (TARGETS, PAPER_TARGETS))
            row: dict[str, Any] = {"world": task.drawn.seed, "arrivals": "uniform" if task.is_uniform else "poisson"}
            row |= {"policy": name, "rate": rate, "target": chosen}
            row |= _played(stage, replace(CONTENDERS[name], target=chosen), given, rate)
            plain = _played(stage, replace(CONTENDERS[name], target=printed), given, rate)
            rows.append(row | {"satisfied_pct_paper_protocol": plain["satisfied_pct"]})
    return rows


def _best(stage: Stage, policy: BlockPolicy, given: Arrivals, rate: float, targets: Sequence[float]) -> float:
    """The target at which most are in time."""
    return max(targets, key=lambda each: _played(stage, replace(policy, target=each), given, rate)["satisfied_pct"])


def _played(stage: Stage, policy: BlockPolicy, given: Arrivals, rate: float) -> dict[str, float]:
    at = given.at(rate)
    played = stage.play(stage.cast(policy), policy.drop, at)
    answered = played.outcomes <= _loop.LATE
    launches, conflicts = (int(played.stats[each]) for each in (_loop.LAUNCHES, _loop.CONFLICTS))
    return {
        "satisfied_pct": 100 * float(np.mean(played.outcomes == _loop.ANSWERED)),
        "latency_ms": float(np.mean((played.ends - at.times)[answered])) / 1e6 if answered.any() else 0.0,
        "conflicts_per_query": conflicts / len(at.times),
        "conflicts_per_launch": conflicts / max(launches, 1),
        "launches_per_query": launches / len(at.times),
        "core_ms_per_query": int(played.stats[_loop.HELD]) / len(at.times) / 1e6,
    }


def _said(rows: list[dict[str, Any]]) -> str:
    last = [f"{row['policy']} {row['satisfied_pct']:.0f}" for row in rows if row["rate"] == RATES[-1]]
    return f"world {rows[0]['world']} {rows[0]['arrivals']}, % in time at {RATES[-1]}/s: {', '.join(last)}"


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics. `ours_below_best_points` is the worst over rates and arrivals of the median over worlds."""
    made: dict[str, float] = {}
    gaps: list[float] = []
    for kind in ("poisson", "uniform"):
        for rate in RATES:
            mine = [row for row in rows if row["arrivals"] == kind and row["rate"] == rate]
            below = []
            for world in dict.fromkeys(row["world"] for row in mine):
                got = {row["policy"]: row["satisfied_pct"] for row in mine if row["world"] == world}
                below.append(max(got.values()) - got[OURS])
            gaps.append(float(np.median(below)))
            made[f"ours_below_best_points_{kind}_{rate}"] = gaps[-1]
    return {"ours_below_best_points": max(gaps), **made}


def _print(rows: Sequence[dict[str, Any]], summary: dict[str, float]) -> None:
    console = Console(width=170)
    for kind in ("poisson", "uniform"):
        title = f"{kind}: % in time, mean latency in ms, conflicts a query / a launch"
        table = Table("policy", "targets", *(f"{rate}/s" for rate in RATES), title=title)
        for name in POLICIES:
            cells = []
            for rate in RATES:
                some = [each for each in rows if (each["arrivals"], each["policy"], each["rate"]) == (kind, name, rate)]
                values = {key: float(np.median([row[key] for row in some])) for key in some[0] if key not in _TEXTS}
                cells.append(
                    f"{values['satisfied_pct']:.1f} {values['latency_ms']:.1f} "
                    f"{values['conflicts_per_query']:.2f}/{values['conflicts_per_launch']:.2f}"
                )
            targets = [row["target"] for row in rows if row["policy"] == name and row["arrivals"] == kind]
            table.add_row(name, f"{min(targets):.2g} to {max(targets):.2g}", *cells)
        console.print(table)
    console.print(", ".join(f"{name} {value:.3g}" for name, value in summary.items()))
    console.print("Figures are medians over worlds. Drop rule: hopeless; batches of one query; QoS 15 ms.")


_TEXTS = ("world", "arrivals", "policy", "rate", "target")
