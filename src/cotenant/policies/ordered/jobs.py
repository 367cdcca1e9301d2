"""What is inside, as a policy that selects sees it: jobs in rows that sort into its order, a queue's made once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol, TypeVar

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import QueueView
from cotenant.policies.ordered.reserve import Reserve
from cotenant.work import Work

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Job = tuple[int, int, int, int, int, int, int, int]
"""Its priority, smallest first; its deadline; the number of its query, or below zero that of a batch; its deadline, or
when it is due within an entitlement; whether it is (1 or 0); the queries in it; the number of its tenant; what it takes
of a lane. They sort into the policy's order."""
RANK, DEADLINE, NUMBER, DUE, ENTITLED, ANSWERS, OWNER, WORK = range(8)

BEHIND = 1 << 20
"""Added to the priority of what stands back: behind everything that does not."""

Number = TypeVar("Number", "float", "NDArray[np.float64]")
_FADES = 1 - 1 / 64
"""What a tenant's attainment counts for once one of its queries goes."""


class Worth(Protocol):
    """What jobs are worth, of one or of columns of many: whether they are within an entitlement, attainment, weight and
    rank of their tenants, their work, and their answers. Of two the one goes that is less in the first in which they
    differ.
    Which of two jobs of one tenant is worth less does not depend on the tenant's attainment, if that is above zero.
    """

    def __call__(
        self, entitled: Number, fared: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """See above."""


@dataclass(slots=True)
class Stakes:
    """What goes into the worth of jobs in one decision: attainments, weights and ranks of tenants, by their numbers."""

    worth: Worth
    fared: list[float]
    weights: Sequence[float]
    ranks: Sequence[int]

    def of(self, job: Job) -> Sequence[float]:
        """The worth of a job."""
        _, _, _, _, entitled, answers, owner, work_ns = job
        return self.worth(entitled, self.fared[owner], self.weights[owner], self.ranks[owner], work_ns, answers)

    def place_of(self, job: Job) -> Sequence[float]:
        """Worth of a job at equal attainments: orders the jobs of one tenant by worth, whatever its attainment is."""
        _, _, _, _, entitled, answers, owner, work_ns = job
        return self.worth(entitled, 1.0, self.weights[owner], self.ranks[owner], work_ns, answers)

    def lost(self, owner: int) -> None:
        """A job of this tenant goes: the next ones of it are worth more."""
        self.fared[owner] *= _FADES


class Candidates:
    """Possible victims of one priority: a heap by worth for each tenant, and a heap of the heads of these.

    A victim lowers the attainment of its tenant. That changes the worth of the tenant's other jobs, but not their
    order: the tenant's heap remains valid. Outdated entries in the heap of heads are skipped (lazy removal).
    """

    __slots__ = ("_current", "_heads", "_job_at", "_own", "_stakes")

    def __init__(self, stakes: Stakes, job_at: Callable[[int], Job]) -> None:
        """Empty at first; `job_at` gives a job by its position."""
        self._stakes, self._job_at = stakes, job_at
        self._own: dict[int, list[tuple[Sequence[float] | int, int]]] = {}
        """Heaps of (place, position) by tenant."""
        self._heads: list[tuple[Sequence[float], int, int]] = []
        """Worth, position and tenant."""
        self._current: dict[int, tuple[Sequence[float], int, int]] = {}
        """The valid entry of `_heads` by tenant."""

    def add(self, jobs: Iterable[tuple[int, Sequence[float] | int, int]]) -> None:
        """Add jobs as (tenant, place, position); places order the jobs of one tenant by worth, as `Stakes.place_of`."""
        own = self._own
        before: dict[int, tuple[Sequence[float] | int, int] | None] = {}
        for owner, place, at in jobs:
            heap = own.get(owner)
            if heap is None:
                heap = own[owner] = []
            before.setdefault(owner, heap[0] if heap else None)
            heappush(heap, (place, at))
        for owner, head in before.items():
            if own[owner][0] is not head:
                self._rank(owner)

    def pop(self) -> int:
        """Remove the job that is worth least, the first one of equal jobs, and give its position. Its tenant's
        attainment fades. There must be a job."""
        while True:
            head = heappop(self._heads)
            owner = head[2]
            if self._current.get(owner) is head:
                heap = self._own[owner]
                heappop(heap)
                self._stakes.lost(owner)
                if heap:
                    self._rank(owner)
                else:
                    del self._current[owner]
                return head[1]

    def _rank(self, owner: int) -> None:
        """Enter the head of a tenant's heap with its present worth."""
        at = self._own[owner][0][1]
        head = self._current[owner] = self._stakes.of(self._job_at(at)), at, owner
        heappush(self._heads, head)


class Selection(Protocol):
    """The jobs of one decision, in the policy's order; those that are given up leave it."""

    def is_timely(self, *, due: bool) -> bool:
        """Whether all would be in time, or with `due` done when they are due, were the lanes one that is as fast."""

    def hopeless(self) -> list[tuple[int, int, int]]:
        """Take out those that would be late as the first: of each the number, what it needs, and what is left to it."""

    def is_within(self) -> bool:
        """Whether all are within entitlements."""

    def stand_back(self, stakes: Stakes, reserve: Reserve | None) -> list[int]:
        """Put those behind all others who have to wait for others, or for what is still to come; their numbers."""

    def select(self, stakes: Stakes, most: int) -> list[tuple[Job, Job]]:
        """Remove victims, `most` at most, so that the other jobs can be in time: each with the job that was late."""

    def behind_the_due(self, paused: int) -> list[int]:
        """Numbers of those beyond entitlements that are to wait for one within."""


class Waiting:
    """The queries of a short queue at one of its editions, as jobs in a list.

    `rank` is the priority of all, None where they differ. `jobs` are as they were told last: by `predictor`, which is
    None before, and for the tenant's number `owner`; `rows` is room to keep them as columns.
    """

    __slots__ = ("_dues", "edition", "jobs", "owner", "predictor", "rank", "rows")

    def __init__(self, queue: QueueView, dues: Mapping[int, int]) -> None:
        """Of a queue that is not empty, whose keys begin with rank and deadline and end with the number; `dues` tells
        when those are due that are within entitlements."""
        self.edition = queue.edition
        self.rank: int | None = queue.keys[0][0]
        if not queue.are_alike and any(key[0] != self.rank for key in queue.keys):
            self.rank = None
        self.jobs: list[Job] = []
        self.rows: NDArray[np.int64] | None = None
        self._dues = [dues.get(query.id) for query in queue.queries] if dues else None
        self.predictor: Predictor | None = None
        self.owner = -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Waiting) and self.edition is other.edition

    __hash__ = None  # type: ignore[assignment]

    def tell(self, queue: QueueView, owner: int, predictor: Predictor, needed_ns: Callable[[Work], int]) -> None:
        """Make the jobs, for the tenant's number and what work is believed to take of a lane now. The queue is that of
        this edition."""
        self.predictor, self.owner, self.rows = predictor, owner, None
        tenant, dues = queue.tenant, self._dues
        name = tenant.name
        found: dict[tuple[int, int], tuple[int, int]] = {}
        jobs = self.jobs = []
        for at, (query, key) in enumerate(zip(queue.queries, queue.keys, strict=True)):
            kind = query.shape, query.items
            known = found.get(kind)
            if known is None:
                work_ns = needed_ns(tenant.work(*kind))
                known = found[kind] = work_ns, predictor.sure_ns(name, work_ns, tenant.slo_ns) - work_ns if dues else 0
            deadline, due = key[1], None if dues is None else dues[at]
            is_within = due is not None
            if due is not None:  # early by what it may run longer, so that it is in time even so
                due = min(due, deadline - known[1])
            jobs.append((key[0], deadline, key[2], deadline if due is None else due, is_within, 1, owner, known[0]))
