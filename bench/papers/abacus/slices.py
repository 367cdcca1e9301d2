"""Four models on slices of one A100 (MIG): each alone, pairs on halves, all on one; section 7.5 of Abacus (SC'21).

Four 1g.5gb slices, two of 2g.10gb or one of 4g.20gb have as many SMs and as much memory. Networks were released for
pairs on 2g.10gb and for groups of four on 4g.20gb; all else lies between bounds (see `_slices`). So worlds are drawn
from between the bounds and at their ends. Figures are medians over worlds, with their range. Nothing here was measured.
(a) As in the paper, with every policy: violations at 50 queries/s, answers in time at 100/s, the largest rate at 99 %.
(b) Our own planner plans each division from predictors fitted to samples of the world. It chooses which tenants share
which slice, and which of them start together. Plans are of rows that come one by one; a query of 32 of them is most of
its target on a small slice. So each plan is simulated with the predicted latencies, as `cotenant simulate` does before
a plan is used. The division that bears the largest rate there is the one to use. The choice is right where no division
serves 5 % more in the world, planned by us or as in the paper, by overlap. The rates of the plans alone are shown
beside.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench._campaign import digest_of, run_all
from bench._weights import FOLDER, MIG2G, MIG4G, PAIRS, find_weights
from bench.papers import abacus
from bench.papers.abacus._a100 import FOUR, targets_ms
from bench.papers.abacus._comparison import BASELINES, FULL_RATE, RATE, contenders, fitted
from bench.papers.abacus._divisions import Divided, World, as_planned, part_of, planned
from bench.papers.abacus._experiment import Contender
from bench.papers.abacus._slices import SIZES, TARGETS, Slice
from cotenant import core
from cotenant.core.predictor import GroupPredictor
from cotenant.core.snapshot import DropRule
from cotenant.policies import ordered
from cotenant.techniques.overlap import policy as overlap
from cotenant.techniques.overlap import predict as groups
from cotenant.techniques.partitions import plan as planning
from cotenant.techniques.partitions.plan import search
from cotenant.techniques.partitions.plan.types import Plan

NAME = "abacus-slices"
SEEDS, QUICK_SEEDS = (1, 2), (1,)
COUNT, QUICK_COUNT = 1000, 240
STEP, QUICK_STEP = 1.02, 1.06
DRAWN = 3
"""Worlds that are drawn, besides the ends."""
TIED = 1.05
"""Simulated rates within this factor of each other count as equal."""
NAMES = {1: "each alone", 2: "pairs", 4: "all on one"}
MIXES: dict[str, tuple[float, ...]] = {"even": (0.25,) * 4} | {
    f"more {name}": tuple(0.55 if each == name else 0.15 for each in FOUR) for name in FOUR
}
"""Shares of the queries by model, in the order of FOUR."""
_PAIRINGS = ((0, 1), (0, 2), (0, 3))
_QUICK_RATED = ("overlap", "overlap, no merging", "edf")
_BELIEVED_SEED = 100
"""Of the first arrivals with which plans are tried on predicted latencies: others than those of the world."""
_SOURCES = (abacus, core, planning, search, ordered, overlap, groups)
_shared: dict[str, Any] = {}


def ends_and_draws(quick: bool) -> list[tuple[float, float]]:
    """Where between the bounds: the middle alone in the quick form; else all ends, and some that are drawn."""
    random = Random(SEEDS[0])
    drawn = [(random.random(), random.random()) for _ in range(DRAWN)]
    return [(0.5, 0.5)] if quick else [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), *drawn]


def divisions(world: World, weights: Sequence[float], targets: Mapping[int, float], quick: bool) -> dict[str, Divided]:
    """As in the paper: each model on a slice of its own, the three ways to pair them, all on one."""

    def divided(size: int, sets: Sequence[Sequence[int]]) -> Divided:
        return Divided(tuple(part_of(world, size, {FOUR[at]: weights[at] for at in each}, targets) for each in sets))

    found = {NAMES[1]: divided(1, [[at] for at in range(4)])}
    for first in _PAIRINGS[: 1 if quick else 3]:
        sets = [first, [at for at in range(4) if at not in first]]
        found[f"{NAMES[2]} {' | '.join('+'.join(FOUR[at] for at in each) for each in sets)}"] = divided(2, sets)
    return found | {NAMES[4]: divided(4, [range(4)])}


def size_of(division: str) -> int:
    """The size of the slices of a division, by its name."""
    return next(size for size, name in NAMES.items() if name in division)


def rows_as_in_the_paper(world: World, mix: str, targets: Mapping[int, float], quick: bool) -> list[dict[str, Any]]:
    """A row for each division as in the paper and policy, of one world and mix."""
    seeds, count, step = _runs(quick)
    rows = []
    for name, divided in divisions(world, MIXES[mix], targets, quick).items():
        for policy, contender in contenders().items():
            is_strong = contender.drop is DropRule.HOPELESS
            if mix != "even" and not (policy == "overlap" or (is_strong and name == NAMES[1])):
                continue
            row: dict[str, Any] = {**_about(world, mix), "division": name, "contender": policy}
            if mix == "even":
                row |= _at_two_loads(divided, contender, count, seeds, targets[size_of(name)])
            if is_strong and (not quick or policy in _QUICK_RATED):
                row["max_rate"] = divided.max_rate(contender, count, seeds, step)
                row["capacity_per_s"] = divided.capacity()
            rows.append(row)
    return rows


def rows_by_plan(world: World, mix: str, targets: Mapping[int, float], quick: bool) -> list[dict[str, Any]]:
    """A row for each division by our planner, served by overlap, of one world and mix."""
    (seeds, count, step), ours = _runs(quick), contenders()["overlap"]
    rows = []
    for size in SIZES:
        rate, plan = planned(world, size, MIXES[mix], targets[size], step)
        row = {**_about(world, mix), "division": f"planned {NAMES[size]}", "contender": "overlap", "planned_rate": rate}
        if plan is not None:
            made = as_planned(world, size, plan, targets)
            tried = as_planned(world, size, plan, targets, is_believed=True)
            row["max_rate"] = made.max_rate(ours, count, seeds, step)
            row["believed_rate"] = tried.max_rate(ours, count, [_BELIEVED_SEED + seed for seed in seeds], step)
            row["tenants"] = " | ".join("+".join(setting.models) for setting, _ in made.parts)
            row["groups"] = _groups(plan)
        rows.append(row)
    return rows


def _runs(quick: bool) -> tuple[tuple[int, ...], int, float]:
    """Seeds, queries of a run, and the factor to which largest rates are found."""
    return (QUICK_SEEDS, QUICK_COUNT, QUICK_STEP) if quick else (SEEDS, COUNT, STEP)


def _about(world: World, mix: str) -> dict[str, Any]:
    return {"alone_at": world.alone_at, "few_at": world.few_at, "mix": mix}


def _at_two_loads(
    divided: Divided, contender: Contender, count: int, seeds: Sequence[int], target_ms: float
) -> dict[str, float]:
    calm = [divided.run(contender, RATE, count, seed) for seed in seeds]
    full = [divided.run(contender, FULL_RATE, count, seed) for seed in seeds]
    results = [result for run in calm for result in run]
    in_time = sum(result.answered for result in results) / sum(result.offered for result in results)
    return {
        "violations_50": 1 - in_time,
        # Of the slice with the longest; a slice may have no answers.
        "p99_over_target_50": max(result.p99_ms for result in results if not math.isnan(result.p99_ms)) / target_ms,
        "goodput_100": statistics.mean(sum(each.answered / each.seconds for each in run) for run in full),
    }


def _groups(plan: Plan) -> str:
    rounds = [partition.round for device in plan.devices for partition in device.partitions]
    steps = [step for each in rounds for step in each.steps if len(step) > 1]
    return ", ".join("+".join(f"{slot.tenant} {slot.batch}" for slot in step) for step in steps)


class Task(NamedTuple):
    """One unit of simulation: a world, by where it lies between the bounds, and a mix of models."""

    place: tuple[float, float]
    mix: str
    by_plan: bool
    quick: bool


class Verdict(NamedTuple):
    """The predictions for one world and mix, and the simulations of the world; rates by size of slice."""

    planned: dict[int, float]
    """The largest rate for which there is a plan."""
    believed: dict[int, float]
    """The largest rate that the plan bears on predicted latencies."""
    simulated: dict[int, float]
    """The most that overlap serves on the division, planned by us or as in the paper."""
    ours: float
    """What overlap serves on the division to use, as planned."""
    isolated: float
    """The most that any policy serves with each model alone on a slice of its own."""

    @property
    def picked(self) -> int:
        """The slices to use."""
        return max(SIZES, key=lambda size: self.believed[size])

    @property
    def by_plan(self) -> int:
        """What the rates of the plans alone would say."""
        return max(SIZES, key=lambda size: self.planned[size])

    def is_right(self, size: int) -> bool:
        """Whether no other division serves more than `TIED` times as much."""
        return self.simulated[size] * TIED >= max(self.simulated.values())


def verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[float, float, str], Verdict]:
    """By world and mix."""
    found = {}
    for key in dict.fromkeys((row["alone_at"], row["few_at"], row["mix"]) for row in rows):
        mine = [row for row in rows if (row["alone_at"], row["few_at"], row["mix"]) == key and "max_rate" in row]
        plans = {size_of(row["division"]): row for row in mine if "planned_rate" in row}
        served = [(size_of(row["division"]), row["max_rate"]) for row in mine if row["contender"] == "overlap"]
        found[key] = verdict = Verdict(
            {size: plans[size]["planned_rate"] if size in plans else 0.0 for size in SIZES},
            {size: plans[size]["believed_rate"] if size in plans else 0.0 for size in SIZES},
            {size: max(rate for of, rate in served if of == size) for size in SIZES},
            0.0,
            max(row["max_rate"] for row in mine if row["division"] == NAMES[1]),
        )
        if verdict.picked in plans:
            found[key] = verdict._replace(ours=plans[verdict.picked]["max_rate"])
    return found


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Simulate, plan, print the tables, return figures."""
    console = Console(width=170)
    console.print("fitting predictors to samples of the slices ...")
    targets = {size: next(iter(targets_ms(data_dir, name).values())) for size, name in TARGETS.items()}
    places = ends_and_draws(quick)
    slices = {
        (size, at): Slice(data_dir, size, at)
        for size, ats in ((1, {a for a, _ in places}), (2, {0.5}), (4, {b for _, b in places}))
        for at in sorted(ats)
    }
    mixes = ["even"] if quick else list(MIXES)
    context = multiprocessing.get_context("fork")
    _shared.update(slices=slices, targets=targets, quick=quick)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        _shared["believed"] = dict(zip(slices, pool.map(_believed, slices), strict=True))
    tasks = [Task(place, mix, by_plan, quick) for mix in mixes for place in places for by_plan in (False, True)]
    files = [
        *sorted((data_dir / FOLDER).glob("*.csv")),
        *(find_weights(data_dir, each) for each in (PAIRS, MIG2G, MIG4G)),
    ]
    rows = run_all(NAME, digest_of(_SOURCES, files), tasks, _rows_of, _said)
    summary = _summary(rows)
    _show(console, rows, summary, quick)
    return {"summary": summary, "rows": rows, "seeds": list(QUICK_SEEDS if quick else SEEDS)}


