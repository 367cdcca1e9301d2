"""Multi-way search for a group (Abacus, SC'21, section 6.3), with batching and splits of the lanes.

1. Predict the leader alone in each batch size, and beside each of two partners in each split of the lanes.
2. Cut the member that takes longest, or all members if the group would be late, at `ways` places.
3. Keep the best feasible group. While it has all members so far, add a third, a fourth, ... in the same way.

The rate of a group is its value over its predicted latency; the value is the time of its work query by query. Feasible:
it is predicted to end by the latest end of all members. A number of members that was never measured must be feasible
also if its members ran in turn.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from cotenant.core.predictor import Group, GroupPredictor, Member
from cotenant.policies.decision_context import NEVER_NS
from cotenant.techniques.overlap.policy.group_choice import Choice
from cotenant.techniques.overlap.policy.group_cuts import coarse, spread
from cotenant.techniques.overlap.policy.group_jobs import Candidate, GroupJob, jobs_of, next_of
from cotenant.techniques.overlap.policy.group_splits import Splits
from cotenant.work import Share, Work

_PARTNERS = 2
"""Candidates that are tried beside a group: the most urgent ones, the paper's order."""
_MOST_TRIALS = 6
"""Groups that are tried before cuts, for each number of members and each split."""
_NEARLY = 0.9
"""Least rate of a short group, as a share of the best rate, at which it is preferred."""
_group_of, _headroom_of = itemgetter(0), itemgetter(1)
_new = tuple.__new__  # what Member(...) does, in half the time


_Trial = tuple[Group, tuple[GroupJob, ...], tuple[Share, ...], float, int, int, int]
"""A group as a plain tuple, since most are dropped at once: the group as the predictor takes it, jobs, split, value,
limits. The limits are the latest end for its jobs, the latest end for the queries behind them, and the least headroom
of the other candidates."""


class _Judged(NamedTuple):
    """The best of some trials, with its predicted latency."""

    trial: _Trial
    latency_ns: int


def find_group(
    candidates: Sequence[Candidate],
    predictor: GroupPredictor,
    splits: Splits,
    begin_ns: int,
    ways: int,
    short_ns: int,
    repeat: bool,
) -> Choice:
    """The best feasible group led by the first candidate, the most urgent one. `ways` 0 forbids cuts.

    Members are added one by one, the best first. Groups longer than `short_ns` are also tried with all members cut.
    With `repeat` a tenant may have several members. If the leader alone is not feasible, it runs alone in its smallest
    batch.
    """
    search = _Search(candidates, predictor, splits, begin_ns, short_ns, repeat)
    trials = alone = search.alone()
    most = len(splits.by_members)
    if most > 1:  # one call for leaders and pairs: a call costs more than a few groups in it
        trials = alone + search.with_another(alone)
    latencies = search.predict(trials)
    best = search.best(trials, latencies, None)
    if ways:
        cut = search.narrowed(trials, latencies, len(alone), ways)
        best = search.best(cut, search.predict(cut), best)
    for count in range(3, most + 1):
        if len(best.trial[1]) < count - 1:
            break
        trials = search.with_another([best.trial])
        if not trials:
            break
        latencies = search.predict(trials)
        if ways:
            cut = search.narrowed(trials, latencies, 0, ways)
            trials, latencies = [*trials, *cut], [*latencies, *search.predict(cut)]
        best = search.best(trials, latencies, best)
    return search.choice(best)


