"""The result of a search for a group."""

from __future__ import annotations

from typing import NamedTuple

from cotenant.core.actions import GroupBasis
from cotenant.core.predictor import Group
from cotenant.core.snapshot import Snapshot, Start
from cotenant.techniques.overlap.policy.group_jobs import GroupJob
from cotenant.work import Share


class Choice(NamedTuple):
    """A group to start. `latest_ns` is the last start at which its prediction meets the deadlines. `longest_ns` is as
    in GroupBasis."""

    group: Group
    jobs: tuple[GroupJob, ...]
    split: tuple[Share, ...]
    latency_ns: int
    latest_ns: int
    longest_ns: int

    def starts(self, number: int, after: tuple[int, ...] = (), *, ahead: bool = False) -> tuple[Start, ...]:
        """The starts of the group, behind the launches `after`.

        `number` is that of its first launch; `ahead` says that the group was chosen while the one before ran.
        """
        latency, basis = self.latency_ns, GroupBasis(number, ahead, self.longest_ns)
        return tuple(
            [
                Start(work, job.queries, share, latency, job.batch, after, basis=basis)
                for (work, _), job, share in zip(self.group, self.jobs, self.split, strict=True)
            ]
        )

    def is_there(self, snapshot: Snapshot) -> bool:
        """Whether all its queries and batches still wait at the same position."""
        for job in self.jobs:
            if job.batch is not None:
                if all(batch.id != job.batch or batch.next_unit != job.start for batch in snapshot.paused):
                    return False
                continue
            queue = snapshot.queues.get(job.tenant.name)
            if queue is None:
                return False
            waiting = {query.id for query in queue.queries}
            if any(query.id not in waiting for query in job.queries):
                return False
        return True
