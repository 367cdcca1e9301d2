"""GACER: how many pointers and how small chunks are best, figure 9 and Table 3, in many drawn worlds.

Figure 9: sets with forced numbers of barriers, from none (streams) to one behind every operator. Barriers are placed
evenly by time and then moved by coordinate descent on predicted costs, for some hundred evaluations. The published
search without chunks is shown beside it. Table 3: VGG16 and ResNet18 with 32 rows each, with convolutions that run as
chunks, each joined behind it. Not in the paper: the same as one run of chunks. Everything is played in the world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from bench._campaign import digest_of, run_all
from bench._data import read_rows
from bench._registry import BenchError
from bench.papers.gacer._gpus import GPUS
from bench.papers.gacer._joint_run import JointWorld
from bench.papers.gacer._judge import PUBLISHED, rules_of
from bench.papers.gacer._models import model_table
from bench.papers.gacer._sets import JointSet, paper_sets
from bench.papers.gacer._worlds import Drawn, draw
from bench.papers.gacer.sets import FIRST_WORLD, SOURCES, WORLDS
from cotenant.techniques.granularity.joint_plan import Chunk, JointPlan
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.granularity.predict.evaluator import JointEvaluator

NAME = "gacer-granularity"
SETS = ("ALEX+V16+R18", "R50+V16+M3", "R101+D121+M3")
COUNTS = (0, 1, 2, 3, 5, 8, 12, 20, 40)
GPU = GPUS[0]
ROUNDS, QUICK_ROUNDS = 600, 60
QUICK_WORLDS = 4
NEAR = 1.01
_ROWS = 32
_CASES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((32,), (32,)),
    ((16, 16), (32,)),
    ((24, 8), (32,)),
    ((32,), (16, 16)),
    ((8, 8, 8, 8), (32,)),
)
"""Rows of chunks of VGG16 and of ResNet18 in Table 3."""


@dataclass(frozen=True, slots=True)
class GrainTask:
    """Some set of Figure 9, or Table 3 where there is none, in one world."""

    drawn: Drawn
    joint: JointSet | None
    rounds: int


def run(quick: bool, data_dir: Path, *, worlds: int | None = None) -> dict[str, Any]:
    """Judge all granularities in all worlds, print the tables, return figures. Raises BenchError for no worlds."""
    count = worlds or (QUICK_WORLDS if quick else WORLDS)
    if count < 1:
        raise BenchError(f"--worlds is {count}, expected at least 1")
    drawn = [draw(FIRST_WORLD + number) for number in range(count)]
    sets = [each for each in paper_sets(data_dir, GPU) if each.name in (SETS[:2] if quick else SETS)]
    rounds = QUICK_ROUNDS if quick else ROUNDS
    tasks = [GrainTask(each, some, rounds) for each in drawn for some in (*sets, None)]
    rows = run_all(NAME, digest_of(SOURCES, []), tasks, judge, _said)
    summary = summary_of(rows)
    _show(rows, data_dir)
    console = Console()
    console.print(", ".join(f"{name} {value:.4g}" for name, value in summary.items()))
    if quick:
        console.print(f"quick: {count} of {WORLDS} worlds, two of the sets, descents a tenth as long")
    return {"summary": summary, "rows": rows, "seeds": [each.seed for each in drawn]}


def judge(task: GrainTask) -> list[dict[str, Any]]:
    """The rows of a task."""
    return _chunked(task.drawn) if task.joint is None else _pointed(task.joint, task.drawn, task.rounds)


def _said(rows: list[dict[str, Any]]) -> str:
    best = min((row for row in rows if row["case"] != "found"), key=lambda row: float(row["ms"]))
    return f"world {rows[0]['world']} {rows[0]['set']}: best is {best['case']}"


def _pointed(joint: JointSet, drawn: Drawn, rounds: int) -> list[dict[str, Any]]:
    """A row for each number of pointers, and one for what the published search finds."""
    tables = joint.tables(drawn)
    world, evaluator = JointWorld(tables, drawn.device), JointEvaluator(tables, rules_of(drawn))
    where = {"world": drawn.seed, "set": joint.name}
    finest = max(table.size for table in tables) - 1
    rows = []
    for count in [each for each in COUNTS if each < finest] + [finest]:
        plan = evenly(evaluator, count)
        even_ms = world.run(plan).makespan_ns / 1e6
        plan = descended(evaluator, plan, rounds) if count < finest else plan
        ms = world.run(plan).makespan_ns / 1e6
        rows.append(where | {"case": "operators" if count == finest else f"{count}", "pointers": count})
        rows[-1] |= {"ms": ms, "even_ms": even_ms}
    found = replace(PUBLISHED["temporal"], rounds=4 * rounds).find(tables, rules_of(drawn)).plan
    rows.append(where | {"case": "found", "pointers": len(found.barriers), "ms": world.run(found).makespan_ns / 1e6})
    return rows


def evenly(evaluator: JointEvaluator, count: int) -> JointPlan:
    """So many barriers, each at the same part of every member's time alone."""
    at = []
    for table in evaluator.tables:
        ends = np.cumsum(table.duration_ns[:, -1])
        parts = np.arange(1, count + 1) / (count + 1)
        at.append(np.searchsorted(ends, parts * ends[-1] * (1 + 1e-12), side="right").tolist())
    return msgspec.structs.replace(evaluator.streams, barriers=tuple(zip(*at, strict=True)))


