"""How many queries a second policies of layer blocks bear in many drawn worlds: figures 12 to 14 of VELTAIR.

Every policy has the same predictions, drop rule (hopeless queries are dropped) and merging (none: batches of one). Each
is judged at its own best planning target, which is chosen on other arrivals. At the rate that is reported every model
of a mix has 95 % of its queries in time. Three more rates stand beside it. One is by the paper's protocol: the best of
targets from 0.85 to 1.0, parts of the SLO fixed once and for all. One is without any drops (on two fifths of the
arrivals). One is the rate that a clairvoyant relaxation bears.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from bench._campaign import run_all
from bench._data import Headline, paper_figure
from bench.papers.veltair import _loop
from bench.papers.veltair._baselines import FixedBlocks, LayerWise, ModelWise, Prema
from bench.papers.veltair._campaign import key_of
from bench.papers.veltair._capacity import (
    PAPER_TARGETS,
    Capacity,
    Effort,
    alone_ns,
    clairvoyant,
    reported,
    tuned,
)
from bench.papers.veltair._models import CLASSES, Efficiency, Model, of_class, read_models
from bench.papers.veltair._play import LANES, Arrivals, Stage, warm_up
from bench.papers.veltair._worlds import VERSIONS, Drawn, kept_worlds, tables_of
from cotenant.core.snapshot import DropRule
from cotenant.techniques.layer_blocks.policy.block_policy import BlockPolicy
from cotenant.techniques.layer_blocks.policy.published import LayerBlock, Variant
from cotenant.techniques.layer_blocks.policy.slack_blocks import SlackBlocks

NAME = "veltair-qps"
HEADLINES = (
    *(
        Headline(
            f"slack_blocks over the best published policy, {load}",
            f"ours_over_best_{load}",
            "x",
            "simulated, drawn worlds, median; the best of eight in each world; decisions cost no time, the pressure is "
            "known exactly",
        )
        for load in CLASSES
    ),
    *(
        Headline(
            f"FULL over layer-wise, {load}",
            f"full_over_layer_wise_{load}_pct",
            "% more queries/s",
            "as above; both re-plan, each at its own best target; layer-wise is the weakest baseline in two classes",
            paper_figure("VELTAIR", "Fig 12", f"VELTAIR-FULL, {load}", "QPS at 95% QoS vs Planaria"),
        )
        for load in CLASSES
    ),
    Headline("best published policy is FULL", "full_is_best_cases", "cases", "as above, of 192; in the paper all"),
)
WORLDS = 48
FIRST_WORLD = 0
OURS = "slack_blocks"
CONTENDERS: dict[str, BlockPolicy] = {
    "model_wise": ModelWise(LANES),
    "layer_wise": LayerWise(LANES),
    "blocks_6": FixedBlocks(LANES, units=6),
    "blocks_11": FixedBlocks(LANES, units=11),
    "prema": Prema(LANES),
    "AS": LayerBlock(LANES, variant=Variant.AS),
    "AC": LayerBlock(LANES, variant=Variant.AC),
    "FULL": LayerBlock(LANES, variant=Variant.FULL),
    OURS: SlackBlocks(LANES),
}
AS_PRINTED: dict[str, BlockPolicy] = {
    "layer_wise": LayerWise(LANES, replan=False),
    "FULL": LayerBlock(LANES, variant=Variant.FULL, replan=False),
}
"""The paper's protocol: parts of the SLO that are fixed, planned for at PAPER_TARGETS."""
_QUICK = Effort(1000, 2, 600, 1, (0.6, 0.8, 0.4), 0.03)


@dataclass(frozen=True, slots=True)
class Task:
    """One class of models in one world."""

    drawn: Drawn
    load: str
    effort: Effort
    is_quick: bool


