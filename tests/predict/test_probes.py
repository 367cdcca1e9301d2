"""A wrong belief does not lock a model out: probes correct it, and cost neighbours next to nothing."""

from __future__ import annotations

from collections import Counter
from heapq import merge
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.actions import Action, Launch, Probe, Respond
from cotenant.core.engine import Engine
from cotenant.core.events import Event, QueryArrived
from cotenant.core.probes import FAILED_NS, LEAST_NS, MOST_NS, SLOWER, Probes
from cotenant.core.snapshot import DropRule
from cotenant.policies import policy_class
from cotenant.predict.online import OnlineModel
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.driver import simulate
from cotenant.types import LossCause, Outcome, Query, Tenant
from cotenant.work import Machine, Share, Work
from cotenant.world.simulated import TableWorld

MS, SECOND = 1_000_000, 1_000_000_000
SLO_NS = 100 * MS
LANES = (Share((0,)), Share((1,)))
ORDERED = ("shares", "most", "fair", "weighted", "fcfs", "sjf", "edf")
Ended = list[tuple[Query, Respond]]


class Followed(Engine):
    """An engine whose beliefs follow what happens, as in the server and in `cotenant simulate`."""

    beliefs: OnlineModel

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        actions = super().handle(event, now_ns)
        probes.extend((now_ns, action.query) for action in actions if isinstance(action, Probe))
        follow_up = self.beliefs(now_ns, event, actions)
        return actions if follow_up is None else [*actions, *self.handle(follow_up, now_ns)]


probes: list[tuple[int, int]] = []


def table(latency_ns: int, units: int = 1) -> LatencyTable:
    return LatencyTable((LatencyRow(0, 1, 1, latency_ns),), (1.0,) * units)


def regular(tenant: Tenant, gap_ns: int, until_ns: int) -> list[tuple[int, str, int]]:
    return [(at, tenant.name, at + tenant.slo_ns) for at in range(gap_ns, until_ns, gap_ns)]


def run(
    policy: str,
    tenants: dict[Tenant, tuple[int, int, int]],
    until_ns: int,
    units: int = 1,
    lanes: tuple[Share, ...] = LANES,
) -> Ended:
    """Simulate tenants, each with its true latency, the one of its profile, and the gap between its queries."""
    made = policy_class(policy)(lanes)
    beliefs = OnlineModel.under(made)
    for tenant, (_, believed_ns, _) in tenants.items():
        beliefs.add(tenant.name, table(believed_ns, units))
    truth = TablePredictor({tenant.name: table(true_ns, units) for tenant, (true_ns, _, _) in tenants.items()})
    engine = Followed([*tenants], made, beliefs.predictor, Machine.cpu((0, 1)))
    engine.beliefs = beliefs
    probes.clear()
    sent = merge(*[regular(tenant, gap_ns, until_ns) for tenant, (_, _, gap_ns) in tenants.items()])
    queries = [Query(number, name, at, due) for number, (at, name, due) in enumerate(sent)]
    ended: Ended = []
    simulate(engine, TableWorld(truth), queries, lambda respond, _: ended.append((queries[respond.query], respond)))
    assert len(ended) == len(queries)
    return ended


def in_time(ended: Ended, tenant: str, from_ns: int = 0) -> float:
    mine = [respond.outcome for query, respond in ended if query.tenant == tenant and query.arrival_ns >= from_ns]
    return sum(outcome is Outcome.ANSWERED for outcome in mine) / len(mine)


@pytest.mark.parametrize("policy", ORDERED)
@given(
    wrong=st.one_of(st.floats(-3, 3), st.sampled_from((-3.0, 3.0))),
    true_ms=st.sampled_from((0.05, 1, 8)),
    slack=st.sampled_from((1.5, 4, 20)),
    units=st.sampled_from((1, 6)),
)
@settings(max_examples=6, deadline=None)
def test_a_model_is_served_whatever_is_believed_of_it(
    policy: str, wrong: float, true_ms: float, slack: float, units: int
) -> None:
    true_ns = round(true_ms * MS)
    tenant = Tenant("a", round(slack * true_ns) + 2 * MS, tuple(range(units + 1)))
    believed_ns = max(1, round(true_ns * 10**wrong))
    gap_ns = max(10 * MS, 3 * true_ns)
    until_ns = 5 * SECOND + 1000 * true_ns + 60 * gap_ns
    ended = run(policy, {tenant: (true_ns, believed_ns, gap_ns)}, until_ns, units)
    assert in_time(ended, "a", until_ns - 60 * gap_ns) >= 0.95, (believed_ns / MS, len(probes))


