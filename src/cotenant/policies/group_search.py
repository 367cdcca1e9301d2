"""The search for a group: who runs beside the most urgent query, in which batch, up to which unit, on how many cores.

Groups are judged by what they get done in their time: the time that the finished work would take query by query and
alone, over the predicted latency of the group. Only groups that the predictor calls feasible are ever chosen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

from cotenant.core.snapshot import Snapshot, Start
from cotenant.policies.group_jobs import NEVER_NS, Candidate, Job, jobs_of
from cotenant.predict.protocol import Group, GroupPredictor, Member
from cotenant.types import Partition

_PARTNERS = 2
"""Candidates that are tried beside a group: the most urgent ones, since the paper, too, adds in that order."""
_MOST_TRIALS = 8
"""Groups that are tried before cuts, for each number of members."""
_NEARLY = 0.9
"""How much of the best group's rate a short one has to reach."""
_MOST_SPLITS = 8
"""Ways to share the device among a number of members."""
_new = tuple.__new__  # what Member(...) does, in half the time


@dataclass(frozen=True, slots=True)
class Shares:
    """The ways to share the lanes of a device: `splits[m - 1]` are those among m members."""

    splits: tuple[tuple[tuple[Partition, ...], ...], ...]
    widest: int
    """Cores of the whole device."""
    narrowest: int
    """Cores of the smallest share."""

    @classmethod
    def of(cls, lanes: tuple[Partition, ...], members: int) -> Shares:
        """Neighbouring lanes go together; of many ways the most even ones are kept."""
        splits = tuple(tuple(_splits(lanes, count)) for count in range(1, members + 1))
        sizes = [share.size for ways in splits for split in ways for share in split]
        return cls(splits, max(sizes), min(sizes))


def _splits(lanes: tuple[Partition, ...], count: int) -> Iterator[tuple[Partition, ...]]:
    ways = [(0, *inner, len(lanes)) for inner in combinations(range(1, len(lanes)), count - 1)]
    for edges in sorted(ways, key=_unevenness)[:_MOST_SPLITS]:
        yield tuple(
            Partition(tuple(core for lane in lanes[a:b] for core in lane.cores), lanes[0].device)
            for a, b in pairwise(edges)
        )


