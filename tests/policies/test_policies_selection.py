"""Who is given up when not all can be in time: against brute force, and what must always hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.policies.ordered import selection
from cotenant.policies.ordered.jobs import AnyColumn, Jobs
from cotenant.policies.ordered.reserve import Expected, Reserve
from cotenant.policies.ordered.selection import _FEW

SOME = settings(max_examples=150, deadline=None, database=None)


class Job(NamedTuple):
    """A job as a row: in this order rows are sorted, by rank, deadline and number."""

    rank: int
    deadline_ns: int
    number: int
    due_ns: int
    is_entitled: int
    owner: int
    work_ns: int


class Victim(NamedTuple):
    job: Job
    for_job: Job


def job(number: int, work: int, deadline: int, *, tenant: str = "a", due: int | None = None, rank: int = 1) -> Job:
    return Job(rank, deadline, number, deadline if due is None else due, due is not None, "ab".index(tenant), work)


def columns(jobs: Sequence[Job]) -> Jobs:
    rows = np.array([(*each[:5], 1, *each[5:]) for each in jobs], np.int64).reshape(-1, 8)
    return Jobs(np.ascontiguousarray(rows.T))


def most_work_first(jobs: Jobs) -> Sequence[AnyColumn]:
    return (-jobs.work_ns,)


def beyond_first(jobs: Jobs) -> Sequence[AnyColumn]:
    return jobs.is_entitled, -jobs.work_ns


def select(jobs: Sequence[Job], free_at: Sequence[int], value: selection.Value) -> list[Victim]:
    return [
        Victim(*[jobs[at] for at in each]) for each in selection.select(columns(jobs), free_at, value, lambda _: None)
    ]


def selected(jobs: Sequence[Job], free_at: Sequence[int]) -> list[Victim]:
    return select(sorted(jobs), free_at, most_work_first)


def standing_back(jobs: Sequence[Job], free_at: Sequence[int]) -> list[int]:
    back = selection.standing_back(columns(jobs), free_at, most_work_first)
    return [each.number for each, waits in zip(jobs, back.tolist(), strict=True) if waits]


def first_late(jobs: Sequence[Job], free_at: Sequence[int]) -> int | None:
    each = columns(jobs)
    return selection.first_late(each.work_ns, each.deadline_ns, free_at)


def most_in_time(jobs: Sequence[Job]) -> int:
    """Brute force: the largest number of jobs that can all be in time on one lane."""
    every = sorted(jobs)
    sizes = range(len(every), -1, -1)
    return next(size for size in sizes if any(first_late(chosen, [0]) is None for chosen in combinations(every, size)))


@st.composite
def job_sets(draw: st.DrawFn, most: int = 7) -> list[Job]:
    drawn = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 60), st.booleans()), min_size=1, max_size=most))
    return [
        job(number, work, work + slack, tenant="ab"[number % 2], due=work + slack if within else None)
        for number, (work, slack, within) in enumerate(drawn)
    ]


@SOME
@given(job_sets())
def test_on_one_lane_no_other_choice_leaves_more_in_time(jobs: list[Job]) -> None:
    assert len(jobs) - len(selected(jobs, [0])) == most_in_time(jobs)


@SOME
@given(job_sets(10), st.integers(1, 3))
def test_what_is_kept_is_in_time_and_nobody_goes_where_all_are(jobs: list[Job], lanes: int) -> None:
    free = [0] * lanes
    gone = {victim.job for victim in selected(jobs, free)}
    assert first_late([each for each in sorted(jobs) if each not in gone], free) is None
    if first_late(sorted(jobs), free) is None:
        assert not gone


@SOME
@given(job_sets(10), st.integers(1, 3))
def test_what_is_within_its_share_goes_only_when_nothing_beyond_is_before_the_late_one(
    jobs: list[Job], lanes: int
) -> None:
    kept = sorted(jobs)
    for victim in select(sorted(jobs), [0] * lanes, beyond_first):
        before = kept[: kept.index(victim.for_job) + 1]
        assert not victim.job.is_entitled or all(each.is_entitled for each in before)
        kept.remove(victim.job)


def test_of_many_those_go_that_go_one_by_one_on_one_lane() -> None:
    for seed in range(20):
        random = Random(seed)
        works = [random.randint(1, 30) for _ in range(_FEW + 40)]
        jobs = sorted(job(number, work, work + random.randint(0, 1500)) for number, work in enumerate(works))
        gone = [victim.job for victim in selected(jobs, [0])]
        assert gone
        assert first_late([each for each in jobs if each not in gone], [0]) is None
        few: list[Job] = list(jobs)
        count = 0
        while (late := first_late(few, [0])) is not None:
            few.remove(max(few[: late + 1], key=lambda each: each.work_ns))
            count += 1
        assert len(gone) == count


def test_nobody_goes_for_a_lower_priority() -> None:
    urgent, other = job(0, 20, 30, rank=1), job(1, 5, 20, rank=2)
    assert [victim.job for victim in selected([urgent, other], [0])] == [other]
    more = [job(number, 20, 30, rank=1) for number in range(_FEW)]
    assert other in [victim.job for victim in selected([*more[:1], other, *more[1:]], [0])]


def test_what_runs_takes_its_lane_until_it_is_predicted_to_end() -> None:
    jobs = [job(0, 10, 25), job(1, 10, 25)]
    assert not selected(jobs, [0])
    assert len(selected(jobs, [10])) == 1
    assert not selected(jobs, [10, 15])


def test_what_is_beyond_stands_back_while_what_is_within_would_be_behind() -> None:
    beyond, within = job(0, 10, 20, tenant="a"), job(1, 10, 100, tenant="b", due=15)
    assert standing_back([beyond, within], [0]) == [0]
    on_time = within._replace(due_ns=20)
    assert standing_back([beyond, on_time], [0]) == []
    assert standing_back([beyond, within._replace(rank=2)], [0]) == []


def stand_back_one_by_one(jobs: Sequence[Job], lanes: int) -> set[int]:
    """As the docstring says it, job by job."""
    back: set[int] = set()
    for at, each in enumerate(jobs):
        while each.is_entitled:
            begin = sum(other.work_ns for other in jobs[:at] if other.number not in back)
            beyond = [
                one for one in jobs[:at] if not one.is_entitled and one.rank == each.rank and one.number not in back
            ]
            if begin <= (each.due_ns - each.work_ns) * lanes or not beyond:
                break
            back.add(max(beyond, key=lambda one: (one.work_ns, -jobs.index(one))).number)
    return back


@SOME
@given(job_sets(12), st.integers(1, 3), st.lists(st.integers(0, 30), min_size=12, max_size=12), st.booleans())
def test_those_stand_back_who_do_when_jobs_are_looked_at_one_by_one(
    jobs: list[Job], lanes: int, sooner: list[int], two_ranks: bool
) -> None:
    jobs = sorted(
        each._replace(
            due_ns=max(0, each.due_ns - early) if each.is_entitled else each.due_ns,
            rank=1 + each.number % 2 if two_ranks else 1,
        )
        for each, early in zip(jobs, sooner, strict=False)
    )
    assert set(standing_back(jobs, [0] * lanes)) == stand_back_one_by_one(jobs, lanes)


def test_what_is_beyond_begins_only_beside_what_is_still_to_come() -> None:
    jobs = [job(0, 10, 20), job(1, 10, 30, due=30), job(2, 10, 40)]
    for ahead, expected in ((0, []), (9, []), (11, [0]), (25, [0, 2])):
        back = np.zeros(3, np.bool_)
        selection.beside_reserve(columns(jobs), [0], back, np.array([ahead, ahead, ahead]))
        assert back.nonzero()[0].tolist() == expected, ahead


def test_the_reserve_is_what_comes_before_a_deadline_and_goes_first() -> None:
    reserve = Reserve.of([Expected(100, 10, 0.5, 0.8), Expected(40, 20, 0.3, 0.3), Expected(200, 5, 0.1, 0.4)], 0)
    jobs = [job(0, 10, 90), job(1, 15, 150), job(2, 30, 300)]
    expected = [
        0.3 * (90 - 40),  # nobody whose query takes as long goes first beyond a share, and one has an SLO so short
        0.3 * (150 - 40) + 0.8 * (150 - 100),
        0.3 * (300 - 40) + 0.8 * (300 - 100) + 0.4 * (300 - 200),
    ]
    assert reserve.ahead_ns(columns(jobs)).tolist() == pytest.approx(expected, abs=1)
    assert Reserve.of([], 0).ahead_ns(columns(jobs)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("lanes", [1, 2])
def test_nothing_waits_for_nobody(lanes: int) -> None:
    assert selected([], [0] * lanes) == []
    assert standing_back([job(0, 5, 9)], [0] * lanes) == []
