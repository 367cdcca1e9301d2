"""The search for a group: who runs beside the most urgent query, in which batch, up to which unit, on how many cores.

Groups are judged by what they get done in their time: the time that the finished work would take query by query and
alone, over the predicted latency of the group. Only groups that the predictor calls feasible are ever chosen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cotenant.core.snapshot import Snapshot, Start
from cotenant.frozen import quick_init
from cotenant.policies.group_cuts import coarse, spread
from cotenant.policies.group_jobs import NEVER_NS, Candidate, Job, jobs_of
from cotenant.policies.group_shares import Shares
from cotenant.predict.protocol import Group, GroupPredictor, Member
from cotenant.types import Partition

_PARTNERS = 2
"""Candidates that are tried beside a group: the most urgent ones, since the paper, too, adds in that order."""
_MOST_TRIALS = 8
"""Groups that are tried before cuts, for each number of members."""
_NEARLY = 0.9
"""How much of the best group's rate a short one has to reach."""
_new = tuple.__new__  # what Member(...) does, in half the time


class _Part(NamedTuple):
    """A member as it is being tried: a job of candidate `of` up to unit `end`."""

    of: int
    job: Job
    end: int
    worth_ns: float
    """What it gets done."""
    latest_ns: int
    """When it has to end, so that what remains of the job can be in time."""
    next_start_ns: int
    """See Job; NEVER_NS if it is too late for that anyway."""
    members: dict[int, Member]
    """As the predictor sees it, by the size of its share: filled when first asked for."""


class _Trial(NamedTuple):
    """A group that is being tried."""

    parts: tuple[_Part, ...]
    split: tuple[Partition, ...]
    group: Group
    """As the predictor sees it."""
    worth_ns: float
    """What it gets done."""
    latest_ns: int
    """When it has to end, so that what remains of its jobs can be in time."""
    next_start_ns: int
    """When it has to end, so that those behind its members can be in time."""
    left_ns: int
    """The least headroom of the candidates that it leaves out."""


class _Judged(NamedTuple):
    """A trial with its prediction."""

    trial: _Trial
    latency_ns: int
    spares_all: bool
    """Whether those left out can still be in time after it."""
    is_short: bool
    """Whether those who might arrive meanwhile could be in time after it, with some of their slack left."""
    rate: float


@quick_init
@dataclass(frozen=True, slots=True)
class Choice:
    """A group to start, and the last moment at which it can start with its prediction holding."""

    starts: tuple[Start, ...]
    latest_ns: int
    units: tuple[int, ...]
    """The unit at which each member begins."""

    def is_there(self, snapshot: Snapshot) -> bool:
        """Whether all that it is made of still waits where it was found."""
        for start, unit in zip(self.starts, self.units, strict=True):
            if start.batch is not None:
                if all(batch.id != start.batch or batch.next_unit != unit for batch in snapshot.paused):
                    return False
                continue
            queue = snapshot.queues.get(start.tenant)
            if queue is None:
                return False
            waiting = {query.id for query in queue.queries}
            if any(query.id not in waiting for query in start.queries):
                return False
        return True


def find_group(
    candidates: Sequence[Candidate],
    predictor: GroupPredictor,
    shares: Shares,
    begin_ns: int,
    ways: int,
    short_ns: int,
    repeat: bool,
) -> Choice:
    """The best feasible group led by the first candidate, which comes first in urgency. `ways` 0 forbids cuts.

    Members are added one by one, the best first; then members are tried cut at `ways` places, and all of them where
    they would take longer than `short_ns`. With `repeat` a tenant may have several members. Where even the leader
    alone is not feasible it runs alone, in its smallest batch.
    """
    search = _Search(candidates, predictor, shares, begin_ns, short_ns, repeat)
    alone = search.alone()
    bases = [trial.parts for trial in alone]  # there is one way to share the device among one
    most = min(len(shares.splits), len(candidates))
    # A call of the predictor costs more than a few groups in it: leaders and pairs are predicted at once.
    judged = search.judge(alone + search.with_another(bases) if most > 1 else alone)
    wider = judged[len(alone) :]
    best = search.best(judged, judged[0])
    if ways:
        best = search.best([best, *search.judge(search.narrowed(judged[: len(alone)], wider, ways))], best)
    for count in range(3, most + 1):
        if len(best.trial.parts) < count - 1:
            break
        wider = search.judge(search.with_another([best.trial.parts]))
        if ways:
            wider += search.judge(search.narrowed([], wider, ways))
        best = search.best([best, *wider], best)
    return search.choice(best)


