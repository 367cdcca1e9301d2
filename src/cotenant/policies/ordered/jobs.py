"""What is inside, as a policy that selects sees it: jobs in rows that sort into its order, a queue's made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """What jobs are worth, of one or of columns of many: whether they are within an entitlement, attainment and weight
    of their tenants, their work, and their answers. Of two the one goes that is less in the first in which they differ.
    """

    def __call__(
        self, entitled: Number, fared: Number, weight: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """See above."""


@dataclass(slots=True)
class Stakes:
    """What goes into the worth of jobs in one decision: attainments and weights of tenants, by their numbers."""

    worth: Worth
    fared: list[float]
    weights: Sequence[float]

    def of(self, job: Job) -> Sequence[float]:
        """The worth of a job."""
        _, _, _, _, entitled, answers, owner, work_ns = job
        return self.worth(entitled, self.fared[owner], self.weights[owner], work_ns, answers)

    def lost(self, owner: int) -> None:
        """A job of this tenant goes: the next ones of it are worth more."""
        self.fared[owner] *= _FADES


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

    def select(self, stakes: Stakes) -> list[tuple[Job, Job]]:
        """Take out jobs so that the others can be in time: each, and the one that would be late else."""

    def behind_the_due(self, paused: int) -> list[int]:
        """Numbers of those beyond entitlements that are to wait for one within."""


class Waiting:
    """The queries of a queue at one of its editions, as jobs.

    `rank` is the priority of all, None where they differ. `jobs` are as they were told last: by `predictor`, which is
    None before, and for the tenant's number `owner`; `rows` is room to keep them as columns.
    """

    __slots__ = ("_dues", "_queue", "edition", "jobs", "owner", "predictor", "rank", "rows")

    def __init__(self, queue: QueueView, dues: Mapping[int, int]) -> None:
        """Of a queue that is not empty, whose keys begin with rank and deadline and end with the number; `dues` tells
        when those are due that are within entitlements."""
        self.edition = queue.edition
        self.rank: int | None = queue.keys[0][0]
        if not queue.are_alike and any(key[0] != self.rank for key in queue.keys):
            self.rank = None
        self.jobs: list[Job] = []
        self._queue = queue.tenant, tuple(queue.queries), tuple(queue.keys)
        self._dues = [dues.get(query.id) for query in queue.queries] if dues else None
        self.rows: NDArray[np.int64] | None = None
        self.predictor: Predictor | None = None
        self.owner = -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Waiting) and self.edition is other.edition

    __hash__ = None  # type: ignore[assignment]

    def tell(self, owner: int, predictor: Predictor, needed_ns: Callable[[Work], int]) -> None:
        """Make the jobs, for the tenant's number and what work is believed to take of a lane now."""
        self.predictor, self.owner, self.rows = predictor, owner, None
        tenant, queries, keys = self._queue
        name, dues = tenant.name, self._dues
        found: dict[tuple[int, int], tuple[int, int]] = {}
        jobs = self.jobs = []
        for at, (query, key) in enumerate(zip(queries, keys, strict=True)):
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
