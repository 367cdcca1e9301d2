"""Tenants, queries and outcomes. Work and its resources are in `work`.

Times are integer nanoseconds on one monotonic clock. All types are immutable: they cross process boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from msgspec import UNSET, Struct, UnsetType

from cotenant.errors import InvalidValueError
from cotenant.work import Work, may_split

DEFAULT_PRIORITY = 0
"""Stands for "no priority given"; as in Triton, 1 is the most urgent level and larger numbers are less urgent."""

UNSET_RANK = 1 << 16
"""`priority_rank` of no priority: behind every level that may be given."""


class Outcome(StrEnum):
    """How a query ended. Every query ends in exactly one."""

    ANSWERED = "answered"
    """Answered within its SLO."""
    LATE = "late"
    """Answered after its deadline."""
    REJECTED = "rejected"
    """Refused at arrival."""
    DROPPED = "dropped"
    """Dropped after admission: expired, hopeless or shed."""
    FAILED = "failed"
    """Its execution raised an error, or its model was removed."""
    CANCELLED = "cancelled"
    """Withdrawn by the client."""


class Cause(StrEnum):
    """Cause of a failure, where it changes what a client should do."""

    UNSERVED = "unserved"
    """The server cannot serve the query at any load: it starts, stops, or lacks the model. No part of the query has
    run, so the client may try another server."""


class LossCause(StrEnum):
    """Why a query was lost, that is not answered in time. Every lost query has exactly one cause. The values appear in
    logs and metrics."""

    OWN_RATE = "own_rate"
    """It waited behind queries of its own tenant, which was over its quota; or no tenant was over its quota."""
    NEIGHBOUR = "neighbour"
    """It waited behind another tenant, or was shed for it."""
    SLOW = "slow"
    """Launches of its tenant ran longer than the profile says."""
    STEAL_TIME = "steal_time"
    """Cores were taken by something else: launches ran longer than the profile says, but not on the processor."""
    SLO = "slo"
    """The profile says that it takes longer than its SLO."""
    FRONT_END = "front_end"
    """It came to the core late: its request was read, decoded or queued at a front-end until then. Or never, as the
    front-ends had no room for its body."""
    REPLY = "reply"
    """It was answered in time, but its response was written late."""
    RATE_LIMIT = "rate_limit"
    """Its tenant sent more queries a second than its `max_rate`."""
    CLIENT = "client"
    """Its client allowed less time than the SLO, or withdrew it."""
    FAILED = "failed"
    """A worker died, or the model raised."""
    GONE = "gone"
    """The model was unloaded or reloaded, or the server started or stopped."""


ANSWERS = (Outcome.ANSWERED, Outcome.LATE)
"""Outcomes with a result."""


def priority_rank(priority: int) -> int:
    """Map a priority (1 highest, 0 unset) to a sort key, smaller first; unset sorts after every level given."""
    return priority if priority > 0 else UNSET_RANK


class _Remembers:
    """Values derived from a tenant and cached for decisions; no fields, so that files do not contain them."""

    __slots__ = ("_works", "rank")

    _works: dict[tuple[int, int], Work]
    rank: int
    """`priority_rank` of the tenant's priority; smallest first."""


@dataclass(frozen=True, slots=True)
class Tenant(_Remembers):
    """Owner of one model with one SLO, weight and priority.

    - `cuts`: unit boundaries at which the model can be left and resumed, from 0 to the number of units.
    - `max_batch`: most rows of a batch along the batch dimension; 1: queries are never merged.
    - `splits`: runs of boundaries between which launches may have a part of a batch's rows. Unset: none.
    - `share`: guaranteed part of all device time; 0: a part of the rest, by weight.
    - `rate`: guaranteed queries a second, of one row of the first shape, even above the share. A query of more rows
      counts by its lane time. Unset: none.
    - `max_rate`: most queries a second, with a burst of one second. Unset: no limit.

    Raises InvalidValueError when a value is out of its range.
    """

    name: str
    slo_ns: int
    cuts: tuple[int, ...] = (0, 1)
    max_batch: int = 1
    weight: float = 1.0
    priority: int = DEFAULT_PRIORITY
    max_queue: int = 256
    splits: tuple[tuple[int, ...], ...] | UnsetType = UNSET
    share: float = 0.0
    rate: float | UnsetType = UNSET
    max_rate: float | UnsetType = UNSET

    def __post_init__(self) -> None:
        object.__setattr__(self, "_works", {})
        object.__setattr__(self, "rank", priority_rank(self.priority))
        where = f"tenant {self.name!r}"
        if self.slo_ns <= 0:
            raise InvalidValueError(where, "slo_ns", self.slo_ns, "a positive latency target")
        rising = all(a < b for a, b in zip(self.cuts, self.cuts[1:], strict=False))
        if len(self.cuts) < 2 or self.cuts[0] != 0 or not rising:
            raise InvalidValueError(where, "cuts", self.cuts, "unit boundaries that rise from 0 to the number of units")
        if self.max_batch < 1:
            raise InvalidValueError(where, "max_batch", self.max_batch, "at least 1")
        if not 0 < self.weight < float("inf"):
            raise InvalidValueError(where, "weight", self.weight, "a positive finite number")
        if not 0 <= self.share <= 1:
            raise InvalidValueError(where, "share", self.share, "a part of device time, above 0 to 1, or 0 (by weight)")
        if self.rate is not UNSET and not 0 < self.rate < float("inf"):
            raise InvalidValueError(where, "rate", self.rate, "a positive number of queries a second")
        if self.max_rate is not UNSET and not 0 < self.max_rate < float("inf"):
            raise InvalidValueError(where, "max_rate", self.max_rate, "a positive number of queries a second")
        if self.priority < 0:
            raise InvalidValueError(where, "priority", self.priority, "0 (unset) or a level from 1 (most urgent)")
        if self.max_queue < 1:
            raise InvalidValueError(where, "max_queue", self.max_queue, "at least 1")

    def __reduce__(self) -> tuple[type[Tenant], tuple[object, ...]]:
        return Tenant, tuple(getattr(self, each.name) for each in fields(self))

    @property
    def unit_count(self) -> int:
        """Number of units of the model."""
        return self.cuts[-1]

    def may_split(self, start: int, end: int) -> bool:
        """Whether units [start, end) may run for a part of the rows."""
        return self.splits is not UNSET and may_split(self.splits, start, end)

    def work(self, shape: int, items: int, start: int = 0) -> Work:
        """Rows of a declared shape, from unit `start` to the end of the model."""
        if start:
            return Work(self.name, shape, items, start, self.cuts[-1])
        found = self._works.get((shape, items))
        if found is None:
            found = self._works[shape, items] = Work(self.name, shape, items, 0, self.cuts[-1])
        return found


class Query(Struct, frozen=True, gc=False):
    """One inference inside the core.

    - `id`: number in the order of arrival, of queries, application queries and stages; breaks ties.
    - `rank`: `priority_rank` of the request's own priority; orders queries of one tenant only.
    - `items`: rows along the batch dimension.
    - `shape`: number of the declared shape with the profile for predictions.
    - `merge_key`: queries of one tenant may be merged if their keys are equal.
    - `expiry_ns`: absolute time of the client's own time-out, or None.
    """

    id: int
    tenant: str
    arrival_ns: int
    deadline_ns: int
    rank: int = UNSET_RANK
    items: int = 1
    shape: int = 0
    merge_key: int = 0
    expiry_ns: int | None = None


class StageQuery(Query, frozen=True, gc=False):
    """A query for one stage of the application query with the number `part_of`; else an ordinary query of the model."""

    part_of: int = 0
    stage: str = ""
