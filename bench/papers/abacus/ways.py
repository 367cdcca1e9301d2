"""Searching for a group in 1, 2, 4 and 8 ways, as Abacus (SC'21, section 7.7) does and as ours does, beside all groups.

Decisions are taken from simulated runs of pairs of models on the A100 of the released network. The rate is that of a
device that runs queries one by one; no queries are merged. Every so many decisions with a choice, all searches solve
the same one. All use the same fitted predictor, without remembered answers as a server would have. The exhaustive
search tries every other model's waiting queries beside the most urgent one, both up to every operator.
Quality is the rate of the chosen group (the time its work would take alone, over its predicted latency). It is a share
of the best group's rate. It is 0 where the choice is infeasible. It is also 0 where the choice makes a query too late
that the best group keeps in time. That is our policy's aim. The paper's is to pack as many operators into the headroom
as fit. For that, the chosen units over those of a scan of every place are shown beside. The final value of a choice is
the largest rate at which 99 % are in time, for three pairs. Each search serves the same queries, charged the same time
a decision. The best group of every decision is not the best for the run. It may cut the most urgent query, which then
runs longer in all.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench._data import paper_figure
from bench.papers.abacus._a100 import A100, targets_ms
from bench.papers.abacus._bound import prices_ms
from bench.papers.abacus._comparison import fitted
from bench.papers.abacus._experiment import Contender, Setting
from bench.papers.abacus._ways import Asked, Published, exhaustive, search_all, value_of
from cotenant.core.predictor import Group, Member
from cotenant.core.snapshot import DropRule, Policy
from cotenant.predict.grouped import GroupedPredictor
from cotenant.techniques.overlap.policy.group_choice import Choice
from cotenant.techniques.overlap.policy.group_search import find_group
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.work import Share, Work

NAME = "abacus-ways"
SEED = 1
WAYS = (1, 2, 4, 8)
OURS = 4
"""Ways of our policy as it comes."""
LOAD = 1.0
COUNT, QUICK_COUNT = 2000, 1000
RATE_SEEDS = (1, 2)
"""Of the runs in the search for the largest rate."""
SOME_PAIRS = (("resnet50", "bert"), ("resnet101", "resnet152"), ("inception_v3", "vgg16"))
"""Those of the quick form, and those with a search for the largest rate."""
EVERY = 5
"""Decisions from one that is compared to the next."""
_MOST = 3
"""Predictions that most decisions are done with, in fewer, says the paper of four ways."""
_CALLS = 2000
PAPER = paper_figure("Abacus", "7.7", "4-way search", "overall prediction latency")
PAPER_ONE = paper_figure("Abacus", "Fig 23", "1 way", "search latency")
PAPER_MORE = paper_figure("Abacus", "Fig 23", "2 ways and more", "search latency")
Search = Callable[..., Choice]
_shared: dict[str, Any] = {}


def searches() -> dict[str, Search]:
    """All of them by the names that rows have; `ways` says in how many places ours may cut."""
    found: dict[str, Search] = {"published, operator by operator": Published(1, scans=True)}
    found |= {f"published, {ways} ways": Published(ways) for ways in WAYS}
    found["ours, no cuts"] = _ours(0)
    found |= {f"ours, {ways} ways": _ours(ways) for ways in WAYS}
    return found


def _ours(ways: int) -> Search:
    def search(*arguments: Any) -> Choice:
        return find_group(*Asked(*arguments)._replace(ways=ways))

    return search


class Unremembered(GroupedPredictor):
    """Asks the fitted model every time, and counts the calls."""

    calls = 0

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        """See GroupPredictor."""
        assert self.fitted is not None
        self.calls += 1
        return list(self.fitted.group_ns(groups))


@dataclass(frozen=True, slots=True)
class Searching(Contender):
    """Overlap with another search in the place of its own."""

    search: Search = find_group

    def make(self, slots: int) -> Policy:
        """See Contender."""
        lanes = tuple(Share((slot,), "a100") for slot in range(slots))
        made = type("Searching", (Overlap,), {"find": staticmethod(self.search)})
        policy: Policy = made(lanes, self.drop, repeat=False)
        return policy


@dataclass(slots=True)
class Observer:
    """Searches as ours does; at every so many decisions with others to choose from it asks all searches the same."""

    predictor: Unremembered
    every: int
    searches: Mapping[str, Search]
    rows: list[dict[str, Any]] = field(default_factory=list)
    asked: int = 0

    def __call__(self, *arguments: Any) -> Choice:
        """See `find_group`."""
        asked = Asked(*arguments)
        if len({candidate.tenant for candidate in asked.candidates}) > 1:
            self.asked += 1
            if not self.asked % self.every:
                self.compare(asked._replace(predictor=self.predictor))
        return find_group(*asked)

    def compare(self, asked: Asked) -> None:
        """A row for each search, with the exhaustive one before them."""
        thinned = len(asked.splits.by_members) > 2
        for search in self.searches.values():  # latencies of single launches would count for the first one
            search(*asked)
        found = {name: self._timed(search, asked) for name, search in self.searches.items()}
        began, calls = perf_counter_ns(), self.predictor.calls
        choice, best = exhaustive(asked, thinned)
        found["exhaustive"] = (choice, perf_counter_ns() - began, self.predictor.calls - calls)
        values = {name: value_of(asked, each.jobs, each.latency_ns) for name, (each, _, _) in found.items()}
        best = max(best, *values.values())
        packed = _units(found["published, operator by operator"][0])
        for name, (each, took_ns, calls) in found.items():
            self.rows.append(
                {
                    "decision": self.asked,
                    "search": name,
                    "quality": values[name].of(best),
                    "rate_of_best": values[name].rate / best.rate,
                    "is_feasible": values[name].is_feasible,
                    "spares_all": values[name].spares_all or not best.spares_all,
                    "units_of_scan": _units(each) / packed,
                    "members": len(each.jobs),
                    "calls": calls,
                    "us": took_ns / 1e3,
                }
            )

    def _timed(self, search: Search, asked: Asked) -> tuple[Choice, int, int]:
        calls, began = self.predictor.calls, perf_counter_ns()
        choice = search(*asked)
        return choice, perf_counter_ns() - began, self.predictor.calls - calls


def _units(choice: Choice) -> int:
    return sum(job.end - job.start for job in choice.jobs)


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Simulate, measure, print the tables, return figures."""
    console = Console(width=150)
    world = A100(data_dir)
    console.print("fitting the predictor to samples of the world ...")
    believed = fitted(world, quick)
    targets = targets_ms(data_dir, "2in7")
    names = [model.name for model in world.models]
    pairs = [pair for pair in combinations(names, 2) if pair in targets and (not quick or pair in SOME_PAIRS)]
    _shared.update(world=world, predictor=believed, targets=targets, quick=quick)
    decisions: list[dict[str, Any]] = []
    rates: list[dict[str, Any]] = []
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        for compared, served in track(pool.map(_pair, pairs), "pairs", len(pairs), console=console):
            decisions += compared
            rates.append(served)
    rows = [_row(name, decisions, rates) for name in (*searches(), "exhaustive")]
    calls_us = prediction_us(world)
    summary = _summary(rows, calls_us)
    _show(console, rows, calls_us, len(decisions) // len(rows), len(pairs), quick)
    return {"summary": summary, "rows": [*rows, *rates], "seeds": [SEED]}


def compared(setting: Setting, count: int, every: int, predictor: Unremembered) -> list[dict[str, Any]]:
    """What all searches choose at every so many decisions of a simulated run."""
    _, serial = prices_ms(setting.world, setting.models, overlap=False)
    observer = Observer(predictor, every, searches())
    setting.run(Searching("overlap", DropRule.HOPELESS, False, observer), LOAD * serial, count, SEED)
    return observer.rows


def _pair(models: tuple[str, str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Decisions of one pair, and the largest rate with every search."""
    quick, believed = _shared["quick"], _shared["predictor"]
    setting = Setting(_shared["world"], believed, models, _shared["targets"][models])
    plain = Unremembered(believed.tables, None, believed.fitted)
    count = QUICK_COUNT if quick else COUNT
    found = compared(setting, count, EVERY, plain)
    served: dict[str, Any] = {"pair": "+".join(models)}
    if not quick and models in SOME_PAIRS:
        for name, search in {**searches(), "exhaustive": search_all}.items():
            contender = Searching("overlap", DropRule.HOPELESS, False, search)
            served[name] = setting.max_rate(contender, count, RATE_SEEDS)
    return found, served


def prediction_us(world: A100) -> dict[int, float]:
    """Median time of one forward pass of the released network, for groups of one call: Figure 23, on this processor."""
    first, second = world.models[0], world.models[-1]
    found = {}
    for ways in (*WAYS, 16):
        work = Work(first.name, 0, 8, 0, first.operators)
        ends = [1 + at % second.operators for at in range(ways)]
        groups = [(Member(work, 1), Member(Work(second.name, 0, 8, 0, end), 1)) for end in ends]
        taken = []
        for _ in range(_CALLS):
            began = perf_counter_ns()
            world.latencies_ms(groups)
            taken.append(perf_counter_ns() - began)
        found[ways] = statistics.median(taken) / 1e3
    return found


def _row(name: str, decisions: Sequence[dict[str, Any]], rates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    mine = [row for row in decisions if row["search"] == name]
    p50, p99 = np.percentile([row["us"] for row in mine], (50, 99)).tolist()
    served = [row[name] / row[f"ours, {OURS} ways"] for row in rates if name in row]
    return {
        "search": name,
        "quality": statistics.fmean(row["quality"] for row in mine),
        "rate_of_best": statistics.fmean(row["rate_of_best"] for row in mine if row["is_feasible"]),
        "infeasible_pct": 100 * statistics.fmean(not row["is_feasible"] for row in mine),
        "spares_pct": 100 * statistics.fmean(row["spares_all"] for row in mine),
        "units_of_scan": statistics.fmean(row["units_of_scan"] for row in mine),
        "calls": statistics.fmean(row["calls"] for row in mine),
        "under_three_pct": 100 * statistics.fmean(row["calls"] < _MOST for row in mine),
        "p50_us": p50,
        "p99_us": p99,
        "max_rate_of_ours": statistics.geometric_mean(served) if served else None,
        "decisions": len(mine),
    }


def _summary(rows: Sequence[dict[str, Any]], calls_us: Mapping[int, float]) -> dict[str, float]:
    by_name = {row["search"]: row for row in rows}
    ours = by_name[f"ours, {OURS} ways"]
    found = {"quality_of_exhaustive": ours["quality"], "ours_p50_us": ours["p50_us"], "ours_p99_us": ours["p99_us"]}
    for kind in ("ours", "published"):
        for ways in WAYS:
            row = by_name[f"{kind}, {ways} ways"]
            found |= {f"quality_{kind}_{ways}": row["quality"], f"p50_us_{kind}_{ways}": row["p50_us"]}
            found[f"calls_{kind}_{ways}"] = row["calls"]
    found["quality_ours_no_cuts"] = by_name["ours, no cuts"]["quality"]
    found["under_three_pct_published_4"] = by_name["published, 4 ways"]["under_three_pct"]
    found |= {f"prediction_us_{ways}": us for ways, us in calls_us.items()}
    if ours["max_rate_of_ours"] is not None:
        found["max_rate_over_published_4"] = 1 / by_name["published, 4 ways"]["max_rate_of_ours"]
        found["max_rate_of_exhaustive"] = 1 / by_name["exhaustive"]["max_rate_of_ours"]
    return found


def _show(
    console: Console,
    rows: Sequence[dict[str, Any]],
    calls_us: Mapping[int, float],
    decisions: int,
    pairs: int,
    quick: bool,
) -> None:
    table = Table(title=f"{decisions} decisions of {pairs} pairs (simulated A100, one fitted predictor for all)")
    columns = ("search", "quality", "rate / best", "infeasible", "spares others", "units / scan", "predictions")
    for column in (*columns, "under three", "p50 us", "p99 us", "largest rate / ours"):
        table.add_column(column, justify="left" if column == "search" else "right")
    for row in rows:
        rate = row["max_rate_of_ours"]
        table.add_row(
            row["search"],
            *(f"{row[key]:.3f}" for key in ("quality", "rate_of_best")),
            *(f"{row[key]:.1f} %" for key in ("infeasible_pct", "spares_pct")),
            f"{row['units_of_scan']:.2f}",
            f"{row['calls']:.1f}",
            f"{row['under_three_pct']:.0f} %",
            *(f"{row[key]:.0f}" for key in ("p50_us", "p99_us")),
            "-" if rate is None else f"{rate:.3f}",
        )
    console.print(table)
    said = {ways: PAPER_ONE if ways == 1 else PAPER_MORE for ways in WAYS}
    figures = Table(title="Figure 23: one prediction of the released network for so many groups at once")
    for column in ("ways", "paper", "here, us"):
        figures.add_column(column, justify="right")
    for ways, us in calls_us.items():
        figures.add_row(str(ways), said[ways].text if ways in said else "-", f"{us:.0f}")
    console.print(figures)
    console.print(f"paper, four ways: most decisions in fewer than {_MOST} predictions, {PAPER.text} in all")
    console.print("times are of this processor and Python, with nothing remembered; decision-overlap has those served")
    if quick:
        console.print("quick: three pairs, few decisions, fewer samples for the predictor, no largest rates")
