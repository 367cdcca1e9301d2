"""Golden traces of runs in which something changes, or whose queries are more than one launch.

As in `test_sim_golden`, every decision is kept byte for byte: of applications, of policies and beliefs that change in
the middle, of tenants that come, go and are suspended, of tail-aware policies, of groups that a fitted predictor is
asked about, of a plan file that is served, and of tasks: parts of batches, launches that wait, and launches that
expand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec import structs

from bench._clockwork import Clockwork
from cotenant import trace
from cotenant.core.events import (
    AnswerLate,
    DrainStarted,
    Event,
    ModelOpening,
    PolicyChanged,
    PredictorChanged,
    QueryCancelled,
    QueryRefused,
    TenantAdded,
    TenantChanged,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
)
from cotenant.core.flow import StageGraph
from cotenant.core.snapshot import DropRule, Policy
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.policies.ordered.sjf import Sjf
from cotenant.policies.registry import rebuild_policy
from cotenant.predict.grouped import GroupedPredictor
from cotenant.predict.margin import SafetyMargin, Spread
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.applications import SimulatedApplication
from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, JointPlan, Wait
from cotenant.techniques.granularity.policy.joint_schedule import JointSchedule
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.techniques.partitions.plan.file import read_plan
from cotenant.techniques.partitions.policy.duty_cycle import DutyCycle
from cotenant.techniques.partitions.serve.plan_lanes import Cores, lay_out
from cotenant.types import LossCause, Outcome, Query, Tenant, priority_rank
from cotenant.work import Machine, Round, Share, Slot
from golden_files import GOLDEN, agree
from golden_runs import BELIEVED, CROWDED, Change, Crowded, find_groups, record
from golden_workload import ROUNDS, RUNS, TABLES, TENANTS, workload
from plan_samples import CPU, latencies
from scenario import MS, ONE_LANE, TWO_LANES
from task_policies import TASK_POLICIES, Branches, Expanding, Halves, Pointers

FOUR_LANES = tuple(Share((core,)) for core in range(4))
SHARES = (Share((0,), "cuda:0"), Share((1, 2), "cuda:0"))
"""Of a GPU of three SMs."""
TWO_DEVICES = Machine.of({"cpu": (0, 1), "cuda:0": range(3)})


# --- applications -----------------------------------------------------------------------------------------------------

SCAN = StageGraph(("find", "read", "sort", "tell"), ((), (0,), (0,), (1, 2)))
SEEK = StageGraph(("embed", "rank"), ((), (0,)))
BY_NAME = {tenant.name: tenant for tenant in TENANTS}


def application(graph: StageGraph, *models: str, shares_ms: Sequence[int] = ()) -> SimulatedApplication:
    """With shares its stages end as in a plan."""
    shares_ns = {name: share * MS for name, share in zip(graph.names, shares_ms, strict=False)}
    return SimulatedApplication(graph.divided(shares_ns), tuple(BY_NAME[model] for model in models))


SCAN_MODELS, SEEK_MODELS = ("embed", "tag", "detect", "spot"), ("embed", "tag")
PREDICTED = {"scan": application(SCAN, *SCAN_MODELS), "seek": application(SEEK, *SEEK_MODELS)}
PLANNED = {
    "scan": application(SCAN, *SCAN_MODELS, shares_ms=(25, 30, 70, 10)),
    "seek": application(SEEK, *SEEK_MODELS, shares_ms=(15, 20)),
}
STAGED = 42
"""Queries, of some 80 stages and others."""


def staged(load: float, slos_ms: Mapping[str, int]) -> list[Query]:
    """The workload, of which a part are queries of applications, some with a priority, some with a time-out."""
    rng = Random(4)
    found = []
    for query in workload(load)[:STAGED]:
        name = rng.choice(("scan", "seek", "seek", "", "", ""))
        if name:
            slo_ns = slos_ms[name] * MS if rng.random() < 0.9 else 20 * MS
            rank = priority_rank(rng.choice((0, 0, 2)))
            expiry_ns = query.arrival_ns + 60 * MS if rng.random() < 0.1 else None
            query = Query(query.id, name, query.arrival_ns, query.arrival_ns + slo_ns, rank, expiry_ns=expiry_ns)
        found.append(query)
    return found


def fanned_out(load: float) -> list[Query]:
    """The workload, of which half are queries of an application that asks three models at once."""
    return [
        Query(query.id, "look", query.arrival_ns, query.arrival_ns + 400 * MS, items=1 + query.id % 4 // 2)
        if query.id % 2
        else query
        for query in workload(load)[:STAGED]
    ]


LOOK = StageGraph(("read", "sort", "embed"), ((), (), ()))
JOINT_PLANS = (
    JointPlan(
        (JointMember("tag", 2, 2, rank=1), JointMember("detect", 2, 12), JointMember("embed", 2, 1, rank=1)),
        ((0, 3, 0),),
        (Wait(0, 1, 1, 6),),
        (Chunk(1, 0, 12, (1, 1)),),
    ),
    JointPlan((JointMember("tag", 1, 2), JointMember("detect", 1, 12)), waits=(Wait(1, 10, 0, 2),)),
)


# --- a plan -----------------------------------------------------------------------------------------------------------

FIRST, SECOND = (read_plan(GOLDEN / "plans" / name) for name in ("shared.toml", "moved.toml"))
"""Of the same loads, with other rates. Read when tests are collected: where plans change, bless them before this."""
FIRST_LANES = lay_out(FIRST, "shared.toml", 0, Cores((0, 1, 2, 3))).lanes
SECOND_LANES = lay_out(SECOND, "moved.toml", 0, Cores((0, 1, 2, 3)), FIRST_LANES).lanes
PLAN_TENANTS = (
    *(Tenant(load.tenant, load.slo_ns, max_batch=16) for load in FIRST.request.loads),
    Tenant("guest", 200 * MS, cuts=(0, 1, 2, 4)),  # who has no slot
)
PLAN_TABLES = {
    load.tenant: LatencyTable(
        tuple(
            LatencyRow(0, batch, size, ns)
            for size, points in latencies(CPU.sizes, CPU.whole)[load.model].items()
            for batch, ns in points.items()
            if size < CPU.whole and batch in (1, 4, 16)
        )
    )
    for load in FIRST.request.loads
} | {"guest": LatencyTable((LatencyRow(0, 1, 1, 40 * MS),), (1.0, 1.0, 2.0, 1.0), 1.1)}
PLAN_CHANGES_NS = 150 * MS
CROWD = 3.0
"""Rates over those that the plans are for, so that rounds are full."""


def planned() -> list[Query]:
    """Arrivals at random at the rates of the first plan, then of the second."""
    rng = Random(11)
    rates = [{load.tenant: load.rate_per_s for load in file.request.loads} | {"guest": 8.0} for file in (FIRST, SECOND)]
    found: list[Query] = []
    now = 0
    slos = {tenant.name: tenant.slo_ns for tenant in PLAN_TENANTS}
    for number in range(70):
        known = rates[now >= PLAN_CHANGES_NS]
        now += round(rng.expovariate(CROWD * sum(known.values())) * 1e9)
        name = rng.choices(list(known), list(known.values()))[0]
        found.append(Query(number, name, now, now + slos[name]))
    return found


# --- runs -------------------------------------------------------------------------------------------------------------

MARGIN = SafetyMargin({"detect": Spread(2.0, 5 * MS), "embed": Spread(1.5, 8 * MS), "spot": Spread(2.0, MS)}, 2 * MS)
WIDER = SafetyMargin({**MARGIN.spreads, "tag": Spread(3.0, 12 * MS)}, 5 * MS)
SURE = BELIEVED.with_margin(MARGIN)
FITTED = GroupedPredictor(TABLES, None, CROWDED)
PAIRED = Round(90 * MS, (Slot("embed", 4, 60.0, 1, 1), Slot("tag", 2, 30.0, 1, 1), Slot("detect", 1, 5.0)))
"""Of a plan in which two tenants overlap, one has a turn alone, and one has no slot."""
SLOWER = {"detect": 1.25, "tag": 1.5}


def tight(load: float) -> list[Query]:
    """The workload, where the longest model is in time in the larger of two partitions alone."""
    return [
        structs.replace(query, deadline_ns=min(query.deadline_ns, query.arrival_ns + 60 * MS))
        if query.tenant == "detect"
        else query
        for query in workload(load)
    ]


def at(time_ms: int, *events: Event) -> list[tuple[int, Event]]:
    return [(time_ms * MS, event) for event in events]


CHANGES: dict[str, Change] = {
    "applications": Change(
        Edf(TWO_LANES),
        [
            *at(210, TenantSuspended("tag", "its worker died")),
            *at(250, PredictorChanged(BELIEVED.scaled(SLOWER))),  # the deadlines of stages follow what is believed
            *at(260, TenantResumed("tag"), QueryRefused("tag", 255_000_000, LossCause.GONE, "it is being reloaded")),
            *at(265, ModelOpening("tag")),
            *at(270, AnswerLate(1, "tag", 200_000_000, 269_000_000), ModelOpening("tag", done=True)),
            *at(330, DrainStarted()),  # stages are let in, since their queries are inside
        ],
        queries=staged(1.5, {"scan": 150, "seek": 55}),
        applications=PREDICTED,
        failure_rate=0.1,
    ),
    "applications-planned": Change(
        DutyCycle(TWO_LANES, DropRule.EXPIRED, preempt=True, rounds=ROUNDS),
        queries=staged(1.3, {"scan": 150, "seek": 60}),
        tenants=[replace(tenant, max_queue=1) if tenant.name == "tag" else tenant for tenant in TENANTS],
        applications=PLANNED,
        failure_rate=0.1,
    ),
    "joint": Change(
        JointSchedule(TWO_LANES, joint_plans=JOINT_PLANS),
        [
            *at(
                150,
                PolicyChanged(JointSchedule(TWO_LANES, DropRule.EXPIRED, preempt=False, joint_plans=JOINT_PLANS[:1])),
            )
        ],
        queries=fanned_out(0.7)[:-5],
        tenants=[replace(tenant, splits=(tenant.cuts,)) if tenant.name == "detect" else tenant for tenant in TENANTS],
        applications={
            "look": application(StageGraph(("read", "sort", "embed"), ((), (), ())), "tag", "detect", "embed")
        },
        failure_rate=0.05,
    ),
    "policy-changed": Change(
        Sjf(TWO_LANES, DropRule.EXPIRED, preempt=True, slack_share=0.0),
        [
            *at(60, TenantSuspended("detect", "its worker died"), TenantSuspended("embed", "its worker died")),
            *at(170, PolicyChanged(Clockwork(ONE_LANE))),  # while queries of suspended tenants wait
            *at(180, TenantResumed("detect"), TenantResumed("embed")),
            *at(230, PolicyChanged(Overlap(TWO_LANES))),
            *at(320, PolicyChanged(DutyCycle(TWO_LANES, preempt=True, rounds=ROUNDS))),
            *at(430, PolicyChanged(Fcfs(ONE_LANE, DropRule.NONE))),
        ],
        queries=workload(1.3),
    ),
    "tenants": Change(
        Edf(ONE_LANE, slack_share=0.0),
        [
            *at(155, TenantSuspended("detect", "its worker died")),  # what its launch makes is lost
            *at(184, QueryCancelled(10)),  # while it runs
            *at(188, QueryCancelled(12), QueryCancelled(0)),  # while it waits; long ended
            *at(205, TenantResumed("detect")),
            *at(260, TenantSuspended("embed", "its worker died")),
            *at(265, TenantSuspended("detect", "its worker died"), TenantResumed("nobody")),
            *at(290, TenantResumed("embed"), TenantResumed("detect")),
            *at(300, TenantRemoved("tag", "the model was unloaded")),
            *at(330, TenantChanged(replace(BY_NAME["embed"], max_queue=3)), PredictorChanged(BELIEVED)),
            *at(330, TenantResumed("embed")),
            *at(390, TenantAdded(replace(BY_NAME["tag"], max_queue=2))),
            *at(520, DrainStarted()),
        ],
        queries=workload(1.1),
        failure_rate=0.25,
    ),
    "edf-tail-aware": Change(
        Edf(ONE_LANE, tail_aware=True),
        [
            *at(200, PredictorChanged(BELIEVED.scaled(SLOWER).with_margin(MARGIN))),
            *at(350, PredictorChanged(BELIEVED.with_margin(WIDER))),
        ],
        SURE,
        workload(1.2),
    ),
    "overlap-lanewise": Change(Overlap(TWO_LANES, barrier=False, slack_share=0.5), (), SURE, workload(1.2)),
    "overlap-fitted": Change(
        Overlap(TWO_LANES),
        [
            *at(200, PredictorChanged(FITTED.with_beliefs(TABLES, SLOWER, 1.125))),
            *at(350, PredictorChanged(GroupedPredictor(TABLES, None, Crowded(10, 0.75), 0.875))),
        ],
        FITTED,
        workload(1.1),
    ),
    "overlap-enqueued": Change(
        Overlap(TWO_LANES, enqueue_ms=5.0),
        [
            *at(220, TenantSuspended("detect", "its worker died"), QueryCancelled(19)),  # while launches wait
            *at(290, TenantResumed("detect")),
            *at(350, PredictorChanged(FITTED.with_beliefs(TABLES, SLOWER, 1.125))),
        ],
        FITTED,
        workload(1.2),
    ),
    "overlap-four-lanes": Change(
        Overlap(FOUR_LANES, DropRule.EXPIRED, ways=2, members=2, slack_share=0.0, repeat=False),
        (),
        FITTED,
        workload(1.6),
        cores=range(4),
    ),
    "gpu-shares": Change(
        Edf(SHARES),
        [
            *at(160, PolicyChanged(Clockwork(SHARES))),
            *at(300, PolicyChanged(DutyCycle(SHARES, rounds=ROUNDS, backfill=False))),
            *at(430, PolicyChanged(Sjf(SHARES[::-1], preempt=True, tail_aware=True)), PredictorChanged(SURE)),
        ],
        queries=tight(1.3),
        cores=range(3),
    ),
    "duty-cycle-crowded": Change(
        DutyCycle(TWO_LANES, preempt=True, slack_share=0.3, rounds=ROUNDS), queries=workload(2.0)
    ),
    "duty-cycle-groups": Change(
        DutyCycle(ONE_LANE, DropRule.EXPIRED, rounds=(PAIRED,)),
        [
            *at(120, PredictorChanged(FITTED.with_beliefs(TABLES, SLOWER, 1.125))),
            *at(300, PolicyChanged(DutyCycle(TWO_LANES, rounds=ROUNDS))),
            *at(340, PolicyChanged(DutyCycle(ONE_LANE, rounds=(PAIRED,), backfill=False))),
        ],
        FITTED,
        workload(1.6),
    ),
    "plan": Change(
        DutyCycle(FIRST_LANES.lanes, rounds=FIRST_LANES.rounds, preempt=True),
        at(
            PLAN_CHANGES_NS // MS,
            PolicyChanged(DutyCycle(SECOND_LANES.lanes, rounds=SECOND_LANES.rounds, preempt=True)),
        ),
        TablePredictor(PLAN_TABLES),
        planned(),
        PLAN_TENANTS,
        range(4),
    ),
    "tasks-halves": Change(
        Halves(TWO_LANES),
        [
            *at(60, QueryCancelled(4)),
            *at(200, TenantSuspended("detect", "its worker died")),
            *at(260, TenantResumed("detect")),
        ],
        queries=workload(1.1),
        tenants=[replace(tenant, splits=(tenant.cuts,)) for tenant in TENANTS],
        failure_rate=0.1,
    ),
    "tasks-branches": Change(
        Branches(TWO_DEVICES.devices),
        at(300, TenantRemoved("detect", "the model was unloaded")),
        queries=workload(0.8),
        machine=TWO_DEVICES,
        failure_rate=0.1,
    ),
    "tasks-pointers": Change(
        Pointers(TWO_LANES),
        at(230, PolicyChanged(Edf(TWO_LANES))),  # while launches wait
        queries=workload(1.2),
        failure_rate=0.1,
    ),
    "tasks-expanding": Change(Expanding(TWO_LANES), queries=workload(0.9), failure_rate=0.05),
}


def policy_of(name: str, options: dict[str, Any]) -> Policy:
    """One of this repository, or of the tests."""
    return msgspec.convert(options, TASK_POLICIES[name]) if name in TASK_POLICIES else rebuild_policy(name, options)


@pytest.mark.parametrize("run", CHANGES)
def test_decisions_are_those_of_the_golden_trace(run: str, bless: bool) -> None:
    agree(GOLDEN / f"{run}.jsonl", record(CHANGES[run]), bless)


@pytest.mark.parametrize("run", CHANGES)
def test_a_golden_trace_replays_to_itself(run: str) -> None:
    """What applications made of it is told in the trace, and is not made again: their stages are queries by then."""
    path = GOLDEN / f"{run}.jsonl"
    head, records = trace.read(path)
    lines = [line for _, line in trace.replay(head, records, policy_of, find_groups)]
    assert lines == path.read_bytes().splitlines()[1:]


def test_the_golden_traces_show_every_event_and_every_outcome() -> None:
    text = b"".join((GOLDEN / f"{run}.jsonl").read_bytes() for run in [*RUNS, *CHANGES]).decode()
    for event in Event.__args__:
        assert f'"{event.__name__}"' in text
    for outcome in Outcome:
        assert f'"outcome":"{outcome.value}"' in text
    for word in (
        "LookAhead",
        "Expand",
        "Enqueue",
        '"after"',
        '"part":true',
        '"ahead":true',
        '"barrier":false',
        '"tail_aware":true',
        '"part_of"',
        '"device":"cuda:0"',
    ):
        assert word in text


def test_no_golden_file_is_without_its_test() -> None:
    traces = [f"{run}.jsonl" for run in [*RUNS, *CHANGES]]
    kept = [path.name for path in GOLDEN.iterdir() if path.suffix != ".py" and path.name[0] != "_"]
    others = [name for name in kept if not name.startswith("many-core-")]  # those have a module of their own
    assert sorted(others) == sorted([*traces, "latencies.txt", "placement.txt", "plans", "policies.txt"])
