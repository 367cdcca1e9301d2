"""The search for a group: who runs beside the most urgent query, in which batch, up to which unit, on how many cores.

Groups are judged by what they get done in their time: the time that the finished work would take query by query and
alone, over the predicted latency of the group. Only groups that the predictor calls feasible are ever chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

from cotenant.core.snapshot import Snapshot, Start
from cotenant.policies.group_jobs import NEVER_NS, Candidate, Job, jobs_of
from cotenant.predict.protocol import Group, GroupPredictor, Member
from cotenant.types import Partition

_PARTNERS = 3
"""Candidates that are tried beside a group: the most urgent ones (the paper adds queries in the order of headroom)."""
_BASES = 2
"""Groups whose members are tried cut."""
_MOST_SPLITS = 8
"""Ways to share the device among a number of members."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The ways to share the lanes of a device: `splits[m - 1]` are those among m members."""

    splits: tuple[tuple[tuple[Partition, ...], ...], ...]

    @classmethod
    def of(cls, lanes: tuple[Partition, ...], members: int) -> Shares:
        """Neighbouring lanes go together; of many ways the most even ones are kept."""
        return cls(tuple(tuple(_splits(lanes, count)) for count in range(1, members + 1)))

    @property
    def widest(self) -> int:
        """Cores of the whole device."""
        return self.splits[0][0][0].size


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
    candidates: Sequence[Candidate], predictor: GroupPredictor, shares: Shares, begin_ns: int, ways: int
) -> Choice:
    """The best feasible group led by the first candidate, which comes first in urgency. `ways` 0 forbids cuts.

    Members are added one by one, the best first; then members are tried cut at `ways` places. Where even the leader
    alone is not feasible it runs alone, in its smallest batch.
    """
    search = _Search(candidates, predictor, shares, begin_ns)
    lead = [search.whole(0, job) for job in search.leading()]
    judged = search.judge([trial for part in lead for trial in search.trials((part,))])
    best = fallback = judged[0]
    bases: list[tuple[_Part, ...]] = [(part,) for part in lead]
    best = search.best(judged, fallback)
    for count in range(2, min(len(shares.splits), len(candidates)) + 1):
        wider = search.judge([trial for base in bases for trial in search.with_another(base)])
        if ways and wider:
            wider += search.judge(search.cut(wider, ways))
        better = search.best([best, *wider], best)
        if len(better.trial.parts) < count:
            break
        best, bases = better, [better.trial.parts]
    return search.choice(best)


class _Search:
    """Local state of one search."""

    def __init__(
        self, candidates: Sequence[Candidate], predictor: GroupPredictor, shares: Shares, begin_ns: int
    ) -> None:
        self._candidates = candidates
        self._predictor = predictor
        self._splits = shares.splits
        self._cores = shares.widest
        self._begin_ns = begin_ns
        self._jobs: dict[int, tuple[Job, ...]] = {}
        # The least headrooms of those who can be in time: a group with m members leaves one of the first m + 1 out.
        self._pressing = sorted([(each.urgency[1], of) for of, each in enumerate(candidates) if each.urgency[1] >= 0])[
            : len(shares.splits) + 1
        ]

    def jobs(self, of: int) -> tuple[Job, ...]:
        """The jobs of a candidate, made when first asked for."""
        found = self._jobs.get(of)
        if found is None:
            found = jobs_of(self._candidates[of], self._begin_ns, self._cores, self._predictor)
            self._jobs[of] = found
        return found

    def leading(self) -> list[Job]:
        """The jobs of the first candidate with its most urgent query."""
        jobs = self.jobs(0)
        return [job for job in jobs if not job.queries or job.queries[0] is jobs[0].queries[0]]

    def whole(self, of: int, job: Job) -> _Part:
        """A job up to its last unit."""
        tenant = job.tenant
        return _Part(of, job, tenant.cuts[-1], job.worth_ns * tenant.weight, job.deadline_ns)

    def trials(self, parts: tuple[_Part, ...]) -> list[_Trial]:
        """The parts on all shares of the device."""
        return [_Trial(parts, split) for split in self._splits[len(parts) - 1]]

    def with_another(self, base: tuple[_Part, ...]) -> list[_Trial]:
        """A group with one more member, whole, of one of the most urgent tenants that are not in it."""
        inside = [part.job.tenant.name for part in base]
        found: list[_Trial] = []
        tried = 0
        for of, candidate in enumerate(self._candidates):
            if candidate.tenant in inside:
                continue
            for job in self.jobs(of):
                found += self.trials((*base, self.whole(of, job)))
            tried += 1
            if tried == _PARTNERS:
                break
        return found

    def cut(self, judged: Sequence[_Judged], ways: int) -> list[_Trial]:
        """The most promising groups, with one member or another cut at places spread over its units."""
        found: list[_Trial] = []
        for each in sorted(judged, key=_by_rate)[-_BASES:]:
            parts = each.trial.parts
            for at, part in enumerate(parts):
                job = part.job
                tenant, units = job.tenant, job.tenant.cuts[-1]
                if part.end < units:
                    continue
                for end in _spread(tenant.cuts, job.start, ways):
                    after = self._predictor.latency_ns(tenant.name, job.shape, job.items, end, units, self._cores)
                    worth = part.worth_ns * (1.0 - after / max(job.remaining_ns, 1))
                    if worth > 0.0:
                        cut = _Part(part.of, job, end, worth, job.deadline_ns - after)
                        found.append(_Trial((*parts[:at], cut, *parts[at + 1 :]), each.trial.split))
        return found

    def judge(self, trials: list[_Trial]) -> list[_Judged]:
        """Predict groups, all at once, and say how they would do."""
        if not trials:
            return []
        latencies = self._predictor.group_ns([_group(trial) for trial in trials])
        return [self._judged(trial, int(latency)) for trial, latency in zip(trials, latencies, strict=True)]

    def _judged(self, trial: _Trial, latency: int) -> _Judged:
        parts, end = trial.parts, self._begin_ns + latency
        worth = 0.0
        latest = NEVER_NS
        spares_all = True
        for part in parts:
            worth += part.worth_ns
            latest = min(latest, part.latest_ns)
            if self._begin_ns <= part.job.next_start_ns < end:
                spares_all = False
        inside = [part.of for part in parts]
        for headroom, of in self._pressing:
            if of not in inside:
                if headroom < latency:
                    spares_all = False
                break
        return _Judged(trial, latency, latest, spares_all, worth / max(latency, 1))

    def best(self, judged: Sequence[_Judged], fallback: _Judged) -> _Judged:
        """The feasible group that gets most done in its time, of those that spare the others if there are any."""
        best: _Judged | None = None
        for each in judged:
            if self._begin_ns + each.latency_ns <= each.latest_ns and (
                best is None or (each.spares_all, each.rate) > (best.spares_all, best.rate)
            ):
                best = each
        return fallback if best is None else best

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
    return tuple(
        [
            Member(part.job.tenant.name, part.job.shape, part.job.items, part.job.start, part.end, share.size)
            for part, share in zip(trial.parts, trial.split, strict=True)
        ]
    )


def _by_rate(judged: _Judged) -> float:
    return judged.rate


def _spread(cuts: Sequence[int], start: int, ways: int) -> Sequence[int]:
    """At most `ways` cuts between `start` and the end, evenly spread."""
    inner = [cut for cut in cuts[1:-1] if cut > start] if start else cuts[1:-1]
    if len(inner) <= ways:
        return inner
    return [inner[(2 * way + 1) * len(inner) // (2 * ways)] for way in range(ways)]
