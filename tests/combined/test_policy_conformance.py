"""What every policy promises to the engine: those of the registry, and those of installed packages.

An installed package that has an entry point of the group `cotenant.policies` is held to it by its name. Histories with
tenants that come and go, and batches that are left at a cut, are in `tests/properties`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any, ClassVar

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from cotenant.core.actions import Action
from cotenant.core.events import Event
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, Drop, DropRule, Policy, Snapshot, Start
from cotenant.errors import ConfigError, ProtocolViolationError
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.registry import make_policy, options_of, policy_class, policy_names
from cotenant.predict.table import TablePredictor
from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, JointPlan, Wait
from cotenant.types import ANSWERS, Query, Tenant, priority_rank
from cotenant.work import Round, Share, Slot
from cotenant.world.simulated import TableWorld
from machines import MODELS, TENANTS, Watched
from scenario import ONE_LANE, TWO_LANES, play

NAMES = policy_names()
PREDICTOR = TablePredictor(MODELS)
SOME = settings(max_examples=40, deadline=None, database=None)


class Held(Watched):
    """A policy that is asked twice about everything, and whose every answer is looked at."""

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        key = super().queue_key(query, tenant, predictor)
        assert key == super().queue_key(query, tenant, predictor), "another key for the same query"
        assert key[-1] == query.id, "a key that two queries may have"
        assert {type(part) for part in key} == {int}, "a key that does not compare"
        return key

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        decision = super().decide(snapshot, memory)
        assert {start.share for start in decision.starts} <= set(self.spec.shares), "a share that it did not name"
        assert all(drop.reason for drop in decision.drops), "a client is told no reason"
        return decision


@st.composite
def arrivals(draw: st.DrawFn) -> list[Query]:
    """Queries of all tenants, of which some come at one instant, and many more than can be in time."""
    made: list[Query] = []
    now = 0
    for number in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0, 0, 1, 5, 30]))
        name = draw(st.sampled_from(sorted(TENANTS)))
        deadline = now + draw(st.sampled_from([TENANTS[name].slo_ns] * 3 + [0, 10, 1000]))
        rank = priority_rank(draw(st.sampled_from([0, 0, 1, 3])))
        items, shape, merge_key = (draw(st.sampled_from(few)) for few in ([1, 1, 2, 7], [0, 0, 1], [0, 0, 0, 1]))
        timeout = draw(st.sampled_from([None, None, 5, 60]))
        made.append(
            Query(
                number,
                name,
                now,
                deadline,
                rank,
                items,
                shape,
                merge_key,
                None if timeout is None else now + timeout,
            )
        )
    return made


def wishes(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Values of those of a policy's options that are switches or one of several words; the others stay as they are."""
    switches: dict[str, st.SearchStrategy[Any]] = {}
    for option, kind in options_of(policy_class(name)).items():
        if kind is bool:
            switches[option] = st.booleans()
        elif isinstance(kind, type) and issubclass(kind, Enum):
            switches[option] = st.sampled_from([each.value for each in kind])
    return st.fixed_dictionaries({}, optional=switches)


PLANS = (
    JointPlan(
        (JointMember("wide", 6, 3), JointMember("long", 1, 7), JointMember("quick", 2, 1)),
        ((1, 3, 0), (2, 4, 1)),
        (Wait(2, 0, 1, 1),),
        (Chunk(0, 0, 2, (3, 3)),),
    ),
    JointPlan((JointMember("wide", 1, 3), JointMember("quick", 1, 1)), ((3, 0),)),
)
"""For policies that take some."""
GROUPED = (Slot("wide", 4, 2.0, 1, 1), Slot("quick", 2, 5.0, 1, 1))
ROUNDS = {
    ONE_LANE: (Round(100, (*GROUPED, Slot("wide", 2, 1.0))),),
    TWO_LANES: (Round(100, GROUPED[:1]), Round(50, (Slot("long", 1, 1.0), Slot("wide", 3, 1.0)))),
}
"""For policies that run them: with a group, and without one of several members."""