def run(quick: bool, data_dir: Path, *, profile: Path | None = None, worlds: int | None = None) -> dict[str, object]:
    """Judge all policies in all worlds. `profile` has other measurements, `worlds` is how many there are."""
    known, made = read_models(data_dir, profile)
    kept = kept_worlds(data_dir, FIRST_WORLD, worlds or (2 if quick else WORLDS))
    effort = _QUICK if quick else Effort()
    warm_up(kept[0], known, made)
    tasks = [Task(drawn, load, effort, quick) for drawn in kept for load in CLASSES]
    key = key_of(data_dir, profile)
    rows = run_all(NAME, key, tasks, partial(judge, known, made), _said)
    summary = summarise(rows)
    _print(rows, summary, quick, len(kept))
    return {"summary": summary, "rows": rows, "seeds": [drawn.seed for drawn in kept]}


def judge(models: Sequence[Model], made: Efficiency, task: Task) -> list[dict[str, Any]]:
    """The rows of one task: each policy, then the bound."""
    mine = of_class(models, task.load)
    stage = Stage(task.drawn, [tables_of(task.drawn, model, made) for model in mine])
    effort = task.effort
    judged, trained = effort.reported(mine), effort.tuned(mine)
    bounds = {within: clairvoyant(stage, judged, within, effort.grain) for within in (0.95, 0.99)}
    where = {"world": task.drawn.seed, "class": task.load}
    rows: list[dict[str, Any]] = []
    for name, policy in CONTENDERS.items():
        found = _best(stage, policy, judged, trained, bounds[0.95] / 2, effort)
        rows.append(where | {"policy": name} | _figures(stage, replace(policy, target=found.target), judged, found))
        if not task.is_quick:
            free = replace(policy, target=found.target, drop=DropRule.NONE)
            rows[-1]["qps_no_drop"] = reported(stage, free, judged[:2], found.qps or bounds[0.95] / 2, 0.03).qps
        if name in AS_PRINTED:
            plain = replace(effort, targets=PAPER_TARGETS)
            printed = _best(stage, AS_PRINTED[name], judged, trained, bounds[0.95] / 2, plain)
            rows[-1] |= {"qps_paper_protocol": printed.qps, "target_paper_protocol": printed.target}
        if name == "FULL" and task.load == "mix" and not task.is_quick:
            rows[-1]["qps_by_versions"] = _by_versions(mine, made, task, replace(policy, target=found.target), found)
            rows[-1]["layers_by_versions"] = _layers_by_versions(stage)
    rows.append(where | {"policy": "clairvoyant", "qps": bounds[0.95], "qps_99": bounds[0.99]})
    return rows


def _best(
    stage: Stage,
    policy: BlockPolicy,
    judged: Sequence[Arrivals],
    trained: Sequence[Arrivals],
    guess: float,
    effort: Effort,
) -> Capacity:
    """What a policy bears at the target that was best on other arrivals."""
    best = tuned(stage, policy, trained, guess, effort)
    return reported(stage, replace(policy, target=best.target), judged, best.qps or guess, effort.grain)


def _figures(stage: Stage, policy: BlockPolicy, given: Sequence[Arrivals], found: Capacity) -> dict[str, Any]:
    """The figures of a policy at the rate that it bears."""
    figures: dict[str, Any] = {"qps": found.qps, "target": found.target}
    if not found.played:
        return figures
    stats = np.sum([each.stats for each in found.played], axis=0)
    queries = sum(len(each.times) for each in given)
    launches = max(int(stats[_loop.LAUNCHES]), 1)
    alone = alone_ns(stage, policy)
    latency: list[float] = []
    in_time: list[list[float]] = []
    for tenant in range(len(stage.slo)):
        taken, ok = [], []
        for arrived, played in zip(given, found.played, strict=True):
            at = arrived.at(found.qps)
            mine = at.who == tenant
            ok.append(float(np.mean(played.outcomes[mine] == _loop.ANSWERED)))
            answered = mine & (played.outcomes <= _loop.LATE)
            taken.append(played.ends[answered] - at.times[answered])
        latency.append(float(np.mean(np.concatenate(taken))))
        in_time.append(ok)
    worst = np.min(in_time, axis=0)
    units = max(int(stats[_loop.UNITS]), 1)
    return figures | {
        "worst_model_in_time": [float(worst.min()), float(worst.max())],
        "latency_ms": [each / 1e6 for each in latency],
        "over_isolated": float(np.mean(np.array(latency) / stage.isolated)),
        "over_same_alone": float(np.mean(np.array(latency) / alone)),
        "core_ms_per_query": float(stats[_loop.HELD]) / queries / 1e6,
        "over_least_work": float(stats[_loop.HELD]) / float(sum(stage.least_work @ each.counts for each in given)),
        "launches_per_query": launches / queries,
        "conflicts_per_query": float(stats[_loop.CONFLICTS]) / queries,
        "conflicts_per_launch": float(stats[_loop.CONFLICTS]) / launches,
        "units_by_version": [float(each) / units for each in stats[_loop.VERSIONS_FROM : _loop.VERSIONS_FROM + 6]],
    }


