"""The strands of a plan for models that start together, and how they are laid on lanes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from cotenant.errors import InvalidValueError
from cotenant.techniques.granularity.joint_plan import Chunk, JointPlan

_KNOWN = 256
"""Plans of which the strands are remembered, each with those of its members that are there."""


class Strand(NamedTuple):
    """Units [start, end) of a member, for all of its rows or, in a chunk, for those from the first to before the last.
    `after` are the numbers of the strands that have to end before it begins."""

    member: int
    start: int
    end: int
    rows: tuple[int, ...]
    after: tuple[int, ...]


class Laid(NamedTuple):
    """A strand on a lane, by their numbers, and from when to when it is predicted to run."""

    strand: int
    lane: int
    start_ns: int
    end_ns: int


@lru_cache(maxsize=_KNOWN)
def strands_of(plan: JointPlan, present: tuple[bool, ...]) -> tuple[Strand, ...]:
    """The strands of those members that are there, each behind all that it comes after; absent ones bind nobody.

    Raises InvalidValueError when waits and barriers go in a circle.
    """
    cuts = [_cuts_of(plan, member, present) if is_there else [] for member, is_there in enumerate(present)]
    found: list[Strand] = []
    ending: dict[tuple[int, int], list[int]] = {}
    """By member and unit, the numbers of the strands that end there."""
    for member, edges in enumerate(cuts):
        rows_before: tuple[Chunk | None, list[int]] = None, []
        for start, end in pairwise(edges):
            chunk = _chunk_at(plan, member, start)
            numbers: list[int] = []
            for part, rows in enumerate(_parts(chunk)):
                known, before = rows_before
                own = before if known is not chunk or chunk is None else before[part : part + 1]
                numbers.append(len(found))
                found.append(Strand(member, start, end, rows, tuple(own)))
            ending[member, end] = numbers
            rows_before = chunk, numbers
    made = []
    for strand in found:
        others = [
            number
            for member, unit in _waits_at(plan, strand.member, strand.start, present)
            for number in ending.get((member, unit), ())
        ]
        made.append(strand._replace(after=tuple(sorted({*strand.after, *others}))))
    return _in_order(plan, made)


def lay(
    strands: Sequence[Strand],
    ranks: Sequence[int],
    times_ns: Sequence[Sequence[int]],
    free_ns: Sequence[int],
) -> list[Laid]:
    """Strands on lanes, in the order in which they begin: list scheduling.

    `times_ns[strand][lane]` is what a strand takes, `free_ns[lane]` when a lane is free, `ranks` are by member. Who can
    begin first goes first; of several the one of the lowest rank, then the one with most behind it. It gets the lane
    where it ends first, its member's last one where that is no later.
    """
    tails = _tails(strands, times_ns)
    left = [len(strand.after) for strand in strands]
    behind: list[list[int]] = [[] for _ in strands]
    for number, strand in enumerate(strands):
        for other in strand.after:
            behind[other].append(number)
    ready = [number for number, count in enumerate(left) if not count]
    ready_ns = [0] * len(strands)
    free, last_lane = list(free_ns), dict[int, int]()
    made: list[Laid] = []
    while ready:
        opens = min(free)
        number = min(
            ready,
            key=lambda each: (max(ready_ns[each], opens), ranks[strands[each].member], -tails[each], each),
        )
        ready.remove(number)
        times, member, begin = times_ns[number], strands[number].member, ready_ns[number]
        lane = min(
            range(len(free)),
            key=lambda each: (max(begin, free[each]) + times[each], last_lane.get(member) != each, each),
        )
        start = max(begin, free[lane])
        free[lane] = end = start + times[lane]
        last_lane[member] = lane
        made.append(Laid(number, lane, start, end))
        for other in behind[number]:
            left[other] -= 1
            ready_ns[other] = max(ready_ns[other], end)
            if not left[other]:
                ready.append(other)
    return made


def _cuts_of(plan: JointPlan, member: int, present: Sequence[bool]) -> list[int]:
    """Where a member that is there is left, from 0 to its end."""
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


def _parts(chunk: Chunk | None) -> list[tuple[int, ...]]:
    """The rows of each part, from the first to behind the last; one of all rows, which needs no words."""
    if chunk is None:
        return [()]
    ends = [sum(chunk.rows[: at + 1]) for at in range(len(chunk.rows))]
    return [(end - rows, end) for end, rows in zip(ends, chunk.rows, strict=True)]


def _waits_at(plan: JointPlan, member: int, unit: int, present: Sequence[bool]) -> list[tuple[int, int]]:
    """What has to have ended before a unit of a member: other members, each with the unit up to which."""
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


def _in_order(plan: JointPlan, strands: Sequence[Strand]) -> tuple[Strand, ...]:
    """The same strands, renumbered so that each comes behind all that it waits for."""
    numbers: dict[int, int] = {}
    while len(numbers) < len(strands):
        free = [
            number
            for number, strand in enumerate(strands)
            if number not in numbers and all(other in numbers for other in strand.after)
        ]
        if not free:
            names = ", ".join(f"{each.model}:{each.batch}" for each in plan.members)
            raise InvalidValueError(
                f"joint plan of {names}", "waits", plan.waits, "members that do not wait in a circle"
            )
        for number in free:
            numbers[number] = len(numbers)
    return tuple(
        strands[number]._replace(after=tuple(sorted(numbers[other] for other in strands[number].after)))
        for number in numbers
    )


def _tails(strands: Sequence[Strand], times_ns: Sequence[Sequence[int]]) -> list[int]:
    """The longest way from the beginning of each strand to the end of all."""
    tails = [min(times) for times in times_ns]
    own = list(tails)
    for number in range(len(strands) - 1, -1, -1):
        for other in strands[number].after:
            tails[other] = max(tails[other], own[other] + tails[number])
    return tails