def made_of(name: str, options: dict[str, Any], lanes: tuple[Share, ...]) -> Policy:
    try:
        return make_policy(name, options, lanes, {"rounds": ROUNDS[lanes], "joint_plans": PLANS})
    except ConfigError:  # switches that exclude each other
        reject()


def hold(policy: Policy, queries: list[Query]) -> list[tuple[int, Event, list[Action]]]:
    """Hold a policy to all of it, on an engine that refuses decisions which break the contract; give what happened.

    Launches take longer or shorter than predicted, and some fail. Queries are served to their ends.
    """
    spec = policy.spec
    assert set(spec.lanes) <= set(spec.shares)
    assert spec.groups is not None or not spec.grouped
    log: list[tuple[int, Event, list[Action]]] = []
    world = TableWorld(PREDICTOR, noise=0.3, failure_rate=0.05, seed=1)
    made = play(Held(policy), TENANTS.values(), PREDICTOR, queries, world, log=lambda *told: log.append(told))
    assert all(made.reasons[query] for query, outcome in made.outcomes.items() if outcome not in ANSWERS)
    return log


@pytest.mark.parametrize("lanes", [ONE_LANE, TWO_LANES], ids=["one-lane", "two-lanes"])
@pytest.mark.parametrize("name", NAMES)
def test_a_policy_is_pure_keeps_the_contract_and_leaves_nothing_undone(name: str, lanes: tuple[Share, ...]) -> None:
    @SOME
    @given(wishes(name), arrivals())
    def held(options: dict[str, Any], queries: list[Query]) -> None:
        first = hold(made_of(name, options, lanes), queries)
        assert first == hold(made_of(name, options, lanes), queries), "it remembers outside of its memory"

    held()


# --- the suite itself -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Changing(Edf):
    """Decides by how often it was asked."""

    asked: ClassVar[Any] = count()

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        decision = Edf.decide(self, snapshot, memory)
        return decision if next(self.asked) % 2 else Decision()


@dataclass(frozen=True, slots=True)
class Meddling(Edf):
    """Takes from the queues."""

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        decision = Edf.decide(self, snapshot, memory)
        for queue in snapshot.queues.values():
            queue.queries.clear()  # type: ignore[attr-defined]
        return decision


@dataclass(frozen=True, slots=True)
class Idle(Edf):
    """Starts nothing."""

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        return Decision()


@dataclass(frozen=True, slots=True)
class Silent(Edf):
    """Drops everybody, and says not why."""

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        waiting = [query.id for queue in snapshot.queues.values() for query in queue.queries]
        return Decision(drops=tuple(Drop(query, "") for query in waiting))


@dataclass(frozen=True, slots=True)
class Alike(Edf):
    """Gives all queries of a deadline the same key."""

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        return (query.deadline_ns,)


@dataclass(frozen=True, slots=True)
class Elsewhere(Edf):
    """Launches in a share of another machine."""

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        [start] = Edf.decide(self, snapshot, memory).starts
        return Decision((Start(start.work, start.queries, Share((9,)), start.predicted_ns),))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Changing, r"Decision\("),
        (Meddling, "^assert "),
        (Idle, "leaves work undone"),
        (Silent, "is told no reason"),
        (Alike, "a key that two queries may have"),
        (Elsewhere, "a share that it did not name"),
    ],
    ids=lambda kind: getattr(kind, "__name__", ""),
)
def test_a_policy_that_breaks_a_promise_is_found(kind: type[Edf], text: str) -> None:
    queries = [Query(number, "wide", 0, 200 + number, items=7 - number) for number in range(1, 4)]
    with pytest.raises((AssertionError, ProtocolViolationError), match=text):
        hold(kind(ONE_LANE, DropRule.NONE), queries)
    hold(Edf(ONE_LANE, DropRule.NONE), queries)
