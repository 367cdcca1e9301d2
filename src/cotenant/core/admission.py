"""Whether a query may come in at all: a pure function of the query and its tenant's queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import DropRule, PolicySpec, QueueView
from cotenant.types import LossCause, Query, StageQuery

_HOPELESS = DropRule.HOPELESS


class Refusal(NamedTuple):
    """Why a query is refused, and the cause of its loss where that is known at once."""

    reason: str
    cause: LossCause | UnsetType = UNSET
    is_full: bool = False
    """Whether it is for want of room in the queue."""
    needed_ns: int = 0
    """Predicted latency at best, where that is above the tenant's SLO and the reason; else 0."""


def hopeless(needed_ns: int, left_ns: int) -> str:
    """Why a query is given up that needs more than is left to its deadline."""
    left = f"{left_ns / 1e6:.1f} ms to the deadline" if left_ns >= 0 else f"{-left_ns / 1e6:.1f} ms after the deadline"
    return f"hopeless: {needed_ns / 1e6:.1f} ms of work left, {left}"


def most_cores(spec: PolicySpec) -> int:
    """The cores that a query can get at best: all of them as the only member of a group, else the largest share."""
    if not spec.grouped:
        return max([share.size for share in spec.shares])
    mask = 0
    for lane in spec.lanes:
        mask |= lane.mask
    return mask.bit_count()


def sizes_to_try(spec: PolicySpec) -> tuple[int, ...]:
    """The numbers of cores that a query can get alone, the most first: admission tries them in this order.

    A policy that launches in unions of its lanes may take any number of them, and with many cores the most are seldom
    the fastest: each unit has a number beyond which further threads cost it more than they do.
    """
    most, widest = most_cores(spec), max([lane.size for lane in spec.lanes])
    if spec.grouped or most == widest:
        return (most,)
    return tuple(range(most, min([lane.size for lane in spec.lanes]) - 1, -1))


def refusal(
    query: Query,
    queue: QueueView | None,
    *,
    drop: DropRule,
    predictor: Predictor,
    sizes: Sequence[int],
    draining: bool,
    now_ns: int,
) -> Refusal | None:
    """Say why the query is refused, or None when it is admitted.

    `sizes` are what `sizes_to_try` gives.
    """
    if draining and not isinstance(query, StageQuery):  # a stage belongs to a query that is inside already
        return Refusal("the server is shutting down", LossCause.GONE)
    if queue is None:
        return Refusal(f"tenant {query.tenant!r} is not served", LossCause.GONE)
    tenant = queue.tenant
    if len(queue.queries) >= tenant.max_queue:
        return Refusal(f"the queue of {tenant.name!r} is full ({tenant.max_queue} waiting)", is_full=True)
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
