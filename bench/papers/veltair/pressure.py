"""Kernels of ResNet-50 beside other users of the memory: the paper's Figures 6 and 7, measured on this machine.

Every distinct convolution's candidates are timed on one core beside none, some and all of the other cores copying
memory. They take turns (lower quartiles of CPU time), at five levels of pressure. Figure 6: the versions of the layer
14 x 14, 3 x 3, 256 to 256 by level. Figure 7: the loss, in the mean over the layers, where each keeps one, two, ...
versions of least regret in place of all candidates. It also has the number of versions that lose less than a tenth at
every level. Kernels are kept in the user's cache.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench._registry import BenchError
from bench._server import cache_folder
from cotenant import zoo
from cotenant.linux import pin
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import CANDIDATES, SearchEffort
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.compile.selection import WITHIN, least_regret
from cotenant.techniques.layer_blocks.compile.store import Store
from cotenant.techniques.layer_blocks.compile.target import this_maker, this_target
from cotenant.techniques.layer_blocks.compile.toolchain import find_compiler
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.execute.loaded_kernels import runtime_of
from cotenant.techniques.layer_blocks.measure.version_pressure import LEVELS, pressure_bench, versions_by_level

NAME = "veltair-pressure"
SHOWN = (256, 256, 14, 14, (3, 3))
"""Channels, filters, plane and kernel of the layer of Figure 6."""
_QUICK_CANDIDATES, _QUICK_EVERY = 3, 8
Times = Mapping[str, Sequence[float]]


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. `data_dir` is not used."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError("pressure is made by other cores: it needs two at least")
    folder = cache_folder() / "veltair-kernels"
    store, backend = Store(folder / "store", this_target(), this_maker()), CKernel(find_compiler())
    problems = _layers(folder, store)
    if quick:
        problems = [each for at, each in enumerate(problems) if at % _QUICK_EVERY == 0 or _is_shown(each)]
    effort = SearchEffort(_QUICK_CANDIDATES if quick else CANDIDATES, workers=len(cores))
    times: dict[Problem, Times] = {}
    with Progress() as progress:
        task = progress.add_task("layers", total=2 * len(problems))
        pin(cores[:1])
        try:
            found = {}
            for each in problems:
                found[each] = search(each, store, backend, effort)
                progress.advance(task)
            with pressure_bench(cores) as bench:
                for each in problems:
                    times[each] = bench.times(each, found[each], store, runtime_of(store))
                    progress.advance(task)
        finally:
            os.sched_setaffinity(0, cores)
    rows = [_row(each, times[each]) for each in problems]
    worst = [max(taken[-1] / taken[0] for taken in each.values()) for each in times.values()]
    summary = {
        "layers": len(rows),
        "most_gb_per_s": bench.most_bytes_per_s / 1e9,
        "slowdown_of_fastest_median": statistics.median(row["slowdown_of_fastest"] for row in rows),
        "slowdown_of_fastest_most": max(row["slowdown_of_fastest"] for row in rows),
        "slowdown_of_any_most": max(worst),
        "layers_where_versions_cross": sum(row["versions"] > 1 for row in rows),
        **{f"loss_of_{count}_pct": statistics.mean(row[f"loss_of_{count}_pct"] for row in rows) for count in (1, 2, 5)},
        "versions_for_a_tenth_mean": statistics.mean(row["versions_for_a_tenth"] for row in rows),
    }
    _show(times, rows, summary)
    if quick:
        print(f"quick: every {_QUICK_EVERY}th layer, {_QUICK_CANDIDATES} candidates")
    return {"summary": summary, "rows": rows}


def _layers(folder: Path, store: Store) -> list[Problem]:
    path = folder / "resnet50.onnx"
    if not path.exists():
        zoo.build("resnet50", path)
    with CompiledModel.open(path, cache_dir=folder / "graphs") as model:
        asked = model.planner({"input": (1, 3, 224, 224)}, store.target.lanes).problems()
    return list(dict.fromkeys(each for unit in asked.values() for each in unit if not each.rows))


def _is_shown(problem: Problem) -> bool:
    return (problem.channels, problem.filters, problem.height, problem.width, problem.kernel) == SHOWN


def _row(problem: Problem, times: Times) -> dict[str, float]:
    """What one layer loses by its number of versions, in % of the mean over the levels; all candidates lose nothing."""
    best = [min(taken[level] for taken in times.values()) for level in range(LEVELS)]

    def loss(count: int) -> float:
        kept = least_regret(times, count, pays=0.0)
        mine = [min(times[name][level] for name in kept) for level in range(LEVELS)]
        return 100 * (sum(mine) / sum(best) - 1)

    def is_close(count: int) -> bool:
        kept = least_regret(times, count, pays=0.0)
        return all(min(times[name][at] for name in kept) * WITHIN <= best[at] for at in range(LEVELS))

    fastest = times[least_regret(times, 1)[0]]
    return {
        "channels": problem.channels,
        "filters": problem.filters,
        "height": problem.height,
        "kernel": problem.kernel[0],
        "slowdown_of_fastest": fastest[-1] / fastest[0],
        "versions": len(set(versions_by_level(times))),
        **{f"loss_of_{count}_pct": loss(count) for count in (1, 2, 5)},
        "versions_for_a_tenth": next((count for count in range(1, LEVELS) if is_close(count)), LEVELS),
    }


def _show(times: Mapping[Problem, Times], rows: Sequence[Mapping[str, float]], summary: Mapping[str, float]) -> None:
    console = Console(width=120)
    shown = next((each for each in times if _is_shown(each)), None)
    if shown is not None:
        table = Table("version", *(f"level {level}" for level in range(LEVELS)), title="Figure 6: us on one core")
        for name in dict.fromkeys(
            (*versions_by_level(times[shown]), *sorted(times[shown], key=lambda n: times[shown][n]))
        ):
            table.add_row(name[:8], *(f"{ns / 1e3:.0f}" for ns in times[shown][name]))
        console.print(table)
    counts = Counter(row["versions_for_a_tenth"] for row in rows)
    parts = ", ".join(f"{count:g}: {100 * of / len(rows):.0f} %" for count, of in sorted(counts.items()))
    console.print(f"Figure 7b: layers by the versions that stay within a tenth of all: {parts}", highlight=False)
    for name, value in summary.items():
        console.print(f"{name}: {value:.3g}", highlight=False)
