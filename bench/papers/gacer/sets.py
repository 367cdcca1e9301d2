"""GACER: what chunks and pointers gain over streams and over one after another, in many drawn worlds.

The paper's five sets run on its three cards by roofline. On one card they also run with launches from CUDA graphs (1.25
us) in place of the drawn ones. Further sets are of kernels that were measured on a V100. Plans are found on predicted
costs of a world and played in the world. The published search (chunks alone, barriers alone, both) has 2,000 rounds.
`unmeasured`: the first plan of ours, as the published one, is not run beside streams, and can be slower. `one`: one
plan of each is run beside streams and dropped where it is slower. `ours`: so are the best few of ours, as in the
product. `robust`: the same with profiles that are 15 % off in times and 20 % in needs. Figures over sets and cards are
taken in each world; the reported figure is the median over worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from bench._campaign import digest_of, run_all
from bench._data import Headline, paper_figure, read_rows
from bench._registry import BenchError
from bench.papers import gacer
from bench.papers.gacer._gpus import GPUS, V100, Gpu
from bench.papers.gacer._judge import OURS, Effort, judge_set
from bench.papers.gacer._sets import JointSet, given_sets, paper_sets, v100_sets
from bench.papers.gacer._worlds import Drawn, draw
from cotenant.techniques.granularity import plan as granularity
from cotenant.techniques.granularity import predict as occupancy

NAME = "gacer-sets"
WORLDS, QUICK_WORLDS = 48, 2
FIRST_WORLD = 0
QUICK = Effort(500, 600, 2)
SOURCES: tuple[ModuleType, ...] = (gacer, granularity, occupancy)
SHOWN = ("streams", "spatial", "temporal", "both", OURS, "robust", "bound")
GRAPHS = replace(GPUS[0], name="Titan V, graphs")
GRAPHS_US = 1.25
"""What a kernel takes to be issued from a CUDA graph."""
HEADLINES = (
    Headline(
        "chunks and pointers over one after another, published search",
        "both_over_sequential_geomean",
        "x",
        "simulated, five sets on three cards by roofline, 48 drawn worlds, median; the paper's is the lowest of five",
        paper_figure("GACER", "Fig 7", "Titan V, five combinations", "speed-up over sequential, lowest"),
    ),
    Headline(
        "streams over one after another",
        "streams_over_sequential_geomean",
        "x",
        "as above; much of it is launches that overlap",
        paper_figure("GACER", "Fig 7", "Stream-Parallel", "speed-up over sequential, lowest"),
    ),
    Headline(
        "our plans over streams",
        "ours_unmeasured_over_streams_geomean",
        "x",
        "as above; one plan, searched on a belief that is not the world, and never compared with streams there",
    ),
    Headline(
        "the same, the best of four plans and streams",
        "ours_over_streams_geomean",
        "x",
        "as above; never slower than streams by construction",
    ),
)
_FEWEST = 4
"""Worlds from which on it is shown what gains hang on."""
_WIDTH = 260


@dataclass(frozen=True, slots=True)
class SetsTask:
    """Some sets in one world."""

    drawn: Drawn
    sets: tuple[JointSet, ...]
    effort: Effort


def run(
    quick: bool,
    data_dir: Path,
    *,
    kernels: Path | None = None,
    sms: int | None = None,
    tflops: float | None = None,
    gbps: float | None = None,
    sets: Sequence[str] | None = None,
    worlds: int | None = None,
) -> dict[str, Any]:
    """Judge all sets in all worlds, print the tables, return figures. Raises BenchError for options that do not fit."""
    is_given = kernels is not None or bool(sets)
    gpus = GPUS if kernels is None else (card_of(kernels, sms, tflops, gbps),)
    if kernels is None and (sms, tflops, gbps) != (None, None, None):
        raise BenchError("--sms, --tflops and --gbps describe the card of --kernels, expected that too")
    if is_given:
        groups = [given_sets(sets or (), kernels, (gpu,)) for gpu in gpus]
    else:
        groups = [paper_sets(data_dir, gpu) for gpu in (*gpus, GRAPHS)] + [v100_sets(data_dir)]
        groups = [groups[0][:3], groups[-1][:1]] if quick else groups
    count = worlds or (QUICK_WORLDS if quick else WORLDS)
    if count < 1:
        raise BenchError(f"--worlds is {count}, expected at least 1")
    drawn = [draw(FIRST_WORLD + number) for number in range(count)]
    effort = QUICK if quick else Effort()
    tasks = [SetsTask(each, tuple(some), effort) for each in drawn for some in groups]
    files = [
        kernels or data_dir / "orion" / "kernels.csv",
        *sorted((Path(gacer.__path__[0]) / "kernels").glob("*.csv")),
    ]
    rows = run_all(NAME, digest_of(SOURCES, files), tasks, judge, _said)
    summary = given_summary(rows) if is_given else summary_of(rows)
    console = Console(width=max(_WIDTH, Console().width))
    paper = {} if is_given else paper_ratios(data_dir)
    _show(console, rows, paper)
    _show_where(console, rows, paper, drawn)
    _show_ranges(console, [row for row in rows if row["gpu"] != GRAPHS.name], drawn)
    summary = {name: value for name, value in summary.items() if isfinite(value)}  # quick runs have not all sets
    console.print(", ".join(f"{name} {value:.4g}" for name, value in summary.items()))
    if quick:
        console.print(f"quick: {count} of {WORLDS} worlds, few of the sets, searches a tenth as long or less")
    return {
        "summary": summary,
        "rows": rows,
        "worlds": list(map(asdict, drawn)),
        "seeds": [each.seed for each in drawn],
    }


def card_of(kernels: Path, sms: int | None, tflops: float | None, gbps: float | None) -> Gpu:
    """The card that options describe. Raises BenchError where one is missing or not positive."""
    sizes = {"sms": sms or 0, "tflops": tflops or 0.0, "gbps": gbps or 0.0}
    for name, value in sizes.items():
        if not (isfinite(value) and value > 0):
            raise BenchError(f"--{name} is missing or {value}, expected a positive number beside --kernels {kernels}")
    return Gpu(kernels.stem, int(sizes["sms"]), sizes["tflops"], sizes["gbps"])


def judge(task: SetsTask) -> list[dict[str, Any]]:
    """A row for each set."""
    graphs = replace(task.drawn, launch_us=GRAPHS_US, host_loss=0.0)
    return [judge_set(each, graphs if each.gpu == GRAPHS else task.drawn, task.effort) for each in task.sets]


def _said(rows: list[dict[str, Any]]) -> str:
    gains = ", ".join(f"{row['set']} {row['streams_ms'] / row['ours_ms']:.3f}" for row in rows)
    return f"world {rows[0]['world']} {rows[0]['gpu']}, ours over streams: {gains}"


def ratio(row: dict[str, Any], ours: str, theirs: str) -> float:
    """How many times as long theirs takes."""
    return float(row[f"{theirs}_ms"] / row[f"{ours}_ms"])


def over_worlds(
    rows: Sequence[dict[str, Any]], ours: str, theirs: str, of: Callable[[Sequence[float]], float]
) -> float:
    """Median over worlds of a figure over the ratios of its sets."""
    by_world: dict[int, list[float]] = {}
    for row in rows:
        by_world.setdefault(row["world"], []).append(ratio(row, ours, theirs))
    return float(np.median([of(each) for each in by_world.values()])) if by_world else float("nan")


def geomean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return float(np.exp(np.mean(np.log(values))))


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics, of the paper's sets on its cards, and those of the measured kernels."""
    rows = [row | {"ours_one_ms": min(row["ours_unmeasured_ms"], row["streams_ms"])} for row in rows]
    paper = [row for row in rows if row["gpu"] in {gpu.name for gpu in GPUS}]
    graphs, measured = ([row for row in rows if row["gpu"] == gpu.name] for gpu in (GRAPHS, V100))
    mean, graphs_mean, measured_mean = (partial(over_worlds, some, of=geomean) for some in (paper, graphs, measured))
    return {
        "both_over_sequential_geomean": mean("both", "sequential"),
        "both_over_sequential_min": over_worlds(paper, "both", "sequential", min),
        "streams_over_sequential_geomean": mean("streams", "sequential"),
        "both_over_streams_geomean": mean("both", "streams"),
        "ours_over_streams_geomean": mean(OURS, "streams"),
        "both_measured_over_streams_geomean": mean("both_measured", "streams"),
        "ours_over_both_geomean": mean("ours_unmeasured", "both"),
        "ours_one_over_both_measured_geomean": mean("ours_one", "both_measured"),
        "bound_over_streams_geomean": mean("bound", "streams"),
        "ours_of_bound_geomean": 1 / mean("bound", OURS),
        **_slower(rows),
        "robust_ours_over_streams_geomean": mean("robust", "streams"),
        "ours_unmeasured_over_streams_geomean": mean("ours_unmeasured", "streams"),
        "robust_unmeasured_over_streams_geomean": mean("robust_unmeasured", "streams"),
        "graphs_streams_over_sequential_geomean": graphs_mean("streams", "sequential"),
        "graphs_both_over_streams_geomean": graphs_mean("both", "streams"),
        "graphs_ours_over_streams_geomean": graphs_mean(OURS, "streams"),
        "v100_ours_over_streams": measured_mean(OURS, "streams"),
        "v100_both_over_streams": measured_mean("both", "streams"),
        "v100_ours_of_bound": 1 / measured_mean("bound", OURS),
    }


