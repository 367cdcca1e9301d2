"""Single decisions on snapshots made by hand: several lanes free at once, several batches paused."""

from __future__ import annotations

from cotenant.core.actions import Release, Respond
from cotenant.core.batches import Batch
from cotenant.core.events import LaunchEnded, QueryArrived, QueryCancelled
from cotenant.core.queues import TenantQueue
from cotenant.core.snapshot import DropRule, Snapshot
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.predict.table import TablePredictor
from cotenant.types import LossCause, Outcome, Query, Tenant
from cotenant.work import Machine, Share
from scenario import MS, ONE_LANE, TWO_LANES, tables
from strict_engine import StrictEngine as Engine

FAR = 10_000 * MS
A = Tenant("a", FAR, max_batch=3)
LONG = Tenant("long", FAR, cuts=(0, 1, 2))
TIGHT = Tenant("tight", 100 * MS)
PREDICTOR = TablePredictor(
    {
        "a": tables({"a": 10 * MS}, batch_slope=0.1).tables["a"],
        "long": tables({"long": 40 * MS}, 2).tables["long"],
        "tight": tables({"tight": 10 * MS}).tables["tight"],
    }
)


def snapshot(policy: ListPolicy, queries: list[Query], paused: list[Batch]) -> Snapshot:
    """Two free cores at time 0."""
    queue = TenantQueue(A)
    for query in queries:
        queue.push(policy.queue_key(query, A, PREDICTOR), query)
    return Snapshot(0, {"a": queue, "long": TenantQueue(LONG)}, paused, {}, 0b11, PREDICTOR)


def test_two_free_lanes_get_batches_that_share_nobody() -> None:
    policy = Edf(TWO_LANES, DropRule.NONE)
    queries = [Query(n, "a", 0, FAR + n, merge_key=n % 2) for n in range(8)]
    decision = policy.decide(snapshot(policy, queries, []), None)
    assert [[query.id for query in start.queries] for start in decision.starts] == [[0, 2, 4], [1, 3, 5]]
    same = [Query(n, "a", 0, FAR + n) for n in range(5)]
    decision = policy.decide(snapshot(policy, same, []), None)
    assert [[query.id for query in start.queries] for start in decision.starts] == [[0, 1, 2], [3, 4]]


def test_the_batch_of_a_second_lane_passes_over_those_promised_to_the_first() -> None:
    policy = Edf(TWO_LANES, DropRule.NONE)
    queries = [Query(n, "a", 0, FAR + n, merge_key=key) for n, key in enumerate((0, 1, 0, 1, 1))]
    decision = policy.decide(snapshot(policy, queries, []), None)
    assert [[query.id for query in start.queries] for start in decision.starts] == [[0, 2], [1, 3, 4]]


def test_lanes_that_share_cores_are_not_both_filled() -> None:
    policy = Edf((*ONE_LANE, *TWO_LANES), DropRule.NONE)
    queries = [Query(n, "a", 0, FAR, merge_key=n) for n in range(3)]
    decision = policy.decide(snapshot(policy, queries, []), None)
    assert [start.share for start in decision.starts] == [Share((0, 1))]


def test_the_most_urgent_of_the_paused_batches_is_resumed_first() -> None:
    policy = Edf(TWO_LANES, DropRule.NONE)
    paused = [Batch(n, LONG, [Query(n, "long", 0, deadline)]) for n, deadline in enumerate((FAR, 70 * MS, 80 * MS))]
    for batch in paused:
        batch.next_unit = 1
    decision = policy.decide(snapshot(policy, [Query(9, "a", 0, 75 * MS)], paused), None)
    assert [(start.batch, [query.id for query in start.queries]) for start in decision.starts] == [(1, []), (None, [9])]
    assert decision.starts[0].predicted_ns == 20 * MS


def test_cancelling_the_last_member_of_a_paused_batch_releases_it() -> None:
    core = Engine([LONG, TIGHT], Edf(ONE_LANE, slack_share=0.0), PREDICTOR, Machine.cpu((0, 1)))
    core.handle(QueryArrived(Query(0, "long", 0, FAR)), 0)
    core.handle(QueryArrived(Query(1, "tight", 1, 100 * MS)), 1)
    [launch] = core.handle(LaunchEnded(0), 20 * MS)
    assert launch.queries == (1,)  # type: ignore[union-attr]
    assert core.handle(QueryCancelled(0), 21 * MS) == [
        Respond(0, Outcome.CANCELLED, "cancelled by the client", LossCause.CLIENT),
        Release(0),
    ]
    assert core.handle(LaunchEnded(1), 30 * MS) == [Respond(1, Outcome.ANSWERED)]
    assert (core.live, core.running) == (0, 0)
