"""The cost of decisions by the policies of blocks: time a query for each model, and of forming one block of 300 units.

The product's own policies decide for queries of each model of Table 2 in the simulated processor of 64 cores. The rate
is half of the one at which its cores would be full. The processor time of `decide` is summed up and divided by the
queries. The paper says that its decisions take less than 100 us a query.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.papers.veltair._baselines import LayerWise
from bench.papers.veltair._models import Efficiency, Model, read_models
from bench.papers.veltair._play import LANES, arrivals
from bench.papers.veltair._product import Beliefs, Timed, play_product
from bench.papers.veltair._worlds import CORES, Drawn, Truth, kept_worlds, tables_of
from cotenant.techniques.layer_blocks.policy.block_jobs import BlockJob, BlockSnapshot
from cotenant.techniques.layer_blocks.policy.block_model import BlockModel
from cotenant.techniques.layer_blocks.policy.block_policy import BlockPolicy
from cotenant.techniques.layer_blocks.policy.published import BlockRules, LayerBlock
from cotenant.techniques.layer_blocks.policy.slack_blocks import SlackBlocks
from cotenant.techniques.layer_blocks.world.many_core import ManyCore
from cotenant.types import Tenant

NAME = "veltair-overhead"
UNITS = 300
POLICIES: dict[str, BlockPolicy] = {
    "layer_wise": LayerWise(LANES, target=0.6),
    "FULL": LayerBlock(LANES, target=0.6),
    "slack_blocks": SlackBlocks(LANES),
}
_QUERIES, _QUICK_QUERIES = 400, 60
_LOAD = 0.5
_ROUNDS = 400


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Time decisions. `per_query_us` is the slowest model's under FULL or ours; the models are in the rows."""
    models, made = read_models(data_dir)
    drawn = kept_worlds(data_dir, 0, 1)[0]
    rows = []
    for model in models:
        truth = tables_of(drawn, model, made)
        for name, policy in POLICIES.items():
            rows.append(_timed(truth, drawn.machine, name, policy, quick))
    formed = block_formation_us(drawn, models[0], made)
    slowest = {name: max(row["per_query_us"] for row in rows if row["policy"] == name) for name in POLICIES}
    middle = {
        name: float(np.median([row["per_query_us"] for row in rows if row["policy"] == name])) for name in POLICIES
    }
    summary = {
        "per_query_us": max(slowest["FULL"], slowest["slack_blocks"]),
        "block_formation_us": formed,
        **{f"per_query_us_{name}": value for name, value in middle.items()},
        **{f"per_query_us_{name}_slowest": value for name, value in slowest.items()},
    }
    _print(rows, summary)
    if quick:
        Console().print(f"quick: {_QUICK_QUERIES} queries of each model instead of {_QUERIES}")
    return {"summary": summary, "rows": rows, "seeds": [drawn.seed]}


def _timed(truth: Truth, machine: ManyCore, name: str, policy: BlockPolicy, quick: bool) -> dict[str, Any]:
    spans = truth.believed.spans()
    work = min(c * spans.block_ns(0, spans.units, 0, 0, c) for c in range(1, CORES + 1))
    count = _QUICK_QUERIES if quick else _QUERIES
    given = arrivals(1, count, [1.0]).at(_LOAD * CORES * 1e9 / work)
    beliefs = Beliefs([truth], machine.bandwidth_bytes_per_s)
    timed = Timed(policy)
    play_product([truth], beliefs, timed, given, machine)
    timed.taken_ns = timed.taken_ns[1:]  # the first one makes tables
    return {
        "model": truth.model.name,
        "policy": name,
        "decisions_per_query": len(timed.taken_ns) / count,
        "per_decision_us": float(np.median(timed.taken_ns)) / 1e3,
        "per_query_us": float(np.sum(timed.taken_ns)) / count / 1e3,
    }


def block_formation_us(drawn: Drawn, base: Model, made: Efficiency, rounds: int = _ROUNDS) -> float:
    """Median time of forming one block (Algorithm 2 in its product form) of a model of UNITS units that wants cores."""
    layers, profiles = (tuple(each[at % len(each)] for at in range(UNITS)) for each in (base.layers, base.profiles))
    long = replace(base, layers=layers, profiles=profiles, qos_ns=base.qos_ns * UNITS // len(base.layers))
    spans = tables_of(drawn, long, made).believed.spans()
    model = BlockModel(Tenant("long", long.qos_ns, tuple(range(UNITS + 1))), 0, 1, spans)
    model.add_pivots(True, 0.6 * long.qos_ns)
    job = BlockJob(0, model, False, 0, long.qos_ns, 0)
    blocks = BlockSnapshot(0, CORES, CORES, 0.0, 0.3, False, [job], [])
    rules, others = BlockRules(0.6, replans=True, adapts=True), [model] * 3
    taken = []
    for _ in range(rounds):
        began = time.thread_time_ns()
        rules.next_block(blocks, job, 0.3, others)
        taken.append(time.thread_time_ns() - began)
    return float(np.median(taken)) / 1e3


def _print(rows: Sequence[dict[str, Any]], summary: dict[str, float]) -> None:
    table = Table("model", "policy", "decisions a query", "us a decision", "us a query")
    for row in rows:
        figures = (row["decisions_per_query"], row["per_decision_us"], row["per_query_us"])
        table.add_row(row["model"], row["policy"], *(f"{each:.1f}" for each in figures))
    console = Console()
    console.print(table)
    console.print(", ".join(f"{name} {value:.3g}" for name, value in summary.items()))
