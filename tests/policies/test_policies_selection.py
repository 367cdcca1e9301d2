"""Who is given up when not all can be in time: against brute force, and what must always hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.policies.ordered.selection import _FEW, Job, Victim, first_late, select, standing_back

SOME = settings(max_examples=150, deadline=None, database=None)


def job(
    number: int,
    work: int,
    deadline: int,
    *,
    tenant: str = "a",
    due: int | None = None,
    rank: int = 1,
    weight: float = 1,
) -> Job:
    at = deadline if due is None else due
    return Job((rank, deadline, number), work, deadline, at, rank, tenant, weight, (number,), due is not None)


def most_work_first(each: Job) -> tuple[float, ...]:
    return (-each.work_ns,)


def beyond_first(each: Job) -> tuple[float, ...]:
    return (float(each.is_entitled), -each.work_ns)


def selected(jobs: Sequence[Job], free_at: Sequence[int]) -> list[Victim]:
    return select(sorted(jobs), free_at, most_work_first, lambda _: None)


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
    for victim in select(sorted(jobs), [0] * lanes, beyond_first, lambda _: None):
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
    assert standing_back([beyond, within], [0], most_work_first) == {(0,)}
    on_time = within._replace(due_ns=20)
    assert standing_back([beyond, on_time], [0], most_work_first) == frozenset()
    assert standing_back([beyond, within._replace(rank=2)], [0], most_work_first) == frozenset()


@pytest.mark.parametrize("lanes", [1, 2])
def test_nothing_waits_for_nobody(lanes: int) -> None:
    assert selected([], [0] * lanes) == []
    assert standing_back([job(0, 5, 9)], [0] * lanes, most_work_first) == frozenset()