def _believed(which: tuple[int, float]) -> GroupPredictor:
    return fitted(_shared["slices"][which], _shared["quick"], FOUR, which[0])


def _rows_of(task: Task) -> list[dict[str, Any]]:
    (alone_at, few_at), mix, by_plan, quick = task
    keys = {1: (1, alone_at), 2: (2, 0.5), 4: (4, few_at)}
    slices, believed = ({size: _shared[of][key] for size, key in keys.items()} for of in ("slices", "believed"))
    make = rows_by_plan if by_plan else rows_as_in_the_paper
    return make(World(alone_at, few_at, slices, believed), mix, _shared["targets"], quick)


def _said(rows: Sequence[Mapping[str, Any]]) -> str:
    rates = [row["max_rate"] for row in rows if "max_rate" in row]
    first, how = rows[0], "planned" if "planned_rate" in rows[0] else "as in the paper"
    place = f"{first['alone_at']:.2f}, {first['few_at']:.2f}"
    return f"world {place}, {first['mix']}, {how}: up to {max(rates, default=0):.0f}/s"


def _median(rows: Sequence[Mapping[str, Any]], size: int, contender: str, key: str) -> float:
    """Over worlds and pairings, of the even mix, of a division as in the paper; NaN where nothing was run."""
    found = [
        row[key]
        for row in rows
        if row["contender"] == contender and row["division"].startswith(NAMES[size]) and key in row
        if row["mix"] == "even"
    ]
    return statistics.median(found) if found else math.nan


