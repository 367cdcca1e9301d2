"""Pairs served end to end through the engine: overlap beside fcfs and edf, open loop, Poisson, in real time.

All contenders have the same kind of executor, predictor, drop rule, cuts and arrivals. "fcfs" and "edf" run one launch
at a time on the whole device, "edf, halves" one in each half. "overlap" forms groups in up to four shares. "edf,
streams" has two lanes that are plain streams, "edf, 4 streams" four. Such lanes are predicted to be as fast as shares
of their size, and are free to use the whole device. The SLO of both tenants is twice the latency alone of the slower
one, as in Abacus (SC'21, section 7.1).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from bench.gpu._belief import believe
from bench.gpu._context import SEGMENTS, Context, Point
from bench.gpu._journal import MeasureError, Row
from bench.gpu._latency import pairs_of
from bench.gpu._rig import Way
from bench.gpu._runner import Job
from bench.gpu._stats import plain
from cotenant.core.actions import Respond
from cotenant.core.engine import Engine
from cotenant.core.snapshot import DropRule, Policy
from cotenant.execute.protocol import Tensors
from cotenant.metrics import OutcomeLog, percentile_ns, summarise
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.predict.grouped import GroupedPredictor
from cotenant.serve.engine.clock import RealClock
from cotenant.serve.engine.driver import Driver
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Share, Work

SERVING = "serving"
OURS, BASELINES = "overlap", ("edf", "edf, streams", "edf, halves", "edf, 4 streams", "fcfs")
STREAMS = ("edf, streams", "edf, 4 streams")
LOADS, QUICK_LOADS = (1.2, 0.8, 1.5), (1.2,)
"""Of what the device serves when it runs one query after the other, both tenants asking for as much work."""
BATCHES, QUICK_BATCHES = (8, 1), (1,)
SLO_FACTOR = 2.0
_FIRST_PAIRS = 3
_SECONDS, _QUICK_SECONDS = 1.5, 0.15
_FEWEST, _LONGEST_S = 200, 4.0
"""Queries that a run should have, and how long it may become for that."""
_WARM_UP_S = 30.0
"""For some hundred ranges and shares, each of which runs before queries wait."""
_PATIENCE_S = 20.0


def serving_points(context: Context) -> Iterator[Point]:
    """Each pair at each load under each policy; the policies of one pair and load follow each other."""
    batches = QUICK_BATCHES if context.quick else BATCHES
    for load in QUICK_LOADS if context.quick else LOADS:
        for items in batches:
            for at, pair in enumerate(pairs_of(context)):
                tier = 2 if load != LOADS[0] else int(items != batches[0] or at >= _FIRST_PAIRS)
                for contender in (OURS, *BASELINES):
                    key = f"items{items}/{'+'.join(pair)}/load{load:g}/{contender}{context.suffix}"
                    yield Point(key, partial(_serve, context, pair, items, load, contender), tier)


@dataclass(frozen=True, slots=True)
class _Setting:
    """A pair as it is served."""

    tenants: tuple[Tenant, ...]
    predictor: GroupedPredictor
    alone_ns: Mapping[str, int]
    items: Mapping[str, int]


def policies_of(context: Context) -> dict[str, Callable[[], Any]]:
    """How each contender is made."""
    whole, halves, quarters = (context.whole,), context.lanes(2), context.lanes(4)
    drop = DropRule.HOPELESS
    return {
        OURS: lambda: Overlap(quarters, drop, members=min(2, len(quarters))),
        "fcfs": lambda: Fcfs(whole, drop),
        "edf": lambda: Edf(whole, drop, preempt=True),
        "edf, halves": lambda: Edf(halves, drop, preempt=True),
        "edf, streams": lambda: Edf(halves, drop, preempt=True),
        "edf, 4 streams": lambda: Edf(quarters, drop, preempt=True),
    }


def _serve(context: Context, pair: Sequence[str], items: int, load: float, contender: str) -> list[Row]:
    policies = {name: make() for name, make in policies_of(context).items()}
    policy = policies[contender]
    sizes = [share.size for each in policies.values() for share in each.spec.shares]
    setting = _setting(context, pair, items, list(dict.fromkeys(sizes)))
    runner = context.runner(policy.spec.shares, Way.STREAMS if contender in STREAMS else Way.SHARES)
    effort = replace(context.effort, longest_s=_WARM_UP_S)
    runner.warm(list(_launches(setting.tenants, setting.items, policy.spec.shares)), effort)
    rates = {name: load / len(pair) * 1e9 / setting.alone_ns[name] for name in pair}
    seconds = _QUICK_SECONDS
    if not context.quick:
        seconds = min(_LONGEST_S, max(_SECONDS, _FEWEST / sum(rates.values())))
    feeds = {name: context.subjects.get(name).feeds(setting.items[name]) for name in pair}
    found, lag_ns = _run(policy, setting, runner.executor, rates, feeds, seconds, context)
    summary = summarise(found, end_ns=round(seconds * 1e9), tenants=pair)
    total = summary.total
    return [
        {
            "pair": "+".join(pair),
            "items": items,
            "load": load,
            "contender": contender,
            "slo_ms": plain(setting.tenants[0].slo_ns / 1e6),
            "seconds": plain(seconds),
            "offered": total.offered,
            "offered_per_s": plain(total.offered_per_s),
            "attainment": plain(total.attainment or 0.0),
            "goodput_per_s": plain(total.goodput_per_s),
            "p99_ms": plain(total.p99_ms or 0.0),
            "late": total.late,
            "dropped": total.dropped,
            "rejected": total.rejected,
            "failed": total.failed,
            "send_lag_p99_ms": plain(lag_ns / 1e6),
            "worst_tenant_attainment": plain(summary.worst_attainment or 0.0),
        }
    ]


def _setting(context: Context, pair: Sequence[str], items: int, sizes: Sequence[int]) -> _Setting:
    rows = {name: items if context.subjects.get(name).spec.batched else 1 for name in pair}
    if len(set(rows.values())) > 1:
        raise MeasureError(f"{' and '.join(pair)} cannot both be served in batches of {items}")
    count = rows[pair[0]]
    predictor = believe(context, pair, count, sizes)
    alone = {
        name: predictor.latency_ns(Work(name, 0, count, 0, context.subjects.get(name).units), context.whole.size)
        for name in pair
    }
    slo = round(SLO_FACTOR * max(alone.values()))
    tenants = tuple(Tenant(name, slo, context.subjects.get(name).cuts(SEGMENTS), max_batch=count) for name in pair)
    return _Setting(tenants, predictor, alone, rows)


def _launches(tenants: Sequence[Tenant], items: Mapping[str, int], shares: Sequence[Share]) -> Iterator[Job]:
    """Everything that a policy may launch."""
    for share in shares:
        for tenant in tenants:
            for at, start in enumerate(tenant.cuts[:-1]):
                for end in tenant.cuts[at + 1 :]:
                    yield Job(tenant.name, items[tenant.name], start, end, share)


def _run(
    policy: Policy,
    setting: _Setting,
    executor: Any,
    rates: Mapping[str, float],
    feeds: Mapping[str, Tensors],
    seconds: float,
    context: Context,
) -> tuple[OutcomeLog, int]:
    """Serve arrivals for so long; how the queries ended, and the 99th percentile of how late they were sent."""
    tenants = {tenant.name: tenant for tenant in setting.tenants}
    ended: list[tuple[str, int, int, Outcome]] = []
    answered = threading.Semaphore(0)
    clock = RealClock()
    driver = Driver(Engine(setting.tenants, policy, setting.predictor, context.machine), executor, clock)
    lags: list[int] = []
    try:
        start_ns = time.monotonic_ns() + 1_000_000
        for due_ns, name in arrivals(rates, seconds, context.seed):
            wait = start_ns + due_ns - time.monotonic_ns()
            if wait > 0:
                time.sleep(wait / 1e9)
            lags.append(max(0, time.monotonic_ns() - start_ns - due_ns))
            tenant, scheduled = tenants[name], start_ns + due_ns

            def make(number: int, now_ns: int, tenant: Tenant = tenant, scheduled: int = scheduled) -> Query:
                # The deadline counts from when the query was due: a sender that lags makes nothing look better.
                deadline = scheduled + tenant.slo_ns
                return Query(number, tenant.name, now_ns, deadline, items=setting.items[tenant.name])

            def done(respond: Respond, _: object, name: str = name, due_ns: int = due_ns) -> None:
                ended.append((name, due_ns, time.monotonic_ns() - start_ns, respond.outcome))
                answered.release()

            driver.submit(make, feeds[name], done)
        for _ in lags:
            if not answered.acquire(timeout=_PATIENCE_S):
                raise MeasureError(f"queries were left after {_PATIENCE_S:g} s")
    finally:
        clock.close()
    log = OutcomeLog(tenants)
    for each in ended:
        log.add(*each)
    return log, percentile_ns(lags, 99) or 0


def arrivals(rates: Mapping[str, float], seconds: float, seed: int) -> list[tuple[int, str]]:
    """Poisson arrivals of each tenant in [0, seconds), in order: nanoseconds and the name."""
    found: list[tuple[int, str]] = []
    for child, (name, rate) in zip(np.random.SeedSequence(seed).spawn(len(rates)), rates.items(), strict=True):
        rng = np.random.default_rng(child)
        gaps = rng.exponential(1.0 / rate, max(16, int(rate * seconds * 2) + 64))
        found += [(round(at * 1e9), name) for at in np.cumsum(gaps).tolist() if at < seconds]
    return sorted(found)


def gains(rows: Sequence[Row]) -> dict[str, float]:
    """What overlap gains over each baseline, in cells (pair, batch, load) that all contenders have.

    Throughput: mean over cells above capacity of the ratio of queries answered in time. Violations: queries not
    answered in time, summed over all cells.
    """
    runs = {(row["pair"], row["items"], row["load"], row["contender"]): row for row in rows}
    cells = [
        cell
        for cell in dict.fromkeys(key[:3] for key in runs)
        if all((*cell, name) in runs for name in (OURS, *BASELINES))
    ]
    found: dict[str, float] = {}
    for name in BASELINES:
        pairs = [(runs[(*cell, OURS)], runs[(*cell, name)], cell[2]) for cell in cells]
        label = name.replace(", ", "_").replace(" ", "_")
        ratios = [
            ours["goodput_per_s"] / theirs["goodput_per_s"]
            for ours, theirs, load in pairs
            if load > 1 and theirs["goodput_per_s"] > 0
        ]
        if ratios:
            found[f"throughput_gain_vs_{label}_pct"] = plain(100 * (sum(ratios) / len(ratios) - 1))
        ours_missed, theirs_missed = (sum(_missed(pair[at]) for pair in pairs) for at in (0, 1))
        if theirs_missed:
            found[f"violation_reduction_vs_{label}_pct"] = plain(100 * (1 - ours_missed / theirs_missed))
    return found


def _missed(row: Row) -> float:
    return (1 - float(row["attainment"])) * int(row["offered"])
