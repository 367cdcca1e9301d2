"""Tasks in the engine, event by event: parts that meet, launches that wait, what becomes of them, and expansion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import UNSET, structs

from cotenant.core.actions import Action, Enqueue, Expand, Launch, Release, Respond
from cotenant.core.events import (
    LaunchEnded,
    LaunchExpanded,
    QueryArrived,
    QueryCancelled,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
    TimerFired,
)
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, Drop, DropRule, Expansion, PolicySpec, Snapshot, Start
from cotenant.errors import ProtocolViolationError
from cotenant.policies.ordered.edf import Edf
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share, Work
from scenario import MS, tables
from strict_engine import StrictEngine as Engine

MACHINE = Machine.of({"cpu": (0, 1), "cuda:0": (0,)})
LEFT, RIGHT, GPU = MACHINE.share((0,)), MACHINE.share((1,)), MACHINE.share((0,), "cuda:0")
DEEP = Tenant("deep", 10**9, cuts=(0, 2, 4, 6), max_batch=4, splits=((0, 2, 4, 6),))
FLAT = Tenant("flat", 10**9)
PREDICTOR = tables({"deep": 10 * MS, "flat": 10 * MS}, 6)
WHOLE = DEEP.work(0, 2)


class Script:
    """Decides what it is told, once each; nothing else. Lanes are all slots by themselves."""

    lanes = (LEFT, RIGHT, GPU)
    spec = PolicySpec(name="script", lanes=lanes, shares=lanes, drop=DropRule.NONE, preempt=True)

    def __init__(self, *decisions: Decision | Callable[[Snapshot], Decision]) -> None:
        self.left = list(decisions)
        self.seen: list[Snapshot] = []

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        return (query.id,)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        self.seen.append(snapshot)
        if not self.left:
            return Decision()
        found = self.left.pop(0)
        return found if isinstance(found, Decision) else found(snapshot)


def query(number: int, tenant: str = "deep", items: int = 2) -> Query:
    return Query(number, tenant, 0, 10**9, items=items)


def start(
    work: Work, share: Share, *after: int, of: Sequence[int] = (0,), batch: int | None = None, **more: bool
) -> Start:
    queries = () if batch is not None else tuple(query(number, work.tenant) for number in of)
    return Start(work, queries, share, 5, batch, after, **more)


def engine(*decisions: Decision | Callable[[Snapshot], Decision]) -> Engine:
    return Engine([DEEP, FLAT], Script(*decisions), PREDICTOR, MACHINE)


def launches(actions: Sequence[Action]) -> list[int]:
    return [action.id for action in actions if isinstance(action, Launch)]


def enqueued(actions: Sequence[Action]) -> list[int]:
    return [action.launch.id for action in actions if isinstance(action, Enqueue)]


def outcomes(actions: Sequence[Action]) -> list[tuple[int, Outcome]]:
    return [(action.query, action.outcome) for action in actions if isinstance(action, Respond)]


def released(actions: Sequence[Action]) -> list[int]:
    return [action.batch for action in actions if isinstance(action, Release)]


HALVES = (start(WHOLE.until(4).part(0, 1), LEFT), start(WHOLE.until(4).part(1, 2), RIGHT))
JOINED = (*HALVES, start(WHOLE.since(4), LEFT, 0, 1))


def test_two_devices_run_at_once_what_their_first_cores_do() -> None:
    core = Engine([FLAT], Edf((LEFT, GPU), DropRule.NONE), PREDICTOR, MACHINE)
    first = core.handle(QueryArrived(query(0, "flat", 1)), 0)
    second = core.handle(QueryArrived(query(1, "flat", 1)), 0)
    assert [action.share for action in (*first, *second) if isinstance(action, Launch)] == [LEFT, GPU]


def test_a_batch_stops_where_its_parts_meet() -> None:
    core = engine(Decision(HALVES), Decision((start(WHOLE.since(4), GPU, batch=0),)))
    begun = core.handle(QueryArrived(query(0)), 0)
    assert [(a.work.rows, a.part, a.last) for a in begun if isinstance(a, Launch)] == [
        ((0, 1), True, False),
        ((1, 2), True, False),
    ]
    assert core.handle(LaunchEnded(1), 5) == []
    [rest] = core.handle(LaunchEnded(0), 6)
    assert isinstance(rest, Launch)
    assert (rest.work, rest.part, rest.last) == (WHOLE.since(4), False, True)
    assert outcomes(core.handle(LaunchEnded(rest.id), 9)) == [(0, Outcome.ANSWERED)]


def test_a_join_starts_when_the_last_part_has_ended_and_has_its_slots_till_then() -> None:
    core = engine(Decision(JOINED))
    *begun, told = core.handle(QueryArrived(query(0)), 0)
    assert launches(begun) == [0, 1]
    assert core.snapshot(0).waiting[2].after == (0, 1)
    assert told == Enqueue(core.snapshot(0).waiting[2])
    assert core.handle(LaunchEnded(0), 5) == []
    assert core.snapshot(5).free_mask & LEFT.mask == 0, "the slot is the join's by now"
    [join] = core.handle(LaunchEnded(1), 6)
    assert told == Enqueue(join), "it runs as it was decided"
    assert outcomes(core.handle(LaunchEnded(2), 9)) == [(0, Outcome.ANSWERED)]
    assert core.snapshot(9).free_mask == MACHINE.mask


def test_a_part_that_fails_ends_the_batch_and_what_waits_never_runs() -> None:
    core = engine(Decision(JOINED))
    core.handle(QueryArrived(query(0)), 0)
    failed = core.handle(LaunchEnded(0, "it broke"), 5)
    assert (outcomes(failed), released(failed)) == ([(0, Outcome.FAILED)], [])
    last = core.handle(LaunchEnded(1), 6)
    assert (launches(last), released(last)) == ([], [0])
    assert core.snapshot(6).free_mask == MACHINE.mask


def test_a_merged_batch_whose_part_fails_is_run_again_apart() -> None:
    whole = DEEP.work(0, 4)
    halves = (
        start(whole.part(0, 2), LEFT, of=(0, 1)),
        start(whole.part(2, 4), RIGHT, of=(0, 1)),
    )

    def alone(snapshot: Snapshot) -> Decision:
        head = snapshot.queues["deep"].queries[0]
        return Decision((Start(WHOLE, (head,), GPU, 5),))

    core = engine(Decision(), Decision(halves), alone)
    core.handle(QueryArrived(query(0)), 0)
    core.handle(QueryArrived(query(1)), 0)
    retried = core.handle(LaunchEnded(1, "it broke"), 5)
    assert (outcomes(retried), launches(retried)) == ([], [2])
    assert core.waiting("deep") == 1
    done = core.handle(LaunchEnded(0), 6)
    assert released(done) == [0]


@pytest.mark.parametrize("how", ["cancelled", "removed", "suspended"])
def test_nobody_waits_for_a_batch_any_more(how: str) -> None:
    core = engine(Decision(JOINED))
    core.handle(QueryArrived(query(0)), 0)
    event = {
        "cancelled": QueryCancelled(0),
        "removed": TenantRemoved("deep", "unloaded"),
        "suspended": TenantSuspended("deep", "its worker died"),
    }[how]
    actions = core.handle(event, 2)
    gone = {"cancelled": [(0, Outcome.CANCELLED)], "removed": [(0, Outcome.FAILED)], "suspended": []}
    assert outcomes(actions) == gone[how]
    assert not core.snapshot(2).waiting
    assert released([*actions, *core.handle(LaunchEnded(0), 5), *core.handle(LaunchEnded(1), 6)]) == [0]
    assert core.snapshot(6).free_mask == MACHINE.mask
    assert core.waiting("deep") == (1 if how == "suspended" else 0)
    core.handle(TenantResumed("deep"), 7)
    assert core.live == (1 if how == "suspended" else 0)


def test_a_pointer_waits_for_the_batch_of_another_whatever_becomes_of_it() -> None:
    first = start(FLAT.work(0, 1), LEFT)
    core = engine(
        Decision((Start(first.work, (query(0, "flat", 1),), LEFT, 5),)),
        Decision((start(WHOLE, LEFT, 0, of=(1,)),)),
    )
    core.handle(QueryArrived(query(0, "flat", 1)), 0)
    assert enqueued(core.handle(QueryArrived(query(1)), 0)) == [1]
    failed = core.handle(LaunchEnded(0, "it broke"), 5)
    assert (outcomes(failed), launches(failed)) == ([(0, Outcome.FAILED)], [1])


def test_who_waits_for_what_never_runs_waits_for_what_that_waited_for() -> None:
    core = engine(
        Decision((start(WHOLE, LEFT),)),
        Decision((start(WHOLE, LEFT, 0, of=(1,)),)),
        Decision((start(WHOLE, LEFT, 1, of=(2,)),)),
    )
    for number in range(3):
        core.handle(QueryArrived(query(number)), 0)
    assert outcomes(core.handle(QueryCancelled(1), 1)) == [(1, Outcome.CANCELLED)]
    assert core.snapshot(1).free_mask & LEFT.mask == 0
    assert launches(core.handle(LaunchEnded(0), 5)) == [2]


def test_who_leaves_a_batch_that_goes_on_is_not_in_the_launch_that_was_enqueued_with_him() -> None:
    rest = DEEP.work(0, 4)
    core = engine(
        Decision(),
        Decision((start(rest.until(2), LEFT, of=(0, 1)),)),
        Decision((Start(FLAT.work(0, 1), (query(2, "flat", 1),), RIGHT, 5),)),
        Decision((start(rest.since(2), RIGHT, 1, batch=0),)),
    )
    core.handle(QueryArrived(query(0)), 0)
    core.handle(QueryArrived(query(1)), 0)
    core.handle(QueryArrived(query(2, "flat", 1)), 0)
    [told] = core.handle(LaunchEnded(0), 5)
    assert isinstance(told, Enqueue)
    core.handle(QueryCancelled(0), 6)
    [_, launch] = core.handle(LaunchEnded(1), 7)
    assert (told.launch.queries, launch) == ((0, 1), structs.replace(told.launch, queries=(1,)))


def test_who_leaves_a_batch_that_has_not_begun_leaves_the_others_to_another_one() -> None:
    """The rows of a batch are put together when it begins, and its launch says how many they are."""

    def alone(snapshot: Snapshot) -> Decision:
        return Decision((Start(WHOLE, tuple(snapshot.queues["deep"].queries), GPU, 5),))

    core = engine(
        Decision((start(WHOLE, LEFT),)), Decision(), Decision((start(DEEP.work(0, 4), LEFT, 0, of=(1, 2)),)), alone
    )
    for number in range(3):
        core.handle(QueryArrived(query(number)), 0)
    actions = core.handle(QueryCancelled(1), 1)
    assert (outcomes(actions), released(actions)) == ([(1, Outcome.CANCELLED)], [1])
    [again] = [action for action in actions if isinstance(action, Launch)]
    assert (again.queries, again.work) == ((2,), WHOLE)
    assert not core.snapshot(1).waiting


def test_a_launch_expands_at_its_next_stop_and_holds_its_slots_from_the_decision_on() -> None:
    both = MACHINE.share((0, 1))
    core = engine(Decision((start(WHOLE, LEFT, is_expandable=True),)), Decision(expansions=(Expansion(0, both, 3),)))
    [launch] = core.handle(QueryArrived(query(0)), 0)
    assert isinstance(launch, Launch)
    assert launch.stops == (2, 4)
    assert core.handle(TimerFired(), 1) == [Expand(0, both)]
    assert core.snapshot(1).free_mask == GPU.mask
    assert core.snapshot(1).running[0].launch.predicted_ns == 3
    core.handle(LaunchExpanded(0), 2)
    core.handle(LaunchEnded(0), 4)
    assert core.snapshot(4).free_mask == MACHINE.mask


def test_one_that_ends_before_it_expanded_gives_all_back() -> None:
    core = engine(
        Decision((start(WHOLE, LEFT, is_expandable=True),)),
        Decision(expansions=(Expansion(0, MACHINE.share((0, 1)), 3),)),
    )
    core.handle(QueryArrived(query(0)), 0)
    core.handle(TimerFired(), 1)
    core.handle(LaunchEnded(0), 2)
    assert core.snapshot(2).free_mask == MACHINE.mask
    with pytest.raises(ProtocolViolationError, match="launch 0 expanded, but it does not run"):
        core.handle(LaunchExpanded(0), 3)


def test_expansion_that_nobody_asked_for_is_a_bug() -> None:
    core = engine(Decision((start(WHOLE, LEFT, is_expandable=True),)))
    core.handle(QueryArrived(query(0)), 0)
    with pytest.raises(ProtocolViolationError, match="launch 0: EXPANDED cannot happen while RUNNING"):
        core.handle(LaunchExpanded(0), 1)


WRONG: dict[str, tuple[Decision, str]] = {
    "a row is missing": (Decision((start(WHOLE.part(0, 1), LEFT),)), "do not run each unit of each row once"),
    "a row twice": (Decision((HALVES[0], start(WHOLE, RIGHT))), "do not run each unit of each row once"),
    "a hole": (Decision((start(WHOLE.until(2), LEFT), start(WHOLE.since(4), RIGHT))), "do not run each unit"),
    "ragged": (
        Decision((start(WHOLE.until(2).part(0, 1), LEFT), start(WHOLE.until(4).part(1, 2), RIGHT))),
        "do not run each unit",
    ),
    "rows beyond": (
        Decision((start(WHOLE.part(0, 1), LEFT), start(WHOLE.part(2, 3), RIGHT))),
        "do not run each unit",
    ),
    "rows before": (Decision((start(WHOLE.part(-1, 1), LEFT),)), "starts Work"),
    "no rows": (Decision((start(WHOLE.part(1, 1), LEFT),)), "starts Work"),
    "begins inside": (Decision((start(WHOLE.until(2), LEFT), start(WHOLE.since(3), RIGHT))), "begins a segment"),
    "waits for nobody": (Decision((start(WHOLE, LEFT, 7),)), "waits for launch 7, which is not under way"),
    "waits for itself": (Decision((start(WHOLE, LEFT, 0),)), "waits for launch 0, which is not under way"),
    "waits for a later one": (Decision((start(WHOLE.until(4), LEFT, 1), *HALVES[1:])), "waits for launch 1, which is"),
    "promised twice": (
        Decision((*HALVES, start(WHOLE.since(4).part(0, 1), LEFT, 0), start(WHOLE.since(4).part(1, 2), LEFT, 0))),
        "not all free",
    ),
    "on slots of others": (Decision((*HALVES, start(WHOLE.since(4), LEFT, 1))), "not all free"),
    "expands what does not run": (Decision(expansions=(Expansion(3, LEFT, 5),)), "lets launch 3 expand, which cannot"),
}


@pytest.mark.parametrize("case", WRONG)
def test_tasks_that_break_the_contract_are_caught_and_not_booked(case: str) -> None:
    wrong, text = WRONG[case]
    core = engine(wrong, Decision(HALVES))
    with pytest.raises(ProtocolViolationError, match=text):
        core.handle(QueryArrived(query(0)), 0)
    assert (core.running, core.waiting("deep"), core.snapshot(0).free_mask) == (0, 1, MACHINE.mask)
    assert launches(core.handle(TimerFired(), 0)) == [0, 1]


@pytest.mark.parametrize("splits", [UNSET, (), ((0, 2),), ((2, 4),), ((0, 2), (4, 6)), ((0, 2), (2, 4))])
def test_units_that_mix_rows_or_of_which_nothing_is_known_get_no_part_of_them(splits: Any) -> None:
    tenant = replace(DEEP, splits=splits)
    core = Engine([tenant], Script(Decision(JOINED), Decision((start(WHOLE, LEFT),))), PREDICTOR, MACHINE)
    with pytest.raises(ProtocolViolationError, match="some of the rows of units 0 to 4 of 'deep', which mix rows"):
        core.handle(QueryArrived(query(0)), 0)
    assert launches(core.handle(TimerFired(), 0)) == [0], "whole it runs as before"


def test_a_launch_whose_batch_is_dropped_with_the_decision_cannot_be_waited_for() -> None:
    core = engine(
        Decision((start(WHOLE, LEFT),)),
        Decision((start(WHOLE, LEFT, 0, of=(1,)),)),
        Decision((start(WHOLE, LEFT, 1, of=(2,)),), (Drop(1, "no more"),)),
    )
    core.handle(QueryArrived(query(0)), 0)
    core.handle(QueryArrived(query(1)), 0)
    with pytest.raises(ProtocolViolationError, match="waits for launch 1, which is not under way"):
        core.handle(QueryArrived(query(2)), 0)


BAD_EXPANSIONS: dict[str, tuple[Expansion, str]] = {
    "not more": (Expansion(0, LEFT, 5), "which are not more"),
    "elsewhere": (Expansion(0, RIGHT, 5), "which are not more"),
    "on another device": (Expansion(0, Share((0, 1), "cuda:0", 0), 5), "which are not more"),
    "taken": (Expansion(0, MACHINE.share((0, 1)), 5), "not all free"),
    "without a stop": (Expansion(1, MACHINE.share((0, 1)), 5), "lets launch 1 expand, which cannot"),
}


@pytest.mark.parametrize("case", BAD_EXPANSIONS)
def test_expansion_that_breaks_the_contract_is_caught(case: str) -> None:
    expansion, text = BAD_EXPANSIONS[case]
    core = engine(
        Decision((start(WHOLE, LEFT, is_expandable=True),)),
        Decision((start(WHOLE, RIGHT, of=(1,)),)),
        Decision(expansions=(expansion,)),
    )
    core.handle(QueryArrived(query(0)), 0)
    core.handle(QueryArrived(query(1)), 0)
    with pytest.raises(ProtocolViolationError, match=text):
        core.handle(TimerFired(), 1)
