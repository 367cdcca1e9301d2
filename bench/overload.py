"""Beyond capacity: what each policy achieves of the most that any schedule could, simulated and served.

Four and seven tenants of the quick start at 1.2 to 3 times what two cores can do. Every run is set beside bounds of its
own arrivals (`workload.bound`: linear programmes, solved exactly):

- on answers in time (`most`);
- on these where every tenant keeps the answers that it could have alone on its quota (`shares`);
- on their weight (`weighted`; simulated only);
- on the smallest attainment (`fair`).

Simulated: exact knowledge, and noise beside it, a boundary every 8 ms. Served: real servers and clients over HTTP on
the same cores, in turns. The load is of the capacity that was measured with clients and front-ends (see goodput). The
bound is of the launches' times in that very run (`cotenant bound`).
`default_of_bound_*` is the lesser of two ratios. One is that of the answers in time to their bound. The other is the
smallest part of the answers that a tenant could have alone on its quota. A figure of the summary is the worst over
loads and sets of tenants, of medians over the seeds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench import _clockwork  # noqa: F401 - registers the policy
from bench._disturbed import core_time, disturbed
from bench._overload import (
    FOUR,
    MOST_RATE,
    SEVEN,
    Bounds,
    Model,
    demands,
    in_time,
    median,
    poisson,
    rates_of,
    simulated,
)
from bench._pace import pace_us
from bench._server import cache_folder
from bench._tenants import Contender, Inputs, ours, prepare, sample_all, saturation, warm_up, workload
from cotenant.load import run_load_process
from cotenant.repository import trace_path
from cotenant.trace import read
from cotenant.trace.bound import bound_of

SETS = {"four": FOUR, "seven": SEVEN}
POLICIES = ("fcfs", "sjf", "edf", "clockwork", "most", "fair", "weighted", "shares")
SERVED = ("sjf", "edf", "most", "fair", "shares")
QUICK_POLICIES = (*SERVED, "weighted")
LOADS, QUICK_LOADS = (1.2, 1.5, 2.0, 3.0), (1.2, 2.0)
SEEDS, SERVED_SEEDS, QUICK_SEEDS = (1, 2, 3), (1, 2), (1,)
NOISES, QUICK_NOISES = (0.0, 0.1), (0.0,)
"""Deviation of the logarithm of latencies; the second about what launches of one kind have on our machines."""
SIM_SECONDS, QUICK_SIM_SECONDS = 20.0, 5.0
SECONDS, QUICK_SECONDS = 8.0, 3.0
WARM_UP_S, QUICK_WARM_UP_S = 2.0, 1.0
DEFAULT = "shares"
_SERVER = '[device]\nlanes = "single"\n'
_SHOWN = ("of_most", "of_shares", "of_default", "of_weighted", "of_fair")


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. `data_dir` is not used; models are kept in the user's cache folder."""
    console = Console()
    seeds = QUICK_SEEDS if quick else SEEDS
    rows = [
        row
        for name, load, seed, noise in product(
            SETS, QUICK_LOADS if quick else LOADS, seeds, QUICK_NOISES if quick else NOISES
        )
        for row in simulate_turn(
            *(name, SETS[name], load, seed, noise, QUICK_SIM_SECONDS if quick else SIM_SECONDS),
            QUICK_POLICIES if quick else POLICIES,
        )
    ]
    show(console, rows, "sim")
    for name in ("four",) if quick else SETS:
        rows += _served(console, name, QUICK_SEEDS if quick else SERVED_SEEDS, quick)
    show(console, rows, "served")
    if quick:
        console.print(
            "quick: one seed, without fcfs and clockwork; simulations of 5 s without noise at 1.2x and 2x; served: "
            "four tenants at 2x for 3 s, a coarser profile"
        )
    return {"summary": summary_of(rows), "rows": rows, "seeds": seeds}


# --- simulated --------------------------------------------------------------------------------------------------------


def simulate_turn(
    name: str,
    models: Sequence[Model],
    load: float,
    seed: int,
    noise: float,
    seconds: float,
    policies: Sequence[str] = POLICIES,
) -> Iterator[dict[str, Any]]:
    """One run of each policy with the same arrivals."""
    slot_ns = {each.name: each.ms * 1e6 for each in models}
    rates = rates_of(slot_ns, 2, load, MOST_RATE if len(models) > len(FOUR) else float("inf"))
    weights = {each.name: each.weight for each in models}
    bounds: Bounds | None = None
    for policy in policies:
        plan, log = simulated(models, poisson(rates), policy, seed, seconds, noise=noise, weighted=policy == "weighted")
        if bounds is None:
            slo_ns = {each.name: round(each.slo_ms * 1e6) for each in models}
            bounds = Bounds.of(demands(plan, slo_ns, slot_ns), 2, weights)
        answered = {each.name: in_time(log, each.name, 0, plan.duration_ns)[0] for each in models}
        yield {
            "part": "sim" if noise == 0 else "sim with noise",
            "set": name,
            "load": load,
            "seed": seed,
            "policy": policy,
            **bounds.figures(answered, weights),
        }


# --- served -----------------------------------------------------------------------------------------------------------


