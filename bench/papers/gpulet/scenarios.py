"""How many of all mixes of nine models, each at one of three rates, four GPUs can serve: by planner.

The rates are 0, 100 and 200 a second, those of the paper's Figure 4; that makes 3^9 - 1 mixes. Latencies are those of
the profile, padded as the artifact pads them. A mix counts for a planner when it gives a plan for it that the
independent checker finds nothing wrong with. Planners that know no interference are checked without it; how many of
their plans hold with it stands beside. No planner adds headroom, and none is allowed to serve less than it is asked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench._registry import BenchError
from bench.papers.gpulet._data import Gpu, baselines, read_gpu
from cotenant.plan.check import check_plan
from cotenant.plan.tables import WithoutInterference
from cotenant.plan.types import Infeasible, Planner

NAME = "gpulet-scenarios"
DEVICES = 4
RATES = (0.0, 100.0, 200.0)
PROCESSES = 2
GOAL_ELASTIC_S = 60.0
BLIND = ("sbp", "greedy", "elastic")
"""Planners that know no interference."""
_CHUNK = 200
_QUICK_MIXES = 500
_PAPER_SCENARIOS = 19_682
_PAPER_LOST = 520
"""Mixes that the ideal search serves and elastic partitioning with interference does not: Figure 15."""

Scenario = tuple[float, ...]


@dataclass(slots=True)
class Tally:
    """What became of some scenarios under one planner. `refuted` counts what the checker found in its plans."""

    schedulable: int = 0
    holding: int = 0
    devices: int = 0
    refuted: int = 0
    longest_ms: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.schedulable += other.schedulable
        self.holding += other.holding
        self.devices += other.devices
        self.refuted += other.refuted
        self.longest_ms = max(self.longest_ms, other.longest_ms)
        self.reasons.update(other.reasons)


def contenders() -> dict[str, Planner]:
    """The planners by name, in the order of the table."""
    return {planner.name: planner for planner in baselines()}


def run(
    quick: bool,
    data_dir: Path | None,
    profile: Path | None = None,
    util: Path | None = None,
    constants: Path | None = None,
    rates: str | None = None,
) -> dict[str, Any]:
    """Count, print the table, return figures. `rates` are three or so rates with commas between, 0 for absent."""
    files = (data_dir, profile, util, constants)
    chosen = RATES if rates is None else _rates(rates)
    models = len(read_gpu(*files).models)
    mixes = [mix for mix in product(chosen, repeat=models) if any(mix)]
    tried = mixes[:: max(1, len(mixes) // _QUICK_MIXES)] if quick else mixes
    rows = [measure(name, tried, files) for name in contenders()]
    _print(rows, len(mixes), len(tried), models, chosen)
    return {"summary": summary(rows, len(tried)), "rows": rows}


def measure(name: str, mixes: Sequence[Scenario], files: Sequence[Path | None]) -> dict[str, Any]:
    """All mixes under one planner, in two processes whose tables stay in memory."""
    chunks = [mixes[at : at + _CHUNK] for at in range(0, len(mixes), _CHUNK)]
    total = Tally()
    with ProcessPoolExecutor(PROCESSES, initializer=_prepare, initargs=(files,)) as pool:
        list(pool.map(_warm, range(PROCESSES)))
        began = time.perf_counter()
        for tally in pool.map(_tally, [name] * len(chunks), chunks):
            total.add(tally)
        seconds = time.perf_counter() - began
    return {
        "planner": name,
        "schedulable": total.schedulable,
        "schedulable_pct": 100 * total.schedulable / len(mixes),
        "holding_beside_neighbours": total.holding,
        "mean_devices": total.devices / max(1, total.schedulable),
        "checked_violations": total.refuted,
        "seconds": seconds,
        "longest_ms": total.longest_ms,
        "reasons": dict(sorted(total.reasons.items())),
    }


def summary(rows: Sequence[dict[str, Any]], tried: int) -> dict[str, float]:
    """The figures by name."""
    found: dict[str, float] = {"scenarios": tried, "checked_violations": sum(row["checked_violations"] for row in rows)}
    for row in rows:
        name = row["planner"]
        found[f"schedulable_{name}"] = row["schedulable"]
        found[f"mean_devices_{name}"] = row["mean_devices"]
        found[f"{name}_seconds"] = row["seconds"]
    if "schedulable_ideal" in found:
        found["elastic_int_below_ideal_pct"] = 100 * (1 - found["schedulable_elastic_int"] / found["schedulable_ideal"])
    return found


_gpu: Gpu | None = None


def _prepare(files: Sequence[Path | None]) -> None:
    global _gpu
    _gpu = read_gpu(*files)


def _warm(_: int) -> None:
    """Wait until the processes are there: reading files is not planning."""
    time.sleep(0.05)


def _tally(name: str, mixes: Sequence[Scenario]) -> Tally:
    assert _gpu is not None
    planner = contenders()[name]
    inventory = [_gpu.device] * DEVICES
    believed = WithoutInterference(_gpu.costs) if name in BLIND else _gpu.costs
    tally = Tally()
    for mix in mixes:
        loads = [_gpu.load(model, rate) for model, rate in zip(_gpu.models, mix, strict=True) if rate]
        began = time.perf_counter()
        plan = planner.plan(loads, inventory, _gpu.costs)
        tally.longest_ms = max(tally.longest_ms, 1e3 * (time.perf_counter() - began))
        if isinstance(plan, Infeasible):
            tally.reasons[plan.constraint] += 1
            continue
        violations = check_plan(plan, loads, inventory, believed)
        tally.refuted += len(violations)
        if not violations:
            tally.schedulable += 1
            tally.devices += len(plan.devices)
            tally.holding += name not in BLIND or not check_plan(plan, loads, inventory, _gpu.costs)
    return tally


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(each) for each in text.split(","))
    except ValueError:
        rates = ()
    if len(rates) < 2 or min(rates) < 0 or len(set(rates)) < len(rates) or not max(rates) < float("inf"):
        raise BenchError(f"--rates is {text!r}, expected different rates a second with commas between, as 0,100,200")
    return rates


def _print(rows: Sequence[dict[str, Any]], mixes: int, tried: int, models: int, rates: Sequence[float]) -> None:
    console = Console()
    shown = ", ".join(f"{rate:g}" for rate in rates)
    table = Table(title=f"{tried} of {mixes} mixes: {models} models at {shown} a second each, {DEVICES} GPUs")
    heads = (
        "planner",
        "schedulable",
        "%",
        "hold beside neighbours",
        "mean GPUs",
        "refuted",
        "s",
        "longest ms",
        "why not",
    )
    for head in heads:
        table.add_column(head, justify="left" if head in ("planner", "why not") else "right")
    for row in rows:
        table.add_row(
            row["planner"],
            str(row["schedulable"]),
            f"{row['schedulable_pct']:.1f}",
            str(row["holding_beside_neighbours"]),
            f"{row['mean_devices']:.2f}",
            str(row["checked_violations"]),
            f"{row['seconds']:.1f}",
            f"{row['longest_ms']:.0f}",
            ", ".join(f"{reason} {count}" for reason, count in row["reasons"].items()),
        )
    console.print(table)
    known = {row["planner"]: row["schedulable"] for row in rows}
    lost = _PAPER_LOST / _PAPER_SCENARIOS
    here = "-"
    if "ideal" in known:
        gap = known["ideal"] - known["elastic_int"]
        here = f"{gap} of {tried} ({100 * gap / tried:.1f} %)"
    paper = f"{_PAPER_LOST} of {_PAPER_SCENARIOS} ({100 * lost:.1f} %)"
    console.print(f"ideal serves, elastic_int does not: paper {paper} | here {here}")
    seconds = next(row["seconds"] for row in rows if row["planner"] == "elastic")
    console.print(
        f"elastic took {seconds:.1f} s in {PROCESSES} processes, checks included; goal < {GOAL_ELASTIC_S:.0f} s"
    )
    if tried < mixes:
        console.print(f"quick: {tried} of {mixes} mixes, evenly taken")
