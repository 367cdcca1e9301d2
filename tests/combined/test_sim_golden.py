"""Golden traces: every decision of a few seeded runs, byte for byte.

A change of code that changes a decision shows here. `pytest --bless` writes them anew: read the difference first.
"""

from __future__ import annotations

import io

import pytest

from cotenant import trace
from cotenant.core.snapshot import Policy
from cotenant.policies.registry import rebuild_policy
from cotenant.predict.table import TablePredictor
from cotenant.sim.driver import simulate
from cotenant.work import Machine
from cotenant.world.simulated import TableWorld
from golden_files import GOLDEN, agree
from golden_workload import RUNS, TABLES, TENANTS, workload
from scenario import CORES
from strict_engine import StrictEngine as Engine


def record(policy: Policy, load: float) -> bytes:
    file = io.BytesIO()
    believed = TablePredictor(TABLES)
    log = trace.TraceWriter(file, trace.header(policy, believed, TENANTS, Machine.cpu(CORES), created=""))
    world = TableWorld(TablePredictor(TABLES), noise=0.1, failure_rate=0.03, seed=7)
    simulate(
        Engine(TENANTS, policy, believed, Machine.cpu(CORES)),
        world,
        workload(load),
        lambda respond, now_ns: None,
        log=log,
    )
    log.flush()
    return file.getvalue()


@pytest.mark.parametrize("run", RUNS)
def test_decisions_are_those_of_the_golden_trace(run: str, bless: bool) -> None:
    agree(GOLDEN / f"{run}.jsonl", record(*RUNS[run]), bless)


@pytest.mark.parametrize("run", RUNS)
def test_a_golden_trace_replays_to_itself(run: str) -> None:
    path = GOLDEN / f"{run}.jsonl"
    head, records = trace.read(path)
    lines = [line for _, line in trace.replay(head, records, rebuild_policy)]
    assert lines == path.read_bytes().splitlines()[1:]


def test_the_golden_traces_show_every_outcome_and_every_action() -> None:
    text = b"".join((GOLDEN / f"{run}.jsonl").read_bytes() for run in RUNS).decode()
    for word in ("answered", "late", "rejected", "dropped", "failed"):
        assert f'"outcome":"{word}"' in text
    for word in ("Launch", "Respond", "Release", "SetTimer", "TimerFired", "LaunchEnded"):
        assert f'"{word}"' in text
