"""Golden traces: every decision of a few seeded runs, byte for byte.

A change of code that changes a decision shows here. `pytest --bless` writes them anew: read the difference first.
"""

from __future__ import annotations

import io
from pathlib import Path
from random import Random

import pytest

from cotenant import trace
from cotenant.core.engine import Engine
from cotenant.core.snapshot import DropRule
from cotenant.execute.simulated import TableWorld
from cotenant.policies import AnyPolicy
from cotenant.policies.clockwork import Clockwork
from cotenant.policies.duty_cycle import DutyCycle
from cotenant.policies.edf import Edf
from cotenant.policies.fcfs import Fcfs
from cotenant.policies.lane_rounds import LaneRound, LaneSlot
from cotenant.policies.overlap import Overlap
from cotenant.policies.sjf import Sjf
from cotenant.predict.table import LatencyRow, LatencyTable, TablePredictor
from cotenant.sim.driver import simulate
from cotenant.types import Query, Tenant, priority_rank
from scenario import CORES, MS, ONE_LANE, TWO_LANES, make_policy

GOLDEN = Path(__file__).parent / "golden"
LIMIT_BYTES = 60_000
MIXED = (LaneSlot("embed", 4, 90.0), LaneSlot("spot", 1, 60.0))
ROUNDS = (LaneRound(40 * MS, MIXED), LaneRound(70 * MS, (LaneSlot("tag", 2, 30.0), LaneSlot("embed", 2, 30.0))))
"""Of a plan in which one tenant has two slots, and one has none."""

RUNS: dict[str, tuple[AnyPolicy, float]] = {
    "fcfs": (Fcfs(ONE_LANE, DropRule.EXPIRED), 0.9),
    "fcfs-no-drop": (Fcfs(ONE_LANE, DropRule.NONE), 1.2),
    "sjf": (Sjf(ONE_LANE), 1.1),
    "sjf-preempt-two-lanes": (Sjf(TWO_LANES, preempt=True, stretch=0.0), 1.1),
    "edf": (Edf(ONE_LANE), 1.1),
    "edf-two-lanes": (Edf(TWO_LANES, DropRule.EXPIRED, preempt=False), 1.1),
    "edf-every-cut": (Edf(ONE_LANE, stretch=0.0), 0.8),
    "clockwork": (Clockwork(ONE_LANE), 1.1),
    "overlap": (Overlap(TWO_LANES), 1.1),
    "duty-cycle": (DutyCycle(TWO_LANES, preempt=True, rounds=ROUNDS), 1.1),
}
"""Policy and load of each run."""

TENANTS = (
    Tenant("detect", 250 * MS, cuts=(0, 3, 6, 10, 12), weight=2.0),
    Tenant("embed", 60 * MS, max_batch=8),
    Tenant("spot", 12 * MS, priority=1),
    Tenant("tag", 90 * MS, cuts=(0, 1, 2), max_batch=4, max_queue=4),
)
TABLES = {
    "detect": LatencyTable(
        (LatencyRow(0, 1, 1, 62 * MS), LatencyRow(0, 1, 2, 40 * MS), LatencyRow(1, 1, 2, 55 * MS)),
        (4.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 3.0, 1.0, 0.5),
        1.1,
    ),
    "embed": LatencyTable((LatencyRow(0, 1, 2, 6 * MS), LatencyRow(0, 8, 2, 20 * MS), LatencyRow(0, 1, 1, 9 * MS))),
    "spot": LatencyTable((LatencyRow(0, 1, 2, 1 * MS),)),
    "tag": LatencyTable((LatencyRow(0, 1, 2, 10 * MS), LatencyRow(0, 4, 2, 22 * MS)), (1.0, 2.0), 1.05),
}
MIX = {"detect": (0.2, 44 * MS), "embed": (0.4, 6 * MS), "spot": (0.25, 1 * MS), "tag": (0.15, 10 * MS)}
"""Share of the queries and latency of each tenant."""
COUNT = 60


def workload(load: float) -> list[Query]:
    rng = Random(2026)
    mean_ns = sum(share * latency for share, latency in MIX.values()) / load
    queries, now = [], 0
    for number in range(COUNT):
        now += round(rng.expovariate(1 / mean_ns)) if rng.random() < 0.9 else 0  # some come at the same instant
        tenant = rng.choices(TENANTS, [MIX[tenant.name][0] for tenant in TENANTS])[0]
        slo_ns = tenant.slo_ns if rng.random() < 0.95 else tenant.slo_ns // 20  # some cannot be met at all
        is_batched = tenant.max_batch > 1
        queries.append(
            Query(
                number,
                tenant.name,
                now,
                now + slo_ns,
                priority_rank(tenant.priority),
                items=rng.choice((1, 1, 1, 2)) if is_batched else 1,
                shape=rng.choice((0, 0, 1)) if tenant.name == "detect" else 0,
                merge_key=rng.choice((0, 0, 0, 1)) if is_batched else 0,
                expiry_ns=now + 40 * MS if rng.random() < 0.1 else None,
            )
        )
    return queries


def record(policy: AnyPolicy, load: float) -> bytes:
    file = io.BytesIO()
    believed = TablePredictor(TABLES)
    log = trace.TraceWriter(file, trace.header(policy, believed, TENANTS, CORES, created=""))
    world = TableWorld(TablePredictor(TABLES), noise=0.1, failure_rate=0.03, seed=7)
    simulate(Engine(TENANTS, policy, believed, CORES), world, workload(load), lambda respond, now_ns: None, log=log)
    log.flush()
    return file.getvalue()


@pytest.mark.parametrize("run", RUNS)
def test_decisions_are_those_of_the_golden_trace(run: str, bless: bool) -> None:
    path = GOLDEN / f"{run}.jsonl"
    made = record(*RUNS[run])
    assert len(made) <= LIMIT_BYTES
    if bless:
        path.write_bytes(made)
    golden = path.read_bytes().splitlines()
    for number, (line, expected) in enumerate(zip(made.splitlines(), golden, strict=False), start=1):
        assert line == expected, f"{path.name} differs first in line {number}"
    assert len(made.splitlines()) == len(golden)


@pytest.mark.parametrize("run", RUNS)
def test_a_golden_trace_replays_to_itself(run: str) -> None:
    path = GOLDEN / f"{run}.jsonl"
    head, records = trace.read(path)
    lines = [line for _, line in trace.replay(head, records, make_policy)]
    assert lines == path.read_bytes().splitlines()[1:]


def test_the_golden_traces_show_every_outcome_and_every_action() -> None:
    text = b"".join(path.read_bytes() for path in sorted(GOLDEN.glob("*.jsonl"))).decode()
    for word in ("answered", "late", "rejected", "dropped", "failed"):
        assert f'"outcome":"{word}"' in text
    for word in ("Launch", "Respond", "Release", "SetTimer", "TimerFired", "LaunchEnded"):
        assert f'"{word}"' in text


def test_no_golden_trace_is_without_its_run() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(RUNS)
