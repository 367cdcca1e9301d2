"""A quota for every tenant: the effect of an overloaded neighbour on tenants in quota, and the use of spare time.

Four tenants of the quick start have equal quotas under `shares`, with edf beside it. They are simulated with exact
knowledge, and served, in turns, with real servers and clients on the same cores. There quotas are of the capacity that
was measured with clients and front-ends (see goodput).
`victim_drop_points`: all demand 0.8 of their quotas but one, which demands 1 to 50 times that. The figure is by how
many points of attainment another tenant is at most below the same queries alone on its quota (`workload.bound`).
`victim_drop_from_1x_points` is against the run at 1x, in which quotas need not decide: more than is promised.
`unused_share_used_pct`: one tenant demands twice the device and the others nothing. A flow (`workload.bound`) gives
the slot time that it could get out of its quota. The figure is the part that its answers in time used.
`newcomer_s`: three demand 3 times their quotas; after a while the fourth begins, at 0.8 of its quota. The figure is how
many seconds of its queries it loses in its first four, beyond its loss where all demand that much.
Of tenants and factors the worst, of seeds the median.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench._overload import FOUR, demands, in_time, median, poisson, rates_of, simulated
from bench._pace import pace_us
from bench._server import cache_folder
from bench._tenants import Inputs, ours, prepare, sample_all, saturation, warm_up, workload
from cotenant.load import run_load_process
from cotenant.metrics import OutcomeLog
from cotenant.repository import trace_path
from cotenant.trace import read
from cotenant.trace.bound import bound_of
from cotenant.workload import ArrivalProcess, Poisson, TenantLoad, Trace, Workload, arrivals
from cotenant.workload.bound import answers_alone, most_answers

POLICIES = ("shares", "edf")
NAMES = tuple(each.name for each in FOUR)
WITHIN, BEYOND, ALONE = 0.8, 3.0, 2.0
"""The demand, as a share of the tenant's quota, of the others' quotas, and of the whole device."""
ANTAGONIST = "minilm"
FACTORS, SERVED_FACTORS, QUICK_FACTORS = (1, 2, 5, 10, 20, 50), (1, 5, 50), (1, 10)
SEEDS, QUICK_SEEDS = (1, 2, 3), (1,)
SECONDS, SERVED_SECONDS, QUICK_SECONDS, QUICK_SIM_SECONDS = 20.0, 12.0, 4.0, 8.0
NEW_S = 4.0
"""How long a newcomer's beginning is, and how long the others are alone before it."""
_LANES = 2
_SERVER = '[device]\nlanes = "single"\n'

Run = Callable[[str, Mapping[str, ArrivalProcess], int, float], tuple[Workload, OutcomeLog, Mapping[str, float]]]
"""What becomes of arrivals under a policy, with a seed, for so many seconds; and the slot time of a query, by tenant,
in nanoseconds."""


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. `data_dir` is not used; models are kept in the user's cache folder."""
    console = Console()
    seeds = QUICK_SEEDS if quick else SEEDS
    slot_ns = {each.name: each.ms * 1e6 for each in FOUR}
    slo_ns = {each.name: round(each.slo_ms * 1e6) for each in FOUR}
    share = rates_of(slot_ns, _LANES, 1.0)
    factors, seconds = (QUICK_FACTORS, QUICK_SIM_SECONDS) if quick else (FACTORS, SECONDS)
    rows = [
        {"part": "sim", **row}
        for seed in seeds
        for policy in POLICIES
        for row in cases(simulation, policy, seed, share, slo_ns, factors, NAMES, seconds)
    ]
    root, service_ns = prepare(cache_folder() / "goodput", NAMES, _SERVER, quick)
    inputs = sample_all(root, NAMES)
    slo_ns = {each.name: each.slo_ns or 0 for each in workload(root, "", dict.fromkeys(NAMES, 1.0), 0, 1, 0).tenants}
    share = rates_of(service_ns, _LANES, 1.0)
    mix = {name: rate / sum(share.values()) for name, rate in share.items()}
    capacity = saturation(ours("fcfs", root, "--policy", "fcfs", "--drop", "none"), mix, inputs, quick)
    console.print(f"capacity: {capacity:.1f} queries/s of the mix", highlight=False)
    share = {name: capacity * part for name, part in mix.items()}
    factors, seconds = (QUICK_FACTORS, QUICK_SECONDS) if quick else (SERVED_FACTORS, SERVED_SECONDS)
    for seed in seeds:
        order = POLICIES[:1] if quick else POLICIES if seed % 2 else POLICIES[::-1]
        for policy in order:
            pace = pace_us()
            rows += [
                {"part": "served", "pace_us": pace, **row}
                for row in cases(
                    _server(root, inputs, slo_ns), policy, seed, share, slo_ns, factors, (ANTAGONIST,), seconds
                )
            ]
    summary = {
        metric + ("" if part == "served" else "_sim") + ("" if policy == POLICIES[0] else f"_{policy}"): value
        for part in ("served", "sim")
        for policy in POLICIES
        for metric, value in _metrics([row for row in rows if (row["part"], row["policy"]) == (part, policy)]).items()
    }
    _show(console, rows)
    if quick:
        console.print(
            "quick: one seed, a neighbour at 10x, 8 s a run simulated and 4 s served (12 s of a newcomer's); served: "
            "without edf, a coarser profile"
        )
    return {"summary": summary, "rows": rows, "seeds": seeds}


