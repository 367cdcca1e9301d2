"""Pairs of real models on this machine: overlap against fcfs, sjf, edf and MLServer, at 0.8, 1.2 and 2 times capacity.

All pairs of five quick-start models, one query a request over HTTP, open loop, Poisson. Each tenant demands the same
share of work. Our servers drop by prediction, have a worker process a tenant and differ in their policy alone. Overlap
has groups measured and a predictor fitted before. It is tail-aware edf where these say that it needs no barrier.
MLServer has no drop rule; spinning is off everywhere. All servers are up all the time, and the runs of a pair take
turns, with the same arrivals. Capacity is measured for each pair as the rate of a closed loop under fcfs without drops,
with the client on the same cores. Single runs of a few seconds differ by many points with any server. So overlap and
edf, which are compared, run several times in turns. MLServer goes on computing requests that were cancelled: it runs
last, and the next run waits until the machine is idle.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench._data import Headline
from bench._disturbed import undisturbed
from bench._registry import BenchError
from bench._server import cache_folder
from bench._tenants import Contender, Inputs, closed_loop, ours, prepare, sample_all, send_load, warm_up
from bench.peers import mlserver_process as mlserver
from cotenant.config import load_server_config
from cotenant.profiles.profile_file import load_profile
from cotenant.repository import SERVER_FILE, profile_path
from cotenant.techniques.overlap.measure.measured_groups import GroupEffort, fit_groups, measure_groups
from cotenant.workload import for_capacity

NAME = "abacus-real"
MODELS = ("resnet50", "minilm", "ocr_recognition", "magika", "silero_vad")
QUICK_MODELS = ("minilm", "magika")
FACTORS, QUICK_FACTORS = (0.8, 1.2, 2.0), (1.2,)
SECONDS, QUICK_SECONDS = 3.0, 2.0
WARM_UP_S = 1.0
AGAIN = ("edf", "overlap", "overlap", "edf")
"""Further runs of the two policies that are compared, in a full run."""
_IDLE_SHARE, _IDLE_LIMIT_S = 0.95, 15.0
SEED = 1
_SATURATE_S, _QUICK_SATURATE_S = 3.0, 1.0
_SERVER = '[device]\nlanes = "single"\n\n[policy]\nname = "overlap"\n'
_GROUPS = GroupEffort(count=700, runs=5, budget_s=150.0)
_QUICK_GROUPS = GroupEffort(count=120, runs=3, budget_s=12.0)
BARRIER = "overlap grouped"
"""Groups that start and end together, whatever was measured; overlap itself asks the measured groups."""
POLICIES = ("overlap", BARRIER, "edf", "sjf", "fcfs")
PEER = "mlserver"
HEADLINES = (
    Headline(
        "more answered in time than by edf",
        "attainment_gain_vs_edf_points",
        "points",
        "measured on the cores of this machine, real models; both drop by prediction; the paper has a GPU",
    ),
    Headline(
        "the same, groups that start and end together over overlap as it is",
        "attainment_grouped_vs_overlap_points",
        "points",
        "as above",
    ),
)


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. `data_dir` is not used; models and the peer's environment are kept in the user's cache folder."""
    console = Console(width=150)
    models = QUICK_MODELS if quick else MODELS
    root, service_ns = prepare(cache_folder() / ("overlap-quick" if quick else "overlap"), models, _SERVER, quick)
    _groups(root, quick, console)
    inputs = sample_all(root, models)
    rows: list[dict[str, Any]] = []
    with ExitStack() as servers:
        urls = {}
        grouped = _with_barrier(root)
        contenders = [
            ours(
                *(name, grouped if name == BARRIER else root, "--policy", name.split()[0], "--no-trace"),
                *(() if name.startswith("overlap") else ("--no-tail-aware",)),
            )
            for name in POLICIES
        ]
        contenders += _peer(root, models, quick, console)
        for contender in contenders:
            urls[contender.name] = servers.enter_context(contender.start())
            asyncio.run(warm_up(urls[contender.name], contender.prefix, inputs, strict=False))
        everything = ours("capacity", root, "--policy", "fcfs", "--drop", "none", "--no-trace")
        capacity_url = servers.enter_context(everything.start())
        pairs = list(combinations(models, 2))
        factors = QUICK_FACTORS if quick else FACTORS
        seconds = QUICK_SECONDS if quick else SECONDS
        with Progress(console=console) as progress:
            named = {contender.name: contender for contender in contenders}
            peers = [named[PEER]] if PEER in named else []
            own = [contender for contender in contenders if contender.name != PEER]
            last = [*([] if quick else [named[name] for name in AGAIN]), *peers]
            task = progress.add_task("pairs", total=len(pairs) * len(factors) * (len(own) + len(last)))
            for number, pair in enumerate(pairs):
                mine = {name: inputs[name] for name in pair}
                share = for_capacity({name: service_ns[name] for name in pair}, 1, 1.0)
                mix = {name: rate / sum(share.values()) for name, rate in share.items()}
                capacity = _capacity(capacity_url, mix, mine, quick)
                for factor in factors:
                    turn = number % len(own)
                    for contender in (*own[turn:], *own[:turn], *last):
                        rates = {name: capacity * factor * part for name, part in mix.items()}
                        row = send_load(root, contender, urls[contender.name], rates, mine, SEED, seconds, WARM_UP_S)
                        rows.append({"pair": "+".join(pair), "load": factor, "capacity_per_s": capacity, **row})
                        progress.advance(task)
                    _wait_idle()
    summary = _summary(rows)
    _show(console, rows, summary)
    if quick:
        console.print("quick: one pair, one load, short runs, a coarse profile and few groups")
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


