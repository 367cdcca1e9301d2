"""GACER: how quick the searches are, ours against the published one after as many seconds, residue against makespan.

A round of the paper's Table 4 is one evaluation of a plan. Everything here is on predicted costs of drawn worlds, the
paper's sets by roofline. The makespans of plans in worlds are in gacer-sets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench._data import read_rows
from bench.papers.gacer._gpus import GPUS
from bench.papers.gacer._judge import rules_of
from bench.papers.gacer._sets import JointSet, paper_sets
from bench.papers.gacer._worlds import draw
from bench.papers.gacer._zoo_kernels import PAPER_NAMES
from bench.papers.gacer.sets import geomean
from cotenant.inner_loop import InnerLoops, best_loops, has_compiler
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.granularity.plan.joint_search import JointSearch
from cotenant.techniques.granularity.plan.planner import JointPlanner, JointProgress
from cotenant.techniques.granularity.plan.published import Descent, JointObjective, Published
from cotenant.techniques.granularity.predict import cluster_loop
from cotenant.techniques.granularity.predict.evaluator import PLAIN, JointEvaluator
from cotenant.techniques.granularity.predict.rules import Occupancy

NAME = "gacer-search"
ROUNDS = 2000
SECONDS = (0.5, 2.0, 10.0)
FIRST_WORLD = 500
WORLDS, RESIDUE_WORLDS = 5, 48
LOSES = 1.01
"""A residue's plan that takes so many times as long has lost."""
_ENDLESS = 1_000_000

Case = tuple[str, Sequence[KernelTable], Occupancy]


def run(quick: bool, data_dir: Path) -> dict[str, Any]:
    """Time and compare the searches, print the tables, return figures."""
    sets = paper_sets(data_dir, GPUS[0])
    rows = [
        *rates(data_dir, 200 if quick else ROUNDS),
        *races(cases(sets[:2] if quick else sets, 1 if quick else WORLDS), SECONDS[:2] if quick else SECONDS),
        *residues(cases(sets[:3] if quick else sets, 2 if quick else RESIDUE_WORLDS)),
    ]
    summary = summary_of(rows)
    _show(rows, data_dir)
    console = Console()
    console.print(", ".join(f"{name} {value:.4g}" for name, value in summary.items()))
    if quick:
        console.print("quick: 200 rounds in place of 2,000; two or three sets of five, one or two worlds, no 10 s")
    return {"summary": summary, "rows": rows, "seeds": [FIRST_WORLD]}


def cases(sets: Sequence[JointSet], worlds: int) -> Iterator[Case]:
    """The sets on predicted costs of worlds, each world with another of the cards."""
    for number in range(worlds):
        drawn = draw(FIRST_WORLD + number)
        for joint in sets:
            card = GPUS[number % len(GPUS)]
            tables = JointSet(joint.name, joint.models, card).tables(drawn)
            yield joint.name, tables, rules_of(drawn)


