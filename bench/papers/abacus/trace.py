"""The 120-minute cluster trace of Abacus (SC'21, section 7.6) on 16 simulated devices, against a Clockwork-like policy.

Each device is the A100 of the released networks and gets a sixteenth of the queries; the target is 100 ms. It has a
pair of ResNet-101, ResNet-152, VGG-19 and BERT, or all four as in the paper. No network of the whole device for groups
of four was released. So at most three of the four models overlap, unless one is given (`--predictor-file 4=FILE`).
The trace has 9 queries a second and device, which is next to no load here. It is therefore scaled to several means,
each a given share of the device's rate when it runs queries one by one. Each minute is replayed for some seconds at its
rate.
The Clockwork-like policy runs one launch at a time in the order of latest start and refuses queries that will be late.
Both policies drop by prediction, with the same predictor, and are shown with and without merging of queries.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import _clockwork  # noqa: F401 - registers the policy
from bench._data import Headline, paper_figure, read_rows
from bench.papers.abacus._a100 import A100, BATCHES, FOUR, files_of
from bench.papers.abacus._bound import prices_ms
from bench.papers.abacus._comparison import fitted
from bench.papers.abacus._experiment import NS_PER_MS, Contender, Setting
from cotenant.core.snapshot import DropRule
from cotenant.types import Query

NAME = "abacus-trace"
DEVICES, QUICK_DEVICES = 16, 3
SECONDS, QUICK_SECONDS = 2.0, 0.5
"""For which each minute of the trace is replayed."""
LOADS, QUICK_LOADS = (1.0, 1.25, 1.5), (1.25,)
MAIN_LOAD = 1.25
"""Mean of the trace over what a device does one by one."""
TARGET_MS = 100.0
SEED = 1
PAPER_GAIN = paper_figure("Abacus", "Fig 22", "16 V100 cluster, MAF trace", "throughput gain over Clockwork, average")
HEADLINES = (
    Headline(
        "more answered in time than Clockwork, without merging",
        "answered_gain_1_25_pct",
        "%",
        "simulated A100s instead of V100s with a pair of models each; the trace at 1.25 times what they do one by one",
        PAPER_GAIN,
    ),
    Headline("the same, all merge", "answered_gain_merging_1_25_pct", "%", "as above", PAPER_GAIN),
    Headline(
        "four models a device as in the paper, without merging",
        "answered_gain_four_1_25_pct",
        "%",
        "as above; groups of three at most",
        PAPER_GAIN,
    ),
)
_CONTENDERS = {
    "clockwork": Contender("clockwork", DropRule.HOPELESS, False),
    "overlap": Contender("overlap", DropRule.HOPELESS, False),
    "clockwork, merging": Contender("clockwork", DropRule.HOPELESS, True),
    "overlap, merging": Contender("overlap", DropRule.HOPELESS, True),
}
_shared: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class _Traced(Setting):
    """A device under the trace: `minutes` are its rates a second, each held for `seconds`."""

    minutes: tuple[float, ...] = ()
    seconds: float = 1.0

    def queries(self, rate: float, count: int, seed: int) -> Iterator[Query]:
        """Poisson arrivals at the rates of the minutes; `rate` scales them, `count` is not looked at."""
        random = Random(seed)
        known = {model.name: model for model in self.world.models}
        number = 0
        for minute, each in enumerate(self.minutes):
            now = minute * self.seconds
            while (now := now + random.expovariate(rate * each)) < (minute + 1) * self.seconds:
                model = known[random.choice(self.models)]
                shape = random.randrange(len(model.lengths)) if model.lengths else 0
                arrival = int(now * 1e9)
                deadline = arrival + int(self.target_ms * NS_PER_MS)
                items = random.choice(BATCHES)
                yield Query(number, model.name, arrival, deadline, items=items, shape=shape, merge_key=shape)
                number += 1


def run(quick: bool, data_dir: Path, predictor_file: list[str] | None = None) -> dict[str, object]:
    """Simulate, print the tables, return figures. `predictor_file` has networks of another world, by size of group."""
    console = Console(width=150)
    world = A100(data_dir, files_of(predictor_file))
    counts = _minutes(data_dir)
    mean = sum(counts) / len(counts)
    most = world.most(FOUR)
    loads = QUICK_LOADS if quick else LOADS
    _shared.update(
        world=world,
        shape=tuple(count / mean for count in counts),
        seconds=QUICK_SECONDS if quick else SECONDS,
    )
    rows: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    deployments = (
        ("", list(combinations(FOUR, 2)), QUICK_DEVICES if quick else DEVICES),
        ("four_", [FOUR], 1 if quick else DEVICES),
    )
    for key, sets, devices in deployments:
        console.print("fitting the predictor to samples of the world ...")
        _shared["predictor"] = fitted(world, quick, FOUR, most) if key else fitted(world, quick)
        _shared["serial"] = {models: prices_ms(world, models, overlap=False)[1] for models in sets}
        tasks = [(device, sets[device % len(sets)], load) for load in loads for device in range(devices)]
        found: list[dict[str, Any]] = []
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
            for each in track(pool.map(_device, tasks), "devices", len(tasks), console=console):
                found += each
        of = f"all four models each, groups of {most} at most" if key else "a pair of the four models each"
        title = f"Answered within {TARGET_MS:.0f} ms over the trace; simulated devices: {devices}, {of}"
        summary |= _gains(console, found, loads, key, title)
        rows += found
    summary = {"answered_gain_vs_clockwork_pct": summary[f"answered_gain_{_key(MAIN_LOAD)}_pct"], **summary}
    console.print(f"the figures to compare are those at {MAIN_LOAD}x without merging; goal: at least +20 %")
    if quick:
        console.print("quick: fewer devices, one load, each minute for half a second, fewer samples for the predictor")
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


def _gains(
    console: Console, rows: Sequence[dict[str, Any]], loads: Sequence[float], key: str, title: str
) -> dict[str, float]:
    """Print the table of one way to deploy; its figures, with `key` in their names."""
    table = Table(title=title)
    for column in ("mean load", "offered", *_CONTENDERS, "gain", "gain, merging", "paper's gain"):
        table.add_column(column, justify="right")
    summary: dict[str, float] = {}
    for load in loads:
        totals = {
            name: [row for row in rows if (row["load"], row["contender"]) == (load, name)] for name in _CONTENDERS
        }
        answered = {name: sum(row["answered"] for row in found) for name, found in totals.items()}
        offered = sum(row["offered"] for row in totals["overlap"])
        gain = 100 * (answered["overlap"] / answered["clockwork"] - 1)
        merging = 100 * (answered["overlap, merging"] / answered["clockwork, merging"] - 1)
        summary |= {
            f"answered_gain_{key}{_key(load)}_pct": gain,
            f"answered_gain_{key}merging_{_key(load)}_pct": merging,
        }
        shares = [f"{100 * answered[name] / offered:.1f} %" for name in _CONTENDERS]
        paper = f"+{PAPER_GAIN.text}" if load == MAIN_LOAD else ""
        table.add_row(f"{load:.2f}x", str(offered), *shares, f"{gain:+.1f} %", f"{merging:+.1f} %", paper)
    console.print(table)
    return summary


def _key(load: float) -> str:
    return f"{load:g}".replace(".", "_")


def _device(task: tuple[int, tuple[str, ...], float]) -> list[dict[str, Any]]:
    device, models, load = task
    minutes = tuple(share * load * _shared["serial"][models] for share in _shared["shape"])
    setting = _Traced(
        _shared["world"], _shared["predictor"], models, TARGET_MS, minutes=minutes, seconds=_shared["seconds"]
    )
    rows = []
    for name, contender in _CONTENDERS.items():
        result = setting.run(contender, 1.0, 0, SEED + device)
        about = {"device": device, "models": "+".join(models), "load": load, "contender": name}
        rows.append({**about, "offered": result.offered, "answered": result.answered, "p99_ms": result.p99_ms})
    return rows


def _minutes(data_dir: Path) -> Sequence[int]:
    return [int(row["queries"]) for row in read_rows(data_dir / "abacus" / "cluster_load_per_minute.csv", "queries")]