def _by_versions(
    models: Sequence[Model], made: Efficiency, task: Task, policy: BlockPolicy, found: Capacity
) -> list[float]:
    """Queries a second with one version of each layer, with two, and so on."""
    rates = []
    for count in range(1, VERSIONS):
        stage = Stage(task.drawn, [tables_of(task.drawn, model, made, count) for model in models])
        rates.append(reported(stage, policy, task.effort.reported(models), found.qps or 1.0, 0.02).qps)
    return [*rates, found.qps]


def _layers_by_versions(stage: Stage) -> list[float]:
    """The part of the layers that use one version over all levels of pressure, two, and so on."""
    counts = [len(set(unit.by_level)) for truth in stage.truths for unit in truth.real.units]
    return [counts.count(each) / len(counts) for each in range(1, VERSIONS + 1)]


def _said(rows: list[dict[str, Any]]) -> str:
    texts = [f"{row['policy']} {row['qps']:.4g}" for row in rows]
    return f"world {rows[0]['world']} {rows[0]['class']}, queries/s: {', '.join(texts)}"


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics: medians over worlds."""
    at = {(row["world"], row["class"], row["policy"]): row for row in rows}
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    made: dict[str, float] = {}

    def gains(load: str, ours: str, theirs: str, column: str = "qps") -> list[float]:
        pairs = [(at[world, load, ours][column], at[world, load, theirs][column]) for world in worlds]
        return [100 * (a / b - 1) if b else (float("inf") if a else 0.0) for a, b in pairs]

    for load in CLASSES:
        made[f"full_over_layer_wise_{load}_pct"] = _median(gains(load, "FULL", "layer_wise"))
        printed = gains(load, "FULL", "layer_wise", "qps_paper_protocol")
        made[f"full_over_layer_wise_{load}_pct_paper_protocol"] = _median(printed)
        made[f"ours_over_full_{load}_pct"] = _median(gains(load, OURS, "FULL"))
        made[f"full_over_as_{load}"] = 1 + _median(gains(load, "FULL", "AS")) / 100
    published = [name for name in CONTENDERS if name != OURS]
    best_of = [max(published, key=lambda name: at[world, load, name]["qps"]) for load in CLASSES for world in worlds]
    made |= {f"{name}_is_best_cases".lower(): float(best_of.count(name)) for name in published}
    shares, worst = [], []
    for load in CLASSES:
        bounds = [at[world, load, OURS]["qps"] / at[world, load, "clairvoyant"]["qps"] for world in worlds]
        made[f"ours_of_clairvoyant_{load}"] = _median(bounds)
        shares += bounds
        for world in worlds:
            best = max(at[world, load, name]["qps"] for name in published)
            ours = at[world, load, OURS]["qps"]
            worst.append(100 * (ours / best - 1) if best else 0.0)
        made[f"ours_over_best_{load}"] = 1 + _median(worst[-len(worlds) :]) / 100
    made["ours_of_clairvoyant"] = _median(shares)
    made["ours_worst_vs_best_baseline_pct"] = min(worst)
    made["ours_behind_best_cases"] = float(sum(each < 0 for each in worst))
    made["cases"] = float(len(worst))
    made["ours_p10_vs_best_baseline_pct"] = float(np.percentile(worst, 10))
    full = [row for row in rows if row["policy"] == "FULL" and "over_same_alone" in row]
    made["full_latency_over_same_policy_alone"] = _median([row["over_same_alone"] for row in full])
    made["full_latency_over_isolated"] = _median([row["over_isolated"] for row in full])
    return made


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def _print(rows: Sequence[dict[str, Any]], summary: dict[str, float], quick: bool, worlds: int) -> None:
    console = Console(width=170)
    columns = ("policy", "queries/s", "10th to 90th", "of layers", "as printed", "no drop", "target", "of bound")
    more = ("conflicts", "a launch", "core ms", "isolated", "alone", "worst seed")
    for load in CLASSES:
        table = Table(*(Column(name, no_wrap=True) for name in (*columns, *more)), title=load)
        mine = [row for row in rows if row["class"] == load]
        bound = {row["world"]: row["qps"] for row in mine if row["policy"] == "clairvoyant"}
        base = {row["world"]: row["qps"] for row in mine if row["policy"] == "layer_wise"}
        for name in (*CONTENDERS, "clairvoyant"):
            some = [row for row in mine if row["policy"] == name]
            rates = [row["qps"] for row in some]
            over = [row["qps"] / base[row["world"]] for row in some if base[row["world"]]]
            table.add_row(
                *(name, f"{_median(rates):.4g}"),
                f"{np.percentile(rates, 10):.3g} to {np.percentile(rates, 90):.3g}",
                f"{_median(over):.2f}" if over else "",
                *(_column(some, key, "{:.4g}") for key in ("qps_paper_protocol", "qps_no_drop", "target")),
                f"{_median([row['qps'] / bound[row['world']] for row in some]):.2f}",
                *(_column(some, key, "{:.2f}") for key in ("conflicts_per_query", "conflicts_per_launch")),
                *(_column(some, key, "{:.1f}") for key in ("core_ms_per_query", "over_isolated", "over_same_alone")),
                _column(
                    [{"least": 100 * row["worst_model_in_time"][0]} for row in some if _TIMED in row], "least", "{:.1f}"
                ),
            )
        console.print(table)
        strict = [row["qps_99"] for row in mine if row["policy"] == "clairvoyant"]
        console.print(
            f"{load}: the bound has 99 % of every model's queries in time up to {_median(strict):.4g} a second"
        )
    by_versions = [row for row in rows if row.get("qps_by_versions")]
    if by_versions:
        gain = np.median(
            [np.array(row["qps_by_versions"]) / (row["qps_by_versions"][0] or 1) for row in by_versions], 0
        )
        parts = np.median([row["layers_by_versions"] for row in by_versions], axis=0)
        console.print("FULL in the mix by versions kept: " + ", ".join(f"{n} {g:.2f}x" for n, g in enumerate(gain, 1)))
        console.print("layers by number of versions: " + ", ".join(f"{n} {g:.0%}" for n, g in enumerate(parts, 1)))
    console.print(", ".join(f"{name} {value:.3g}" for name, value in summary.items()))
    console.print(
        f"{worlds} worlds; figures are medians over them. Drop rule: hopeless; batches of one query. Conflicts and core"
        " time are a query's; its latency is given over that alone on all cores, and alone under the same policy.\n"
        "Worst seed: % in time of the model and seed with the least; over all seeds it is 95 or more."
    )
    if quick:
        console.print(
            "quick: few worlds, 2,000 queries, three targets; no rates without drops or by number of versions"
        )


_TIMED = "worst_model_in_time"


def _column(rows: Sequence[dict[str, Any]], key: str, form: str) -> str:
    values = [row[key] for row in rows if key in row]
    return form.format(_median(values)) if values else ""
