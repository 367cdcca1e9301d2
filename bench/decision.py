"""How long the core takes over an event when it has to decide: 8 tenants and 64 queries, 32 and 1,000, 200 on 8 lanes.

Each case runs the engine in steady state. A launch ends (or its segment), and a query arrives for each one that left.
Every call of `Engine.handle` that asked the policy is timed on its own with the monotonic clock. The collector of
cyclic garbage is frozen and off, as in the server: nothing here makes cycles.

Two more cases time every event. In `crowd` 200 tenants send 520 queries a second (Poisson) to 8 lanes, 1.6 times what
these can do. In `burst` 10,000 queries wait that can all be in time, and then the predictor doubles: 5,000 have to go.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from time import perf_counter_ns, thread_time_ns

import numpy as np
from rich.console import Console
from rich.table import Table

from cotenant.core.actions import Action, Launch, Respond, SetTimer
from cotenant.core.engine import Engine
from cotenant.core.events import Event, LaunchEnded, PredictorChanged, QueryArrived, TimerFired
from cotenant.core.snapshot import Decision, DropRule, Snapshot
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.policies.ordered.selective import Fair, Most, Shares
from cotenant.policies.ordered.sjf import Sjf
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share

SEED = 1
GOAL_P99_US, CROWDED_GOAL_P99_US = 100.0, 400.0
MANY_GOAL_P99_US, BURST_GOAL_MS = 1000.0, 20.0
WAITING, CROWDED_WAITING, CROWD = 64, 1000, 4
TENANTS, RATE, BURST = 200, 520.0, 10_000
_MS = 1_000_000
_LATENCIES_MS = (1, 2, 3, 5, 8, 13, 21, 34)
_UNITS = 12
_MAX_BATCH = 8
_COLUMNS = ("mean_waiting", "mean_batch", "p50_us", "p99_us", "max_us", "p99_cpu_us", "given_up_pct")
_ONE = (Share((0, 1)),)
_TWO = (Share((0,)), Share((1,)))
_EIGHT = tuple(Share((core,)) for core in range(8))
MAIN = "edf, preempt, batching"

CASES: dict[str, tuple[ListPolicy, int]] = {
    MAIN: (Edf(_ONE, slack_share=0.1), _MAX_BATCH),
    "edf, preempt, batching, 2 lanes": (Edf(_TWO, slack_share=0.1), _MAX_BATCH),
    "edf, every cut, batching": (Edf(_ONE, slack_share=0.0), _MAX_BATCH),
    "edf, whole models": (Edf(_ONE, preempt=False), 1),
    "sjf, batching": (Sjf(_ONE), _MAX_BATCH),
    "fcfs, batching": (Fcfs(_ONE), _MAX_BATCH),
    "most, 2 lanes": (Most(_TWO), 1),
    "fair, 2 lanes": (Fair(_TWO), 1),
    "shares, 2 lanes": (Shares(_TWO), 1),
}
"""Policy and largest batch of each row; all drop hopeless queries."""
CROWDED = ("edf, whole models", "most, 2 lanes", "fair, 2 lanes", "shares, 2 lanes")
"""Those that are measured with 32 tenants and 1,000 queries, too."""
OPEN: dict[str, ListPolicy] = {
    "shares": Shares(_EIGHT),
    "fair": Fair(_EIGHT),
    "most": Most(_EIGHT),
    "edf": Edf(_EIGHT),
}
"""Those that 200 tenants send to, and those of a burst."""


def setting(policy: ListPolicy, max_batch: int, crowd: int = 1) -> tuple[list[Tenant], TablePredictor]:
    """Tenants, `crowd` of each latency, with SLOs that leave room for about the waiting queries.

    Half of the models are cut at each of their units.
    """
    tenants, tables = [], {}
    room_ms = 1000 if crowd == 1 else 6000
    for number, latency_ms in enumerate(_LATENCIES_MS * crowd):
        units = _UNITS if number % 2 else 1
        name, latency = f"t{number}", latency_ms * _MS
        points = ((1, latency), (max_batch + 1, round(latency * (1 + 0.4 * max_batch))))
        rows = tuple(LatencyRow(0, items, cores, ns) for items, ns in points for cores in (1, 2))
        tables[name] = LatencyTable(rows, (1.0,) * units, 1.1)
        tenants.append(Tenant(name, room_ms * _MS + 20 * latency, cuts=tuple(range(units + 1)), max_batch=max_batch))
    assert policy.drop is DropRule.HOPELESS
    return tenants, TablePredictor(tables)


class _Counting:
    """The policy as it is, with a count of its decisions: tells which calls of `handle` had to decide."""

    def __init__(self, policy: ListPolicy) -> None:
        self.spec, self.queue_key = policy.spec, policy.queue_key
        self._decide = policy.decide
        self.decisions = 0

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        self.decisions += 1
        return self._decide(snapshot, memory)


def measure(case: str, count: int, crowd: int = 1) -> dict[str, object]:
    """Time `count` calls of `handle` that decide; `crowd` above 1 for many tenants and queries."""
    policy, max_batch = CASES[case]
    tenants, predictor = setting(policy, max_batch, crowd)
    inside = WAITING if crowd == 1 else CROWDED_WAITING
    counting = _Counting(policy)
    engine = Engine(tenants, counting, predictor, Machine.cpu((0, 1)))
    rng = Random(SEED)
    now, number = 0, 0
    running: list[tuple[int, int]] = []
    taken_ns: list[int] = []
    taken_cpu_ns: list[int] = []
    given_up = 0
    waiting: list[int] = []
    batch_sizes: list[int] = []

    def handle(event: Event) -> None:
        nonlocal given_up
        before = counting.decisions
        began_cpu = thread_time_ns()
        began = perf_counter_ns()
        actions: list[Action] = engine.handle(event, now)
        taken = perf_counter_ns() - began
        taken_cpu = thread_time_ns() - began_cpu
        if counting.decisions > before:
            taken_ns.append(taken)
            taken_cpu_ns.append(taken_cpu)
            waiting.append(engine.live - len(running))
        for action in actions:
            if isinstance(action, Launch):
                running.append((now + action.predicted_ns, action.id))
                batch_sizes.append(len(action.queries))
            elif isinstance(action, Respond):
                given_up += action.outcome in (Outcome.DROPPED, Outcome.REJECTED)

    with _without_collector():
        while len(taken_ns) < count:
            for _ in range(inside - engine.live):  # those that are refused are not sent again before the next end
                tenant = tenants[rng.randrange(len(tenants))]
                query = Query(number, tenant.name, now, now + tenant.slo_ns)
                number += 1
                handle(QueryArrived(query))
            running.sort(reverse=True)
            now, launch = running.pop()
            handle(LaunchEnded(launch))
    p50, p99, worst = np.percentile(np.array(taken_ns[count // 10 :]) / 1e3, (50, 99, 100)).tolist()
    return {
        "case": case if crowd == 1 else f"{case}, {len(tenants)} tenants",
        "decisions": count,
        "mean_waiting": float(np.mean(waiting)),
        "mean_batch": float(np.mean(batch_sizes)),
        "p50_us": p50,
        "p99_us": p99,
        "max_us": worst,
        "p99_cpu_us": float(np.percentile(np.array(taken_cpu_ns[count // 10 :]) / 1e3, 99)),
        "given_up_pct": 100 * given_up / number,
    }


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class _Run:
    """An engine with its clock, its timer and its launches, which take as long as predicted. It times every event."""

    def __init__(self, tenants: Sequence[Tenant], policy: ListPolicy, predictor: TablePredictor) -> None:
        self.engine = Engine(tenants, policy, predictor, Machine.cpu(tuple(range(8))))
        self.now_ns = 0
        self.taken_ns: list[int] = []
        self.cpu_ns: list[int] = []
        self.inside: list[int] = []
        self.given_up: list[int] = []
        """Of each event."""
        self._due: list[tuple[int, int, Event]] = []

    def handle(self, event: Event) -> None:
        began, began_cpu = perf_counter_ns(), thread_time_ns()
        actions = self.engine.handle(event, self.now_ns)
        self.cpu_ns.append(thread_time_ns() - began_cpu)
        self.taken_ns.append(perf_counter_ns() - began)
        self.inside.append(self.engine.live)
        gone = 0
        for action in actions:
            if isinstance(action, Launch):
                heappush(self._due, (self.now_ns + action.predicted_ns, action.id, LaunchEnded(action.id)))
            elif isinstance(action, SetTimer):
                heappush(self._due, (action.at_ns, -1, TimerFired()))
            elif isinstance(action, Respond):
                gone += action.outcome in (Outcome.DROPPED, Outcome.REJECTED)
        self.given_up.append(gone)

    def until(self, end_ns: int) -> None:
        """Let everything happen that is due before that time."""
        while self._due and self._due[0][0] <= end_ns:
            self.now_ns, _, event = heappop(self._due)
            self.handle(event)
        self.now_ns = end_ns


def _many(slo_ms: float, slower: float = 1.0, max_queue: int = 256) -> tuple[list[Tenant], TablePredictor]:
    """200 tenants with models that take 2 to 88 ms, 25 on average, in four segments; each SLO is another."""
    tenants, tables = [], {}
    for number in range(TENANTS):
        name, spread = f"t{number}", 1 + 0.3 * (37 * number % TENANTS) / TENANTS
        latency = round(2 * _LATENCIES_MS[number % len(_LATENCIES_MS)] * spread * slower * _MS)
        tables[name] = LatencyTable((LatencyRow(0, 1, 1, latency),), (1.0,) * 4, 1.1)
        slo_ns = round((slo_ms + number) * _MS) + 10 * latency
        tenants.append(Tenant(name, slo_ns, cuts=(0, 1, 2, 3, 4), max_queue=max_queue))
    return tenants, TablePredictor(tables)


def measure_crowd(case: str, seconds: int) -> dict[str, object]:
    """Time all events of 200 tenants that send 520 queries a second to 8 lanes."""
    tenants, predictor = _many(1000.0)
    made, rng = _Run(tenants, OPEN[case], predictor), Random(SEED)
    sent, at_ns = 0, 0.0
    with _without_collector():
        while (at_ns := at_ns + rng.expovariate(RATE) * 1e9) < seconds * 1e9:
            made.until(int(at_ns))
            tenant = tenants[rng.randrange(TENANTS)]
            made.handle(QueryArrived(Query(sent, tenant.name, made.now_ns, made.now_ns + tenant.slo_ns)))
            sent += 1
    return {
        "case": f"{case}, {TENANTS} tenants, {RATE:.0f} queries/s, 8 lanes",
        **_figures(made, len(made.taken_ns) // 10),
        "cpu_s_per_s": sum(made.cpu_ns) / 1e9 / seconds,
        "given_up_pct": 100 * sum(made.given_up) / sent,
    }


def measure_burst(case: str, inside: int) -> dict[str, object]:
    """Time the events after which queries that wait have to go since the predictor doubles; a second of them."""
    room_ms = 1.15 * inside * 28 / 8
    tenants, predictor = _many(room_ms, max_queue=inside)
    _, slow = _many(room_ms, 2.0)
    made, rng = _Run(tenants, OPEN[case], predictor), Random(SEED)
    with _without_collector():
        for number in range(inside):
            tenant = tenants[rng.randrange(TENANTS)]
            query = Query(number, tenant.name, 0, tenant.slo_ns)
            made.handle(QueryArrived(query, more=number < inside - 1))
        first = len(made.taken_ns)
        made.handle(PredictorChanged(slow))
        made.until(_MS * 1000)
    given_up = made.given_up[first:]
    return {
        "case": f"{case}, {inside:,} inside, predictor doubles",
        **_figures(made, first),
        "given_up": sum(given_up),
        "most_given_up": max(given_up),
    }


def _figures(made: _Run, first: int) -> dict[str, object]:
    """Of all events from that number on."""
    taken, cpu = np.array(made.taken_ns[first:]) / 1e3, np.array(made.cpu_ns[first:]) / 1e3
    p50, p99, worst = np.percentile(taken, (50, 99, 100)).tolist()
    return {
        "decisions": taken.size,
        "mean_waiting": float(np.mean(made.inside[first:])),
        "p50_us": p50,
        "p99_us": p99,
        "max_us": worst,
        "p99_cpu_us": float(np.percentile(cpu, 99)),
        "max_cpu_us": float(cpu.max()),
    }


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure, print the table, return figures. `data_dir` is not used: nothing here is compared with a paper."""
    count = 20_000 if quick else 200_000
    rows = [measure(case, count) for case in CASES]
    rows += [measure(case, count // 20, CROWD) for case in CROWDED]
    eight, many = len(_LATENCIES_MS), len(_LATENCIES_MS) * CROWD
    view = Table(
        title=f"One event with a decision: {eight} tenants, {WAITING} queries inside; {many} and {CROWDED_WAITING:,}"
    )
    for column in ("policy", "waiting", "queries a launch", "p50 us", "p99 us", "max us", "p99 CPU us", "shed %"):
        view.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        figures = [f"{row[key]:.1f}" for key in _COLUMNS]
        view.add_row(str(row["case"]), *figures)
    console = Console()
    console.print(view)
    main = rows[0]
    console.print(
        f"{MAIN}: p99 {main['p99_us']:.1f} us (goal < {GOAL_P99_US:.0f}), {main['p99_cpu_us']:.1f} us of CPU time: "
        "that leaves out other processes of the machine. Collector frozen and off, as in the server."
    )
    found = {key: rows[0][key] for key in ("p50_us", "p99_us", "p99_cpu_us")}
    for name in ("most", "fair", "shares"):
        mine = [row for row in rows if str(row["case"]).startswith(name)]
        for row, end, goal in zip(mine, ("", "_crowded"), (GOAL_P99_US, CROWDED_GOAL_P99_US), strict=True):
            found |= {f"{name}{end}_p99_us": row["p99_us"], f"{name}{end}_p99_cpu_us": row["p99_cpu_us"]}
            console.print(f"{row['case']}: p99 {row['p99_us']:.1f} us (goal < {goal:.0f})", highlight=False)
    crowd = [measure_crowd(case, 10 if quick else 60) for case in OPEN]
    bursts = [measure_burst(case, BURST // 10 if quick else BURST) for case in OPEN]
    for view, name, more in (
        (Table(title="One event, 200 tenants and 8 lanes"), "cpu_s_per_s", crowd),
        (Table(title="One event, after the predictor has doubled"), "most_given_up", bursts),
    ):
        for column in ("policy", "inside", "p50 us", "p99 us", "max us", "p99 CPU us", "max CPU us", name):
            view.add_column(column, justify="left" if column == "policy" else "right")
        for row in more:
            keys = ("mean_waiting", "p50_us", "p99_us", "max_us", "p99_cpu_us", "max_cpu_us", name)
            view.add_row(str(row["case"]), *[f"{row[key]:.2f}" for key in keys])
        console.print(view)
    found |= {f"many_{key}": crowd[0][key] for key in ("p99_us", "p99_cpu_us", "cpu_s_per_s")}
    worst = max([float(str(row["max_us"])) / 1e3 for row in bursts])
    found |= {"burst_ms": worst, "burst_given_up": bursts[0]["given_up"]}
    console.print(
        f"{crowd[0]['case']}: p99 {crowd[0]['p99_us']:.0f} us (goal < {MANY_GOAL_P99_US:.0f}). "
        f"Longest event of a burst: {worst:.1f} ms (goal < {BURST_GOAL_MS:.0f})",
        highlight=False,
    )
    if quick:
        console.print(f"quick: {count:,} instead of 200,000 decisions a row, 10 instead of 60 s, a tenth of the burst")
    return {"summary": found, "rows": [*rows, *crowd, *bursts]}
