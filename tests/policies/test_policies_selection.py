"""Who is given up when not all can be in time: against brute force, and what must always hold."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from itertools import combinations
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.policies.shedding.jobs import FEW, FewJobs, Number, SelectionValues, Value
from cotenant.policies.shedding.many_jobs import ManyJobs
from cotenant.policies.shedding.reserve import ExpectedDemand, Reserve

ALL = 10**9
SOME = settings(max_examples=150, deadline=None, database=None)
TENANTS = "ab"
OF_TENANTS = st.sampled_from([(1, 1), (1, 2), (2, 1)])
"""Their ranks."""


class Job(NamedTuple):
    """See jobs.Job: in this order jobs are sorted, by rank, deadline and number."""

    rank: int
    deadline_ns: int
    number: int
    due_ns: int
    is_entitled: int
    answers: int
    owner: int
    work_ns: int


class Victim(NamedTuple):
    job: Job
    for_job: Job


def job(number: int, work: int, deadline: int, *, tenant: str = "a", due: int | None = None, rank: int = 1) -> Job:
    is_due = due is not None
    return Job(rank, deadline, number, due if is_due else deadline, is_due, 1, TENANTS.index(tenant), work)


def one_by_one(jobs: Sequence[Job], free_at: Sequence[int], now_ns: int = 0) -> FewJobs | ManyJobs:
    return FewJobs([tuple(each) for each in jobs], free_at, now_ns)


def in_columns(jobs: Sequence[Job], free_at: Sequence[int], now_ns: int = 0) -> FewJobs | ManyJobs:
    rows = np.array(jobs, np.int64).reshape(-1, 8)
    return ManyJobs(np.ascontiguousarray(rows.T), free_at, now_ns)


BOTH = (one_by_one, in_columns)


def most_work_first(
    in_quota: Number, attainment: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
) -> Sequence[Number]:
    return (-work_ns,)


def beyond_first(
    in_quota: Number, attainment: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
) -> Sequence[Number]:
    return in_quota, -attainment * in_quota, (in_quota - 1) * rank, -work_ns / answers


class Harsh(SelectionValues):
    """Of two tenants, the first of which has fared better; a tenant that loses fares much worse."""

    def __init__(self, value: Value, ranks: Sequence[int] = (1, 1)) -> None:
        super().__init__(value, [1.0, 0.9], [1.0, 1.0], ranks)

    def lost(self, owner: int) -> None:
        self.attainments[owner] *= 0.8


def agreed(found: Sequence[object]) -> object:
    """What both ways give."""
    first, second = found
    assert first == second
    return first


def select(jobs: Sequence[Job], free_at: Sequence[int], value: Value) -> list[Victim]:
    """What is shed; tenants that fared well lose first, and then fare worse."""

    def by(make: object) -> list[Victim]:
        found = make(jobs, free_at).select(Harsh(value), ALL)  # type: ignore[operator]
        return [Victim(Job(*gone), Job(*for_job)) for gone, for_job in found]

    if len(jobs) > FEW:  # one by one all lanes count
        return by(in_columns)
    return agreed([by(make) for make in BOTH])  # type: ignore[return-value]


def selected(jobs: Sequence[Job], free_at: Sequence[int]) -> list[Victim]:
    return select(sorted(jobs), free_at, most_work_first)


def standing_back(jobs: Sequence[Job], free_at: Sequence[int], reserve: Reserve | None = None) -> list[int]:
    found = [make(jobs, free_at).defer(Harsh(most_work_first), reserve) for make in BOTH]
    return agreed(found)  # type: ignore[return-value]


def first_late(jobs: Sequence[Job], free_at: Sequence[int]) -> int | None:
    """The position of the first job that is late when each goes to the lane that is free first; None if none is."""
    times = sorted(free_at)
    for at, each in enumerate(jobs):
        end = times[0] + each.work_ns
        if end > each.deadline_ns:
            return at
        heapreplace(times, end)
    return None


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
        works = [random.randint(1, 30) for _ in range(FEW + 40)]
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
    more = [job(number, 20, 30, rank=1) for number in range(FEW)]
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
        long_ns = 10**9  # so that what comes is the same before each deadline, as good as
        every = Reserve.of([ExpectedDemand(-long_ns, 1, ahead / long_ns, ahead / long_ns)], 0)
        assert standing_back(jobs, [0], every) == expected, ahead


@SOME
@given(
    job_sets(12),
    st.integers(1, 3),
    st.integers(0, 1000),
    st.integers(0, 30),
    st.booleans(),
    st.integers(-13, 0),
    OF_TENANTS,
)
def test_one_by_one_and_in_columns_all_is_the_same(
    jobs: list[Job], lanes: int, now: int, free: int, two_ranks: bool, paused: int, ranks: tuple[int, int]
) -> None:
    jobs = sorted(
        each._replace(
            deadline_ns=each.deadline_ns + now,
            due_ns=each.due_ns + now,
            rank=1 + each.number % 2 if two_ranks else 1,
            number=each.number if each.number % 3 else -1 - each.number,
        )
        for each in jobs
    )
    reserve = Reserve.of([ExpectedDemand(100, 10, 0.2, 0.5), ExpectedDemand(40, 20, 0.1, 0.2)], now)
    free_at = [now + free, *[now] * (lanes - 1)]
    first, second = (make(jobs, free_at, now) for make in BOTH)
    for is_due in (True, False):
        assert first.are_timely(virtual=is_due) == second.are_timely(virtual=is_due)
    assert first.are_in_quota() == second.are_in_quota()
    assert first.hopeless() == second.hopeless()
    found = []
    for each in (first, second):
        values = Harsh(beyond_first, ranks)
        held, gone = each.defer(values, reserve), each.select(values, ALL)
        found.append((held, gone, sorted(each.behind_quotas(-paused))))
    assert found[0] == found[1]


def test_the_reserve_is_what_comes_before_a_deadline_and_goes_first() -> None:
    reserve = Reserve.of(
        [ExpectedDemand(100, 10, 0.5, 0.8), ExpectedDemand(40, 20, 0.3, 0.3), ExpectedDemand(200, 5, 0.1, 0.4)], 0
    )
    jobs = [job(0, 10, 90), job(1, 15, 150), job(2, 30, 300)]
    expected = [
        0.3 * (90 - 40),  # nobody whose query takes as long goes first beyond a share, and one has an SLO so short
        0.3 * (150 - 40) + 0.8 * (150 - 100),
        0.3 * (300 - 40) + 0.8 * (300 - 100) + 0.4 * (300 - 200),
    ]
    for made, known in ((reserve, expected), (Reserve.of([], 0), [0.0, 0.0, 0.0])):
        assert [made.ahead_ns(each.deadline_ns, each.work_ns) for each in jobs] == pytest.approx(known, abs=1)


@pytest.mark.parametrize("lanes", [1, 2])
def test_nothing_waits_for_nobody(lanes: int) -> None:
    assert selected([], [0] * lanes) == []
    assert standing_back([job(0, 5, 9)], [0] * lanes) == []
