"""GACER: the value of joint plans to a server: sets that arrive together, and models that do not, in drawn worlds.

Joint arrivals: requests to all members of one of the paper's sets. They come at 0.8, 1.2 and 1.5 times the rate of one
set after another (Poisson). A request is in time when all members are answered within twice the time of one after
another. Where one member is dropped the others are withdrawn. Independent arrivals: queries of members come by
themselves (Poisson, equal rates, at parts of the rate of one after another). Each has twice its time alone.

The policies: `edf` on one lane that is the whole card; `streams`, edf with a lane for each member, all of which share
the card; and the joint policy. The joint policy has a lane for each stream of its plan for sets, and the whole card for
models without one. The plan is found on predicted costs. It is the best of the first few and of streams, as run once in
the world; the product does so on a device. Where one after another is best there is no plan, and the policy is edf.
Latencies alone are known. On a lane a model is predicted to take its time beside the others in a run of the set without
a plan. With `_naive`, lanes are predicted not to slow each other.

Under every policy models may be left at the stops of the plan; where they come by themselves, about every 2 ms, too.
A decision is charged for each launch that does not wait for another. Ranks have no effect on the card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench._campaign import digest_of, run_all
from bench._data import Headline
from bench._registry import BenchError
from bench.papers.gacer._gpus import GPUS
from bench.papers.gacer._joint_run import JointWorld
from bench.papers.gacer._judge import Effort, rules_of
from bench.papers.gacer._kernel_world import KernelDevice, KernelWorld
from bench.papers.gacer._sets import JointSet, paper_sets
from bench.papers.gacer._worlds import Drawn, draw
from bench.papers.gacer.sets import FIRST_WORLD, SOURCES
from cotenant import core, policies
from cotenant.core.actions import Action, Launch, Respond
from cotenant.core.engine import Engine
from cotenant.core.events import Event, QueryArrived, QueryWithdrawn
from cotenant.core.snapshot import Policy
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.driver import simulate
from cotenant.techniques.granularity.joint_plan import JointMember, JointPlan
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.granularity.plan.joint_search import JointSearch
from cotenant.techniques.granularity.policy.joint_schedule import JointSchedule
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share

NAME = "gacer-serving"
WORLDS, QUICK_WORLDS = 24, 2
RATES = (0.8, 1.2, 1.5)
LOADS = (0.5, 0.8)
HEADLINE = 1.2
SLACK = 2
"""Times the makespan of one after another, or the time alone, that there is."""
DECISION_NS = 60_000
"""What a decision takes: the product's at the 99th percentile of `decision`."""
SEGMENT_NS = 2_000_000
"""Where members arrive by themselves, models may be left about so often."""
HEADLINES = (
    Headline(
        "sets that arrive together at 1.2 times capacity: attainment over edf",
        "joint_gain_vs_edf_points",
        "points",
        "simulated, five sets, 24 drawn worlds, median; a part of it is another drop rule, and none of plans",
    ),
    Headline(
        "the same, over a stream for each member",
        "joint_gain_vs_streams_points",
        "points",
        "as above; the better of two beliefs of theirs",
    ),
    Headline(
        "models that arrive by themselves: attainment over edf, worst of five sets and two loads",
        "poisson_worst_vs_edf_points",
        "points",
        "as above",
    ),
)
_MOST_LANES, _WIDTH = 8, 180
UNPLANNED = "clustered_unplanned"
"""The policy `joint` without plans: its drop rule and its lanes alone."""
POLICIES = ("edf", "streams", "streams_naive", "clustered", "clustered_naive", UNPLANNED)


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests of a set, and queries of each member on average, are played for a figure, and at what rates."""

    requests: int = 60
    queries: int = 100
    rates: tuple[float, ...] = RATES
    loads: tuple[float, ...] = LOADS


@dataclass(frozen=True, slots=True)
class ServingTask:
    """A set in one world."""

    drawn: Drawn
    joint: JointSet
    effort: Effort
    load: Load


def run(quick: bool, data_dir: Path, *, worlds: int | None = None) -> dict[str, Any]:
    """Serve all sets in all worlds, print the tables, return figures. Raises BenchError for no worlds."""
    count = worlds or (QUICK_WORLDS if quick else WORLDS)
    if count < 1:
        raise BenchError(f"--worlds is {count}, expected at least 1")
    drawn = [draw(FIRST_WORLD + number) for number in range(count)]
    effort, load = (Effort(500, 600, 2), Load(24, 24, (HEADLINE,), (0.8,))) if quick else (Effort(), Load())
    tasks = []
    for number, each in enumerate(drawn):
        sets = paper_sets(data_dir, GPUS[number % len(GPUS)])
        tasks += [ServingTask(each, joint, effort, load) for joint in (sets[:2] if quick else sets)]
    files = sorted((Path(__file__).parent / "kernels").glob("*.csv"))
    rows = run_all(NAME, digest_of((*SOURCES, core, policies), files), tasks, judge, _said)
    summary = summary_of(rows)
    console = Console(width=max(_WIDTH, Console().width))
    _show(console, rows)
    console.print(", ".join(f"{name} {value:.4g}" for name, value in summary.items()))
    if quick:
        console.print(
            f"quick: {count} of {WORLDS} worlds, two of the sets, one rate, {load.requests} requests, short searches"
        )
    return {
        "summary": summary,
        "rows": rows,
        "worlds": list(map(asdict, drawn)),
        "seeds": [each.seed for each in drawn],
    }


# --- a set in a world -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """A policy with its lanes, and what it believes."""

    policy: Policy
    beside: Mapping[str, float]
    """Times as long as alone a model is believed to take on a lane of one slot, by its name."""


class ChargedWorld(KernelWorld):
    """Launches begin when their decision is over; those that wait for others were decided with these."""

    def __init__(self, tables: Sequence[KernelTable], device: KernelDevice, widest: int) -> None:
        KernelWorld.__init__(self, {table.model: table for table in tables}, device)
        self._widest = widest
        self.planned: set[int] = set()
        """Queries that ran in a set: in less than the widest share."""

    def start(self, launch: Launch, now_ns: int) -> None:
        """See World."""
        if launch.share.size < self._widest:
            self.planned.update(launch.queries)
        KernelWorld.start(self, launch, now_ns if launch.after else now_ns + DECISION_NS)


class Together:
    """An engine to which requests for all members come: for `simulate`, in place of the engine.

    Query i of a request has the number `request * members + i`. A query that ends without an answer ends its request.
    """

    def __init__(self, engine: Engine, members: Sequence[tuple[str, int]]) -> None:
        self.policy = engine.policy
        self._engine = engine
        self._members = members
        self._left: dict[int, set[int]] = {}

    @property
    def live(self) -> int:
        """Queries that have not ended."""
        return self._engine.live

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """See Engine: requests are answered when all members are, in the time of the last."""
        count = len(self._members)
        events: list[Event] = [event]
        if isinstance(event, QueryArrived):
            asked = event.query
            self._left[asked.id] = {asked.id * count + number for number in range(count)}
            events = [
                QueryArrived(
                    Query(asked.id * count + number, name, asked.arrival_ns, asked.deadline_ns, items=items),
                    more=number + 1 < count,
                )
                for number, (name, items) in enumerate(self._members)
            ]
        out: list[Action] = []
        while events:
            for action in self._engine.handle(events.pop(0), now_ns):
                if not isinstance(action, Respond):
                    out.append(action)
                    continue
                request = action.query // count
                left = self._left.get(request)
                if left is None:
                    continue
                left.discard(action.query)
                if action.outcome is not Outcome.ANSWERED:
                    del self._left[request]
                    out.append(Respond(request, action.outcome, action.reason))
                    events += [QueryWithdrawn(number, "another member ended") for number in sorted(left)]
                elif not left:
                    del self._left[request]
                    out.append(Respond(request, Outcome.ANSWERED, ""))
        return out


def judge(task: ServingTask) -> list[dict[str, Any]]:
    """A row for each rate of joint arrivals, and each load of independent ones, with attainment in % by policy."""
    joint, drawn = task.joint, task.drawn
    tables = joint.tables(drawn)
    world, rows = JointWorld(tables, drawn.device), [table.batch for table in tables]
    streams = world.run(JointPlan(members_of(tables)), records=True)
    sequential_ns = world.in_turn(rows).makespan_ns
    plan, planned_ns = best_plan(tables, world, drawn, task.effort, sequential_ns)
    alone_ns = [solo_ns(table, table.batch, drawn.device) for table in tables]
    ends = [max(span.end_ns for span in streams.spans if span.member == number) for number in range(len(tables))]
    beside = {table.model: end / ns for table, end, ns in zip(tables, ends, alone_ns, strict=True)}
    servers = servers_of(plan, len(tables), beside)
    beliefs = {table.model: belief(table, plan, drawn.device) for table in tables}
    row = {"world": drawn.seed, "gpu": joint.gpu.name, "set": joint.name}
    row |= {
        "streams_gain": sequential_ns / streams.makespan_ns,
        "plan_gain": sequential_ns / planned_ns,
        "plan": None if plan is None else [len(plan.barriers), len(plan.waits), len(plan.chunks)],
    }
    found = []
    for rate in task.load.rates:
        times = np.random.default_rng((28, drawn.seed, 6)).exponential(sequential_ns / rate, task.load.requests)
        made = row | {"part": "joint", "rate": rate}
        requests = [
            Query(number, "set", at, at + SLACK * sequential_ns)
            for number, at in enumerate(np.cumsum(times, dtype=int).tolist())
        ]
        tenants = tenants_of(tables, [SLACK * sequential_ns] * len(tables), plan, segmented=False)
        for name, server in servers.items():
            engine = engine_of(tenants, server, beliefs)
            asked = Together(engine, [(table.model, table.batch) for table in tables])
            made[name], planned = play(asked, tables, drawn.device, requests)
            made[f"{name}_planned"] = planned / (len(tables) * len(requests))
        found.append(made)
    for load in task.load.loads:
        made = row | {"part": "independent", "rate": load}
        queries = list(independent(tables, alone_ns, load, task.load.queries, drawn.seed))
        tenants = tenants_of(tables, [SLACK * ns for ns in alone_ns], plan, segmented=True)
        for name, server in servers.items():
            made[name], planned = play(engine_of(tenants, server, beliefs), tables, drawn.device, queries)
            made[f"{name}_planned"] = planned / len(queries)
        found.append(made)
    return found


def members_of(tables: Sequence[KernelTable]) -> tuple[JointMember, ...]:
    """The set with all rows of its tables."""
    return tuple(JointMember(table.model, table.batch, table.size) for table in tables)


def best_plan(
    tables: Sequence[KernelTable], world: JointWorld, drawn: Drawn, effort: Effort, sequential_ns: int
) -> tuple[JointPlan | None, int]:
    """The best of streams and the first alternatives as they run in the world, and its makespan; None where one after
    another is best."""
    found = JointSearch(evaluations=effort.evaluations, seed=drawn.seed).find(tables, rules_of(drawn))
    plans = [JointPlan(members_of(tables)), *found.alternatives[: effort.measured]]
    played_ns, number = min((world.run(each).makespan_ns, number) for number, each in enumerate(plans))
    return (plans[number], played_ns) if played_ns < sequential_ns else (None, sequential_ns)


def solo_ns(table: KernelTable, rows: int, device: KernelDevice) -> int:
    """What a model takes alone."""
    return JointWorld([table], device).in_turn([rows]).makespan_ns


def belief(table: KernelTable, plan: JointPlan | None, device: KernelDevice) -> LatencyTable:
    """Latencies alone of all the rows that are launched, and how they spread over units."""
    sizes = {table.batch}
    for chunk in plan.chunks if plan is not None else ():
        if plan is not None and plan.members[chunk.member].model == table.model:
            sizes.update(chunk.rows)
    rows = tuple(LatencyRow(0, items, 1, solo_ns(table, items, device)) for items in sorted(sizes))
    weights = np.maximum(table.duration_ns[:, -1] + device.gap_ns, device.launch_ns)
    return LatencyTable(rows, tuple(weights.tolist()))


def streams_in(plan: JointPlan | None, members: int) -> int:
    """How many streams run at once at most: a member's, and one more for each further part of its widest chunk."""
    parts = [1] * members
    for chunk in plan.chunks if plan is not None else ():
        parts[chunk.member] = max(parts[chunk.member], len(chunk.rows))
    return min(sum(parts), max(_MOST_LANES, members))


