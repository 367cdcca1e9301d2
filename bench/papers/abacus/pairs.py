"""Pairs of models on one simulated A100: overlap against fcfs, sjf and edf, weak as in Abacus (SC'21) and strong.

The device is the network of weights that the paper's authors released, with run-to-run noise of the size they report;
nothing here was measured on a GPU. The policy believes a predictor that was fitted to samples of it, never the network
itself. Queries have a random batch (4 to 32 rows) and sequence length and the paper's target for their pair.
(a) As in the paper: fcfs, sjf and edf run query by query and drop one only when it is past its target.
(b) The baselines drop by prediction too, with the same predictor. Overlap also merges queries of one tenant. That is
shown in three ways: overlap as it is against baselines that run query by query, nobody merges, everybody merges.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench._data import Headline, paper_figure
from bench.papers.abacus import predictor as fits
from bench.papers.abacus._a100 import A100, files_of, targets_ms
from bench.papers.abacus._bound import merging_gain, most_in_time, prices_ms
from bench.papers.abacus._experiment import DECISION_NS, Contender, Setting
from cotenant.core.snapshot import DropRule
from cotenant.predict.groups.grouped import GroupedPredictor
from cotenant.predict.groups.overlap_fit import fit_overlap

NAME = "abacus-pairs"
SEEDS, QUICK_SEEDS = (1, 2, 3), (1,)
COUNT, QUICK_COUNT = 2000, 600
RATE, FULL_RATE = 50.0, 100.0
"""Queries a second at which the paper looks at violations, and at throughput."""
BASELINES = ("fcfs", "sjf", "edf")
QUANTILE = 0.95
"""Of a group's latency: what the policy calls feasible."""
_BOUND_COUNT = 1000
_SAMPLES, _QUICK_SAMPLES = 42_000, 6_000
_QUICK_PAIRS = (("resnet50", "bert"), ("resnet101", "resnet152"), ("inception_v3", "vgg16"))
_T_95 = {1: math.nan, 2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
PAPER_VIOLATIONS = paper_figure("Abacus", "headline", "vs state of the art", "QoS violation reduction, average")
PAPER_THROUGHPUT = paper_figure("Abacus", "headline", "vs state of the art", "throughput gain, average")

HEADLINES = (
    Headline(
        "fewer violations at 50/s, nobody merges queries",
        "violation_reduction_strong_no_merging_pct",
        "%",
        "simulated A100; baselines drop by the same predictions",
        PAPER_VIOLATIONS,
    ),
    Headline(
        "the same, everybody merges",
        "violation_reduction_strong_all_merging_pct",
        "%",
        "simulated A100; baselines drop by the same predictions",
        PAPER_VIOLATIONS,
    ),
    Headline(
        "rate with 99 % in time over the best baseline's, nobody merges",
        "max_rate_gain_strong_no_merging",
        "x",
        "simulated A100; the paper has the gain in answers at 100/s; bound: full devices, whole queries",
        PAPER_THROUGHPUT,
        bound="capacity_gain_bound",
    ),
    Headline(
        "the same, everybody merges",
        "max_rate_gain_strong_all_merging",
        "x",
        "simulated A100; as above; bound: full batches",
        PAPER_THROUGHPUT,
        bound="capacity_gain_bound_merging",
    ),
)
_shared: dict[str, Any] = {}
"""What worker processes inherit."""


def contenders() -> dict[str, Contender]:
    """All policies by the names that rows have."""
    found = {
        "overlap": Contender("overlap", DropRule.HOPELESS, True),
        "overlap, no merging": Contender("overlap", DropRule.HOPELESS, False),
    }
    for name in BASELINES:
        found[f"{name}, drops late"] = Contender(name, DropRule.EXPIRED, False)
        found[name] = Contender(name, DropRule.HOPELESS, False)
        found[f"{name}, merging"] = Contender(name, DropRule.HOPELESS, True)
    return found


def run(
    quick: bool, data_dir: Path, predictor_file: list[str] | None = None, models: int | None = None
) -> dict[str, object]:
    """Simulate, print the tables, return figures. `predictor_file` and `models` name another world of the same form."""
    console = Console(width=170)
    world = A100(data_dir, files_of(predictor_file), models)
    seeds = QUICK_SEEDS if quick else SEEDS
    console.print("fitting the predictor to samples of the world ...")
    predictor = fitted(world, quick)
    targets = targets_ms(data_dir, "2in7")
    names = [model.name for model in world.models]
    groups = [pair for pair in combinations(names, 2) if pair in targets and (not quick or pair in _QUICK_PAIRS)]
    _shared.update(world=world, predictor=predictor, targets=targets, seeds=seeds, quick=quick)
    context = multiprocessing.get_context("fork")
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        for found in track(pool.map(_pair, groups), "pairs", len(groups), console=console):
            rows += found
    summary = _summary(rows)
    _show(console, rows, summary, groups, quick)
    return {"summary": summary, "rows": rows, "seeds": list(seeds)}


def fitted(world: A100, quick: bool) -> GroupedPredictor:
    """What a server would believe: latencies alone from a profile, groups as fitted to noisy samples, at QUANTILE."""
    samples, _ = fits.draw(world, fits.tenants_of(world), _QUICK_SAMPLES if quick else _SAMPLES, fits.SEED)
    facts = fits.facts_of(world)
    groups = fit_overlap(samples, facts, seed=fits.SEED, settings=fits.QUICK if quick else fits.BEST).at(QUANTILE)
    return GroupedPredictor({each.name: each.table for each in facts}, None, groups)


def _pair(models: tuple[str, str]) -> list[dict[str, Any]]:
    """All runs of one pair, in a process of its own."""
    quick, seeds = _shared["quick"], _shared["seeds"]
    target = _shared["targets"][models]
    setting = Setting(_shared["world"], _shared["predictor"], models, target)
    count = QUICK_COUNT if quick else COUNT
    bound: dict[float, float] = {}
    prices, capacity = prices_ms(setting.world, models)
    _, serial = prices_ms(setting.world, models, overlap=False)
    for rate in (RATE, FULL_RATE):
        arrivals = list(setting.queries(rate, min(count, _BOUND_COUNT), seeds[0]))
        bound[rate] = most_in_time(arrivals, prices)
    rows = []
    for name, contender in contenders().items():
        row: dict[str, Any] = {"pair": "+".join(models), "contender": name, "target_ms": target}
        for rate in (RATE, FULL_RATE):
            results = [setting.run(contender, rate, count, seed) for seed in seeds]
            row[f"violations_{rate:.0f}"] = [1 - result.attainment for result in results]
            row[f"goodput_{rate:.0f}"] = [result.answered / result.seconds for result in results]
            row[f"p99_over_target_{rate:.0f}"] = statistics.mean(result.p99_ms / target for result in results)
            row[f"bound_attainment_{rate:.0f}"] = bound[rate]
        if contender.drop is DropRule.HOPELESS:
            row["max_rate"] = setting.max_rate(contender, count, seeds, 1.03 if quick else 1.01)
        row["capacity_gain_bound"] = capacity / serial
        row["capacity_gain_bound_merging"] = merging_gain(setting.world, models)
        rows.append(row)
    return rows


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures over all pairs; see docs/benchmarks.md for how each is defined."""
    rates = {(row["pair"], row["contender"]): row["max_rate"] for row in rows if "max_rate" in row}
    pairs = list(dict.fromkeys(row["pair"] for row in rows))

    def gains(ours: str, suffix: str) -> list[float]:
        return [rates[pair, ours] / max(rates[pair, name + suffix] for name in BASELINES) for pair in pairs]

    weak = [_reduction(rows, "overlap", f"{name}, drops late", "violations_50") for name in BASELINES]
    strong = [_reduction(rows, "overlap", name, "violations_50") for name in BASELINES]
    alike = [_reduction(rows, "overlap, no merging", name, "violations_50") for name in BASELINES]
    merging = [_reduction(rows, "overlap", f"{name}, merging", "violations_50") for name in BASELINES]
    throughput = [_gain(rows, "overlap", f"{name}, drops late", "goodput_100") for name in BASELINES]
    found: dict[str, float] = {}
    for (
        key,
        ours,
        suffix,
    ) in (  # equal terms first: nobody merges, all do; then ours with merging against theirs without
        ("_no_merging", "overlap, no merging", ""),
        ("_all_merging", "overlap", ", merging"),
        ("", "overlap", ""),
    ):
        each = gains(ours, suffix)
        found[f"max_rate_gain_strong{key}"] = statistics.geometric_mean(each)
        found[f"worst_pair_strong{key}"] = min(each)
    found |= {
        "violation_reduction_strong_no_merging_pct": statistics.mean(mean for mean, _ in alike),
        "violation_reduction_strong_all_merging_pct": statistics.mean(mean for mean, _ in merging),
        "violation_reduction_strong_pct": statistics.mean(mean for mean, _ in strong),
        "violation_reduction_pct": statistics.mean(mean for mean, _ in weak),
        "violation_reduction_ci_pct": statistics.mean(half for _, half in weak),
        "throughput_gain_pct": statistics.mean(mean for mean, _ in throughput),
        "throughput_gain_ci_pct": statistics.mean(half for _, half in throughput),
    }
    for key in ("capacity_gain_bound", "capacity_gain_bound_merging"):
        found[key] = statistics.geometric_mean([row[key] for row in rows if row["contender"] == "overlap"])
    return found


def _paired(rows: Sequence[dict[str, Any]], name: str, key: str) -> list[float]:
    """Means over all pairs, one a seed."""
    values = [row[key] for row in rows if row["contender"] == name]
    return [statistics.mean(each) for each in zip(*values, strict=True)]


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of the 95 % confidence interval over the seeds."""
    if len(values) < 2:
        return values[0], math.nan
    half = _T_95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


def _reduction(rows: Sequence[dict[str, Any]], ours: str, theirs: str, key: str) -> tuple[float, float]:
    pairs = zip(_paired(rows, ours, key), _paired(rows, theirs, key), strict=True)
    return _interval([100 * (1 - mine / max(other, 1e-9)) for mine, other in pairs])


def _gain(rows: Sequence[dict[str, Any]], ours: str, theirs: str, key: str) -> tuple[float, float]:
    pairs = zip(_paired(rows, ours, key), _paired(rows, theirs, key), strict=True)
    return _interval([100 * (mine / max(other, 1e-9) - 1) for mine, other in pairs])


def _show(
    console: Console,
    rows: Sequence[dict[str, Any]],
    summary: dict[str, float],
    groups: Sequence[tuple[str, ...]],
    quick: bool,
) -> None:
    policies = Table(title=f"Means over {len(groups)} pairs (simulated A100, all policies with the same predictor)")
    for column in ("policy", "drop rule", "merges", "violations at 50/s", "p99 / target", "in time/s at 100/s"):
        policies.add_column(column, justify="left" if column in ("policy", "drop rule", "merges") else "right")
    for name, contender in contenders().items():
        mine = [row for row in rows if row["contender"] == name]
        policies.add_row(
            contender.policy,
            "once past its target" if contender.drop is DropRule.EXPIRED else "by prediction",
            "yes" if contender.merges else "no",
            f"{100 * statistics.mean(_paired(rows, name, 'violations_50')):.2f} %",
            f"{statistics.mean(row['p99_over_target_50'] for row in mine):.2f}",
            f"{statistics.mean(_paired(rows, name, 'goodput_100')):.1f}",
        )
    ours = [row for row in rows if row["contender"] == "overlap"]
    limits = [
        f"{100 * statistics.mean(1 - row[f'bound_attainment_{rate}'] for row in ours):.2f} %" for rate in (50, 100)
    ]
    policies.add_row("clairvoyant bound", "", "no, whole queries", f"{limits[0]} (at 100/s: {limits[1]})", "", "")
    console.print(policies)
    table = Table(title="Largest rate at which 99 % are answered in time; all drop by prediction")
    columns = (
        "pair",
        "target ms",
        "best of fcfs sjf edf",
        "overlap",
        "gain",
        "no merging",
        "gain",
        "all merging",
        "gain",
    )
    for column in (*columns, "LP bound of capacity"):
        table.add_column(column, justify="left" if column == "pair" else "right")
    rates = {(row["pair"], row["contender"]): row["max_rate"] for row in rows if "max_rate" in row}
    for row in ours:
        pair = row["pair"]
        plain = max(rates[pair, name] for name in BASELINES)
        merging = max(rates[pair, f"{name}, merging"] for name in BASELINES)
        full, single = rates[pair, "overlap"], rates[pair, "overlap, no merging"]
        figures = (plain, full, full / plain, single, single / plain, merging, full / merging)
        table.add_row(
            pair,
            f"{row['target_ms']:.0f}",
            *(f"{value:.2f}x" if value < 9 and at in (2, 4, 6) else f"{value:.1f}" for at, value in enumerate(figures)),
            f"{row['capacity_gain_bound']:.2f}x",
        )
    console.print(table)
    against = Table(title="paper | here")
    for column in ("figure", "paper", "here", "goal"):
        against.add_column(column, justify="left" if column == "figure" else "right")
    goals = {
        "violation_reduction_pct": "80",
        "throughput_gain_pct": "40",
        "violation_reduction_strong_pct": "70",
        "max_rate_gain_strong": "1.35",
        "worst_pair_strong": "0.98",
    }
    paper = {"violation_reduction_pct": PAPER_VIOLATIONS.value, "throughput_gain_pct": PAPER_THROUGHPUT.value}
    for key, value in summary.items():
        against.add_row(key, paper.get(key, "-"), f"{value:.3f}", goals.get(key, ""))
    console.print(against)
    console.print(
        f"decisions are charged {DECISION_NS / 1000:.0f} us; groups are called feasible at the {QUANTILE:.0%} quantile"
    )
    if quick:
        console.print("quick: three pairs, one seed, short runs, fewer samples for the predictor")
