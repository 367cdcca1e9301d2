"""Pairs of models on one simulated A100: overlap against fcfs, sjf and edf, weak as in Abacus (SC'21) and strong.

The device is the network of weights that the paper's authors released, with run-to-run noise of the size they report.
Nothing here was measured on a GPU. The policy predicts by a predictor that was fitted to samples of it, never by the
network itself. Queries have a random batch (4 to 32 rows) and sequence length and the paper's target for their pair.
(a) As in the paper: fcfs, sjf and edf run query by query and drop one only when it is past its target.
(b) The baselines drop by prediction too, with the same predictor. Overlap also merges queries of one tenant. That is
shown in three ways: overlap as it is against baselines that run query by query, without merging, all merge.
"""

from __future__ import annotations

import statistics
from itertools import combinations
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench._data import Headline, paper_figure
from bench.papers.abacus._a100 import A100, files_of, targets_ms
from bench.papers.abacus._comparison import (
    QUANTILE,
    TERMS,
    Comparison,
    Rows,
    fitted,
    gains,
    max_rate_gains,
    mean_of_each,
    reductions,
    show_policies,
    show_rates,
)
from bench.papers.abacus._experiment import DECISION_NS

NAME = "abacus-pairs"
_QUICK_PAIRS = (("resnet50", "bert"), ("resnet101", "resnet152"), ("inception_v3", "vgg16"))
PAPER_VIOLATIONS = paper_figure("Abacus", "headline", "vs state of the art", "QoS violation reduction, average")
PAPER_THROUGHPUT = paper_figure("Abacus", "headline", "vs state of the art", "throughput gain, average")

HEADLINES = (
    Headline(
        "fewer violations at 50/s, without merging",
        "violation_reduction_strong_no_merging_pct",
        "%",
        "simulated A100; baselines drop by the same predictions",
        PAPER_VIOLATIONS,
    ),
    Headline(
        "the same, all merge",
        "violation_reduction_strong_all_merging_pct",
        "%",
        "simulated A100; baselines drop by the same predictions",
        PAPER_VIOLATIONS,
    ),
    Headline(
        "rate with 99 % in time over the best baseline's, without merging",
        "max_rate_gain_strong_no_merging",
        "x",
        "simulated A100; the paper has the gain in answers at 100/s; bound: full devices, whole queries",
        PAPER_THROUGHPUT,
        bound="capacity_gain_bound",
    ),
    Headline(
        "the same, all merge",
        "max_rate_gain_strong_all_merging",
        "x",
        "simulated A100; as above; bound: full batches",
        PAPER_THROUGHPUT,
        bound="capacity_gain_bound_merging",
    ),
)


def run(
    quick: bool, data_dir: Path, predictor_file: list[str] | None = None, models: int | None = None
) -> dict[str, object]:
    """Simulate, print the tables, return figures. `predictor_file` and `models` name another world of the same form."""
    console = Console(width=170)
    world = A100(data_dir, files_of(predictor_file), models)
    console.print("fitting the predictor to samples of the world ...")
    comparison = Comparison(world, fitted(world, quick), targets_ms(data_dir, "2in7"), quick)
    names = [model.name for model in world.models]
    pairs = [
        pair for pair in combinations(names, 2) if pair in comparison.targets and (not quick or pair in _QUICK_PAIRS)
    ]
    rows = comparison.run(pairs, console)
    summary = _summary(rows)
    show_policies(console, rows, f"{len(pairs)} pairs")
    show_rates(console, rows)
    _show(console, summary, quick)
    return {"summary": summary, "rows": rows, "seeds": list(comparison.seeds)}


def _summary(rows: Rows) -> dict[str, float]:
    """The figures over all pairs; see docs/benchmarks.md for how each is defined."""
    weak = mean_of_each(reductions(rows, "overlap", ", drops late", "violations_50"))
    throughput = mean_of_each(gains(rows, "overlap", ", drops late", "goodput_100"))
    found: dict[str, float] = {}
    for key, ours, suffix in TERMS:
        each = max_rate_gains(rows, ours, suffix)
        found[f"max_rate_gain_strong{key}"] = statistics.geometric_mean(each)
        found[f"worst_pair_strong{key}"] = min(each)
        found[f"violation_reduction_strong{key}_pct"] = mean_of_each(reductions(rows, ours, suffix, "violations_50"))[0]
    found |= {
        "violation_reduction_pct": weak[0],
        "violation_reduction_ci_pct": weak[1],
        "throughput_gain_pct": throughput[0],
        "throughput_gain_ci_pct": throughput[1],
    }
    for key in ("capacity_gain_bound", "capacity_gain_bound_merging"):
        found[key] = statistics.geometric_mean([row[key] for row in rows if row["contender"] == "overlap"])
    return found


def _show(console: Console, summary: dict[str, float], quick: bool) -> None:
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
