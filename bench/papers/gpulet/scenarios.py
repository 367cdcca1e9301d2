"""How many of all mixes of nine models, each at one of three rates, four GPUs can serve: by planner.

The rates are 0, 100 and 200 a second, those of the paper's Figure 4; that makes 3^9 - 1 mixes. Latencies are those of
the profile, padded as the artifact pads them. A mix counts for a planner when it gives a plan for it that the
independent checker finds nothing wrong with. Planners that know no interference are checked without it; how many of
their plans hold with it stands beside. No planner adds headroom, and none is allowed to serve less than it is asked.

All planners but `ours` divide a GPU into two partitions at most, as the paper does. `ours` may use any split into the
sizes of the profile; `ours_two` is the same planner with the paper's splits. Both spend little on saving GPUs here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench._data import Headline, paper_figure
from bench._registry import BenchError
from bench.papers.gpulet._data import OURS, Files, Gpu, read_gpu
from bench.papers.gpulet._ideal import Ideal
from bench.papers.gpulet._planners import baselines
from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.planners import is_blind
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.table_costs import WithoutInterference
from cotenant.techniques.partitions.plan.types import Infeasible, Planner

NAME = "gpulet-scenarios"
DEVICES = 4
RATES = (0.0, 100.0, 200.0)
PROCESSES = 2
GOAL_ELASTIC_S = 60.0
"""Planners that know no interference."""
SAVING_S = 0.05
"""Work that ours may spend on a mix to save GPUs, once it has a plan."""
_CHUNK = 50
_QUICK_MIXES = 250
_FEWER = ("gpu-let", "Fig 15", "glet+int vs ideal", "fewer schedulable scenarios")
PAPER_LOST, PAPER_LOST_PCT = paper_figure(*_FEWER, unit="scenarios"), paper_figure(*_FEWER, unit="% of 19682")
"""Mixes that the ideal search serves and elastic partitioning with interference does not."""
HEADLINES = (
    Headline(
        "fewer mixes served than by ideal, the paper's planner",
        "elastic_int_below_ideal_pct",
        "%",
        "reconstructed latencies",
        PAPER_LOST_PCT,
    ),
    Headline(
        "mixes served by ours, two partitions a GPU",
        "ours_two",
        "%",
        "reconstructed latencies; bound: all mixes; ideal has two partitions, too, but not every plan",
        bound="scenarios",
        of="scenarios",
    ),
    Headline(
        "mixes served by ours, up to five partitions",
        "ours",
        "%",
        "reconstructed latencies; finer splits than the paper allows",
        bound="scenarios",
        of="scenarios",
    ),
)

Scenario = tuple[float, ...]


@dataclass(slots=True)
class Tally:
    """What became of some scenarios under one planner. `refuted` counts what the checker found in its plans.

    `by_mix` holds the devices of each mix in turn, 0 where there is no plan that holds.
    """

    schedulable: int = 0
    holding: int = 0
    devices: int = 0
    refuted: int = 0
    longest_ms: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    by_mix: list[int] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.schedulable += other.schedulable
        self.holding += other.holding
        self.devices += other.devices
        self.refuted += other.refuted
        self.longest_ms = max(self.longest_ms, other.longest_ms)
        self.reasons.update(other.reasons)
        self.by_mix += other.by_mix


def contenders() -> dict[str, Planner]:
    """The planners by name, in the order of the table."""
    ours = Optimal(saving_s=SAVING_S, solver=False)
    two = replace(ours, most_partitions=2, label="ours_two")
    return {planner.name: planner for planner in (*baselines(), Ideal(), two, ours)}


def run(
    quick: bool,
    data_dir: Path,
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
    rows, by_mix = [], {}
    for name in contenders():
        row, by_mix[name] = measure(name, tried, files)
        rows.append(row)
    figures = summary(rows, by_mix)
    _print(rows, figures, len(mixes), len(tried), models, chosen)
    return {"summary": figures, "rows": rows}


def measure(name: str, mixes: Sequence[Scenario], files: Files) -> tuple[dict[str, Any], list[int]]:
    """All mixes under one planner, in two processes that keep their tables in memory; a row, and the devices by mix."""
    chunks = [mixes[at : at + _CHUNK] for at in range(0, len(mixes), _CHUNK)]
    total = Tally()
    with ProcessPoolExecutor(PROCESSES, initializer=_prepare, initargs=(files,)) as pool:
        list(pool.map(_warm, range(PROCESSES)))
        began = time.perf_counter()
        for tally in track(pool.map(_tally, [name] * len(chunks), chunks), name, len(chunks)):
            total.add(tally)
        seconds = time.perf_counter() - began
    row = {
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
    return row, total.by_mix


def summary(rows: Sequence[dict[str, Any]], by_mix: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """The figures by name: mixes that can be served by planner, and means over those that both planners serve."""
    found: dict[str, float] = {row["planner"]: row["schedulable"] for row in rows}
    found["checked_violations"] = sum(row["checked_violations"] for row in rows)
    both = [(theirs, own) for theirs, own in zip(by_mix["elastic_int"], by_mix[OURS], strict=True) if theirs and own]
    if both:
        found["mean_gpus_elastic_int"] = sum(theirs for theirs, _ in both) / len(both)
        found["mean_gpus_ours"] = sum(own for _, own in both) / len(both)
    found["mixes_ours_dearer"] = sum(own > theirs for theirs, own in both)
    found["ideal_not_ours"] = sum(bool(a and not b) for a, b in zip(by_mix["ideal"], by_mix[OURS], strict=True))
    found["scenarios"] = len(by_mix[OURS])
    found["elastic_int_below_ideal_pct"] = 100 * (1 - found["elastic_int"] / max(1, found["ideal"]))
    for row in rows:
        found[f"seconds_{row['planner']}"] = row["seconds"]
    return found


_gpu: Gpu | None = None


def _prepare(files: Files) -> None:
    global _gpu
    _gpu = read_gpu(*files)


def _warm(_: int) -> None:
    """Wait until the processes are there: reading files is not planning."""
    time.sleep(0.05)


def _tally(name: str, mixes: Sequence[Scenario]) -> Tally:
    assert _gpu is not None
    planner = contenders()[name]
    inventory = [_gpu.device_of(name)] * DEVICES
    believed = WithoutInterference(_gpu.costs) if is_blind(name) else _gpu.costs
    tally = Tally()
    for mix in mixes:
        loads = [_gpu.load(model, rate) for model, rate in zip(_gpu.models, mix, strict=True) if rate]
        began = time.perf_counter()
        plan = planner.plan(loads, inventory, _gpu.costs)
        tally.longest_ms = max(tally.longest_ms, 1e3 * (time.perf_counter() - began))
        tally.by_mix.append(0)
        if isinstance(plan, Infeasible):
            tally.reasons[plan.constraint] += 1
            continue
        violations = check_plan(plan, loads, inventory, believed)
        tally.refuted += len(violations)
        if not violations:
            tally.schedulable += 1
            tally.by_mix[-1] = len(plan.devices)
            tally.devices += len(plan.devices)
            tally.holding += not is_blind(name) or not check_plan(plan, loads, inventory, _gpu.costs)
    return tally


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(each) for each in text.split(","))
    except ValueError:
        rates = ()
    if len(rates) < 2 or min(rates) < 0 or len(set(rates)) < len(rates) or not max(rates) < float("inf"):
        raise BenchError(f"--rates is {text!r}, expected different rates a second with commas between, as 0,100,200")
    return rates


def _print(
    rows: Sequence[dict[str, Any]],
    figures: Mapping[str, float],
    mixes: int,
    tried: int,
    models: int,
    rates: Sequence[float],
) -> None:
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
    gap = figures["ideal"] - figures["elastic_int"]
    console.print(
        f"ideal serves, elastic_int does not: paper {PAPER_LOST.value} ({PAPER_LOST_PCT.text}) | "
        f"here {gap:.0f} of {tried} ({100 * gap / tried:.1f} %)"
    )
    if "mean_gpus_ours" in figures:
        console.print(
            f"GPUs on average where both have a plan: elastic_int {figures['mean_gpus_elastic_int']:.2f}, "
            f"ours {figures['mean_gpus_ours']:.2f}; ours takes more in {figures['mixes_ours_dearer']:.0f} mixes"
        )
    console.print("ours may split a GPU into up to five partitions, all others into two")
    seconds = next(row["seconds"] for row in rows if row["planner"] == "elastic")
    console.print(
        f"elastic took {seconds:.1f} s in {PROCESSES} processes, checks included; goal < {GOAL_ELASTIC_S:.0f} s"
    )
    if tried < mixes:
        console.print(f"quick: {tried} of {mixes} mixes, evenly taken")