def servers_of(plan: JointPlan | None, members: int, beside: Mapping[str, float]) -> dict[str, Server]:
    """The policies by name. A lane is a slot: streams share the whole card, whatever their shares say."""
    plans = () if plan is None else (plan,)

    def lanes(count: int) -> tuple[Share, ...]:
        return tuple(Share((number,), "cuda:0") for number in range(count))

    narrow, wide = lanes(members), lanes(streams_in(plan, members))
    edf, joint_schedule = Edf(narrow, preempt=True), JointSchedule(wide, preempt=True, joint_plans=plans)
    return {
        "edf": Server(Edf(lanes(1), preempt=True), {}),
        "streams": Server(edf, beside),
        "streams_naive": Server(edf, {}),
        "clustered": Server(joint_schedule, beside),
        "clustered_naive": Server(joint_schedule, {}),
        UNPLANNED: Server(replace(joint_schedule, joint_plans=()), beside),
    }


def tenants_of(
    tables: Sequence[KernelTable], slos_ns: Sequence[int], plan: JointPlan | None, *, segmented: bool
) -> list[Tenant]:
    """The members, which may be left where the plan stops them and, `segmented`, about every 2 ms."""
    made = []
    for table, slo_ns in zip(tables, slos_ns, strict=True):
        cuts: tuple[int, ...] = (0, table.size)
        if segmented:
            ends = np.cumsum(table.duration_ns[:, -1])
            parts = max(1, round(ends[-1] / SEGMENT_NS))
            inner = {int(np.searchsorted(ends, ends[-1] * part / parts)) for part in range(1, parts)}
            cuts = tuple(sorted({*cuts, *inner}))
        if plan is not None:
            cuts = plan.cuts_of(table.model, cuts)
        made.append(Tenant(table.model, slo_ns, cuts, table.batch, max_queue=4096, splits=table.splits))
    return made


