"""Admission control: pure functions of a query, its tenant's queue and its tenant's rate limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET, Struct, UnsetType

from cotenant.core.predictor import Predictor
from cotenant.core.queues import TenantQueue
from cotenant.core.snapshot import DropRule, PolicySpec
from cotenant.types import LossCause, Query, StageQuery

_HOPELESS = DropRule.HOPELESS


class Gate(Struct, frozen=True, gc=False, omit_defaults=True):
    """Admission state of a tenant: plain data with which a front-end refuses a request before it reads the body.

    `is_away`: the tenant's worker is dead and may be restarted. `opens_ns`: the time at which the rate limit admits the
    next query; 0 without a limit.
    """

    is_draining: bool = False
    is_away: bool = False
    max_waiting: int = 0
    """Length of a full queue; 0 where the queue has room."""
    opens_ns: int = 0

    def refusal(self, tenant: str, now_ns: int) -> Refusal | None:
        """Reason to refuse any query of the tenant now; None where the answer depends on the query."""
        if self.is_draining:
            return Refusal(_DRAINING, LossCause.GONE)
        if self.opens_ns > now_ns:
            return _too_many(tenant)
        return _full(tenant, self.max_waiting) if self.max_waiting else None


OPEN = Gate()


def gate_of(queue: TenantQueue | None, *, draining: bool, is_away: bool, now_ns: int) -> Gate:
    """The gate of a tenant at this time; open for a tenant without a queue."""
    if queue is None:
        return OPEN
    most = queue.tenant.max_queue
    is_full, opens_ns = len(queue.queries) >= most, 0 if queue.limit is None else queue.limit.opens_ns
    if not (is_full or draining or is_away or opens_ns > now_ns):
        return OPEN
    return Gate(draining, is_away, most if is_full else 0, max(0, opens_ns))


class Refusal(NamedTuple):
    """Why a query is refused, and the cause of the loss if it is known at once."""

    reason: str
    cause: LossCause | UnsetType = UNSET
    is_full: bool = False
    """Whether the tenant's queue is full."""
    needed_ns: int = 0
    """Shortest predicted latency, if the query is refused because that exceeds the tenant's SLO; else 0."""


def hopeless(needed_ns: int, left_ns: int) -> str:
    """Reason of dropping a query that needs more time than is left to its deadline."""
    left = f"{left_ns / 1e6:.1f} ms to the deadline" if left_ns >= 0 else f"{-left_ns / 1e6:.1f} ms after the deadline"
    return f"hopeless: {needed_ns / 1e6:.1f} ms of work left, {left}"


_DRAINING = "the server is shutting down"


def _too_many(tenant: str) -> Refusal:
    return Refusal(f"tenant {tenant!r} sends more queries a second than its max_rate", LossCause.RATE_LIMIT)


def _full(tenant: str, waiting: int) -> Refusal:
    return Refusal(f"the queue of {tenant!r} is full ({waiting} waiting)", is_full=True)


def most_cores(spec: PolicySpec) -> int:
    """Most cores that a query can get: all cores as the only member of a group, else those of the largest share."""
    if not spec.grouped:
        return max([share.size for share in spec.shares])
    mask = 0
    for lane in spec.lanes:
        mask |= lane.mask
    return mask.bit_count()


def sizes_to_try(spec: PolicySpec) -> tuple[int, ...]:
    """Numbers of cores that a query can get alone, largest first: admission tries them in this order.

    A policy that launches in unions of its lanes may take any number of cores. The largest number is often not the
    fastest: each unit has a number of threads above which synchronisation costs more than it gains.
    """
    most, widest = most_cores(spec), max([lane.size for lane in spec.lanes])
    if spec.grouped or most == widest:
        return (most,)
    return tuple(range(most, min([lane.size for lane in spec.lanes]) - 1, -1))


def refusal(
    query: Query,
    queue: TenantQueue | None,
    *,
    drop: DropRule,
    predictor: Predictor,
    sizes: Sequence[int],
    draining: bool,
    now_ns: int,
) -> Refusal | None:
    """Why the query is refused; None when it is admitted.

    `sizes` is the result of `sizes_to_try`. Stages of applications belong to admitted queries: no rate limits them.
    """
    if draining and not isinstance(query, StageQuery):
        return Refusal(_DRAINING, LossCause.GONE)
    if queue is None:
        return Refusal(f"tenant {query.tenant!r} is not served", LossCause.GONE)
    tenant = queue.tenant
    if queue.limit is not None and queue.limit.opens_ns > now_ns and not isinstance(query, StageQuery):
        return _too_many(tenant.name)
    if len(queue.queries) >= tenant.max_queue:
        return _full(tenant.name, tenant.max_queue)
    if query.expiry_ns is not None and query.expiry_ns <= now_ns:
        return Refusal("its time-out has passed")
    if drop is _HOPELESS:
        work, left_ns = tenant.work(query.shape, query.items), query.deadline_ns - now_ns
        best = predictor.latency_ns(work, sizes[0])
        if best > left_ns and len(sizes) > 1:
            best = min([predictor.latency_ns(work, size) for size in sizes])
        if best > left_ns:
            reason = f"{best / 1e6:.1f} ms of work do not fit into {left_ns / 1e6:.1f} ms"
            if left_ns < 0:
                reason = f"its deadline passed {-left_ns / 1e6:.1f} ms before its body had come and was decoded"
            return Refusal(reason, LossCause.SLO, needed_ns=best) if best > tenant.slo_ns else Refusal(reason)
    return None