def rates(data_dir: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Seconds for 2,000 rounds of the published search, by set of Table 4, with each kind of kernels."""
    batch = {short: size for joint in paper_sets(data_dir, GPUS[0]) for short, size in joint.models}
    drawn = draw(FIRST_WORLD)
    names = dict.fromkeys(row["models"] for row in read_rows(data_dir / "gacer" / "table4_search_time.csv", "models"))
    for name in names:
        models = tuple((PAPER_NAMES[short], batch.get(PAPER_NAMES[short], 8)) for short in name.split("+"))
        tables = JointSet(name, models, GPUS[0]).tables(drawn)
        row: dict[str, Any] = {"part": "rate", "set": name, "units": sum(table.size for table in tables)}
        kinds = {"plain": PLAIN}
        if has_compiler():
            kinds["compiled"] = best_loops(cluster_loop)
        for kind, loops in kinds.items():
            _rounds(tables, rules_of(drawn), loops, 10)  # compiles
            spent, done = 0.0, 0
            while done < rounds:
                taken, count = _rounds(tables, rules_of(drawn), loops, rounds - done)
                spent, done = spent + taken, done + count
            row[f"{kind}_s"] = spent / done * ROUNDS
        yield row


def _rounds(tables: Sequence[KernelTable], rules: Occupancy, loops: InnerLoops, rounds: int) -> tuple[float, int]:
    """Seconds of a published search from its start, and how many rounds it had."""
    search = Descent(Published(rounds=rounds), JointEvaluator(tables, rules, loops), None)
    start = time.perf_counter()
    search.run()
    return time.perf_counter() - start, search.evaluated


def races(some: Iterator[Case], seconds: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Makespans that both searches believe in after so many seconds."""
    for name, tables, rules in some:
        JointSearch(evaluations=200).find(tables, rules)  # compiles
        tried = JointSearch(evaluations=_ENDLESS, rounds=100).find(tables, rules, until(seconds[0])).evaluated
        row: dict[str, Any] = {"part": "race", "set": name}
        for each in seconds:
            count = max(200, round(tried * each / seconds[0]))
            planners: tuple[JointPlanner, ...] = (Published(rounds=_ENDLESS), JointSearch(evaluations=count))
            for planner in planners:
                found = planner.find(tables, rules, until(each))
                row |= {f"{planner.name}_{each:g}s_ms": found.makespan_ns / 1e6, "bound_ms": found.bound_ns / 1e6}
                row |= {"streams_ms": found.streams_ns / 1e6, f"{planner.name}_{each:g}s_plans": found.evaluated}
        yield row


def until(seconds: float) -> JointProgress:
    """Ends a search after so long."""
    end = time.perf_counter() + seconds

    def progress(evaluated: int, best_ns: float) -> bool:
        return time.perf_counter() < end

    return progress


def residues(some: Iterator[Case]) -> Iterator[dict[str, Any]]:
    """Makespans of the published search by either objective."""
    for name, tables, rules in some:
        row: dict[str, Any] = {"part": "residue", "set": name}
        for objective in JointObjective:
            found = Published(objective=objective).find(tables, rules)
            row |= {f"{objective}_ms": found.makespan_ns / 1e6, "streams_ms": found.streams_ns / 1e6}
        yield row


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics."""
    rated, raced, chosen = ([row for row in rows if row["part"] == part] for part in ("rate", "race", "residue"))
    summary = {"rounds_2000_s": max(row.get("compiled_s", row["plain_s"]) for row in rated)}
    summary["rounds_2000_plain_s"] = max(row["plain_s"] for row in rated)
    for each in SECONDS:
        if f"ours_{each:g}s_ms" in raced[0]:
            gains = [row[f"both_{each:g}s_ms"] / row[f"ours_{each:g}s_ms"] for row in raced]
            summary[f"ours_{each:g}s_over_published".replace(".", "_")] = geomean(gains)
    slower = [row["residue_ms"] / row["makespan_ms"] > LOSES for row in chosen]
    behind = [row["residue_ms"] > row["streams_ms"] * (1 + 1e-9) for row in chosen]
    summary["residue_loses_pct"] = 100 * sum(slower) / len(slower)
    summary["residue_slower_than_streams_pct"] = 100 * sum(behind) / len(behind)
    return summary


def _show(rows: Sequence[dict[str, Any]], data_dir: Path) -> None:
    console = Console(width=max(120, Console().width))
    paper = {
        row["models"]: row["time_s"]
        for row in read_rows(data_dir / "gacer" / "table4_search_time.csv", "models")
        if row["search_rounds"] == str(ROUNDS)
    }
    table = Table(title=f"{ROUNDS:,} rounds, s", title_justify="left")
    for column in ("set", "units", "paper", "plain", "compiled"):
        table.add_column(column, justify="left" if column == "set" else "right")
    for row in rows:
        if row["part"] == "rate":
            compiled = f"{row['compiled_s']:.2f}" if "compiled_s" in row else "-"
            table.add_row(row["set"], str(row["units"]), paper[row["set"]], f"{row['plain_s']:.2f}", compiled)
    console.print(table)
    raced = [row for row in rows if row["part"] == "race"]
    table = Table(title="gain over streams as believed: published / ours, and the bound's", title_justify="left")
    columns = [each for each in SECONDS if f"ours_{each:g}s_ms" in raced[0]]
    table.add_column("set")
    for each in columns:
        table.add_column(f"{each:g} s", justify="right")
    table.add_column("bound", justify="right")
    for name in dict.fromkeys(row["set"] for row in raced):
        some = [row for row in raced if row["set"] == name]

        def gain(of: str, some: Sequence[dict[str, Any]] = some) -> str:
            return f"{geomean([row['streams_ms'] / row[of] for row in some]):.3f}"

        shown = [f"{gain(f'both_{each:g}s_ms')} / {gain(f'ours_{each:g}s_ms')}" for each in columns]
        table.add_row(name, *shown, gain("bound_ms"))
    console.print(table)