def _wait_idle() -> None:
    """Wait until the cores have next to nothing to do, or the limit has passed."""
    until_s = time.monotonic() + _IDLE_LIMIT_S
    before = _ticks()
    while time.monotonic() < until_s:
        time.sleep(0.25)
        now = _ticks()
        if now[0] - before[0] >= _IDLE_SHARE * (now[1] - before[1]):
            return
        before = now


def _ticks() -> tuple[int, int]:
    """Ticks of all cores together that were idle, and all."""
    ticks = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _groups(root: Path, quick: bool, console: Console) -> None:
    """Measure groups and fit the predictor."""
    settings, profile = load_server_config(root / SERVER_FILE), load_profile(profile_path(root))
    effort = _QUICK_GROUPS if quick else _GROUPS
    with Progress(console=console) as progress:
        task = progress.add_task("groups", total=effort.count)
        samples, errors = measure_groups(
            root,
            settings,
            profile,
            effort,
            fresh=not quick,
            on_step=lambda done, *_: progress.update(task, completed=done),
        )
    if errors:
        raise BenchError(f"groups cannot be measured: {errors}")
    predictor = fit_groups(root, profile)
    console.print(f"{len(samples)} groups measured; predictor {predictor.key} fitted")


def _with_barrier(root: Path) -> Path:
    """The same repository with the barrier on."""
    other = root.with_name(root.name + "-grouped")
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(root, other)
    (other / SERVER_FILE).write_text(_SERVER + "barrier = true\n", encoding="utf-8")
    return other


def _peer(root: Path, models: Sequence[str], quick: bool, console: Console) -> list[Contender]:
    """MLServer with a worker for all cores, which answered most at saturation in the benchmark `goodput`."""
    if quick and not mlserver.ENVIRONMENT.is_installed:
        console.print("quick: MLServer is left out, since it is not installed yet; a full run installs it")
        return []
    try:
        mlserver.ENVIRONMENT.install()
    except BenchError as error:
        console.print(f"left out: {error}")
        return []
    files = {model: root / model / "1" / "model.onnx" for model in models}
    tuning = mlserver.Tuning(1, len(os.sched_getaffinity(0)))
    return [Contender(PEER, f"MLServer, {tuning}", lambda: mlserver.serving(files, tuning), mlserver.MODEL_PREFIX)]


def _capacity(url: str, mix: Mapping[str, float], inputs: Inputs, quick: bool) -> float:
    seconds = _QUICK_SATURATE_S if quick else _SATURATE_S
    return max(uvloop.run(closed_loop(url, "", mix, inputs, seconds)) for _ in range(2))


def _means(rows: Sequence[dict[str, Any]], key: str) -> dict[tuple[str, float, str], float]:
    """Means of a figure over the runs that were not disturbed, else over all, by pair, load and contender."""
    found: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["pair"], row["load"], row["contender"]), []).append(row)
    return {place: statistics.mean(row[key] for row in undisturbed(mine)) for place, mine in found.items()}


def _gains(rows: Sequence[dict[str, Any]], other: str) -> dict[tuple[str, float], float]:
    """Attainment of overlap less that of another contender, in points, by pair and load."""
    found = _means(rows, "attainment")
    return {
        (pair, load): 100 * (value - found[pair, load, other])
        for (pair, load, name), value in found.items()
        if name == "overlap" and (pair, load, other) in found
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    edf = _gains(rows, "edf")
    summary = {
        "attainment_gain_vs_edf_points": statistics.mean(edf.values()),
        "attainment_worst_vs_edf_points": min(edf.values()),
        "attainment_best_vs_edf_points": max(edf.values()),
        "attainment_grouped_vs_overlap_points": -statistics.mean(_gains(rows, BARRIER).values()),
    }
    if len(edf) > 1:
        error = statistics.stdev(edf.values()) / math.sqrt(len(edf))
        summary["attainment_gain_vs_edf_standard_error_points"] = error
    peer = _gains(rows, PEER)
    if peer:
        summary["attainment_gain_vs_peer_points"] = statistics.mean(peer.values())
    for load in dict.fromkeys(row["load"] for row in rows):
        label = f"{load:g}x".replace(".", "_")
        summary[f"attainment_gain_vs_edf_{label}_points"] = statistics.mean(
            gain for (_, at), gain in edf.items() if at == load
        )
    return summary


def _show(console: Console, rows: Sequence[dict[str, Any]], summary: Mapping[str, float]) -> None:
    names = list(dict.fromkeys(row["contender"] for row in sorted(rows, key=lambda row: _order(row["contender"]))))
    table = Table(title="Answered within the SLO, as a share of the offered queries (goodput/s)")
    table.add_column("pair")
    for column in ("load", "offered/s", *names, "overlap - edf"):
        table.add_column(column, justify="right")
    offered, attainment, goodput = (_means(rows, key) for key in ("offered_per_s", "attainment", "goodput_per_s"))
    for (pair, load), gain in _gains(rows, "edf").items():
        places = [(pair, load, name) for name in names]
        table.add_row(
            pair,
            f"{load:g} x",
            f"{offered[places[0]]:.0f}",
            *(f"{attainment[place]:.3f} ({goodput[place]:.0f})" for place in places),
            f"{gain:+.1f} points",
        )
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {value:+.2f}", highlight=False)


def _order(name: str) -> int:
    return [*POLICIES, PEER].index(name)
