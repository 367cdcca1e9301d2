"""Groups in the engine, event by event: one that is started behind the one that runs, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from cotenant.core.actions import Action, Enqueue, GroupBasis, Launch, LookAhead, Release, SetTimer, group_of
from cotenant.core.events import (
    Event,
    LaunchEnded,
    LookAheadDue,
    PolicyChanged,
    QueryArrived,
    QueryCancelled,
    TenantResumed,
    TenantSuspended,
    TimerFired,
)
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import IN_GROUPS, Decision, DropRule, PolicySpec, Snapshot, Start
from cotenant.errors import ProtocolViolationError
from cotenant.types import Query, Tenant
from cotenant.work import Machine, Share
from scenario import tables
from strict_engine import StrictEngine as Engine

MACHINE = Machine.cpu((0, 1))
LEFT, RIGHT = MACHINE.share((0,)), MACHINE.share((1,))
TENANTS = tuple(Tenant(name, 10**9) for name in "ab")
PREDICTOR = tables({"a": 5, "b": 5})

Step = Callable[[Snapshot], Decision]


class Groups:
    """Decides what it is told, once each, as groups; with nothing left to be told, nothing."""

    spec = PolicySpec(
        name="groups", lanes=(LEFT, RIGHT), shares=(LEFT, RIGHT), drop=DropRule.NONE, requests=IN_GROUPS, preempt=True
    )

    def __init__(self, *steps: Step) -> None:
        self.left = list(steps)
        self.asked = 0

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        return (query.id,)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        self.asked += 1
        return self.left.pop(0)(snapshot) if self.left else Decision()


def query(number: int, tenant: str = "a") -> Query:
    return Query(number, tenant, 0, 10**9)


def nothing(snapshot: Snapshot) -> Decision:
    return Decision()


def heads(snapshot: Snapshot, after: tuple[int, ...] = ()) -> Decision:
    """The head of each queue on a lane of its own."""
    found = [(queue.tenant, queue.queries[0]) for queue in snapshot.queues.values() if queue.queries]
    lanes: Sequence[Share] = Groups.spec.lanes
    basis = GroupBasis(snapshot.next_launch, ahead=bool(after))
    starts = [
        Start(tenant.work(0, 1), (head,), lane, 5, None, after, basis=basis)
        for (tenant, head), lane in zip(found, lanes, strict=False)
    ]
    return Decision(tuple(starts))


def behind(snapshot: Snapshot) -> Decision:
    """The same behind all that runs."""
    return heads(snapshot, tuple(snapshot.running))


class Stage:
    """An engine with a group of launches 0 and 1 under way, and two queries that wait."""

    def __init__(self, *steps: Step) -> None:
        self.policy = Groups(nothing, nothing, nothing, heads, *steps)
        self.engine = Engine(TENANTS, self.policy, PREDICTOR, MACHINE)
        told = [self.tell(QueryArrived(query(number, tenant))) for number, tenant in enumerate("abab")]
        assert kinds(told[-1]) == ["Launch", "Launch", "LookAhead"]

    def tell(self, event: Event) -> list[Action]:
        return self.engine.handle(event, 0)

    @property
    def free(self) -> int:
        return self.engine.snapshot(0).free_mask


def kinds(actions: Sequence[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_a_group_is_started_behind_the_one_that_runs_and_runs_when_that_has_ended() -> None:
    stage = Stage(behind)
    told = stage.tell(LookAheadDue())
    assert kinds(told) == ["Enqueue", "Enqueue"]
    assert [action.launch.after for action in told if isinstance(action, Enqueue)] == [(0, 1), (0, 1)]
    assert stage.engine.launches == (0, 1, 2, 3)
    assert kinds(stage.tell(LaunchEnded(0))) == ["Respond"], "a barrier: its slot is kept"
    assert stage.free == 0
    started = stage.tell(LaunchEnded(1))[1:]
    assert [Enqueue(action) for action in started if isinstance(action, Launch)] == told
    assert {(group_of(launch), launch.basis.ahead) for launch in started if isinstance(launch, Launch)} == {(2, True)}
    stage.tell(LaunchEnded(2))
    stage.tell(LaunchEnded(3))
    assert (stage.engine.live, stage.free) == (0, MACHINE.mask)


def test_no_more_is_asked_until_the_group_behind_runs() -> None:
    stage = Stage(behind, behind)
    stage.tell(LookAheadDue())
    asked = stage.policy.asked
    assert stage.tell(QueryArrived(query(4))) == []
    assert stage.tell(LookAheadDue()) == []
    stage.tell(LaunchEnded(1))
    assert stage.policy.asked == asked
    assert kinds(stage.tell(LaunchEnded(0)))[1:] == ["Launch", "Launch", "LookAhead"]
    [next_one] = stage.tell(LookAheadDue())
    assert isinstance(next_one, Enqueue)
    assert (next_one.launch.queries, next_one.launch.after) == ((4,), (2, 3))


def test_nothing_is_looked_ahead_for_when_nobody_waits() -> None:
    stage = Stage(behind)
    stage.tell(LookAheadDue())
    stage.tell(LaunchEnded(0))
    assert kinds(stage.tell(LaunchEnded(1))) == ["Respond", "Launch", "Launch"]
    assert kinds(stage.tell(QueryArrived(query(4)))) == ["LookAhead"]


def test_when_all_have_left_the_group_behind_the_policy_is_asked_again() -> None:
    stage = Stage(behind, behind)
    stage.tell(LookAheadDue())
    stage.tell(QueryArrived(query(4)))
    assert kinds(stage.tell(QueryCancelled(2))) == ["Respond", "Release"]
    left = stage.tell(QueryCancelled(3))
    assert kinds(left) == ["Respond", "Release", "LookAhead"]
    assert [action.batch for action in left if isinstance(action, Release)] == [3]
    [again] = stage.tell(LookAheadDue())
    assert isinstance(again, Enqueue)
    assert again.launch.queries == (4,)
    stage.tell(LaunchEnded(0))
    assert stage.free == 0
    assert kinds(stage.tell(LaunchEnded(1))) == ["Respond", "Launch"]


def test_queries_that_return_from_the_group_behind_are_decided_upon() -> None:
    stage = Stage(behind, heads)
    stage.tell(LookAheadDue())
    assert kinds(stage.tell(TenantSuspended("a", "its worker died"))) == ["Release"]
    assert kinds(stage.tell(TenantSuspended("b", "its worker died"))) == ["Release"]
    assert (stage.engine.waiting("a"), stage.engine.waiting("b")) == (1, 1)
    assert kinds(stage.tell(TenantResumed("a"))) == []
    stage.tell(TenantResumed("b"))
    stage.tell(LaunchEnded(0))
    assert kinds(stage.tell(LaunchEnded(1))) == ["Respond", "Launch", "Launch"]
    assert stage.engine.waiting("a") == 0


def test_a_member_that_never_runs_leaves_the_others_of_its_group() -> None:
    stage = Stage(behind, behind)
    stage.tell(LookAheadDue())
    assert kinds(stage.tell(TenantSuspended("a", "its worker died"))) == ["Release"]
    assert stage.tell(TenantResumed("a")) == [], "asked when the others run"
    stage.tell(LaunchEnded(0))
    _, launch, look = stage.tell(LaunchEnded(1))
    assert isinstance(launch, Launch)
    assert (launch.queries, look) == ((3,), LookAhead())
    [again] = stage.tell(LookAheadDue())
    assert isinstance(again, Enqueue)
    assert (again.launch.queries, again.launch.after) == ((2,), (3,))


def test_the_group_behind_runs_whatever_policy_there_is_by_then() -> None:
    stage = Stage(behind)
    stage.tell(LookAheadDue())
    other = Groups(heads)
    assert stage.tell(PolicyChanged(other)) == []
    stage.tell(QueryArrived(query(4)))
    assert other.asked == 0
    stage.tell(LaunchEnded(0))
    assert kinds(stage.tell(LaunchEnded(1)))[-3:] == ["Launch", "Launch", "LookAhead"]


def again(at_ns: int) -> Step:
    return lambda _: Decision(again_ns=at_ns)


def test_the_policy_is_asked_again_when_it_said() -> None:
    stage = Stage(again(7), again(9), behind)
    assert stage.tell(LookAheadDue()) == [SetTimer(7)]
    assert kinds(stage.engine.handle(TimerFired(), 7)) == ["LookAhead"]
    assert stage.engine.handle(LookAheadDue(), 7) == [SetTimer(9)]
    assert kinds(stage.engine.handle(TimerFired(), 9)) == ["LookAhead"]
    assert kinds(stage.engine.handle(LookAheadDue(), 9)) == ["Enqueue", "Enqueue"]


def test_a_timer_of_an_expiry_before_that_leaves_it_set() -> None:
    stage = Stage(nothing, again(7), behind)
    stage.tell(LookAheadDue())
    assert kinds(stage.tell(QueryArrived(Query(4, "a", 0, 10**9, expiry_ns=5)))) == ["LookAhead", "SetTimer"]
    assert stage.tell(LookAheadDue()) == [], "it fires before"
    assert stage.engine.handle(TimerFired(), 5)[1:] == [SetTimer(7)]
    assert kinds(stage.engine.handle(TimerFired(), 7)) == ["LookAhead"]


def test_a_time_that_has_passed_sets_no_timer_and_one_that_came_too_late_does_nothing() -> None:
    stage = Stage(again(0), again(7), heads)
    assert stage.tell(LookAheadDue()) == []
    assert kinds(stage.tell(QueryArrived(query(4)))) == ["LookAhead"]
    assert stage.tell(LookAheadDue()) == [SetTimer(7)]
    stage.tell(LaunchEnded(0))
    assert kinds(stage.tell(LaunchEnded(1))) == ["Respond", "Launch", "Launch", "LookAhead"]
    assert stage.tell(LookAheadDue()) == []
    assert stage.engine.handle(TimerFired(), 7) == []


WRONG: dict[str, Step] = {
    "behind nothing": heads,
    "behind one of two": lambda snapshot: heads(snapshot, (0,)),
    "one of two behind": lambda snapshot: Decision((*behind(snapshot).starts[:1], *heads(snapshot).starts[1:])),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_group_beside_one_that_runs_is_caught_and_not_booked(case: str) -> None:
    stage = Stage(WRONG[case], behind)
    with pytest.raises(ProtocolViolationError, match="starts a group while another one runs"):
        stage.tell(LookAheadDue())
    assert (stage.engine.waiting("a"), stage.engine.launches) == (1, (0, 1))
    assert kinds(stage.tell(LookAheadDue())) == ["Enqueue", "Enqueue"]