def engine_of(tenants: Sequence[Tenant], server: Server, beliefs: Mapping[str, LatencyTable]) -> Engine:
    """An engine with the lanes of a policy."""
    cores = max(share.size for share in server.policy.spec.shares)
    tables = {}
    for name, table in beliefs.items():
        lane = [replace(row, latency_ns=int(row.latency_ns * server.beside.get(name, 1.0))) for row in table.rows]
        whole = [replace(row, cores=cores) for row in table.rows] if cores > 1 else []
        tables[name] = replace(table, rows=(*lane, *whole))
    predictor = TablePredictor(tables)
    return Engine(tenants, server.policy, predictor, Machine.holding(server.policy.spec.shares))


def play(
    engine: Engine | Together, tables: Sequence[KernelTable], device: KernelDevice, queries: Sequence[Query]
) -> tuple[float, int]:
    """Which part of the queries, in %, is answered in time; and how many queries ran in a set."""
    world, in_time = ChargedWorld(tables, device, max(share.size for share in engine.policy.spec.shares)), 0

    def responded(respond: Respond, _now_ns: int) -> None:
        nonlocal in_time
        in_time += respond.outcome is Outcome.ANSWERED

    simulate(engine, world, queries, responded)
    return 100 * in_time / len(queries), len(world.planned)