def descended(evaluator: JointEvaluator, plan: JointPlan, rounds: int) -> JointPlan:
    """The same number of barriers, each member's moved between its neighbours as long as that helps, for so many
    evaluations."""
    least, left, before = evaluator.cost(plan).makespan_ns, rounds, -1
    while before != left and left > 0:
        before, changed = left, False
        for number in range(len(plan.barriers)):
            for member in range(len(plan.members)):
                own = [0, *(barrier[member] for barrier in plan.barriers), plan.members[member].units]
                for place in range(own[number], own[number + 2] + 1):
                    if left <= 0:
                        return plan
                    barrier = plan.barriers[number]
                    moved = (*barrier[:member], place, *barrier[member + 1 :])
                    barriers = (*plan.barriers[:number], moved, *plan.barriers[number + 1 :])
                    other = msgspec.structs.replace(plan, barriers=barriers)
                    left -= 1
                    cost = evaluator.cost(other).makespan_ns
                    if cost < least:
                        least, plan, changed = cost, other, True
        if not changed:
            break
    return plan


def _chunked(drawn: Drawn) -> list[dict[str, Any]]:
    """Table 3: a row for each case."""
    tables = [model_table(model, _ROWS, GPU, drawn) for model in ("vgg16", "resnet18")]
    world, rows = JointWorld(tables, drawn.device), []
    streams = JointEvaluator(tables, rules_of(drawn)).streams
    for number, parts in enumerate(_CASES, 1):
        for kind in ("each", "run"):
            chunks = [
                chunk for member, rows_of in enumerate(parts) for chunk in _cut(tables[member], member, rows_of, kind)
            ]
            if kind == "run" and not chunks:
                continue
            plan = msgspec.structs.replace(streams, chunks=tuple(chunks))
            row = {"world": drawn.seed, "set": "Table 3", "case": f"{number} {kind}"}
            rows.append(row | {"ms": world.run(plan).makespan_ns / 1e6})
    return rows


def _cut(table: KernelTable, member: int, rows: tuple[int, ...], kind: str) -> list[Chunk]:
    """Chunks of each convolution, or of all that lies between the first and the last."""
    if len(rows) == 1:
        return []
    units = [unit for unit, name in enumerate(table.units) if name.startswith("Conv")]
    if kind == "run":
        return [Chunk(member, units[0], units[-1] + 1, rows)]
    return [Chunk(member, unit, unit + 1, rows) for unit in units]


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics: `sweet_spot_found` is a share of the sets, by medians over worlds; other shares are of cases."""
    curves: dict[tuple[int, str], dict[str, float]] = {}
    for row in rows:
        curves.setdefault((row["world"], row["set"]), {})[row["case"]] = row["ms"]
    pointed = {
        key: {case: ms / curve["0"] for case, ms in curve.items()} for key, curve in curves.items() if "0" in curve
    }
    chunked = [curve for curve in curves.values() if "1 each" in curve]
    medians = []
    for name in dict.fromkeys(name for _, name in pointed):
        mine = [curve for (_, each), curve in pointed.items() if each == name]
        medians.append({case: float(np.median([curve[case] for curve in mine])) for case in mine[0]})
    sets, cases = ([_spot(curve) for curve in some] for some in (medians, list(pointed.values())))
    made = {
        "sweet_spot_found": float(np.mean([middle and found for middle, found in sets])),
        "sweet_spot_in_the_middle": float(np.mean([middle for middle, _ in cases])),
        "sweet_spot_found_by_world": float(np.mean([found for middle, found in cases if middle] or [0.0])),
        "operators_over_streams_time": float(np.median([curve["operators"] for curve in pointed.values()])),
    }
    for case in range(2, len(_CASES) + 1):
        made[f"table_3_case_{case}_time"] = float(
            np.median([each[f"{case} each"] / each["1 each"] for each in chunked])
        )
    return made


def _spot(curve: Mapping[str, float]) -> tuple[bool, bool]:
    """Whether the best number of barriers lies between none and one behind every operator; and whether the search ends
    near the best of all."""
    inner = min(time for case, time in curve.items() if case not in ("0", "operators", "found"))
    ends = min(curve["0"], curve["operators"])
    return inner < ends, curve["found"] <= NEAR * min(inner, ends)


def _show(rows: Sequence[dict[str, Any]], data_dir: Path) -> None:
    console = Console(width=max(120, Console().width))
    for name in dict.fromkeys(row["set"] for row in rows):
        mine = [row for row in rows if row["set"] == name]
        base = {row["world"]: row["ms"] for row in mine if row["case"] in ("0", "1 each")}
        table = Table("case", "time", "10th to 90th", "best in", "paper", title=f"{name}: time over that of streams")
        best = {
            world: min((row["ms"], row["case"]) for row in mine if row["world"] == world and row["case"] != "found")[1]
            for world in base
        }
        columns = ("case", "latency_ms")
        printed = {
            row["case"]: float(row["latency_ms"])
            for row in read_rows(data_dir / "gacer" / "table3_spatial_granularity.csv", *columns)
        }
        for case in dict.fromkeys(row["case"] for row in mine):
            some = [row["ms"] / base[row["world"]] for row in mine if row["case"] == case]
            low, middle, high = np.percentile(some, (10, 50, 90))
            paper = printed[case.split()[0]] / printed["1"] if name == "Table 3" and case.endswith("each") else None
            table.add_row(
                case,
                f"{middle:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{list(best.values()).count(case)} of {len(best)}",
                "" if paper is None else f"{paper:.3f}",
            )
        console.print(table)