def given_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics of sets that options name."""
    mean = partial(over_worlds, rows, of=geomean)
    return {
        "streams_over_sequential": mean("streams", "sequential"),
        "both_over_streams": mean("both", "streams"),
        "ours_over_streams": mean(OURS, "streams"),
        "robust_ours_over_streams": mean("robust", "streams"),
        "ours_of_bound": 1 / mean("bound", OURS),
        **_slower(rows),
    }


def _slower(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How many plans are slower than streams where streams are not run beside them."""
    slower = {
        name: float(sum(row[f"{column}_ms"] > row["streams_ms"] for row in rows))
        for name, column in (("ours", "ours_unmeasured"), ("both", "both"))
    }
    return {f"{name}_slower_than_streams": count for name, count in slower.items()} | {"cases": float(len(rows))}


def paper_ratios(data_dir: Path) -> dict[tuple[str, str], dict[str, float]]:
    """By set and card, what streams and GACER take in Table 2, as parts of the sequential execution."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    taken: dict[tuple[str, str, str], float] = {}
    columns = ("models", "gpu", "method", "latency_ms")
    for row in read_rows(data_dir / "gacer" / "table2_latency.csv", *columns):
        taken[row["models"], row["gpu"], row["method"]] = float(row["latency_ms"])
    for (models, gpu, method), ms in taken.items():
        if method != "cudnn_seq":
            name = {"stream_parallel": "streams", "gacer": "both"}[method]
            found.setdefault((models, gpu), {})[name] = taken[models, gpu, "cudnn_seq"] / ms
    return found


def _show(console: Console, rows: Sequence[dict[str, Any]], paper: dict[tuple[str, str], dict[str, float]]) -> None:
    names = ("set", "card", *SHOWN[:-1], "ours/streams", "robust/streams", "of bound", "paper")
    table = Table(*(Column(name, no_wrap=True) for name in names))
    table.title = (
        "Speed-up over one after another, median over worlds and 10th to 90th percentile; paper: streams, GACER"
    )
    for name, gpu in dict.fromkeys((row["set"], row["gpu"]) for row in rows):
        mine = [row for row in rows if (row["set"], row["gpu"]) == (name, gpu)]
        printed = paper.get((name, gpu), {})
        table.add_row(
            *(name, gpu),
            *(_spread([ratio(row, each, "sequential") for row in mine]) for each in SHOWN[:-1]),
            *(_spread([ratio(row, each, "streams") for row in mine]) for each in (OURS, "robust")),
            f"{np.median([1 / ratio(row, 'bound', OURS) for row in mine]):.2f}",
            ", ".join(f"{value:.2f}" for value in printed.values()),
        )
    console.print(table)


def _show_where(
    console: Console,
    rows: Sequence[dict[str, Any]],
    paper: Mapping[tuple[str, str], Mapping[str, float]],
    drawn: Sequence[Drawn],
) -> None:
    """In which worlds as much is gained as the paper has: how far their parameters are from those of all."""
    asked = [row for row in rows if (row["set"], row["gpu"]) in paper]
    names = [each.name for each in fields(Drawn) if isinstance(getattr(drawn[0], each.name), int | float)]
    numbers = {each.seed: np.array([float(getattr(each, name)) for name in names]) for each in drawn}
    spread = np.std(list(numbers.values()), axis=0)
    for name in ("streams", "both"):
        some = [row for row in asked if name in paper[row["set"], row["gpu"]]]
        reached = [row for row in some if ratio(row, name, "sequential") >= paper[row["set"], row["gpu"]][name]]
        text = f"{name}: as much as the paper's in {len(reached)} of {len(some)} cases of a world, set and card"
        if some:
            best = max(ratio(row, name, "sequential") / paper[row["set"], row["gpu"]][name] for row in some)
            text += f", {best:.2f} of it in the best"
        if reached and len(drawn) >= _FEWEST:
            means = np.mean([numbers[row["world"]] for row in reached], axis=0)
            all_means = np.mean(list(numbers.values()), axis=0)
            off = np.abs(means - all_means) / np.maximum(spread, 1e-12)
            most = [at for at in np.argsort(-off) if names[at] != "seed"][:4]
            text += "; there " + ", ".join(f"{names[at]} {means[at]:.3g} ({all_means[at]:.3g})" for at in most)
        if some:
            console.print(f"{text}{' (mean of all worlds)' if reached else ''}")


def _spread(values: Sequence[float]) -> str:
    low, middle, high = np.percentile(values, (10, 50, 90))
    return f"{middle:.2f} {low:.2f}-{high:.2f}"


def _show_ranges(console: Console, rows: Sequence[dict[str, Any]], drawn: Sequence[Drawn]) -> None:
    """Which parameters the gains hang on: medians over worlds by its values, or below and above its middle."""
    if len(drawn) < _FEWEST:
        return
    shown = (("streams", "sequential"), ("both", "sequential"), ("both", "streams"), (OURS, "streams"))
    worlds = {each.seed: [row for row in rows if row["world"] == each.seed] for each in drawn}
    gains = {seed: [geomean([ratio(row, *pair) for row in mine]) for pair in shown] for seed, mine in worlds.items()}
    table = Table("parameter", "values", *(f"{a}/{b}" for a, b in shown), title="Gains by drawn parameter")
    lines: list[tuple[float, list[str]]] = []
    for name in (each.name for each in fields(Drawn) if each.name != "seed"):
        values = {each.seed: getattr(each, name) for each in drawn}
        groups = {
            str(value): [seed for seed in values if values[seed] == value] for value in sorted(set(values.values()))
        }
        if isinstance(getattr(drawn[0], name), float):
            ordered = sorted(values, key=lambda seed: (values[seed], seed))
            halves = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
            groups = {f"{values[half[0]]:.3g} to {values[half[-1]]:.3g}": half for half in halves}
        medians = [np.median([gains[seed] for seed in some], axis=0) for some in groups.values()]
        differs = float(np.max(medians, axis=0)[1] - np.min(medians, axis=0)[1])
        cells = [", ".join(f"{each[column]:.3f}" for each in medians) for column in range(len(shown))]
        lines.append((-differs, [name, ", ".join(groups), *cells]))
    for _, line in sorted(lines):
        table.add_row(*line)
    console.print(table)
