"""Overlap against fcfs, sjf and edf, weak as in Abacus (SC'21) and strong, for sets of models that share one device.

Every set is a task for a process of its own, with all policies at the paper's two loads. It also has the largest rate
at which 99 % are answered in time, beside bounds that no schedule can beat.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.papers.abacus import predictor as fits
from bench.papers.abacus._a100 import A100
from bench.papers.abacus._bound import merging_gain, most_in_time, prices_ms
from bench.papers.abacus._experiment import Contender, Setting
from cotenant.core.predictor import GroupPredictor
from cotenant.core.snapshot import DropRule
from cotenant.predict.grouped import GroupedPredictor
from cotenant.techniques.overlap.group_samples import GroupSample
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_features import TenantFacts
from cotenant.techniques.overlap.predict.overlap_fit import fit_overlap

SEEDS, QUICK_SEEDS = (1, 2, 3), (1,)
COUNT, QUICK_COUNT = 2000, 600
RATE, FULL_RATE = 50.0, 100.0
"""Queries a second at which the paper looks at violations, and at throughput."""
BASELINES = ("fcfs", "sjf", "edf")
TERMS = (("_no_merging", "overlap, no merging", ""), ("_all_merging", "overlap", ", merging"), ("", "overlap", ""))
"""Ours and the ending of the baselines' names: on equal terms first; then ours with merging against theirs without."""
QUANTILE = 0.95
"""Of a group's latency: what the policy calls feasible."""
SAMPLES, QUICK_SAMPLES = 42_000, 6_000
_BOUND_COUNT = 1000
_T_95 = {1: math.nan, 2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
Rows = Sequence[Mapping[str, Any]]
_shared: list[Comparison] = []
"""What worker processes inherit."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The world and the belief in it, the targets by set of models, and how long every run is."""

    world: A100
    predictor: GroupPredictor
    targets: Mapping[tuple[str, ...], float]
    quick: bool

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of arrivals and noise."""
        return QUICK_SEEDS if self.quick else SEEDS

    def run(self, sets: Sequence[tuple[str, ...]], console: Console) -> list[dict[str, Any]]:
        """A row for every set and contender."""
        rows: list[dict[str, Any]] = []
        _shared[:] = [self]
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
            for found in track(pool.map(_rows_of, sets), "sets of models", len(sets), console=console):
                rows += found
        return rows

    def rows_of(self, models: tuple[str, ...]) -> list[dict[str, Any]]:
        """All runs of one set of models."""
        target = self.targets[models]
        setting = Setting(self.world, self.predictor, models, target)
        count = QUICK_COUNT if self.quick else COUNT
        prices, capacity = prices_ms(self.world, models)
        _, serial = prices_ms(self.world, models, overlap=False)
        bound = {
            rate: most_in_time(list(setting.queries(rate, min(count, _BOUND_COUNT), self.seeds[0])), prices)
            for rate in (RATE, FULL_RATE)
        }
        capacities = {
            "capacity_per_s": capacity,
            "capacity_gain_bound": capacity / serial,
            "capacity_gain_bound_merging": merging_gain(self.world, models),
        }
        rows = []
        for name, contender in contenders().items():
            row: dict[str, Any] = {"models": "+".join(models), "contender": name, "target_ms": target}
            for rate in (RATE, FULL_RATE):
                results = [setting.run(contender, rate, count, seed) for seed in self.seeds]
                row[f"violations_{rate:.0f}"] = [1 - result.attainment for result in results]
                row[f"goodput_{rate:.0f}"] = [result.answered / result.seconds for result in results]
                row[f"p99_over_target_{rate:.0f}"] = statistics.mean(result.p99_ms / target for result in results)
                row[f"bound_attainment_{rate:.0f}"] = bound[rate]
            if contender.drop is DropRule.HOPELESS:
                row["max_rate"] = setting.max_rate(contender, count, self.seeds, 1.03 if self.quick else 1.01)
            rows.append(row | capacities)
        return rows


def _rows_of(models: tuple[str, ...]) -> list[dict[str, Any]]:
    return _shared[0].rows_of(models)


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


def fitted(world: A100, quick: bool, models: Sequence[str] | None = None, most: int = 2) -> GroupedPredictor:
    """What a server would believe of these models (default: all), in groups of at most `most`.

    Latencies alone are those of a profile, groups are as fitted to noisy samples, at QUANTILE.
    """
    tenants, facts = fits.tenants_of(world, models), fits.facts_of(world, models, most)
    samples, _ = fits.draw(world, tenants, QUICK_SAMPLES if quick else SAMPLES, fits.SEED, most)
    found = fit(samples, facts, quick).at(QUANTILE)
    return GroupedPredictor({each.name: each.table for each in facts}, None, found)


def fit(samples: Sequence[GroupSample], facts: Sequence[TenantFacts], quick: bool) -> OverlapPredictor:
    """Ours, with the settings that fit this world; on one thread, as the matrices are too small for more."""
    from threadpoolctl import threadpool_limits  # of scikit-learn, which is imported only where it is needed, too

    with threadpool_limits(1):
        return fit_overlap(samples, facts, seed=fits.SEED, settings=fits.QUICK if quick else fits.BEST)


def max_rate_gains(rows: Rows, ours: str, suffix: str) -> list[float]:
    """By set of models: the largest rate of ours over the best baseline's of those with this suffix to their names."""
    rates = {(row["models"], row["contender"]): row["max_rate"] for row in rows if "max_rate" in row}
    sets = dict.fromkeys(row["models"] for row in rows)
    return [rates[each, ours] / max(rates[each, name + suffix] for name in BASELINES) for each in sets]


def reductions(rows: Rows, ours: str, suffix: str, key: str) -> list[tuple[float, float]]:
    """By how many per cent ours has less than each baseline, with half of the 95 % interval."""
    return _compared(rows, ours, suffix, key, lambda mine, other: 100 * (1 - mine / other))


def gains(rows: Rows, ours: str, suffix: str, key: str) -> list[tuple[float, float]]:
    """By how many per cent ours has more; see `reductions`."""
    return _compared(rows, ours, suffix, key, lambda mine, other: 100 * (mine / other - 1))


def mean_of_each(figures: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Over the baselines: mean of the means, and of the halves of the intervals."""
    means, halves = zip(*figures, strict=True)
    return statistics.mean(means), statistics.mean(halves)


def mean_of(rows: Rows, name: str, key: str) -> float:
    """Mean of a contender over all sets and seeds."""
    return statistics.mean(_by_seed(rows, name, key))


def _compared(
    rows: Rows, ours: str, suffix: str, key: str, figure: Callable[[float, float], float]
) -> list[tuple[float, float]]:
    mine = _by_seed(rows, ours, key)
    found = []
    for name in BASELINES:
        theirs = _by_seed(rows, name + suffix, key)
        found.append(_interval([figure(one, max(other, 1e-9)) for one, other in zip(mine, theirs, strict=True)]))
    return found


def _by_seed(rows: Rows, name: str, key: str) -> list[float]:
    """Means over all sets, one a seed."""
    values = [row[key] for row in rows if row["contender"] == name]
    return [statistics.mean(each) for each in zip(*values, strict=True)]


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of the 95 % confidence interval over the seeds."""
    if len(values) < 2:
        return values[0], math.nan
    half = _T_95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


def show_policies(console: Console, rows: Rows, of: str) -> None:
    """A line for every policy, means over all sets, beside the bound."""
    policies = Table(title=f"Means over {of} (simulated A100, all policies with the same predictor)")
    for column in ("policy", "drop rule", "merges", "violations at 50/s", "p99 / target", "in time/s at 100/s"):
        policies.add_column(column, justify="left" if column in ("policy", "drop rule", "merges") else "right")
    for name, contender in contenders().items():
        mine = [row for row in rows if row["contender"] == name]
        policies.add_row(
            contender.policy,
            "once past its target" if contender.drop is DropRule.EXPIRED else "by prediction",
            "yes" if contender.merges else "no",
            f"{100 * mean_of(rows, name, 'violations_50'):.2f} %",
            f"{statistics.mean(row['p99_over_target_50'] for row in mine):.2f}",
            f"{mean_of(rows, name, 'goodput_100'):.1f}",
        )
    ours = [row for row in rows if row["contender"] == "overlap"]
    limits = [
        f"{100 * statistics.mean(1 - row[f'bound_attainment_{rate}'] for row in ours):.2f} %" for rate in (50, 100)
    ]
    policies.add_row("clairvoyant bound", "", "no, whole queries", f"{limits[0]} (at 100/s: {limits[1]})", "", "")
    console.print(policies)


def show_rates(console: Console, rows: Rows) -> None:
    """A line for every set: largest rates of ours and of the best baseline, and the bounds."""
    table = Table(title="Largest rate at which 99 % are answered in time; all drop by prediction")
    columns = ("models", "target ms", "best of fcfs sjf edf", "overlap", "gain", "no merging", "gain", "all merging")
    for column in (*columns, "gain", "bounds: capacity/s", "gain", "gain, merging"):
        table.add_column(column, justify="left" if column == "models" else "right")
    rates = {(row["models"], row["contender"]): row["max_rate"] for row in rows if "max_rate" in row}
    for row in (row for row in rows if row["contender"] == "overlap"):
        models = row["models"]
        plain = max(rates[models, name] for name in BASELINES)
        merging = max(rates[models, f"{name}, merging"] for name in BASELINES)
        full, single = rates[models, "overlap"], rates[models, "overlap, no merging"]
        table.add_row(
            models,
            f"{row['target_ms']:.0f}",
            *(f"{plain:.1f}", f"{full:.1f}", f"{full / plain:.2f}x", f"{single:.1f}", f"{single / plain:.2f}x"),
            *(f"{merging:.1f}", f"{full / merging:.2f}x", f"{row['capacity_per_s']:.1f}"),
            *(f"{row[key]:.2f}x" for key in ("capacity_gain_bound", "capacity_gain_bound_merging")),
        )
    console.print(table)