@pytest.mark.parametrize("policy", ORDERED)
@pytest.mark.parametrize("lanes", [LANES[:1], LANES], ids=["one", "two"])
def test_probes_of_what_is_hopeless_cost_neighbours_next_to_nothing(policy: str, lanes: tuple[Share, ...]) -> None:
    neighbour, hopeless = Tenant("n", 100 * MS), Tenant("h", 100 * MS)
    load = {neighbour: (16 * MS, 16 * MS, 20 * MS), hopeless: (300 * MS, 300 * MS, 50 * MS)}
    ended = run(policy, load, 70 * SECOND, lanes=lanes)
    assert 1 <= len(probes) <= 2
    assert all(later - earlier >= SLOWER * 250 * MS for (earlier, _), (later, _) in pairwise(probes))
    alone = run(policy, {neighbour: load[neighbour]}, 70 * SECOND, lanes=lanes)
    assert in_time(ended, "n") >= 0.99 * in_time(alone, "n")
    assert in_time(ended, "h") == 0


def test_a_probe_in_vain_is_dropped_at_its_deadline_and_says_why() -> None:
    tenant = Tenant("h", 100 * MS)
    ended = run("shares", {tenant: (300 * MS, 300 * MS, 50 * MS)}, SECOND)
    by_number = {query.id: respond for query, respond in ended}
    assert [number for _, number in probes] == [0]
    assert by_number[0].outcome is Outcome.DROPPED
    assert by_number[0].reason == "timed out after 100.0 ms while it was running"
    assert by_number[0].cause is LossCause.SLO
    others = Counter(respond.outcome for query, respond in ended if query.id)
    assert others == {Outcome.REJECTED: len(ended) - 1}


@pytest.mark.parametrize("drop", [DropRule.NONE, DropRule.HOPELESS])
def test_what_a_client_asks_for_is_no_reason_for_a_probe(drop: DropRule) -> None:
    """A query with a deadline that is shorter than the SLO, and too short, is refused as before."""
    policy = policy_class("edf")(LANES, drop)
    engine = Engine([Tenant("a", 100 * MS)], policy, TablePredictor({"a": table(50 * MS)}), Machine.cpu((0, 1)))
    actions = engine.handle(QueryArrived(Query(0, "a", 0, 40 * MS)), 0)
    kinds = [type(action) for action in actions]
    assert Probe not in kinds
    assert (Respond in kinds) is (drop is DropRule.HOPELESS)


@given(st.lists(st.tuples(st.sampled_from(("run", "fail", "lose", "wait")), st.integers(1, 10**12)), max_size=60))
def test_probes_keep_their_bound_whatever_happens(steps: list[tuple[str, int]]) -> None:
    """At most one at a time, at most a tenth of a lane while it helps, at least one in MOST_NS."""
    made, now, number, last = Probes(), 0, 0, 0
    for what, ns in steps:
        believed_ns = 300 * MS
        query = Query(number, "a", now, now + SLO_NS)
        probe = made.admit(query, believed_ns, SLO_NS, -1 - number, now)
        if probe is None:
            assert now - last < MOST_NS
            now += ns
            continue
        assert probe.merge_key == -1 - number
        assert probe.expiry_ns == query.deadline_ns < probe.deadline_ns
        assert made.admit(Query(number + 1, "a", now, now + SLO_NS), believed_ns, SLO_NS, -9, now) is None
        number, began, last = number + 2, now, now
        if what in ("run", "fail"):
            ran_ns = ns % (600 * MS) + 1
            now += ran_ns
            launch = Launch(0, 0, (query.id,), Work("a", 0, 1, 0, 1), True, LANES[0], believed_ns)
            made.ended(launch, ran_ns, now, has_failed=what == "fail")
            least = max(LEAST_NS, FAILED_NS if what == "fail" else 0, 9 * ran_ns if ran_ns <= SLO_NS else 0)
            early = made.admit(Query(number, "a", now, now + SLO_NS), believed_ns, SLO_NS, -9, now + least - 2 * MS)
            assert early is None, (ran_ns, began)
            last = now
        else:
            now += ns
    assert made.admit(Query(number, "a", 0, 1), 1, 1, -9, now + MOST_NS) is not None
    assert len(made.inside) <= 1
    made.forget("a")
    assert not made.inside