def _unevenness(edges: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    sizes = [b - a for a, b in pairwise(edges)]
    return max(sizes) - min(sizes), edges


class _Part(NamedTuple):
    """A member as it is being tried: a job of candidate `of` up to unit `end`."""

    of: int
    job: Job
    end: int
    worth_ns: float
    """What it gets done."""
    latest_ns: int
    """When it has to end, so that what remains of the job can be in time."""


class _Trial(NamedTuple):
    """A group that is being tried."""

    parts: tuple[_Part, ...]
    split: tuple[Partition, ...]


class _Judged(NamedTuple):
    """A trial with its prediction."""

    trial: _Trial
    latency_ns: int
    latest_ns: int
    """When it has to end."""
    spares_all: bool
    """Whether those left out can still be in time after it."""
    is_short: bool
    """Whether those who might arrive meanwhile could be in time after it, with some of their slack left."""
    rate: float


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
    bases: list[tuple[_Part, ...]] = [(part,) for part in search.leading()]
    most = min(len(shares.splits), len(candidates))
    alone = [trial for base in bases for trial in search.trials(base)]
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
        # The least headrooms of those who can be in time: a group with m members leaves one of the first m + 1 out.
        self._pressing = sorted([(each.urgency[1], of) for of, each in enumerate(candidates) if each.urgency[1] >= 0])[
            : len(shares.splits) + 1
        ]

    def parts(self, of: int) -> list[_Part]:
        """The ways in which a candidate can join, whole; made when first asked for."""
        found = self._parts.get(of)
        if found is None:
            found = self._parts[of] = [
                _Part(of, job, job.tenant.cuts[-1], job.worth_ns * job.tenant.weight, job.deadline_ns)
                for job in jobs_of(self._candidates[of], self._begin_ns, self._cores, self._narrow, self._predictor)
            ]
        return found

    def leading(self) -> list[_Part]:
        """The ways in which the first candidate can join with its most urgent query."""
        parts = self.parts(0)
        head = parts[0].job.queries[:1]
        return [part for part in parts if part.job.queries[:1] == head]

    def trials(self, parts: tuple[_Part, ...]) -> list[_Trial]:
        """The parts on all shares of the device."""
        return [_new(_Trial, (parts, split)) for split in self._splits[len(parts) - 1]]

    def with_another(self, bases: Sequence[tuple[_Part, ...]]) -> list[_Trial]:
        """Groups with one more member, whole: of one of the most urgent tenants, or other queries of one inside."""
        inside = [part.job.tenant.name for part in bases[0]]
        numbers = [part.of for part in bases[0]]
        found: list[_Trial] = []
        tried = 0
        for of, candidate in enumerate(self._candidates):
            is_again = candidate.tenant in inside
            if of in numbers or (is_again and not self._repeat):
                continue
            for part in self.parts(of):
                for base in reversed(bases):
                    if not (is_again and _share_queries(base, part)):
                        found += self.trials((*base, part))
            tried += 1
            if tried == _PARTNERS or len(found) >= _MOST_TRIALS:
                break
        return found[:_MOST_TRIALS]

    def narrowed(self, alone: Sequence[_Judged], wider: Sequence[_Judged], ways: int) -> list[_Trial]:
        """Variants with cuts: of leaders alone that are too long, and of the most promising one of the wider groups."""
        found = self.trimmed(alone)
        if wider:
            found += self.cut(wider, ways) + self.trimmed([max(wider, key=_by_rate)])
        return found

    def cut(self, judged: Sequence[_Judged], ways: int) -> list[_Trial]:
        """The most promising group, with one member or another cut at places spread over its units."""
        found: list[_Trial] = []
        parts, split = max(judged, key=_by_rate).trial
        latency_ns = self._predictor.latency_ns
        for at, part in enumerate(parts):
            job = part.job
            tenant, units = job.tenant, job.tenant.cuts[-1]
            for end in _spread(tenant.cuts, job.start, ways):
                after = latency_ns(tenant.name, job.shape, job.items, end, units, self._cores)
                worth = part.worth_ns * (1.0 - after / max(job.remaining_ns, 1))
                if worth > 0.0:
                    cut = _Part(part.of, job, end, worth, job.deadline_ns - after)
                    found.append(_new(_Trial, ((*parts[:at], cut, *parts[at + 1 :]), split)))
        return found

    def trimmed(self, judged: Sequence[_Judged]) -> list[_Trial]:
        """Groups that are too long, with each member cut where it alone would become so."""
        found: list[_Trial] = []
        for each in judged:
            if not each.is_short:
                parts, split = each.trial
                made = [self._trim(part, share.size) for part, share in zip(parts, split, strict=True)]
                if any(cut is not part for cut, part in zip(made, parts, strict=True)):
                    found.append(_new(_Trial, (tuple(made), split)))
        return found

    def _trim(self, part: _Part, cores: int) -> _Part:
        """The part up to the last cut that it reaches within the time of a short group, the first one at least."""
        job = part.job
        tenant, cuts = job.tenant, job.tenant.cuts
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
        after = latency_ns(tenant.name, job.shape, job.items, cuts[low], cuts[-1], self._cores)
        worth = part.worth_ns * (1.0 - after / max(job.remaining_ns, 1))
        return _Part(part.of, job, cuts[low], worth, job.deadline_ns - after) if worth > 0.0 else part

    def judge(self, trials: list[_Trial]) -> list[_Judged]:
        """Predict groups, all at once, and say how they would do."""
        if not trials:
            return []
        begin, pressing, short_ns = self._begin_ns, self._pressing, self._short_ns
        judged: list[_Judged] = []
        latencies = self._predictor.group_ns([_group(trial) for trial in trials])
        for trial, latency in zip(trials, latencies, strict=True):
            end = begin + latency
            worth, latest, spares_all = 0.0, NEVER_NS, True
            inside = []
            for of, job, _, worth_ns, latest_ns in trial.parts:
                inside.append(of)
                worth += worth_ns
                if latest_ns < latest:
                    latest = latest_ns
                if begin <= job.next_start_ns < end:
                    spares_all = False
            for headroom, of in pressing:
                if of not in inside:
                    if headroom < latency:
                        spares_all = False
                    break
            rate = worth / max(latency, 1)
            judged.append(_new(_Judged, (trial, latency, latest, spares_all, latency <= short_ns, rate)))
        return judged

    def best(self, judged: Sequence[_Judged], fallback: _Judged) -> _Judged:
        """The feasible group that gets most done in its time; those that spare the others go before.

        A short one is preferred where it does nearly as well: cuts are not free, but nor is what arrives meanwhile.
        """
        best: _Judged | None = None
        short: _Judged | None = None
        for each in judged:
            if self._begin_ns + each.latency_ns <= each.latest_ns:
                rank = (each.spares_all, each.rate)
                if best is None or rank > (best.spares_all, best.rate):
                    best = each
                if each.is_short and (short is None or rank > (short.spares_all, short.rate)):
                    short = each
        if best is None:
            return fallback
        is_good = short is not None and short.spares_all == best.spares_all and short.rate >= _NEARLY * best.rate
        return short if short is not None and is_good else best

    def choice(self, chosen: _Judged) -> Choice:
        """What the engine is told of the group."""
        latency, (parts, split) = chosen.latency_ns, chosen.trial
        starts = tuple(
            [
                Start(part.job.tenant.name, part.job.queries, part.end, share, latency, part.job.batch)
                for part, share in zip(parts, split, strict=True)
            ]
        )
        return Choice(
            starts, max(self._begin_ns, chosen.latest_ns - latency), tuple([part.job.start for part in parts])
        )


def _group(trial: _Trial) -> Group:
    members = []
    for (_, job, end, _, _), share in zip(trial.parts, trial.split, strict=True):
        members.append(_new(Member, (job.tenant.name, job.shape, job.items, job.start, end, share.size)))
    return tuple(members)


def _share_queries(base: tuple[_Part, ...], part: _Part) -> bool:
    taken = [query.id for each in base for query in each.job.queries]
    return any(query.id in taken for query in part.job.queries)


def _by_rate(judged: _Judged) -> float:
    return judged.rate


def _spread(cuts: Sequence[int], start: int, ways: int) -> Sequence[int]:
    """At most `ways` cuts between `start` and the end, evenly spread."""
    inner = [cut for cut in cuts[1:-1] if cut > start] if start else cuts[1:-1]
    if len(inner) <= ways:
        return inner
    return [inner[(2 * way + 1) * len(inner) // (2 * ways)] for way in range(ways)]
