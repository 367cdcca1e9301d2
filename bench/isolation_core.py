"""Isolation in the core: the part of its quota that a well-behaved tenant keeps beside neighbours that try to take it.

Random mixes under the default policy `shares`, simulated with exact latencies, on 1 to 4 lanes. A mix has well-behaved
tenants, which demand 0.3 to 1 times their quotas with single rows, and adversaries. An adversary sends up to 30 times
its quota into a short queue. It sends many rows a query, requests of the highest priority, bursts, time-outs shorter
than its SLO, and queries that it withdraws. It may have a configured priority, and a rate above the machine.
SLOs are the operator's: each is at least twice the work of a query, and twice the longest uncut segment of a neighbour.
`quota_kept_p1` and `quota_kept_min` are the first percentile and the least of one ratio, over all tenants of all mixes.
The ratio is that of a well-behaved tenant's answers in time to those that its queries could have alone. Alone means on
a device of its quota (`workload.bound.answers_alone`). Each of them sends 200 queries at least.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from msgspec import UNSET
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import cotenant.core
import cotenant.policies
import cotenant.policies.ordered
from bench._campaign import digest_of, run_all
from cotenant.core.actions import Action, Respond
from cotenant.core.engine import Engine
from cotenant.core.events import Event, QueryArrived, QueryCancelled
from cotenant.core.snapshot import Policy
from cotenant.policies.registry import make_policy
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim import driver
from cotenant.types import Outcome, Query, Tenant, priority_rank
from cotenant.work import Machine, Share
from cotenant.workload import bound
from cotenant.workload.bound import TimedQuery, answers_alone
from cotenant.world.simulated import TableWorld

NAME = "isolation-core"
MIXES, QUICK_MIXES = 500, 40
LEAST_QUERIES = 200
"""Of a well-behaved tenant."""
MOST_QUERIES = 2500
"""Of an adversary: what bounds the time of a mix."""
_LEAST_QUOTA = 0.01
_LONGEST_MS = 100.0
_NS = 1e9


@dataclass(frozen=True, slots=True)
class Party:
    """A tenant of a mix and what its clients do. `work_ms` and `slope`: of the first row, and of each further row as a
    part of it; `load`: lanes asked for over `quota`, those that are guaranteed; `rows`: of a query; `priority`: of
    requests, 0 to this; `timeout`, `leaves`: parts of queries with a time-out, and that are withdrawn; `burst`: queries
    that come at once."""

    tenant: Tenant
    work_ms: float
    slope: float
    is_good: bool
    load: float
    quota: float
    rows: int = 1
    priority: int = 0
    timeout: float = 0.0
    leaves: float = 0.0
    burst: int = 1

    def ms(self, rows: int) -> float:
        """Latency of so many rows on a lane."""
        return self.work_ms * (1 + (rows - 1) * self.slope)

    @property
    def table(self) -> LatencyTable:
        """Its latencies."""
        sizes = sorted({1, self.tenant.max_batch})
        rows = tuple(LatencyRow(0, size, 1, round(self.ms(size) * 1e6)) for size in sizes)
        return LatencyTable(rows, (1.0,) * self.tenant.unit_count)

    @property
    def segment_ms(self) -> float:
        """Longest part of the model between two cuts, with as many rows as may run together."""
        return self.ms(self.tenant.max_batch) / self.tenant.unit_count


@dataclass(frozen=True, slots=True)
class Mix:
    """Tenants on so many lanes for so long."""

    lanes: int
    parties: tuple[Party, ...]
    seconds: float


def quotas(tenants: Sequence[Tenant], rated: Sequence[float], lanes: int) -> list[float]:
    """Lanes that each tenant is guaranteed. `rated` are those of rates, which are scaled down to the machine; shares
    are of what they leave."""
    over, left = max(1.0, sum(rated) / lanes), max(0.0, lanes - sum(rated))
    named = sum(each.share for each in tenants)
    weights = sum(each.weight for each in tenants if not each.share)
    found = []
    for each, own in zip(tenants, rated, strict=True):
        part = each.share / max(1.0, named) if each.share else max(0.0, 1 - named) * each.weight / weights
        found.append(max(own / over, part * left))
    return found


def drawn(seed: int) -> Mix:
    """A random mix."""
    random = Random(f"{NAME} {seed}")
    lanes, count = random.choice([1, 2, 2, 3, 4]), random.randint(2, 6)
    good, seconds = random.randint(1, count - 1), random.uniform(5, 15)
    tenants = [_tenant(random, f"t{at}") for at in range(count)]
    rated = [
        lanes * random.uniform(0.3, 1.2) / count * (4 if at >= good and random.random() < 0.3 else 1)
        if not each.share and random.random() < 0.25
        else 0.0
        for at, each in enumerate(tenants)
    ]
    parties = []
    for at, (tenant, lanes_of_rate, quota) in enumerate(
        zip(tenants, rated, quotas(tenants, rated, lanes), strict=True)
    ):
        is_good = at < good and quota > _LEAST_QUOTA  # else rates leave nothing, and there is nothing to keep
        parties.append(_party(random, tenant, lanes_of_rate, quota, is_good, seconds))
    made = []
    for each in parties:
        others = [other.segment_ms for other in parties if other is not each]
        slo_ms = 2 * max(each.ms(each.rows), *others) * random.choice([1.0, random.uniform(1, 3), 10.0])
        made.append(replace(each, tenant=replace(each.tenant, slo_ns=round(slo_ms * 1e6))))
    return Mix(lanes, tuple(made), seconds)


def _tenant(random: Random, name: str) -> Tenant:
    return Tenant(
        name,
        1,
        max_batch=random.choice([1, 1, 4, 8]),
        weight=random.choice([1.0, 1.0, 1.0, 2.0, 4.0]),
        priority=random.choice([0, 0, 0, 1, 2]),
        share=random.uniform(0.1, 0.9) if random.random() < 0.15 else 0.0,
    )


def _party(random: Random, tenant: Tenant, rated: float, quota: float, is_good: bool, seconds: float) -> Party:
    work_ms, slope, rows = 2 * 30 ** random.random(), random.choice([0.2, 0.5, 1.0]), 1
    if is_good:
        load = random.uniform(0.3, 1.0)
        work_ms = min(work_ms, 1e3 * load * quota * seconds / (1.3 * LEAST_QUERIES))
        more: dict[str, Any] = {}
    else:
        load, rows = 30 ** random.random(), random.choice([1, tenant.max_batch])
        work_ms = min(_LONGEST_MS, max(work_ms, 1e3 * load * quota * seconds / MOST_QUERIES / (1 + (rows - 1) * slope)))
        tenant = replace(tenant, max_queue=random.choice([1, 4, 16, 256, 256]))
        more = {
            "priority": random.choice([0, 0, 1, 2]),
            "timeout": random.choice([0.0, 0.0, 0.5, 1.0]),
            "leaves": random.choice([0.0, 0.0, 0.3, 0.9]),
            "burst": random.choice([1, 1, 10, 50]),
        }
    units = max(1, round(work_ms / random.uniform(3, 15)))
    tenant = replace(tenant, cuts=tuple(range(units + 1)), rate=rated / work_ms * 1e3 if rated else UNSET)
    return Party(tenant, work_ms, slope, is_good, load, quota, rows, **more)


def queries_of(mix: Mix, seed: int) -> tuple[list[Query], dict[int, int]]:
    """The queries in the order of arrival, and when clients withdraw those that they do, by number."""
    come = list[tuple[int, Party, float, float, int]]()
    for each in mix.parties:
        random = Random(f"{NAME} {seed} {each.tenant.name}")
        rate = each.load * max(each.quota, 0.02) / each.ms(each.rows) * 1e3
        if not each.is_good:
            rate = min(rate, MOST_QUERIES / mix.seconds)
        now = 0.0
        while (now := now + random.expovariate(rate / each.burst)) < mix.seconds:
            for _ in range(each.burst):
                timeout = random.uniform(0.1, 1.0) if random.random() < each.timeout else 0.0
                leaves = random.uniform(0.0, 1.0) if random.random() < each.leaves else 0.0
                rank = priority_rank(random.randint(0, each.priority))
                come.append((round(now * _NS), each, timeout, leaves, rank))
    queries, leaving = list[Query](), dict[int, int]()
    for number, (now_ns, party, timeout, leaves, rank) in enumerate(sorted(come, key=lambda one: one[0])):
        slo_ns = party.tenant.slo_ns
        deadline = now_ns + round(slo_ns * (timeout or 1.0))
        expiry = deadline if timeout else None
        queries.append(Query(number, party.tenant.name, now_ns, deadline, rank, party.rows, expiry_ns=expiry))
        if leaves:
            leaving[number] = now_ns + round(slo_ns * leaves)
    return queries, leaving


class _Leaving(Engine):
    """An engine with clients that withdraw queries, each before the first event that is no sooner."""

    def __init__(self, tenants: Sequence[Tenant], policy: Policy, predictor: TablePredictor, lanes: int) -> None:
        super().__init__(tenants, policy, predictor, Machine.cpu(tuple(range(lanes))))
        self.leaving: dict[int, int] = {}
        self._soon: list[tuple[int, int]] = []

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """See Engine."""
        actions: list[Action] = []
        while self._soon and self._soon[0][0] <= now_ns:
            actions += super().handle(QueryCancelled(heappop(self._soon)[1]), now_ns)
        if isinstance(event, QueryArrived) and event.query.id in self.leaving:
            heappush(self._soon, (self.leaving[event.query.id], event.query.id))
        return actions + super().handle(event, now_ns)


def answered(mix: Mix, queries: Sequence[Query], leaving: dict[int, int], policy: str = "shares") -> Counter[str]:
    """Answers in time, by tenant."""
    predictor = TablePredictor({each.tenant.name: each.table for each in mix.parties})
    lanes = tuple(Share((core,)) for core in range(mix.lanes))
    engine = _Leaving([each.tenant for each in mix.parties], make_policy(policy, {}, lanes), predictor, mix.lanes)
    engine.leaving = leaving
    owner, found = [each.tenant for each in queries], Counter[str]()

    def on_respond(respond: Respond, now_ns: int) -> None:
        found[owner[respond.query]] += respond.outcome is Outcome.ANSWERED

    driver.simulate(engine, TableWorld(predictor), queries, on_respond)
    return found


def kept(seed: int, policy: str = "shares") -> Iterator[dict[str, Any]]:
    """A row for each well-behaved tenant of a mix."""
    mix = drawn(seed)
    queries, leaving = queries_of(mix, seed)
    found = answered(mix, queries, leaving, policy)
    for each in mix.parties:
        if each.is_good:
            name = each.tenant.name
            own = [
                TimedQuery(name, query.arrival_ns, query.deadline_ns, each.work_ms * 1e6)
                for query in queries
                if query.tenant == name
            ]
            alone = answers_alone(own, each.quota)
            yield {
                "mix": seed,
                "tenant": name,
                "lanes": mix.lanes,
                "quota": each.quota,
                "asked": len(own),
                "alone": alone,
                "in_time": found[name],
                "kept": found[name] / alone,
            }


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. `data_dir` is not used; rows of mixes that were run before are kept in the user's cache folder."""
    count = QUICK_MIXES if quick else MIXES
    sources = [cotenant.core, cotenant.policies, cotenant.policies.ordered, driver, bound, sys.modules[__name__]]
    rows = run_all(NAME, digest_of(sources, ()), range(1, count + 1), _judge, _said)
    values = np.array([row["kept"] for row in rows])
    summary = {"quota_kept_p1": float(np.percentile(values, 1)), "quota_kept_min": float(values.min())}
    console = Console()
    _show(console, rows)
    if quick:
        console.print(f"quick: {count} of {MIXES} mixes")
    return {"summary": summary, "rows": rows, "mixes": count}


def _judge(seed: int) -> list[dict[str, Any]]:
    return list(kept(seed))


def _said(rows: list[dict[str, Any]]) -> str:
    return " ".join(f"{row['mix']}:{row['tenant']} {row['kept']:.3f}" for row in rows)


def _show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table("mix", "tenant", "lanes", "quota", "asked", "alone", "in time", "kept", box=SIMPLE)
    table.title = f"The lowest of {len(rows)} well-behaved tenants"
    for row in sorted(rows, key=lambda each: each["kept"])[:10]:
        cells = [f"{row['quota']:.2f}", str(row["asked"]), f"{row['alone']:.0f}", str(row["in_time"])]
        table.add_row(str(row["mix"]), row["tenant"], str(row["lanes"]), *cells, f"{row['kept']:.3f}")
    console.print(table)
