"""Three and four models on one simulated A100: overlap against fcfs, sjf and edf, as in section 7.4 of Abacus (SC'21).

The same experiment as `abacus-pairs`, for the four models of that section. Triples run in the world of the released
networks for one and two, and for three at once. The paper's quadruple ran on the whole device, of which no network for
four was released: it is judged where one is given (`--predictor-file 4=FILE`).
The networks for two and for three were fitted separately and do not agree. Half of the groups of three take less time
than two of their members. So largest rates are shown again in a world where no group is quicker than a part of it.
Errors of predictors for groups of three, and of four on a 4g.20gb slice, stand beside the paper's.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench._data import Headline, paper_figure
from bench.papers.abacus import predictor as fits
from bench.papers.abacus._a100 import A100, FOUR, files_of, targets_ms
from bench.papers.abacus._comparison import (
    BASELINES,
    QUANTILE,
    TERMS,
    Comparison,
    Rows,
    fit,
    fitted,
    gains,
    max_rate_gains,
    mean_of_each,
    reductions,
    show_policies,
    show_rates,
)
from bench.papers.abacus._experiment import DECISION_NS
from cotenant.techniques.overlap.predict.overlap_features import paper_features

NAME = "abacus-many"
GOALS = {
    "violation_reduction_pct": "85",
    "throughput_gain_pct": "50",
    "max_rate_gain_triples_no_merging": "1.3",
    "max_rate_gain_triples_all_merging": "1.12",
    "max_rate_gain_quadruples_no_merging": "1.3",
    "max_rate_gain_quadruples_all_merging": "1.12",
    "worst_no_merging": "1.0",
    "worst_all_merging": "0.98",
}
_NAMES = {3: "triples", 4: "quadruples"}
_PAPERS = {3: "triplets", 4: "quadruplets"}
_QUICK_SETS = (("resnet101", "resnet152", "bert"), ("resnet101", "vgg19", "bert"))
_SAMPLES, _TEST, _QUICK_SAMPLES, _QUICK_TEST = 8000, 3000, 3000, 1000
"""Groups that predictors of one size learn from, 2000 for each triple as the paper has for a pair, and are tried on."""
PAPER_ERRORS = {
    size: paper_figure("Abacus", "5.5", f"{name}, MLP", "prediction error (MAPE)") for size, name in _PAPERS.items()
}
_VIOLATIONS = "QoS violation reduction (same three figures printed for triplets and quadruplets)"
PAPER = {
    (size, key): [paper_figure("Abacus", "Fig 18/19", f"{name} vs {policy.upper()}", metric) for policy in BASELINES]
    for size, name in _PAPERS.items()
    for key, metric in (("violation_reduction", _VIOLATIONS), ("throughput_gain", "peak throughput gain"))
}
HEADLINES = (
    Headline(
        "three models: fewer violations at 50/s than edf that drops late",
        "violation_reduction_vs_edf_pct",
        "%",
        "simulated A100; as in the paper, but ours merges queries",
        PAPER[3, "violation_reduction"][-1],
    ),
    Headline(
        "three models: rate with 99 % in time over the best baseline's, without merging",
        "max_rate_gain_triples_no_merging",
        "x",
        "simulated A100; baselines drop by the same predictions; the paper has answers at 100/s over edf's; "
        "bound: full devices, whole queries",
        PAPER[3, "throughput_gain"][-1],
        bound="capacity_gain_bound",
    ),
    Headline(
        "the same, all merge",
        "max_rate_gain_triples_all_merging",
        "x",
        "simulated A100; as above; bound: full batches",
        PAPER[3, "throughput_gain"][-1],
        bound="capacity_gain_bound_merging",
    ),
    Headline(
        "error of predicted latencies of groups of three, ours",
        "mape_ours_3",
        "%",
        "simulated A100; groups that no fit has seen",
        PAPER_ERRORS[3],
    ),
    Headline(
        "error of predicted latencies of groups of four, ours",
        "mape_ours_4",
        "%",
        "simulated 4g.20gb slice; groups that no fit has seen",
        PAPER_ERRORS[4],
    ),
)


def run(quick: bool, data_dir: Path, predictor_file: list[str] | None = None) -> dict[str, object]:
    """Simulate, print the tables, return figures. `predictor_file` has networks of another world, by size of group."""
    console = Console(width=170)
    files = files_of(predictor_file)
    world = A100(data_dir, files)
    targets = targets_ms(data_dir, "3in4") | targets_ms(data_dir, "4in4")
    summary: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    for size in range(3, world.most(FOUR) + 1):
        sets = [each for each in targets if len(each) == size and (not quick or size > 3 or each in _QUICK_SETS)]
        console.print(f"fitting the predictor to samples of groups of one to {size} ...")
        comparison = Comparison(world, fitted(world, quick, FOUR, size), targets, quick)
        found = comparison.run(sets, console)
        show_policies(console, found, f"{len(sets)} {_NAMES[size]}" if len(sets) > 1 else "the quadruple")
        show_rates(console, found)
        summary |= _summary(found, size)
        rows += found
        if not quick:
            ordered = A100(data_dir, files, ordered=True)
            console.print("the same where no group is quicker than a part of it:")
            found = replace(comparison, world=ordered, predictor=fitted(ordered, quick, FOUR, size)).run(sets, console)
            show_rates(console, found)
            summary |= {f"{key}_ordered": value for key, value in _rates(found, size).items()}
            again += [row | {"ordered": True} for row in found]
    summary |= _worst(rows)
    console.print("fitting predictors to groups of three and of four ...")
    slice_or_whole = A100(data_dir, files) if 4 in files else A100(data_dir, device="mig4g")
    tasks = ((world, world, 3, quick), (slice_or_whole, world, 4, quick))
    with ProcessPoolExecutor(len(tasks), mp_context=multiprocessing.get_context("fork")) as pool:
        errors = list(pool.map(_errors, *zip(*tasks, strict=True)))
    for row in errors:
        summary |= {f"{key}_{row['size']}": row[key] for key in ("mape_mlp", "mape_ours", "coverage_p99")}
    _show(console, summary, errors, quick)
    return {"summary": summary, "rows": [*rows, *again, *errors], "seeds": list(comparison.seeds)}


def _summary(rows: Rows, size: int) -> dict[str, float]:
    """The figures of one size of sets; see docs/benchmarks.md for how each is defined."""
    fewer = reductions(rows, "overlap", ", drops late", "violations_50")
    more = gains(rows, "overlap", ", drops late", "goodput_100")
    name = "" if size == 3 else f"{_NAMES[size]}_"
    found: dict[str, float] = {}
    for key, each in (("violation_reduction", fewer), ("throughput_gain", more)):
        found[f"{key}_{name}pct"], found[f"{key}_{name}ci_pct"] = mean_of_each(each)
        found |= {f"{key}_{name}vs_{policy}_pct": mean for policy, (mean, _) in zip(BASELINES, each, strict=True)}
    return found | _rates(rows, size)


def _rates(rows: Rows, size: int) -> dict[str, float]:
    """Gains in the largest rate, and what they are of what a device can do at most."""
    ending = "" if size == 3 else f"_{_NAMES[size]}"
    found = {
        f"max_rate_gain_{_NAMES[size]}{key}": statistics.geometric_mean(max_rate_gains(rows, ours, suffix))
        for key, ours, suffix in TERMS
    }
    single = [row for row in rows if row["contender"] == "overlap, no merging"]
    found[f"of_capacity_bound{ending}"] = statistics.geometric_mean(
        [row["max_rate"] / row["capacity_per_s"] for row in single]
    )
    for key in ("capacity_gain_bound", "capacity_gain_bound_merging"):
        found[f"{key}{ending}"] = statistics.geometric_mean([row[key] for row in single])
    return found


def _worst(rows: Rows) -> dict[str, float]:
    return {f"worst{key}": min(max_rate_gains(rows, ours, suffix)) for key, ours, suffix in TERMS[:2]}


def _errors(world: A100, alone: A100, size: int, quick: bool) -> dict[str, Any]:
    """Predictors of groups of one size, on groups that they have not seen; latencies alone are those of `alone`."""
    tenants, facts = fits.tenants_of(alone, FOUR), fits.facts_of(alone, FOUR, size)
    count, tried = (_QUICK_SAMPLES, _QUICK_TEST) if quick else (_SAMPLES, _TEST)
    samples, _ = fits.draw(world, tenants, count, fits.SEED, size, size)
    tests, truth = fits.draw(world, tenants, tried, fits.SEED + 1, size, size)
    groups = [sample.members for sample in tests]
    order, lengths = [model.name for model in world.models], {model.name: model.lengths for model in world.models}
    taught = paper_features([sample.members for sample in samples], order, lengths, size)
    mlp = fits.in_scikit_learn("mlp").fit(taught, np.array([sample.median_ns for sample in samples]))
    ours = fit(samples, facts, quick)
    upper = ours.at(0.99).group_ns(groups)
    return {
        "size": size,
        "samples": len(samples),
        "mape_mlp": fits.mape(np.maximum(mlp.predict(paper_features(groups, order, lengths, size)), 1.0), truth),
        "mape_ours": fits.mape(ours.group_ns(groups), truth),
        "coverage_p99": fits.coverage(upper, tests),
        "p99_over_latency": float(np.mean(np.array(upper) / truth)),
    }


def _show(console: Console, summary: dict[str, float], errors: Sequence[dict[str, Any]], quick: bool) -> None:
    table = Table(title="Errors of predictors for groups of one size (MAPE), on groups that they have not seen")
    for column in (
        "groups of",
        "samples",
        "paper, MLP",
        "MLP here",
        "ours",
        "99 % quantile covers",
        "over the latency",
    ):
        table.add_column(column, justify="right")
    for row in errors:
        table.add_row(
            *(str(row["size"]), str(row["samples"]), PAPER_ERRORS[row["size"]].text, f"{row['mape_mlp']:.1f} %"),
            *(f"{row['mape_ours']:.1f} %", f"{row['coverage_p99']:.2f} % of runs", f"{row['p99_over_latency']:.3f}x"),
        )
    console.print(table)
    against = Table(title="paper | here")
    for column in ("figure", "paper", "here", "goal"):
        against.add_column(column, justify="left" if column == "figure" else "right")
    paper = {
        f"{key}_{'' if size == 3 else f'{_NAMES[size]}_'}vs_{policy}_pct": figure.value
        for (size, key), figures in PAPER.items()
        for policy, figure in zip(BASELINES, figures, strict=True)
    }
    for key, value in summary.items():
        against.add_row(key, paper.get(key, "-"), f"{value:.3f}", GOALS.get(key, ""))
    console.print(against)
    console.print(
        f"decisions are charged {DECISION_NS / 1000:.0f} us; groups are called feasible at the {QUANTILE:.0%} quantile"
    )
    if f"max_rate_gain_{_NAMES[4]}" not in summary:
        console.print("no quadruple: no network of the whole device for groups of four was released (4=FILE gives one)")
    if quick:
        console.print("quick: two triples, one seed, short runs, fewer samples; not the world of ordered groups")
