"""What a trace says of a run beside its bounds, from small simulated traces whose numbers can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from cotenant.core.events import Event, PredictorChanged, TenantAdded
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.driver import simulate
from cotenant.trace import TraceError, TraceWriter, header, read
from cotenant.trace.bound import RunBound, bound_of
from cotenant.types import Query, Tenant
from cotenant.work import Machine
from cotenant.world.simulated import TableWorld
from scenario import CORES, MS, TWO_LANES, tables
from strict_engine import StrictEngine as Engine

LONG = Tenant("long", 100 * MS, cuts=(0, 2, 4), weight=2.0)
SHORT = Tenant("short", 100 * MS, max_batch=4)
LANE = TWO_LANES[:1]
BELIEF = TablePredictor({**tables({"long": 80 * MS}, 4).tables, **tables({"short": 10 * MS}, batch_slope=0.5).tables})


def at(number: int, tenant: Tenant, arrival_ms: float) -> Query:
    arrival = round(arrival_ms * MS)
    return Query(number, tenant.name, arrival, arrival + tenant.slo_ns)


def recorded(
    path: Path,
    queries: Sequence[Query],
    slower: float = 1.0,
    before: Sequence[Event] = (),
    believed: TablePredictor = BELIEF,
) -> RunBound:
    """The bound of a run that begins with some events at 0."""
    machine, policy = Machine.cpu(CORES[:1]), Edf(LANE, preempt=False)
    writer = TraceWriter(path.open("wb"), header(policy, BELIEF, (LONG, SHORT), machine, created=""))
    engine = Engine((LONG, SHORT), policy, BELIEF, machine)
    for event in before:
        writer(0, event, engine.handle(event, 0))
    real = believed.scaled({"long": slower, "short": slower})
    simulate(engine, TableWorld(real), queries, lambda *_: None, log=writer)
    writer.close()
    return bound_of(*read(path))


def test_a_run_is_set_beside_what_could_have_been(tmp_path: Path) -> None:
    """The short one is there to 102 ms, the long ones share what it leaves of these."""
    found = recorded(tmp_path / "t", [at(0, LONG, 0), at(1, LONG, 1), at(2, SHORT, 2)])
    long, short = found.tenants
    assert (long.offered, long.in_time, long.slot_ns, long.pace) == (2, 1, 80 * MS, 1.0)
    assert (short.offered, short.in_time) == (1, 1)
    assert short.slot_ns == pytest.approx(BELIEF.latency_ns(SHORT.work(0, 4), 1) / 4)
    left = 102 * MS - short.slot_ns
    assert found.most == pytest.approx(1 + left / (80 * MS))
    assert found.weighted == pytest.approx(1 + 2 * left / (80 * MS))
    assert (found.in_time, found.value, found.least) == (2, 3.0, 0.5)
    assert found.limited_by == ("long", "short")
    assert [each.share for each in found.tenants] == pytest.approx([2 / 3, 1 / 3])
    assert long.alone == pytest.approx(2 / 3 * 101 / 80)
    assert short.alone == pytest.approx(1)
    assert found.shares == pytest.approx(found.most)
    assert found.short is None


def test_launches_that_take_longer_than_the_profile_says_count_as_they_were(tmp_path: Path) -> None:
    found = recorded(tmp_path / "t", [at(0, LONG, 0)], slower=1.2)
    assert found.tenants[0].pace == pytest.approx(1.2)
    assert found.tenants[0].slot_ns == pytest.approx(96 * MS)
    assert found.most == pytest.approx(1)
    assert found.tenants[1].attainment == 1.0
    assert found.least == found.fair == 1.0


def test_who_withdrew_is_left_out_and_who_was_added_later_is_not(tmp_path: Path) -> None:
    new = Tenant("new", 100 * MS)
    believed = TablePredictor({**BELIEF.tables, **tables({"new": 5 * MS}).tables})
    before = [PredictorChanged(believed), TenantAdded(new)]
    path = tmp_path / "t"
    found = recorded(path, [at(8, new, 1), at(9, new, 2)], before=before, believed=believed)
    assert [(each.tenant, each.offered) for each in found.tenants] == [("long", 0), ("short", 0), ("new", 2)]
    head, records = read(path)
    told = list(records)
    for record in told:
        for kind, action in record.actions:
            if kind == "Respond" and action["query"] == 9:
                action["outcome"] = "cancelled"
    assert bound_of(head, told).tenants[2].offered == 1


def test_what_has_no_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no query that ended"):
        recorded(tmp_path / "t", [])
    two = Machine.of({"cpu": (0,), "cuda:0": (0,)})
    policy = Edf((two.share((0,)),))
    with (tmp_path / "two").open("wb") as file:
        TraceWriter(file, header(policy, BELIEF, (LONG,), two, created="")).flush()
    with pytest.raises(TraceError, match="devices cpu, cuda:0, expected one"):
        bound_of(*read(tmp_path / "two"))


@pytest.mark.parametrize("seed", range(12))
def test_no_run_is_above_its_bound_whatever_batches_really_take(tmp_path: Path, seed: int) -> None:
    """Batches run at a pace of their own, which no mean of all launches tells: first more come than can be served, then
    one at a time."""
    random, name = Random(seed), "short"
    rows = sorted(random.sample(range(2, 9), 3))
    profile = LatencyTable(tuple(LatencyRow(0, n, 1, 4 * MS * n + 6 * MS) for n in (1, *rows)), (1.0,))
    real_rows = [LatencyRow(0, 1, 1, 10 * MS)]
    for each in rows:
        latency = round((4 * MS * each + 6 * MS) * random.choice([0.3, 0.5, 1.0, 1.4]))
        real_rows.append(LatencyRow(0, each, 1, max(latency, real_rows[-1].latency_ns)))
    tenant = Tenant(name, 60 * MS, max_batch=rows[-1], max_queue=1000)
    queries, now = list[Query](), 0
    for number in range(400):
        now += round(random.expovariate(1 / random.choice([0.5, 1.0])) * MS) if number < 150 else 15 * MS
        queries.append(Query(number, name, now, now + tenant.slo_ns))
    believed, machine, policy = TablePredictor({name: profile}), Machine.cpu(CORES[:1]), Edf(LANE, preempt=False)
    path = tmp_path / "t"
    writer = TraceWriter(path.open("wb"), header(policy, believed, (tenant,), machine, created=""))
    world = TableWorld(TablePredictor({name: LatencyTable(tuple(real_rows), (1.0,))}))
    simulate(Engine((tenant,), policy, believed, machine), world, queries, lambda *_: None, log=writer)
    writer.close()
    found = bound_of(*read(path))
    assert found.in_time > 250
    assert found.in_time <= found.most + 1e-6
    assert found.in_time <= found.shares + 1e-6
    assert found.least <= found.fair + 1e-6
