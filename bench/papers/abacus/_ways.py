"""Searches for a group to be compared with ours: the paper's m-way one (Abacus, SC'21, section 6.3), and all groups.

Both are asked what `find_group` is asked, and give what it gives. Queries are not merged here: the paper has none of
that, and all groups of merged queries are too many to try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, product
from typing import NamedTuple

from cotenant.core.predictor import Group, GroupPredictor, Member
from cotenant.policies.decision_context import NEVER_NS
from cotenant.techniques.overlap.policy.group_choice import Choice
from cotenant.techniques.overlap.policy.group_cuts import coarse
from cotenant.techniques.overlap.policy.group_jobs import Candidate, GroupJob, jobs_of
from cotenant.techniques.overlap.policy.group_splits import Splits
from cotenant.work import Share

_AT_ONCE = 4096
"""Groups of the exhaustive search that are predicted in one call."""


class Asked(NamedTuple):
    """What a search is asked; see `find_group`."""

    candidates: Sequence[Candidate]
    predictor: GroupPredictor
    splits: Splits
    begin_ns: int
    ways: int
    short_ns: int
    repeat: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """Slots of the device, and of its smallest share."""
        return self.splits.widest, self.splits.narrowest


class Value(NamedTuple):
    """What a group is worth by the rule of our policy: the larger, the better."""

    is_feasible: bool
    spares_all: bool
    """Whether a candidate that is left out can still be in time after it."""
    rate: float
    """Time that the finished work would take query by query and alone, over the predicted latency of the group."""

    def of(self, best: Value) -> float:
        """As a share of the best: nothing where that is feasible, or spares the others, and this does not."""
        return self.rate / best.rate if self[:2] == best[:2] else 0.0


def value_of(asked: Asked, jobs: Sequence[GroupJob], latency_ns: int) -> Value:
    """The value of a group with this predicted latency."""
    end = asked.begin_ns + latency_ns
    inside = {job.tenant.name for job in jobs}
    outside = (each.headroom_ns for each in asked.candidates if each.tenant not in inside)
    left = min((headroom for headroom in outside if headroom >= 0), default=NEVER_NS)
    spares = latency_ns <= left and end <= min(job.next_start_ns for job in jobs)
    is_feasible = end <= min(job.latest_ns for job in jobs)
    return Value(is_feasible, is_feasible and spares, sum(job.value_ns for job in jobs) / latency_ns)


class Published:
    """The paper's search: the query with the least headroom whole, then the others in the order of their headroom.

    Each further query runs as far as the prediction stays within the headroom of the first.

    A round predicts groups for `ways` places at once, evenly spread over those that are still possible. It first looks
    for how many queries are in it whole, then for the operator at which the next one ends. With `scans` it tries one
    operator after the other, as Figure 12 begins. `rounds` counts the predictions of the last search.
    """

    def __init__(self, ways: int, *, scans: bool = False) -> None:
        self.ways = ways
        self.scans = scans
        self.rounds = 0

    def __call__(self, *arguments: object) -> Choice:
        """See `find_group`."""
        asked = Asked(*arguments)  # type: ignore[arg-type]
        self.rounds = 0
        jobs = list(_in_turn(asked))
        latest = jobs[0].latest_ns
        room_ns = latest - asked.begin_ns

        def whole(counts: Sequence[int]) -> Sequence[int]:
            return self._predict(asked, [jobs[:count] for count in counts])

        count = self._most(1, len(jobs), whole, room_ns)
        chosen = jobs[:count]
        if count < len(jobs) and asked.ways:
            follower = jobs[count]

            def up_to(ends: Sequence[int]) -> Sequence[int]:
                return self._predict(asked, [[*chosen, follower._replace(end=end)] for end in ends])

            end = self._most(follower.start, follower.end - 1, up_to, room_ns)
            if end > follower.start:
                cut = cut_at(asked, follower, end)
                chosen.append(follower if cut is None else cut)
        latency = asked.predictor.group_ns([group_of(chosen, split_of(asked, len(chosen)))])[0]
        return _choice(asked, tuple(chosen), latency, latest)

    def _most(self, low: int, high: int, latencies: Callable[[Sequence[int]], Sequence[int]], room_ns: int) -> int:
        """The largest number up to `high` with a prediction that fits. `low` fits, and so does any below a fit."""
        while low < high:
            left = high - low
            if self.scans:
                places = [low + 1]
            elif left <= self.ways:
                places = list(range(low + 1, high + 1))
            else:
                places = [low + -(-left * way // (self.ways + 1)) for way in range(1, self.ways + 1)]
            for place, latency in zip(places, latencies(places), strict=True):
                if latency > room_ns:
                    high = place - 1
                    break
                low = place
        return low

    def _predict(self, asked: Asked, groups: Sequence[Sequence[GroupJob]]) -> Sequence[int]:
        self.rounds += 1
        return asked.predictor.group_ns([group_of(jobs, split_of(asked, len(jobs))) for jobs in groups])


def exhaustive(asked: Asked, thinned: bool = False) -> tuple[Choice, Value]:
    """The group of the highest value among all that the first candidate leads.

    The choices are all sets of members among the waiting queries, one a tenant, and all cuts of each. With `thinned`
    they are those that our search may use, which are few enough for groups of three.
    """
    best: tuple[Value, tuple[GroupJob, ...], int] | None = None
    found = _all_jobs(asked, thinned)
    while groups := list(islice(found, _AT_ONCE)):
        latencies = asked.predictor.group_ns([group_of(jobs, split_of(asked, len(jobs))) for jobs in groups])
        for jobs, latency in zip(groups, latencies, strict=True):
            value = value_of(asked, jobs, latency)
            if best is None or value > best[0]:
                best = value, jobs, latency
    assert best is not None  # the leader alone is one of them
    value, jobs, latency = best
    return _choice(asked, jobs, latency, min(job.latest_ns for job in jobs)), value


def search_all(*arguments: object) -> Choice:
    """As `find_group`: the best group of all."""
    return exhaustive(Asked(*arguments))[0]  # type: ignore[arg-type]


def cut_at(asked: Asked, job: GroupJob, end: int) -> GroupJob | None:
    """The job up to unit `end`, None where that gets nothing done: what remains takes as long alone as all of it."""
    work = job.tenant.work(job.shape, job.items, end)
    after = asked.predictor.latency_ns(work, asked.splits.widest)
    value = job.value_ns * (1.0 - after / job.remaining_ns)
    return job._replace(end=end, value_ns=value, latest_ns=job.latest_ns - after) if value > 0 else None


def group_of(jobs: Sequence[GroupJob], split: Sequence[Share]) -> Group:
    """As the predictor sees it."""
    return tuple(
        Member(job.tenant.work(job.shape, job.items, job.start).until(job.end), share.size)
        for job, share in zip(jobs, split, strict=True)
    )


def split_of(asked: Asked, members: int) -> tuple[Share, ...]:
    """Shares of so many members; on the simulated device all ways to share it are one."""
    return asked.splits.by_members[members - 1][0]


def _choice(asked: Asked, jobs: tuple[GroupJob, ...], latency_ns: int, latest_ns: int) -> Choice:
    split = split_of(asked, len(jobs))
    return Choice(group_of(jobs, split), jobs, split, latency_ns, max(asked.begin_ns, latest_ns - latency_ns), 0)


def _in_turn(asked: Asked) -> Iterator[GroupJob]:
    """The first queries of the tenants, whole, in the order of their headrooms; as many as a group may have."""
    taken: set[str] = set()
    for candidate in asked.candidates:
        if candidate.tenant not in taken and len(taken) < len(asked.splits.by_members):
            taken.add(candidate.tenant)
            yield _job_of(asked, candidate)


def _job_of(asked: Asked, candidate: Candidate) -> GroupJob:
    """A paused batch, or the first query of a queue from a place on."""
    return jobs_of(candidate, True, asked.begin_ns, asked.sizes, asked.predictor)[-1]


def _all_jobs(asked: Asked, thinned: bool) -> Iterator[tuple[GroupJob, ...]]:
    leader, *others = asked.candidates
    options: dict[str, list[GroupJob]] = {}
    for candidate in others:
        if candidate.tenant != leader.tenant:
            for job in _queries_of(asked, candidate):
                options.setdefault(candidate.tenant, []).extend(_with_cuts(asked, job, thinned))
    led = _with_cuts(asked, _job_of(asked, leader), thinned)
    for count in range(len(asked.splits.by_members)):
        for names in combinations(options, count):
            yield from product(led, *(options[name] for name in names))


def _queries_of(asked: Asked, candidate: Candidate) -> Iterator[GroupJob]:
    """What of a tenant may join: its paused batch, or any of its waiting queries that can be in time."""
    first = _job_of(asked, candidate)
    yield first
    if not candidate.is_queue:
        return
    queue, latency_ns = candidate.source, asked.predictor.latency_ns
    for at in range(candidate.at + 1, len(queue.queries)):
        query = queue.queries[at]
        needed = latency_ns(queue.tenant.work(query.shape, query.items), asked.splits.widest)
        headroom = query.deadline_ns - asked.begin_ns - needed
        if headroom >= 0:
            place = Candidate(queue.tenant.rank, headroom, query.id, candidate.tenant, queue, at, True, needed)
            # The head of the queue waits behind it then.
            yield _job_of(asked, place)._replace(next_start_ns=asked.begin_ns + candidate.headroom_ns)


def _with_cuts(asked: Asked, job: GroupJob, thinned: bool) -> list[GroupJob]:
    cuts = coarse(job.tenant.cuts) if thinned else job.tenant.cuts
    ends = [cut for cut in cuts[1:-1] if cut > job.start] if asked.ways else []
    return [job, *(cut for end in ends if (cut := cut_at(asked, job, end)) is not None)]