def independent(
    tables: Sequence[KernelTable], alone_ns: Sequence[int], load: float, count: int, seed: int
) -> Iterator[Query]:
    """Poisson arrivals of each member at one rate, at which all take a part `load` of the time one after another."""
    random = np.random.default_rng((28, seed, 7))
    total = count * len(tables)
    gaps = random.exponential(sum(alone_ns) / load / len(tables), total)
    who = random.integers(len(tables), size=total).tolist()
    for number, (at, member) in enumerate(zip(np.cumsum(gaps, dtype=int).tolist(), who, strict=True)):
        table = tables[member]
        yield Query(number, table.model, at, at + SLACK * alone_ns[member], items=table.batch)


# --- figures --------------------------------------------------------------------------------------------------------


def _said(rows: list[dict[str, Any]]) -> str:
    row = next(row for row in rows if (row["part"], row["rate"]) == ("joint", HEADLINE))
    named = ", ".join(f"{name} {row[name]:.0f}" for name in POLICIES)
    return f"world {row['world']} {row['gpu']} {row['set']} at {HEADLINE}: {named}; plan {row['plan_gain']:.2f}x"


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics, in points of attainment: of each world the mean over sets, or the worst of sets and loads; the
    median over worlds."""
    joint = [row for row in rows if row["part"] == "joint" and row["rate"] == HEADLINE]
    alone = [row for row in rows if row["part"] == "independent"]
    judged = all(UNPLANNED in row for row in joint)  # results before it was played do not have it
    return {
        **(
            {"joint_gain_vs_unplanned_points": _over_worlds(joint, "clustered", (UNPLANNED,), np.mean)}
            if judged
            else {}
        ),
        "joint_gain_vs_edf_points": _over_worlds(joint, "clustered", ("edf",), np.mean),
        "joint_gain_vs_streams_points": _over_worlds(joint, "clustered", ("streams", "streams_naive"), np.mean),
        "poisson_worst_vs_edf_points": _over_worlds(alone, "clustered", ("edf",), np.min),
        "joint_naive_gain_vs_edf_points": _over_worlds(joint, "clustered_naive", ("edf",), np.mean),
        "poisson_naive_worst_vs_edf_points": _over_worlds(alone, "clustered_naive", ("edf",), np.min),
        "poisson_streams_worst_vs_edf_points": _over_worlds(alone, "streams", ("edf",), np.min),
    }


def _over_worlds(
    rows: Sequence[dict[str, Any]], ours: str, theirs: Sequence[str], of: Callable[[list[float]], Any]
) -> float:
    """Median over worlds of a figure over the points that `ours` has more than the best of `theirs`."""
    by_world: dict[int, list[float]] = {}
    for row in rows:
        by_world.setdefault(row["world"], []).append(row[ours] - max(row[name] for name in theirs))
    return float(np.median([of(each) for each in by_world.values()]))


def _show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(
        title="Attainment in %, median over worlds; planned: part of the requests (queries) that ran as a set"
    )
    for name in ("arrivals", "set", "rate", *POLICIES, "planned", "plan", "all at once"):
        table.add_column(name, no_wrap=True)
    for part, name, rate in dict.fromkeys((row["part"], row["set"], row["rate"]) for row in rows):
        mine = [row for row in rows if (row["part"], row["set"], row["rate"]) == (part, name, rate)]
        cells = [f"{np.median([row[each] for row in mine]):.1f}" if each in mine[0] else "" for each in POLICIES]
        cells.append(f"{np.mean([row['clustered_planned'] for row in mine]):.2f}")
        gains = [f"{np.median([row[f'{each}_gain'] for row in mine]):.2f}x" for each in ("plan", "streams")]
        table.add_row(part, name, f"{rate:g}", *cells, *gains)
    console.print(table)
