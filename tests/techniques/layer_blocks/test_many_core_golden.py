"""Golden traces of blocks on many cores: versions, cores got and wanted, growth and pressure, byte for byte.

`pytest --bless` writes them anew: read the difference first.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from cotenant import trace
from cotenant.core.snapshot import Decision, Policy, Snapshot
from cotenant.policies.registry import rebuild_policy
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.profiles.version_table import Implementation, UnitVersions, VersionTable
from cotenant.sim.driver import simulate
from cotenant.techniques.layer_blocks.policy.published import LayerBlock
from cotenant.techniques.layer_blocks.policy.slack_blocks import SlackBlocks
from cotenant.techniques.layer_blocks.world.many_core import ManyCore, ManyCoreWorld
from cotenant.trace.explain import QueryHistory, explain
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share
from golden_files import GOLDEN, agree
from strict_engine import StrictEngine as Engine

US = 1000
CORES = 8
BANDWIDTH = 20_000_000_000
LANES = tuple(Share((core,)) for core in range(CORES))
TENANTS = (
    Tenant("wide", 7000 * US, cuts=tuple(range(13))),
    Tenant("deep", 14_000 * US, cuts=(0, 2, 5, 9, 14, 20)),
)
RUNS: dict[str, Policy] = {
    "many-core-layer-block": LayerBlock(LANES, target=0.6),
    "many-core-slack-blocks": SlackBlocks(LANES, slack_share=0.2),
}


def versions_of(units: int, seed: int) -> VersionTable:
    """Units of which the fast implementation moves much, and the slower one, made for high pressure, little."""
    rng = Random(seed)
    made = []
    for _ in range(units):
        alone, moved, serial = rng.randint(200, 1200) * US, rng.randint(300_000, 3_000_000), rng.choice([0.02, 0.2])
        counts = (1, 2, 4, 8)
        ns = tuple(round(alone * (serial + (1 - serial) / c)) for c in counts)
        fast = Implementation(counts, ns, tuple(moved * c for c in (1, 1, 2, 4)))
        calm = Implementation(counts, tuple(round(1.15 * each) for each in ns), (moved // 3,) * 4)
        made.append(UnitVersions((fast, calm), (0, 0, 1)))
    return VersionTable(CORES, 3, BANDWIDTH, tuple(made))


TABLES = {
    tenant.name: LatencyTable(
        (LatencyRow(0, 1, 1, 5_000 * US),), (1.0,) * tenant.unit_count, 1.0, versions_of(tenant.unit_count, seed)
    )
    for seed, tenant in enumerate(TENANTS)
}


def workload() -> list[Query]:
    rng = Random(26)
    made, now = [], 0
    for number in range(30):
        now += round(rng.expovariate(1 / 1800)) * US
        tenant = rng.choice(TENANTS)
        made.append(Query(number, tenant.name, now, now + tenant.slo_ns))
    return made


def record(policy: Policy) -> bytes:
    file = io.BytesIO()
    believed = TablePredictor(TABLES)
    log = trace.TraceWriter(file, trace.header(policy, believed, TENANTS, Machine.cpu(range(CORES)), created=""))
    tables = {name: table.versions for name, table in TABLES.items() if isinstance(table.versions, VersionTable)}
    engine = Engine(TENANTS, policy, believed, Machine.cpu(range(CORES)))
    simulate(engine, ManyCoreWorld(tables, ManyCore(BANDWIDTH)), workload(), lambda respond, now_ns: None, log=log)
    log.flush()
    return file.getvalue()


@pytest.mark.parametrize("run", RUNS)
def test_decisions_are_those_of_the_golden_trace(run: str, bless: bool) -> None:
    agree(GOLDEN / f"{run}.jsonl", record(RUNS[run]), bless)


@pytest.mark.parametrize("run", RUNS)
def test_a_golden_trace_replays_to_itself(run: str) -> None:
    path = GOLDEN / f"{run}.jsonl"
    head, records = trace.read(path)
    lines = [line for _, line in trace.replay(head, records, rebuild_policy)]
    assert lines == path.read_bytes().splitlines()[1:]


class Forgetful:
    """Decides with its memory, and at every third decision once more without: the decision has to be the same."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.spec, self.queue_key = policy.spec, policy.queue_key
        self.count = 0

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        made = self.policy.decide(snapshot, memory)
        self.count += 1
        if self.count % 3 == 0:
            assert self.policy.decide(snapshot, None) == made
            assert self.policy.decide(snapshot, memory) == made
        return made


@pytest.mark.parametrize("run", RUNS)
def test_what_is_kept_between_decisions_changes_none(run: str) -> None:
    forgetful = Forgetful(RUNS[run])
    tenants = (replace(TENANTS[0], max_batch=3), TENANTS[1])
    engine = Engine(tenants, forgetful, TablePredictor(TABLES), Machine.cpu(range(CORES)))
    tables = {name: table.versions for name, table in TABLES.items() if isinstance(table.versions, VersionTable)}
    outcomes: Counter[Outcome] = Counter()
    world = ManyCoreWorld(tables, ManyCore(BANDWIDTH))
    simulate(engine, world, workload(), lambda respond, now_ns: outcomes.update([respond.outcome]))
    assert forgetful.count > 40
    assert outcomes.total() == len(workload())


def test_the_traces_show_what_blocks_have() -> None:
    text = b"".join((GOLDEN / f"{run}.jsonl").read_bytes() for run in RUNS).decode()
    for word in ('"wanted":', '"pressure_pct":', '"Expand"', '"LaunchExpanded"', "dropped", "answered"):
        assert word in text, word
    launches = [launch for run in RUNS for launch in launches_of(run)]
    assert {trace.work_of(launch).version for launch in launches} == {0, 1, 2}
    assert len({len(launch["share"]["cores"]) for launch in launches}) > 4


def launches_of(run: str) -> list[dict[str, object]]:
    _, records = trace.read(GOLDEN / f"{run}.jsonl")
    return [action for each in records for kind, action in each.actions if kind == "Launch"]


def test_explain_tells_version_cores_and_pressure_of_each_block() -> None:
    path = GOLDEN / "many-core-layer-block.jsonl"
    told: list[str] = []
    for launch in launches_of("many-core-layer-block"):
        queries: list[int] = launch["queries"]  # type: ignore[assignment]
        basis = trace.basis_of(launch)
        if basis.get("wanted") and basis.get("pressure_pct") and trace.work_of(launch).version:
            story = explain(trace.read(path)[1], queries[0])
            assert isinstance(story, QueryHistory)
            told = [line for line in story.sentences() if f"of {basis['wanted']} requested" in line]
            assert told
            assert f"in version {trace.work_of(launch).version} on cores" in told[0]
            assert f"at a pressure of {basis['pressure_pct']} %" in told[0]
            break
    assert told, "no launch that wanted more under pressure"


def test_no_golden_file_is_without_its_run() -> None:
    assert {path.stem for path in GOLDEN.glob("many-core-*.jsonl")} == set(RUNS)
