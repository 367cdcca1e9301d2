"""Strands of joint plans: who runs what behind whom, and on which lane."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, JointPlan, Wait
from cotenant.techniques.granularity.policy.joint_tasks import JointTask, list_schedule, tasks_of

A, B = JointMember("a", 4, 6), JointMember("b", 1, 3)


def told(plan: JointPlan, *present: bool) -> list[tuple[str, list[str]]]:
    """Each strand by a name, in order, with the names of those before it."""
    tasks = tasks_of(plan, present or (True,) * len(plan.members))

    def name(task: JointTask) -> str:
        rows = "" if not task.rows else "/{}-{}".format(*task.rows)
        return f"{plan.members[task.member].model}{task.start}-{task.end}{rows}"

    return [(name(each), [name(tasks[other]) for other in each.after]) for each in tasks]


def test_streams_are_one_strand_each() -> None:
    assert told(JointPlan((A, B))) == [("a0-6", []), ("b0-3", [])]


def test_a_barrier_holds_all_who_are_there() -> None:
    plan = JointPlan((A, B), barriers=((2, 1), (4, 1), (6, 2)))
    assert told(plan) == [
        ("a0-2", []),
        ("b0-1", []),
        ("a2-4", ["a0-2", "b0-1"]),
        ("a4-6", ["b0-1", "a2-4"]),
        ("b1-2", ["a0-2", "b0-1", "a2-4"]),
        ("b2-3", ["a4-6", "b1-2"]),
    ]
    assert told(plan, True, False) == [("a0-6", [])]
    assert told(plan, False, True) == [("b0-3", [])]


def test_empty_segments_bind_too() -> None:
    assert told(JointPlan((A, B), barriers=((0, 1), (6, 1)))) == [
        ("b0-1", []),
        ("a0-6", ["b0-1"]),
        ("b1-3", ["b0-1", "a0-6"]),
    ]


def test_waits_bind_their_two_members_alone() -> None:
    plan = JointPlan((A, B), waits=(Wait(1, 2, 0, 3), Wait(0, 0, 1, 1)))
    assert told(plan) == [
        ("b0-1", []),
        ("a0-3", ["b0-1"]),
        ("b1-2", ["b0-1"]),
        ("a3-6", ["a0-3"]),
        ("b2-3", ["a0-3", "b1-2"]),
    ]
    assert told(plan, True, False) == [("a0-6", [])]


def test_chunks_fork_and_join_and_a_barrier_within_holds_each() -> None:
    plan = JointPlan((A, B), barriers=((3, 1),), chunks=(Chunk(0, 1, 4, (3, 1)), Chunk(0, 4, 5, (1, 1, 2))))
    assert told(plan) == [
        ("a0-1", []),
        ("b0-1", []),
        ("a1-3/0-3", ["a0-1"]),
        ("a1-3/3-4", ["a0-1"]),
        ("a3-4/0-3", ["b0-1", "a1-3/0-3"]),
        ("a3-4/3-4", ["b0-1", "a1-3/3-4"]),
        ("b1-3", ["b0-1", "a1-3/0-3", "a1-3/3-4"]),
        ("a4-5/0-1", ["a3-4/0-3", "a3-4/3-4"]),
        ("a4-5/1-2", ["a3-4/0-3", "a3-4/3-4"]),
        ("a4-5/2-4", ["a3-4/0-3", "a3-4/3-4"]),
        ("a5-6", ["a4-5/0-1", "a4-5/1-2", "a4-5/2-4"]),
    ]


def test_a_circle_of_waits_is_refused() -> None:
    plan = JointPlan((A, B), waits=(Wait(0, 0, 1, 3), Wait(1, 1, 0, 2)))
    with pytest.raises(InvalidValueError, match="circular"):
        tasks_of(plan, (True, True))
    assert told(plan, True, False) == [("a0-6", [])]


@st.composite
def plans(draw: st.DrawFn) -> tuple[JointPlan, tuple[bool, ...]]:
    """Any plan of up to three members, and who is there."""
    count = draw(st.integers(1, 3))
    members = tuple(
        JointMember(f"m{i}", draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(0, 2)))
        for i in range(count)
    )
    levels = draw(st.integers(0, 3))
    columns = [sorted(draw(st.integers(0, each.units)) for _ in range(levels)) for each in members]
    barriers = tuple(tuple(column[level] for column in columns) for level in range(levels))
    waits = []
    for _ in range(draw(st.integers(0, 2)) if count > 1 else 0):
        a, b = draw(st.permutations(range(count)))[:2]
        waits.append(Wait(a, draw(st.integers(0, members[a].units - 1)), b, draw(st.integers(1, members[b].units))))
    chunks = []
    for number, member in enumerate(members):
        if member.batch > 1 and draw(st.booleans()):
            start = draw(st.integers(0, member.units - 1))
            first = draw(st.integers(1, member.batch - 1))
            end = draw(st.integers(start + 1, member.units))
            chunks.append(Chunk(number, start, end, (first, member.batch - first)))
    present = tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    return JointPlan(members, barriers, tuple(waits), tuple(chunks)), present


def latest_start(plan: JointPlan, present: tuple[bool, ...], takes: list[list[int]]) -> dict[tuple[int, int], int]:
    """When each unit begins with a lane for everybody, by the words of JointPlan alone: another way than by strands.

    `takes[member][unit]` is what a unit takes, chunked or not. Raises RecursionError for circles.
    """
    begun: dict[tuple[int, int], int] = {}

    def end_before(member: int, unit: int) -> int:
        return begin(member, unit - 1) + takes[member][unit - 1] if unit and present[member] else 0

    def begin(member: int, unit: int) -> int:
        if (member, unit) not in begun:
            times = [end_before(member, unit)]
            for barrier in plan.barriers:
                if barrier[member] <= unit:
                    times += [end_before(other, at) for other, at in enumerate(barrier) if other != member]
            for wait in plan.waits:
                if wait.member == member and wait.unit <= unit:
                    times.append(end_before(wait.after, wait.after_unit))
            begun[member, unit] = max(times)
        return begun[member, unit]

    for member, each in enumerate(plan.members):
        for unit in range(each.units if present[member] else 0):
            begin(member, unit)
    return begun


@settings(max_examples=300, deadline=None)
@given(plans(), st.randoms(use_true_random=False))
def test_strands_run_all_and_begin_just_when_the_plan_lets_them(
    drawn: tuple[JointPlan, tuple[bool, ...]], random: Random
) -> None:
    plan, present = drawn
    takes = [[random.randint(1, 9) for _ in range(each.units)] for each in plan.members]
    try:
        expected = latest_start(plan, present, takes)
    except RecursionError:
        with pytest.raises(InvalidValueError):
            tasks_of(plan, present)
        return
    tasks = tasks_of(plan, present)
    cells = sorted(
        (each.member, row, unit)
        for each in tasks
        for row in range(*(each.rows or (0, plan.members[each.member].batch)))
        for unit in range(each.start, each.end)
    )
    members = [(number, each) for number, each in enumerate(plan.members) if present[number]]
    assert cells == [(n, row, unit) for n, each in members for row in range(each.batch) for unit in range(each.units)]
    assert all(max(each.after, default=-1) < number for number, each in enumerate(tasks))
    times = [[sum(takes[each.member][each.start : each.end])] * (len(tasks) or 1) for each in tasks]
    scheduled = list_schedule(tasks, [each.rank for each in plan.members], times, [0] * (len(tasks) or 1))
    got = {(tasks[each.task].member, tasks[each.task].start): each.start_ns for each in scheduled}
    assert got == {place: expected[place] for place in got}


@settings(max_examples=200, deadline=None)
@given(plans(), st.randoms(use_true_random=False), st.integers(1, 3))
def test_lanes_run_one_strand_at_a_time_each_behind_those_before_it(
    drawn: tuple[JointPlan, tuple[bool, ...]], random: Random, lanes: int
) -> None:
    plan, present = drawn
    try:
        tasks = tasks_of(plan, present)
    except InvalidValueError:
        return
    times = [[random.randint(1, 9) for _ in range(lanes)] for _ in tasks]
    free = [random.choice([0, 0, 5]) for _ in range(lanes)]
    scheduled = list_schedule(tasks, [each.rank for each in plan.members], times, free)
    assert sorted(each.task for each in scheduled) == list(range(len(tasks)))
    ends = {each.task: each.end_ns for each in scheduled}
    order = [each.task for each in scheduled]
    for each in scheduled:
        assert each.end_ns - each.start_ns == times[each.task][each.lane]
        assert each.start_ns >= max([free[each.lane], *(ends[other] for other in tasks[each.task].after)])
        assert all(order.index(other) < order.index(each.task) for other in tasks[each.task].after)
    for one, other in combinations(scheduled, 2):
        assert one.lane != other.lane or one.end_ns <= other.start_ns


def test_lower_ranks_go_first_and_then_who_has_most_behind_him() -> None:
    members = (JointMember("a", 1, 1, rank=1), JointMember("b", 1, 1), JointMember("c", 1, 1))
    tasks = tasks_of(JointPlan(members), (True, True, True))
    scheduled = list_schedule(tasks, [each.rank for each in members], [[9], [3], [5]], [0])
    assert [tasks[each.task].member for each in scheduled] == [2, 1, 0]


def test_a_member_stays_on_its_lane_where_that_costs_nothing() -> None:
    plan = JointPlan((A, B), waits=(Wait(0, 3, 1, 3),))
    tasks = tasks_of(plan, (True, True))
    scheduled = list_schedule(tasks, [0, 0], [[4, 4, 4]] * len(tasks), [0, 0, 0])
    lanes = {(tasks[each.task].member, tasks[each.task].start): each.lane for each in scheduled}
    assert lanes[0, 0] == lanes[0, 3] != lanes[1, 0]
