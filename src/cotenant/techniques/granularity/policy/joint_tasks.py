"""The tasks of a joint plan, and list scheduling of them on lanes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from cotenant.errors import InvalidValueError
from cotenant.techniques.granularity.joint_plan import Chunk, JointPlan

_KNOWN = 256
"""Plans (with their present members) of which the tasks are cached."""


class JointTask(NamedTuple):
    """Units [start, end) of a member, for all rows, or for `rows` [first, end) in a chunk. `after` are the numbers of
    the tasks that have to end before it starts."""

    member: int
    start: int
    end: int
    rows: tuple[int, ...]
    after: tuple[int, ...]


class ScheduledTask(NamedTuple):
    """A task on a lane, by their numbers, with its predicted start and end."""

    task: int
    lane: int
    start_ns: int
    end_ns: int


@lru_cache(maxsize=_KNOWN)
def tasks_of(plan: JointPlan, present: tuple[bool, ...]) -> tuple[JointTask, ...]:
    """The tasks of the present members, in topological order. Absent members delay no task.

    Raises InvalidValueError when waits and barriers are circular.
    """
    cuts = [_cuts_of(plan, member, present) if is_there else [] for member, is_there in enumerate(present)]
    found: list[JointTask] = []
    ending: dict[tuple[int, int], list[int]] = {}
    """By member and unit, the numbers of the tasks that end there."""
    for member, edges in enumerate(cuts):
        rows_before: tuple[Chunk | None, list[int]] = None, []
        for start, end in pairwise(edges):
            chunk = _chunk_at(plan, member, start)
            numbers: list[int] = []
            for index, rows in enumerate(_chunk_rows(chunk)):
                known, before = rows_before
                own = before if known is not chunk or chunk is None else before[index : index + 1]
                numbers.append(len(found))
                found.append(JointTask(member, start, end, rows, tuple(own)))
            ending[member, end] = numbers
            rows_before = chunk, numbers
    made = []
    for task in found:
        others = [
            number
            for member, unit in _waits_at(plan, task.member, task.start, present)
            for number in ending.get((member, unit), ())
        ]
        made.append(task._replace(after=tuple(sorted({*task.after, *others}))))
    return _in_order(plan, made)


def list_schedule(
    tasks: Sequence[JointTask],
    ranks: Sequence[int],
    times_ns: Sequence[Sequence[int]],
    free_ns: Sequence[int],
) -> list[ScheduledTask]:
    """Place tasks on lanes by list scheduling; in order of start times.

    `times_ns[task][lane]` is the predicted time of a task, `free_ns[lane]` when a lane is free; `ranks` are by member.

    1. Of the ready tasks take the one with the least `max(ready, earliest free lane)`; ties: lowest rank, longest tail.
    2. Place it on the lane with the least `max(ready, free) + time`; ties: the last lane of its member.
    3. Repeat until no task is left.

    The tail of a task is its longest path to the end of all (critical path priority).
    """
    tails = _tails(tasks, times_ns)
    missing = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for other in task.after:
            followers[other].append(number)
    ready = [number for number, count in enumerate(missing) if not count]
    ready_ns = [0] * len(tasks)
    free, last_lane = list(free_ns), dict[int, int]()
    made: list[ScheduledTask] = []
    while ready:
        earliest = min(free)
        number = min(
            ready,
            key=lambda each: (max(ready_ns[each], earliest), ranks[tasks[each].member], -tails[each], each),
        )
        ready.remove(number)
        times, member, begin = times_ns[number], tasks[number].member, ready_ns[number]
        lane = min(
            range(len(free)),
            key=lambda each: (max(begin, free[each]) + times[each], last_lane.get(member) != each, each),
        )
        start = max(begin, free[lane])
        free[lane] = end = start + times[lane]
        last_lane[member] = lane
        made.append(ScheduledTask(number, lane, start, end))
        for other in followers[number]:
            missing[other] -= 1
            ready_ns[other] = max(ready_ns[other], end)
            if not missing[other]:
                ready.append(other)
    return made


def _cuts_of(plan: JointPlan, member: int, present: Sequence[bool]) -> list[int]:
    """Units at which a present member is left, from 0 to its end."""
    units = plan.members[member].units
    places = {0, units}
    if sum(present) > 1:
        places.update(barrier[member] for barrier in plan.barriers)
    for wait in plan.waits:
        if wait.member == member and present[wait.after]:
            places.add(wait.unit)
        if wait.after == member and present[wait.member]:
            places.add(wait.after_unit)
    for chunk in plan.chunks:
        if chunk.member == member:
            places.update((chunk.start, chunk.end))
    return sorted(places)


def _chunk_at(plan: JointPlan, member: int, unit: int) -> Chunk | None:
    return next((each for each in plan.chunks if each.member == member and each.start <= unit < each.end), None)


def _chunk_rows(chunk: Chunk | None) -> list[tuple[int, ...]]:
    """Rows [first, end) of each chunk; one empty tuple for all rows."""
    if chunk is None:
        return [()]
    ends = [sum(chunk.rows[: at + 1]) for at in range(len(chunk.rows))]
    return [(end - rows, end) for end, rows in zip(ends, chunk.rows, strict=True)]


def _waits_at(plan: JointPlan, member: int, unit: int, present: Sequence[bool]) -> list[tuple[int, int]]:
    """Members that have to end units before this unit starts, each with its number of units."""
    found = [
        (other, barrier[other])
        for barrier in plan.barriers
        if barrier[member] == unit
        for other, is_there in enumerate(present)
        if is_there and other != member
    ]
    found += [
        (wait.after, wait.after_unit)
        for wait in plan.waits
        if (wait.member, wait.unit) == (member, unit) and present[wait.after]
    ]
    return found


def _in_order(plan: JointPlan, tasks: Sequence[JointTask]) -> tuple[JointTask, ...]:
    """The same tasks in topological order, with new numbers."""
    numbers: dict[int, int] = {}
    while len(numbers) < len(tasks):
        free = [
            number
            for number, task in enumerate(tasks)
            if number not in numbers and all(other in numbers for other in task.after)
        ]
        if not free:
            names = ", ".join(f"{each.model}:{each.batch}" for each in plan.members)
            raise InvalidValueError(f"joint plan of {names}", "waits", plan.waits, "no circular waits or barriers")
        for number in free:
            numbers[number] = len(numbers)
    return tuple(
        tasks[number]._replace(after=tuple(sorted(numbers[other] for other in tasks[number].after)))
        for number in numbers
    )


def _tails(tasks: Sequence[JointTask], times_ns: Sequence[Sequence[int]]) -> list[int]:
    """Length of the longest path from the start of each task to the end of all."""
    tails = [min(times) for times in times_ns]
    own = list(tails)
    for number in range(len(tasks) - 1, -1, -1):
        for other in tasks[number].after:
            tails[other] = max(tails[other], own[other] + tails[number])
    return tails