def _served(console: Console, name: str, seeds: Sequence[int], quick: bool) -> Iterator[dict[str, Any]]:
    """Runs of one set of tenants: all policies in turns."""
    models = tuple(each.name for each in SETS[name])
    folder = "goodput" if models == tuple(each.name for each in FOUR) else f"overload-{name}"
    root, service_ns = prepare(cache_folder() / folder, models, _SERVER, quick)
    inputs = sample_all(root, models)
    slots = len(os.sched_getaffinity(0))
    most = MOST_RATE if len(models) > len(FOUR) else float("inf")
    part = rates_of(service_ns, slots, 1.0, most)
    mix = {model: rate / sum(part.values()) for model, rate in part.items()}
    capacity = saturation(ours("fcfs", root, "--policy", "fcfs", "--drop", "none"), mix, inputs, quick)
    console.print(f"{name}: capacity {capacity:.1f} queries/s of the mix", highlight=False)
    contenders = [
        ours(policy, root, "--policy", policy, "--drop", "hopeless", *(() if policy == "fcfs" else ("--preempt",)))
        for policy in SERVED
    ]
    for seed, load in product(seeds, (2.0,) if quick else LOADS):
        beyond = {model: capacity * load * rate for model, rate in mix.items()}
        at = seed % len(contenders)
        for contender in (*contenders[at:], *contenders[:at]):
            figures = _serve(contender, root, beyond, inputs, slots, seed, quick)
            yield {"part": "served", "set": name, "load": load, "seed": seed, "policy": contender.name, **figures}


def _serve(
    contender: Contender, root: Path, rates: Mapping[str, float], inputs: Inputs, slots: int, seed: int, quick: bool
) -> dict[str, float]:
    """One run of a server: clients' answers in time, beside the bounds of the sent queries."""
    spans = (QUICK_SECONDS, QUICK_WARM_UP_S) if quick else (SECONDS, WARM_UP_S)
    plan = workload(root, "", rates, seed, *spans)
    pace = pace_us()
    with contender.start() as url:
        asyncio.run(warm_up(url, "", inputs, strict=False))
        before = core_time()
        result = run_load_process(plan, http_url=url, inputs=inputs)
        others = disturbed(before)
    took = {each.tenant: each for each in bound_of(*read(trace_path(root))).tenants}
    weights = dict.fromkeys(rates, 1.0)
    bounds = Bounds.of(demands(plan, result.slo_ns, {name: took[name].slot_ns for name in rates}), slots, weights)
    answered = {name: in_time(result.log, name, plan.warmup_ns, plan.duration_ns)[0] for name in rates}
    return {
        **bounds.figures(answered, weights),
        "pace_us": pace,
        "send_lag_p99_ms": result.lag.p99_ns / 1e6,
        **others,
        **{f"over_profile_{name}": took[name].pace for name in rates},
        **{f"slot_ms_{name}": took[name].slot_ns / 1e6 for name in rates},
    }


# --- results ----------------------------------------------------------------------------------------------------------


def worst(rows: Sequence[Mapping[str, Any]], part: str, policy: str, key: str) -> float:
    """The least over sets and loads of medians over the seeds."""
    return min(found.values()) if (found := _medians(rows, part, policy, key)) else float("nan")


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each objective's policy as a share of that objective's bound; `most` over sjf in answers in time."""
    found = {}
    for part in ("sim", "served"):
        found[f"default_of_bound_{part}"] = worst(rows, part, DEFAULT, "of_default")
        found[f"default_answers_of_bound_{part}"] = worst(rows, part, DEFAULT, "of_shares")
        found[f"most_of_bound_{part}"] = worst(rows, part, "most", "of_most")
        found[f"edf_of_bound_{part}"] = worst(rows, part, "edf", "of_most")
    found["fair_min_of_bound"] = worst(rows, "sim", "fair", "of_fair")
    found["fair_min_of_bound_served"] = worst(rows, "served", "fair", "of_fair")
    found["weighted_of_bound_sim"] = worst(rows, "sim", "weighted", "of_weighted")
    over = {}
    for part in ("sim", "served"):
        theirs = _medians(rows, part, "sjf", "in_time")
        mine = _medians(rows, part, "most", "in_time")
        over[part] = min([mine[at] / max(1.0, theirs[at]) for at in theirs], default=float("nan"))
        found[f"most_over_sjf_worst_{part}"] = over[part]
    found["most_over_sjf_worst"] = min(over.values())
    return found


def _medians(rows: Sequence[Mapping[str, Any]], part: str, policy: str, key: str) -> dict[tuple[str, float], float]:
    mine = [row for row in rows if (row["part"], row["policy"]) == (part, policy)]
    places = dict.fromkeys((row["set"], row["load"]) for row in mine)
    return {at: median([row for row in mine if (row["set"], row["load"]) == at], key) for at in places}


def show(console: Console, rows: Sequence[Mapping[str, Any]], part: str) -> None:
    """A line for each set, load and policy: medians over the seeds."""
    table = Table("tenants", "load", "policy", "in time", *(key.removeprefix("of_") for key in _SHOWN), box=SIMPLE)
    table.title = f"{part}: in time of all, and of what no schedule could beat; medians over the seeds"
    mine = [row for row in rows if row["part"] == part]
    for name, load, policy in dict.fromkeys((row["set"], row["load"], row["policy"]) for row in mine):
        these = [row for row in mine if (row["set"], row["load"], row["policy"]) == (name, load, policy)]
        attainment = median([{"part": row["in_time"] / row["asked"]} for row in these], "part")
        cells = [f"{median(these, key):.3f}" for key in _SHOWN]
        table.add_row(name, f"{load:g} x", policy, f"{attainment:.3f}", *cells)
    console.print(table)