def _best(rows: Sequence[Mapping[str, Any]], size: int, suffix: str) -> float:
    rates = [_median(rows, size, name + suffix, "max_rate") for name in BASELINES]
    return max((rate for rate in rates if not math.isnan(rate)), default=math.nan)


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures over all worlds; see docs/benchmarks.md for how each is defined."""
    judged = verdicts(rows)
    over = [each.ours / each.isolated for each in judged.values()]
    even = [each.ours / each.isolated for (_, _, mix), each in judged.items() if mix == "even"]
    found = {
        "planner_picks_best_pct": 100 * statistics.mean(each.is_right(each.picked) for each in judged.values()),
        "plan_rates_pick_best_pct": 100 * statistics.mean(each.is_right(each.by_plan) for each in judged.values()),
        "ours_over_best_isolated": statistics.median(over),
        "ours_over_best_isolated_least": min(over),
        "ours_over_best_isolated_most": max(over),
        "ours_over_best_isolated_even": statistics.median(even),
        "picked_over_best": min(each.simulated[each.picked] / max(each.simulated.values()) for each in judged.values()),
    }
    for size, name in NAMES.items():
        key = name.replace(" ", "_")
        ours, alike = (_median(rows, size, policy, "max_rate") for policy in ("overlap", "overlap, no merging"))
        bounds = _median(rows, size, "overlap, no merging", "capacity_per_s")
        found |= {
            f"max_rate_{key}": ours,
            f"max_rate_gain_{key}_no_merging": alike / _best(rows, size, ""),
            f"max_rate_gain_{key}_all_merging": ours / _best(rows, size, ", merging"),
            f"of_capacity_bound_{key}": alike / bounds,
            f"p99_over_target_{key}": _median(rows, size, "overlap", "p99_over_target_50"),
        }
    return found


def _show(console: Console, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, float], quick: bool) -> None:
    table = Table(title="Even shares of four models: medians over worlds (and pairings); the same predictors for all")
    table.add_column("policy")
    for what in ("late at 50/s", "p99 / target", "in time/s at 100/s", "largest rate"):
        for name in NAMES.values():
            table.add_column(f"{what}: {name}", justify="right")
    for policy in contenders():
        figures = []
        for key, form in (
            ("violations_50", "{:.1%}"),
            ("p99_over_target_50", "{:.2f}"),
            ("goodput_100", "{:.1f}"),
            ("max_rate", "{:.1f}"),
        ):
            for size in SIZES:
                value = _median(rows, size, policy, key)
                figures.append("-" if math.isnan(value) else form.format(value))
        table.add_row(policy, *figures)
    console.print(table)
    judged = Table(
        title="Largest rates of divisions by our planner (each alone / pairs / all on one): by the plan, as "
        "predicted, and in the world (overlap, all merge)"
    )
    for column in ("1g between", "few on 4g between", "mix", "plan", "believed", "world", "by plan", "to use", "right"):
        judged.add_column(column, justify="right" if "between" in column else "left")
    for column in ("ours", "best alone"):
        judged.add_column(column, justify="right")
    for (alone_at, few_at, mix), each in verdicts(rows).items():
        judged.add_row(
            *(f"{alone_at:.2f}", f"{few_at:.2f}", mix),
            *(
                " / ".join(f"{rates[size]:.0f}" for size in SIZES)
                for rates in (each.planned, each.believed, each.simulated)
            ),
            *(NAMES[each.by_plan], NAMES[each.picked], "yes" if each.is_right(each.picked) else "no"),
            *(f"{each.ours:.1f}", f"{each.isolated:.1f}"),
        )
    console.print(judged)
    for row in rows:
        if row.get("planned_rate") and row["mix"] == "even":
            console.print(f"{row['division']}: {row['tenants']}; start together: {row['groups'] or 'none'}")
    for key, value in summary.items():
        console.print(f"{key} {value:.3f}")
    console.print(
        "paper: on 1g.5gb slices the 99 % latency is far beyond the target; pairs on halves do as all on one do"
    )
    if quick:
        console.print("quick: one world, even shares, one way to pair, one seed, short runs, rates of four policies")