class _Search:
    """State of one search."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        predictor: GroupPredictor,
        splits: Splits,
        begin_ns: int,
        short_ns: int,
        repeat: bool,
    ) -> None:
        self._candidates = candidates
        self._predictor = predictor
        self._splits = splits.by_members
        self._cores, self._sizes = splits.widest, (splits.widest, splits.narrowest)
        self._begin_ns = begin_ns
        self._short_ns = short_ns
        self._repeat = repeat
        self._unmeasured = predictor.unmeasured(len(self._splits))
        self._tried: dict[int, tuple[Candidate, tuple[GroupJob, ...]]] = {}
        self._pressing = candidates
        if candidates[0].rank != candidates[-1].rank:  # else they stand in this order already
            self._pressing = sorted(candidates, key=_headroom_of)

    def jobs(self, candidate: Candidate) -> tuple[GroupJob, ...]:
        """The uncut jobs that a candidate can contribute; made at first use."""
        tried = self._tried.get(candidate.first)
        if tried is None:
            leads = candidate is self._candidates[0]
            jobs = jobs_of(candidate, leads, self._begin_ns, self._sizes, self._predictor)
            tried = self._tried[candidate.first] = candidate, jobs
        return tried[1]

    def alone(self) -> list[_Trial]:
        """The first candidate alone on the whole device, the smallest batch first."""
        leader, (split,) = self._candidates[0], self._splits[0]
        left_ns = self._left_ns([leader.first])
        found: list[_Trial] = []
        for job in reversed(self.jobs(leader)):
            _, tenant, _, _, items, shape, start, end, _, value, latest, next_start = job
            member = _new(Member, (Work(tenant.name, shape, items, start, end), self._cores))
            found.append(((member,), (job,), split, value, latest, next_start, left_ns))
        return found

    def with_another(self, bases: Sequence[_Trial]) -> list[_Trial]:
        """Groups with one more uncut member: of one of the most urgent tenants, or other queries of a present one.

        The bases have members of the same candidates.
        """
        jobs = bases[0][1]
        numbers, inside = [job.first for job in jobs], [job.tenant.name for job in jobs]
        splits = self._splits[len(numbers)]
        most = _MOST_TRIALS * len(splits)
        # Groups that leave the last share of their split to one more.
        begun = [
            (split[-1].size, _resized(group, split), jobs, split, value, latest, next_start)
            for group, jobs, _, value, latest, next_start, _ in reversed(bases)
            for split in splits
        ]
        found: list[_Trial] = []
        tried = 0
        for candidate in self._with_next(numbers) if self._repeat else self._candidates:
            is_again = candidate.tenant in inside
            if candidate.first in numbers or (is_again and not self._repeat):
                continue
            left_ns = self._left_ns([*numbers, candidate.first])
            for job in self.jobs(candidate):
                _, tenant, _, _, items, shape, start, end, _, job_value, job_latest, job_next = job
                work = Work(tenant.name, shape, items, start, end)
                last: Group = ()
                last_size = 0
                for size, group, jobs, split, value, latest, next_start in begun:
                    if is_again and _share_queries(jobs, job):
                        continue
                    if size != last_size:
                        last_size = size
                        last = (_new(Member, (work, size)),)
                    found.append(
                        (
                            group + last,
                            (*jobs, job),
                            split,
                            value + job_value,
                            latest if latest < job_latest else job_latest,
                            next_start if next_start < job_next else job_next,
                            left_ns,
                        )
                    )
            tried += 1
            if tried == _PARTNERS or len(found) >= most:
                break
        return found[:most]

    def _with_next(self, inside: Sequence[int]) -> Sequence[Candidate]:
        """The first candidates, and the next queries behind the present members, the most urgent first."""
        found = list(self._candidates[: len(inside) + _PARTNERS])
        members = [self._tried[first][0] for first in inside]
        last = {candidate.tenant: candidate for candidate in members if candidate.is_queue}
        for candidate in last.values():
            another = next_of(candidate, self._begin_ns, self._cores, self._predictor)
            if another is not None:
                insort(found, another)
        return found

    def _left_ns(self, inside: list[int]) -> int:
        """The least non-negative headroom of the candidates that are not in this list of first queries."""
        for candidate in self._pressing:
            if candidate.first not in inside and candidate.headroom_ns >= 0:
                return candidate.headroom_ns
        return NEVER_NS

    def narrowed(self, trials: Sequence[_Trial], latencies: Sequence[int], alone: int, ways: int) -> list[_Trial]:
        """Cut variants of leaders alone that are too long, and of the wider group with the highest rate.

        The first `alone` trials are leaders alone.
        """
        found: list[_Trial] = []
        for at in range(alone):
            if latencies[at] > self._short_ns:
                found += self._trimmed(trials[at])
        most, promising = -1.0, -1
        for at in range(alone, len(trials)):
            rate = trials[at][3] / latencies[at]
            if rate > most:
                most, promising = rate, at
        if promising >= 0:
            found += self._cut(trials[promising], latencies[promising], ways)
            if latencies[promising] > self._short_ns:
                found += self._trimmed(trials[promising])
        return found

    def _cut(self, trial: _Trial, latency_ns: int, ways: int) -> list[_Trial]:
        """The group with members cut at places spread over their units.

        If the group is in time, only its longest member is cut, since all others wait for it.
        """
        group, jobs, _, _, latest_ns, _, _ = trial
        in_time = self._begin_ns + (self._longest_ns(group) or latency_ns) <= latest_ns
        found: list[_Trial] = []
        for at in (self._longest(group),) if in_time else range(len(jobs)):
            job = jobs[at]
            for end in spread(job.tenant.cuts, job.start, ways):
                cut = self._cut_at(job, end)
                if cut is not None:
                    found.append(_with_cut(trial, at, cut))
        return found

    def _longest(self, group: Group) -> int:
        """The member with the longest latency alone on its share."""
        latency_ns = self._predictor.latency_ns
        alone = [latency_ns(*member) for member in group]
        return alone.index(max(alone))

    def _trimmed(self, trial: _Trial) -> list[_Trial]:
        """The group with each member cut to the length of a short group; empty if no member can be cut."""
        made = trial
        for at, (job, share) in enumerate(zip(trial[1], trial[2], strict=True)):
            cut = self._trim(job, share.size)
            if cut is not None:
                made = _with_cut(made, at, cut)
        return [] if made is trial else [made]

    def _trim(self, job: GroupJob, cores: int) -> GroupJob | None:
        """The job up to the last cut within the time of a short group, but the first cut at least.

        None if the job is short enough or has no cut.
        """
        cuts, work = coarse(job.tenant.cuts), job.tenant.work(job.shape, job.items, job.start)
        latency_ns = self._predictor.latency_ns
        low, high = bisect_right(cuts, job.start), len(cuts) - 1
        if low == high or latency_ns(work.until(job.end), cores) <= self._short_ns:
            return None
        while low < high - 1:
            middle = (low + high) // 2
            if latency_ns(work.until(cuts[middle]), cores) <= self._short_ns:
                low = middle
            else:
                high = middle
        return self._cut_at(job, cuts[low])

    def _cut_at(self, job: GroupJob, end: int) -> GroupJob | None:
        """The job up to unit `end`; None if it then has no value, or is cut already."""
        first, tenant, queries, batch, items, shape, start, units, remaining, value, latest, next_start = job
        if units != tenant.cuts[-1]:
            return None
        after = self._predictor.latency_ns(Work(tenant.name, shape, items, end, units), self._cores)
        value *= 1.0 - after / remaining
        if value <= 0.0:
            return None
        latest -= after
        return _new(
            GroupJob, (first, tenant, queries, batch, items, shape, start, end, remaining, value, latest, next_start)
        )

    def predict(self, trials: Sequence[_Trial]) -> Sequence[int]:
        """Predicted latencies of trials in ns, all in one call; never 0."""
        return self._predictor.group_ns(list(map(_group_of, trials))) if trials else ()

    def best(self, trials: Sequence[_Trial], latencies: Sequence[int], before: _Judged | None) -> _Judged:
        """The feasible group with the highest rate, among these and the best one `before`.

        Groups that keep all other candidates in time go first. A short group is preferred if its rate is nearly as
        high: cuts have a cost, but so has waiting of later arrivals. If none is feasible: the one before, or else the
        first.
        """
        if self._unmeasured:
            trials, latencies = self._safe(trials, latencies)
        if before is not None:
            trials, latencies = [before.trial, *trials], [before.latency_ns, *latencies]
        begin, short_ns = self._begin_ns, self._short_ns
        if max(latencies) <= short_ns:
            short_ns = 0  # all are short
        best = short = trials[0], latencies[0]
        best_spares = short_spares = False
        highest = highest_short = -1.0
        for trial, latency in zip(trials, latencies, strict=True):
            _, _, _, value, latest, next_start, left = trial
            end = begin + latency
            if end > latest:
                continue
            rate = value / latency
            spares_all = latency <= left and end <= next_start
            if rate > highest if spares_all is best_spares else spares_all:
                best, best_spares, highest = (trial, latency), spares_all, rate
            if latency <= short_ns and (rate > highest_short if spares_all is short_spares else spares_all):
                short, short_spares, highest_short = (trial, latency), spares_all, rate
        is_good = short_spares is best_spares and 0.0 <= _NEARLY * highest <= highest_short
        return _new(_Judged, short if is_good else best)

    def _longest_ns(self, group: Group) -> int:
        """Upper bound on the time of a group with an unmeasured number of members; else 0."""
        return self._predictor.longest_ns([group])[0] if len(group) in self._unmeasured else 0

    def _safe(self, trials: Sequence[_Trial], latencies: Sequence[int]) -> tuple[Sequence[_Trial], Sequence[int]]:
        """The trials with measured numbers of members, and those that meet all deadlines even at their upper bound."""
        groups = [trial[0] for trial in trials if len(trial[0]) in self._unmeasured]
        if not groups:
            return trials, latencies
        longest = dict(zip(groups, self._predictor.longest_ns(groups), strict=True))
        kept = [
            at
            for at, trial in enumerate(trials)
            if trial[0] not in longest or self._begin_ns + longest[trial[0]] <= self._deadline_ns(trial)
        ]
        return [trials[at] for at in kept], [latencies[at] for at in kept]

    def _deadline_ns(self, trial: _Trial) -> int:
        """The latest end that keeps all queries in time: members, those behind them, and other candidates."""
        _, _, _, _, latest_ns, next_start_ns, left_ns = trial
        return min(latest_ns, next_start_ns, self._begin_ns + left_ns)

    def choice(self, chosen: _Judged) -> Choice:
        """The group with its latest start."""
        latency, trial = chosen.latency_ns, chosen.trial
        group, jobs, split, _, latest_ns, _, _ = trial
        longest = self._longest_ns(group)
        last = self._deadline_ns(trial) - longest if longest else latest_ns - latency
        return _new(Choice, (group, jobs, split, latency, max(self._begin_ns, last), longest))


def _resized(group: Group, split: tuple[Share, ...]) -> Group:
    """The members on the first shares of a split."""
    return tuple([_new(Member, (work, share.size)) for (work, _), share in zip(group, split, strict=False)])


def _with_cut(trial: _Trial, at: int, cut: GroupJob) -> _Trial:
    """The trial with one job cut: its latest end is earlier, since the rest of the job follows."""
    group, jobs, split, value, latest, next_start, left_ns = trial
    work, size = group[at]
    member = _new(Member, (work.until(cut.end), size))
    cut_latest = cut.latest_ns
    return (
        (*group[:at], member, *group[at + 1 :]),
        (*jobs[:at], cut, *jobs[at + 1 :]),
        split,
        value - jobs[at].value_ns + cut.value_ns,
        cut_latest if cut_latest < latest else latest,
        next_start,
        left_ns,
    )


def _share_queries(jobs: tuple[GroupJob, ...], job: GroupJob) -> bool:
    taken = {query.id for each in jobs for query in each.queries}
    return not taken.isdisjoint([query.id for query in job.queries])
