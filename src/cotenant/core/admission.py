"""Whether a query may come in at all: a pure function of the query and its tenant's queue."""

from __future__ import annotations

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import DropRule, Policy, QueueView
from cotenant.types import Query, StageQuery

_HOPELESS = DropRule.HOPELESS


def most_cores(policy: Policy) -> int:
    """The cores that a query can get at best: all of them as the only member of a group, else the largest lane."""
    if not policy.grouped:
        return max([lane.size for lane in policy.lanes])
    mask = 0
    for lane in policy.lanes:
        mask |= lane.mask
    return mask.bit_count()


def refusal(
    query: Query,
    queue: QueueView | None,
    *,
    drop: DropRule,
    predictor: Predictor,
    widest: int,
    draining: bool,
    now_ns: int,
) -> str | None:
    """Say why the query is refused, or None when it is admitted.

    `widest` is what `most_cores` gives.
    """
    if draining and not isinstance(query, StageQuery):  # a stage belongs to a query that is inside already
        return "the server is shutting down"
    if queue is None:
        return f"tenant {query.tenant!r} is not served"
    tenant = queue.tenant
    if len(queue.queries) >= tenant.max_queue:
        return f"the queue of {tenant.name!r} is full ({tenant.max_queue} waiting)"
    if query.expiry_ns is not None and query.expiry_ns <= now_ns:
        return "its time-out has passed"
    if drop is _HOPELESS:
        best = predictor.latency_ns(tenant.work(query.shape, query.items), widest)
        if now_ns + best > query.deadline_ns:
            return f"{best / 1e6:.1f} ms of work do not fit into {(query.deadline_ns - now_ns) / 1e6:.1f} ms"
    return None