class _Search:
    """Local state of one search."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        predictor: GroupPredictor,
        shares: Shares,
        begin_ns: int,
        short_ns: int,
        repeat: bool,
    ) -> None:
        self._candidates = candidates
        self._predictor = predictor
        self._splits = shares.splits
        self._cores, self._narrow = shares.widest, shares.narrowest
        self._begin_ns = begin_ns
        self._short_ns = short_ns
        self._repeat = repeat
        self._parts: dict[int, list[_Part]] = {}
        self._pressing = _pressing(candidates, len(shares.splits) + 1)

    def parts(self, of: int) -> list[_Part]:
        """The ways in which a candidate can join, whole; made when first asked for."""
        found = self._parts.get(of)
        if found is None:
            candidate, begin = self._candidates[of], self._begin_ns
            jobs = jobs_of(candidate, begin, self._cores, self._narrow, self._predictor)
            tenant = jobs[0].tenant
            end, weight = tenant.cuts[-1], tenant.weight
            found = self._parts[of] = []
            for job in jobs:
                next_start = job.next_start_ns if job.next_start_ns >= begin else NEVER_NS
                found.append(_new(_Part, (of, job, end, job.worth_ns * weight, job.deadline_ns, next_start, {})))
        return found

    def leading(self) -> list[_Part]:
        """The ways in which the first candidate can join with its most urgent query."""
        parts = self.parts(0)
        head = parts[0].job.queries[:1]
        return [part for part in parts if part.job.queries[:1] == head]

    def alone(self) -> list[_Trial]:
        """The first candidate by itself, on the whole device."""
        left_ns = self._left_ns((0,))
        return [trial for part in self.leading() for trial in _trials((part,), self._splits[0], left_ns)]

    def with_another(self, bases: Sequence[tuple[_Part, ...]]) -> list[_Trial]:
        """Groups with one more member, whole: of one of the most urgent tenants, or other queries of one inside."""
        inside = [part.job.tenant.name for part in bases[0]]
        numbers = [part.of for part in bases[0]]
        splits = self._splits[len(numbers)]
        found: list[_Trial] = []
        tried = 0
        for of, candidate in enumerate(self._candidates):
            is_again = candidate.tenant in inside
            if of in numbers or (is_again and not self._repeat):
                continue
            left_ns = self._left_ns((*numbers, of))
            for part in self.parts(of):
                for base in reversed(bases):
                    if not (is_again and _share_queries(base, part)):
                        found += _trials((*base, part), splits, left_ns)
            tried += 1
            if tried == _PARTNERS or len(found) >= _MOST_TRIALS:
                break
        return found[:_MOST_TRIALS]

    def _left_ns(self, inside: tuple[int, ...]) -> int:
        """The least headroom of those who can be in time and are not among these candidates."""
        for headroom, of in self._pressing:
            if of not in inside:
                return headroom
        return NEVER_NS

    def narrowed(self, alone: Sequence[_Judged], wider: Sequence[_Judged], ways: int) -> list[_Trial]:
        """Variants with cuts: of leaders alone that are too long, and of the most promising one of the wider groups."""
        found = self.trimmed(alone)
        if wider:
            promising = max(wider, key=_by_rate)
            found += self.cut(promising, ways) + self.trimmed([promising])
        return found

    def cut(self, judged: _Judged, ways: int) -> list[_Trial]:
        """A group with members cut at places spread over their units.

        It is the longest that the others wait for; the others are cut, too, where all of them together are too late.
        """
        trial = judged.trial
        parts, split = trial.parts, trial.split
        in_time = self._begin_ns + judged.latency_ns <= trial.latest_ns
        found: list[_Trial] = []
        for at in (self._longest(trial),) if in_time else range(len(parts)):
            part, before, after = parts[at], parts[:at], parts[at + 1 :]
            for end in spread(part.job.tenant.cuts, part.job.start, ways):
                cut = self._cut_at(part, end)
                if cut is not None:
                    found += _trials((*before, cut, *after), (split,), trial.left_ns)
        return found

    def _longest(self, trial: _Trial) -> int:
        """Which member would take longest alone on its share."""
        latency_ns = self._predictor.latency_ns
        alone = [
            latency_ns(job.tenant.name, job.shape, job.items, job.start, end, share.size)
            for (_, job, end, *_), share in zip(trial.parts, trial.split, strict=True)
        ]
        return alone.index(max(alone))

    def trimmed(self, judged: Sequence[_Judged]) -> list[_Trial]:
        """Groups that are too long, with each member cut where it alone would become so."""
        found: list[_Trial] = []
        for each in judged:
            if not each.is_short:
                parts, split = each.trial.parts, each.trial.split
                made = [self._trim(part, share.size) for part, share in zip(parts, split, strict=True)]
                if any(cut is not part for cut, part in zip(made, parts, strict=True)):
                    found += _trials(tuple(made), (split,), each.trial.left_ns)
        return found

    def _trim(self, part: _Part, cores: int) -> _Part:
        """The part up to the last cut that it reaches within the time of a short group, the first one at least."""
        job = part.job
        tenant, cuts = job.tenant, coarse(job.tenant.cuts)
        latency_ns = self._predictor.latency_ns
        low, high = bisect_right(cuts, job.start), len(cuts) - 1
        if low == high or latency_ns(tenant.name, job.shape, job.items, job.start, part.end, cores) <= self._short_ns:
            return part
        while low < high - 1:
            middle = (low + high) // 2
            if latency_ns(tenant.name, job.shape, job.items, job.start, cuts[middle], cores) <= self._short_ns:
                low = middle
            else:
                high = middle
        cut = self._cut_at(part, cuts[low])
        return part if cut is None else cut

    def _cut_at(self, part: _Part, end: int) -> _Part | None:
        """The part up to unit `end` only; None when it would get nothing done."""
        of, job, _, worth_ns, _, next_start_ns, _ = part
        tenant, _, _, items, shape, _, remaining_ns, _, deadline_ns, _ = job
        after = self._predictor.latency_ns(tenant.name, shape, items, end, tenant.cuts[-1], self._cores)
        worth = worth_ns * (1.0 - after / (remaining_ns if remaining_ns > 1 else 1))
        if worth <= 0.0:
            return None
        return _new(_Part, (of, job, end, worth, deadline_ns - after, next_start_ns, {}))

    def judge(self, trials: list[_Trial]) -> list[_Judged]:
        """Predict groups, all at once, and say how they would do."""
        if not trials:
            return []
        begin, short_ns = self._begin_ns, self._short_ns
        judged: list[_Judged] = []
        latencies = self._predictor.group_ns([trial.group for trial in trials])
        for trial, latency in zip(trials, latencies, strict=True):
            _, _, _, worth, _, next_start, left = trial
            spares_all = begin + latency <= next_start and latency <= left
            rate = worth / (latency if latency > 1 else 1)
            judged.append(_new(_Judged, (trial, latency, spares_all, latency <= short_ns, rate)))
        return judged

    def best(self, judged: Sequence[_Judged], fallback: _Judged) -> _Judged:
        """The feasible group that gets most done in its time; those that spare the others go before.

        A short one is preferred where it does nearly as well: cuts are not free, but nor is what arrives meanwhile.
        """
        best: _Judged | None = None
        short: _Judged | None = None
        highest = highest_short = (False, -1.0)
        begin = self._begin_ns
        for each in judged:
            trial, latency, spares_all, is_short, rate = each
            if begin + latency <= trial.latest_ns:
                rank = (spares_all, rate)
                if rank > highest:
                    best, highest = each, rank
                if is_short and rank > highest_short:
                    short, highest_short = each, rank
        if best is None:
            return fallback
        is_good = short is not None and short.spares_all == best.spares_all and short.rate >= _NEARLY * best.rate
        return short if short is not None and is_good else best

    def choice(self, chosen: _Judged) -> Choice:
        """What the engine is told of the group."""
        latency, (parts, split, _, _, latest_ns, _, _) = chosen.latency_ns, chosen.trial
        starts = tuple(
            [
                Start(part.job.tenant.name, part.job.queries, part.end, share, latency, part.job.batch)
                for part, share in zip(parts, split, strict=True)
            ]
        )
        return Choice(starts, max(self._begin_ns, latest_ns - latency), tuple([part.job.start for part in parts]))


def _trials(parts: tuple[_Part, ...], splits: Sequence[tuple[Partition, ...]], left_ns: int) -> list[_Trial]:
    """The parts on these shares of the device."""
    worth, latest, next_start, known = 0.0, NEVER_NS, NEVER_NS, []
    for _, _, _, worth_ns, latest_ns, next_start_ns, members in parts:
        worth += worth_ns
        known.append(members)
        if latest_ns < latest:
            latest = latest_ns
        if next_start_ns < next_start:
            next_start = next_start_ns
    found: list[_Trial] = []
    for split in splits:
        group = []
        for at, share in enumerate(split):  # a strict zip costs as much as the rest of the loop
            size = share.size
            group.append(known[at].get(size) or _member(parts[at], size))
        found.append(_new(_Trial, (parts, split, tuple(group), worth, latest, next_start, left_ns)))
    return found


def _member(part: _Part, size: int) -> Member:
    """Make a member, to be found in the part from now on."""
    _, job, end, _, _, _, members = part
    tenant, _, _, items, shape, start, *_ = job
    made = members[size] = _new(Member, (tenant.name, shape, items, start, end, size))
    return made


def _pressing(candidates: Sequence[Candidate], most: int) -> list[tuple[int, int]]:
    """The least headrooms of those who can be in time, at most so many, each with its candidate.

    A group with m members leaves one of the first m + 1 out.
    """
    if candidates[0].rank == candidates[-1].rank:  # they stand in this order already
        found: list[tuple[int, int]] = []
        for of, each in enumerate(candidates):
            if each.headroom_ns >= 0:
                found.append((each.headroom_ns, of))
                if len(found) == most:
                    break
        return found
    return sorted([(each.headroom_ns, of) for of, each in enumerate(candidates) if each.headroom_ns >= 0])[:most]


def _share_queries(base: tuple[_Part, ...], part: _Part) -> bool:
    taken = [query.id for each in base for query in each.job.queries]
    return any(query.id in taken for query in part.job.queries)


def _by_rate(judged: _Judged) -> float:
    return judged.rate
