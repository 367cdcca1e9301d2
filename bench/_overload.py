"""Tenants that ask for more than there is: simulated runs of them, and every run beside what no schedule could beat."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench._disturbed import undisturbed
from cotenant.config import NS_PER_MS, PolicySection
from cotenant.metrics import OutcomeLog
from cotenant.policies.registry import options_of, policy_class
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.scenario import Assumptions, Scenario, run_scenario
from cotenant.types import Outcome, Tenant
from cotenant.work import Share
from cotenant.workload import ArrivalProcess, Poisson, TenantLoad, Workload, arrivals, for_capacity
from cotenant.workload.bound import (
    TimedQuery,
    largest_least_share,
    most_answers,
    most_answers_with_shares,
    most_value,
)

LANES = (Share((0,)), Share((1,)))
CUT_MS = 8.0
"""Between boundaries in the simulated models: what a worker pauses at in the quick-start repository, about."""
MOST_RATE = 40.0
"""Queries a second of one of the seven at most, as in the demo: beyond, the tiny ones measure the front-ends."""
_HARDLY = 1e-9


@dataclass(frozen=True, slots=True)
class Model:
    """A tenant of a simulation: what a query of it takes on one core, its SLO, and its weight where weights count."""

    name: str
    ms: float
    slo_ms: float
    weight: float = 1.0

    def tenant(self, weighted: bool) -> Tenant:
        """As the core knows it."""
        units = max(1, round(self.ms / CUT_MS))
        weight = self.weight if weighted else 1.0
        return Tenant(self.name, round(self.slo_ms * NS_PER_MS), tuple(range(units + 1)), weight=weight)

    def table(self) -> LatencyTable:
        """What it takes, batches bringing nothing; a core is all that it can use."""
        units = max(1, round(self.ms / CUT_MS))
        return LatencyTable((LatencyRow(0, 1, 1, round(self.ms * NS_PER_MS)),), (1.0,) * units)


FOUR = (
    Model("resnet50", 78, 250, 4),
    Model("minilm", 23, 120, 1),
    Model("ocr_recognition", 100, 400, 2),
    Model("magika", 7, 30, 1),
)
"""Models of the quick start, as they were once measured on a core, with its SLOs."""
SEVEN = (
    *FOUR,
    Model("ocr_detection", 114, 500, 2),
    Model("ocr_orientation", 5.7, 20, 1),
    Model("silero_vad", 0.3, 20, 1),
)
"""All of them."""


def rates_of(service_ns: Mapping[str, float], slots: int, load: float, most: float = math.inf) -> dict[str, float]:
    """Queries a second that together demand `load` times the capacity of the slots, in equal shares of work.

    No tenant sends more than `most`; the others share the rest.
    """
    rates: dict[str, float] = {}
    while left := {name: ns for name, ns in service_ns.items() if name not in rates}:
        used = sum(rate * service_ns[name] / 1e9 for name, rate in rates.items())
        wanted = for_capacity(left, slots, load - used / slots)
        above = [name for name, rate in wanted.items() if rate > most]
        rates.update(dict.fromkeys(above, most) if above else wanted)
    return {name: rates[name] for name in service_ns}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no schedule could beat in a run, an objective each: see `workload.bound`. `alone` is what each tenant could
    have on its share, all shares being equal."""

    asked: Mapping[str, int]
    most: float
    shares: float
    alone: Mapping[str, float]
    weighted: float
    fair: float

    @classmethod
    def of(cls, queries: Sequence[TimedQuery], slots: int, weights: Mapping[str, float]) -> Bounds:
        """The bounds of queries of tenants, which are all in `weights`."""
        shares, alone = most_answers_with_shares(queries, slots, dict.fromkeys(weights, 1 / len(weights)))
        asked = {name: sum(each.tenant == name for each in queries) for name in weights}
        weighted = most_value(queries, slots, weights)
        return cls(asked, most_answers(queries, slots), shares, alone, weighted, largest_least_share(queries, slots)[0])

    def figures(self, in_time: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, float]:
        """Ratios of answers in time to the bounds.

        `least_kept` is the smallest part of the answers that a tenant could have had alone on its quota. `of_default`
        is that, or the part of all answers if that is less. So taking from one tenant's quota to answer more queries
        of others gains nothing.
        """
        kept = min(in_time[name] / alone for name, alone in self.alone.items() if alone > _HARDLY)
        total, least = sum(in_time.values()), min(in_time[name] / asked for name, asked in self.asked.items() if asked)
        return {
            "asked": sum(self.asked.values()),
            "in_time": total,
            "least_attainment": least,
            "of_most": total / self.most,
            "of_shares": total / self.shares,
            "of_weighted": sum(count * weights[name] for name, count in in_time.items()) / self.weighted,
            "of_fair": least / max(self.fair, _HARDLY),
            "least_kept": kept,
            "of_default": min(kept, total / self.shares),
            "bound_most": self.most / sum(self.asked.values()),
            "bound_shares": self.shares / sum(self.asked.values()),
            "bound_fair": self.fair,
            **{f"attainment_{name}": in_time[name] / asked for name, asked in self.asked.items() if asked},
        }


def demands(workload: Workload, slo_ns: Mapping[str, int], slot_ns: Mapping[str, float]) -> list[TimedQuery]:
    """The queries of a workload that are counted, by tenant."""
    found = []
    for time_ns, position, _ in arrivals(workload):
        name = workload.tenants[position].name
        if time_ns >= workload.warmup_ns:
            found.append(TimedQuery(name, time_ns, time_ns + slo_ns[name], slot_ns[name]))
    return found


def in_time(log: OutcomeLog, name: str, start_ns: int, end_ns: int) -> tuple[int, int]:
    """How many queries of a tenant that were due in [start, end) were answered in time, and how many there were."""
    columns = log.columns(name).window(start_ns, end_ns)
    return int(columns.of(Outcome.ANSWERED).sum()), len(columns.outcome)


def simulated(
    models: Sequence[Model],
    processes: Mapping[str, ArrivalProcess],
    policy: str,
    seed: int,
    seconds: float,
    *,
    noise: float = 0.0,
    weighted: bool = False,
) -> tuple[Workload, OutcomeLog]:
    """A run on two lanes of a core, in which latencies are as predicted, plus noise.

    With noise, predictions and margins are learnt as by a server. Tenants without an arrival process send no queries.
    """
    tenants = {each.name: each.tenant(weighted) for each in models}
    loads = tuple(TenantLoad(name, name, process) for name, process in processes.items())
    workload = Workload(loads, round(seconds * 1e9), seed=seed)
    scenario = Scenario(
        workload,
        tuple(tenants.values()),
        tuple(tenants[name] for name in processes),
        {each.name: each.table() for each in models},
        LANES,
    )
    chosen = section(policy)
    follower = scenario.online_model(scenario.policy(chosen)) if noise else None
    return workload, run_scenario(scenario, chosen, Assumptions(noise=noise), seed, follower=follower)


def section(policy: str) -> PolicySection:
    """A policy that stops at boundaries if it can, and else is as it comes: all get the same drop rule."""
    return PolicySection(policy, {"preempt": True} if "preempt" in options_of(policy_class(policy)) else {})


def poisson(rates: Mapping[str, float]) -> dict[str, ArrivalProcess]:
    """Independent arrivals at these rates."""
    return {name: Poisson(rate) for name, rate in rates.items()}


def median(rows: Iterable[Mapping[str, Any]], key: str) -> float:
    """Of a figure over the rows that were not disturbed, or all if all were; nan where there is none."""
    return float(statistics.median([row[key] for row in undisturbed(rows)] or [math.nan]))