# --- cases ------------------------------------------------------------------------------------------------------------


def cases(
    play: Run,
    policy: str,
    seed: int,
    share: Mapping[str, float],
    slo_ns: Mapping[str, int],
    factors: Sequence[int],
    lonely: Sequence[str],
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """All measurements of a policy with one seed.

    `share` has the rates that make up the tenants' quotas; `lonely` are the tenants that demand the whole device, one
    by one."""
    about = {"policy": policy, "seed": seed}
    calm = {name: WITHIN * rate for name, rate in share.items()}
    usual: dict[str, float] = {}
    for factor in factors:
        rates = calm | {ANTAGONIST: factor * calm[ANTAGONIST]}
        plan, log, slot_ns = play(policy, poisson(rates), seed, seconds)
        queries = demands(plan, slo_ns, slot_ns)
        found = {}
        for name in NAMES:
            answered, asked = in_time(log, name, plan.warmup_ns, plan.duration_ns)
            alone = answers_alone([each for each in queries if each.tenant == name], _LANES / len(NAMES))
            found[f"attainment_{name}"] = answered / max(1, asked)
            found[f"alone_{name}"] = alone / max(1, asked)
        yield {**about, "case": "victim", "factor": factor, **found}
        if factor == 1:
            usual = found
    for name in lonely:
        plan, log, slot_ns = play(policy, poisson({name: ALONE * len(NAMES) * share[name]}), seed, seconds)
        answered, asked = in_time(log, name, plan.warmup_ns, plan.duration_ns)
        queries = demands(plan, slo_ns, slot_ns)
        could = most_answers(queries, _LANES)
        own = answers_alone(queries, _LANES / len(NAMES))
        used = 100 * (answered - own) / (could - own)
        yield {**about, "case": "unused", "tenant": name, "asked": asked, "in_time": answered, "used_pct": used}
    for name in dict.fromkeys((*lonely, NAMES[0])):
        # A newcomer with a stream of its own: the others' arrivals do not depend on which tenant it is.
        others = {each: BEYOND * rate for each, rate in share.items() if each != name}
        new_s = max(seconds, 3 * NEW_S)
        its = Workload((TenantLoad(name, name, Poisson(calm[name])),), round((new_s - NEW_S) * 1e9), seed=seed + 1000)
        times = tuple(each.time_ns + round(NEW_S * 1e9) for each in arrivals(its))
        plan, log, _ = play(policy, poisson(others) | {name: Trace(times)}, seed, new_s)
        until = round(2 * NEW_S * 1e9)
        answered, asked = in_time(log, name, round(NEW_S * 1e9), until)
        later, after = in_time(log, name, until, plan.duration_ns)
        lost = usual[f"attainment_{name}"] - answered / max(1, asked)
        yield {
            **about,
            "case": "newcomer",
            "tenant": name,
            "attainment_first": answered / max(1, asked),
            "attainment_later": later / max(1, after),
            "lost_s": max(0.0, lost * NEW_S),
        }


def simulation(
    policy: str, processes: Mapping[str, ArrivalProcess], seed: int, seconds: float
) -> tuple[Workload, OutcomeLog, Mapping[str, float]]:
    """Runs of the simulator."""
    return *simulated(FOUR, processes, policy, seed, seconds), {each.name: each.ms * 1e6 for each in FOUR}


def _server(root: Path, inputs: Inputs, slo_ns: Mapping[str, int]) -> Run:
    """Runs, each by a fresh server that has answered a few queries of every tenant."""

    def play(
        policy: str, processes: Mapping[str, ArrivalProcess], seed: int, seconds: float
    ) -> tuple[Workload, OutcomeLog, Mapping[str, float]]:
        loads = tuple(TenantLoad(name, name, process, slo_ns=slo_ns[name]) for name, process in processes.items())
        plan = Workload(loads, round(seconds * 1e9), seed=seed)
        mine = {name: inputs[name] for name in processes}
        with ours(policy, root, "--policy", policy, "--drop", "hopeless", "--preempt").start() as url:
            asyncio.run(warm_up(url, "", inputs, strict=False))
            result = run_load_process(plan, http_url=url, inputs=mine)
        took = bound_of(*read(trace_path(root))).tenants
        return plan, result.log, {each.tenant: each.slot_ns for each in took}

    return play


# --- results ----------------------------------------------------------------------------------------------------------


def _metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The three figures, of the runs of one policy."""
    victims = [row for row in rows if row["case"] == "victim"]
    first = {row["seed"]: row for row in victims if row["factor"] == 1}
    others = [name for name in NAMES if name != ANTAGONIST]

    def largest(reference: Callable[[Mapping[str, Any], str], float]) -> float:
        return max(
            statistics.median([100 * (reference(row, name) - row[f"attainment_{name}"]) for row in these])
            for factor in dict.fromkeys(row["factor"] for row in victims)
            for these in [[row for row in victims if row["factor"] == factor]]
            for name in others
        )

    found: dict[str, float] = {}
    if victims:
        found["victim_drop_points"] = largest(lambda row, name: row[f"alone_{name}"])
        found["victim_drop_from_1x_points"] = largest(lambda row, name: first[row["seed"]][f"attainment_{name}"])
    for metric, case, key, of in (
        ("unused_share_used_pct", "unused", "used_pct", min),
        ("newcomer_s", "newcomer", "lost_s", max),
    ):
        mine = [row for row in rows if row["case"] == case]
        values = [
            median([row for row in mine if row["tenant"] == name], key)
            for name in dict.fromkeys(row["tenant"] for row in mine)
        ]
        if values:
            found[metric] = of(values)
    return found


def _show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("part", "policy", "case", "tenant", *NAMES, "of the rest", "lost s", box=SIMPLE)
    table.title = "Attainment (victim: and alone on its share; newcomer: at first, and later); medians over the seeds"
    keys = dict.fromkeys(
        (row["part"], row["policy"], row["case"], row.get("factor"), row.get("tenant")) for row in rows
    )
    for part, policy, case, factor, tenant in keys:
        these = [
            row
            for row in rows
            if (row["part"], row["policy"], row["case"], row.get("factor"), row.get("tenant"))
            == (part, policy, case, factor, tenant)
        ]
        cells = [""] * len(NAMES)
        used = lost = ""
        if case == "victim":
            cells = [
                f"{median(these, f'attainment_{name}'):.3f} {median(these, f'alone_{name}'):.3f}" for name in NAMES
            ]
        elif case == "unused":
            used = f"{median(these, 'used_pct'):.1f} %"
        elif case == "newcomer":
            first, later = median(these, "attainment_first"), median(these, "attainment_later")
            cells[NAMES.index(tenant)] = f"{first:.2f} {later:.2f}"
            lost = f"{median(these, 'lost_s'):.2f}"
        table.add_row(part, policy, case, tenant or f"{ANTAGONIST} {factor}x", *cells, used, lost)
    console.print(table)
