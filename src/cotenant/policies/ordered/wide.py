"""Widening: while no query waits, a launch also gets the free lanes beside its own, up to its next boundary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from msgspec import structs

from cotenant.core.snapshot import Start
from cotenant.policies.decision_context import NEVER_NS, DecisionContext, extent
from cotenant.types import Tenant
from cotenant.work import CPU, Share

_LEAST_GAIN = 0.75
"""Largest ratio of latencies at which doubling the lanes counts as a gain. Chosen by hand
(docs/decisions/0042-lanes-that-widen.md)."""


def unions(lanes: Sequence[Share], most: int) -> tuple[Share, ...]:
    """Shares of 2, 4, 8, ... up to `most` neighbouring lanes of cores, the largest first.

    Shares of one size are disjoint, so that models are loaded few times.
    """
    cores = [lane for lane in lanes if lane.device == CPU]
    made: list[Share] = []
    count = 2
    while count <= min(most, len(cores)):
        blocks = [cores[at : at + count] for at in range(0, len(cores) - count + 1, count)]
        made = [*(reduce(Share.joined, block) for block in blocks), *made]
        count *= 2
    return tuple(made)


def widened(
    context: DecisionContext, start: Start, tenant: Tenant, wide: Sequence[Share], free: int, slack_share: float
) -> Start:
    """The start in the largest wider share that qualifies; unchanged if none does.

    1. A share of `wide` qualifies if it contains the start's lane and its other slots are in the mask `free`.
       Each doubling of lanes has to multiply the latency by at most _LEAST_GAIN.
    2. The launch ends at the last boundary within `slack_share` of every tenant's slack (SLO - own latency), or at its
       next boundary. A model without cuts qualifies only if it ends within that time.
    """
    cuts, latency_ns = tenant.cuts, context.latency_ns
    whole = start.work.until(cuts[-1])
    narrow_ns = latency_ns(whole, start.share.size)
    for share in wide:
        if start.share.mask & ~share.mask or share.mask & ~(free | start.share.mask):
            continue
        needed, doublings = latency_ns(whole, share.size), (share.size // start.share.size).bit_length() - 1
        if needed > narrow_ns * _LEAST_GAIN**doublings:
            continue
        allowed = NEVER_NS
        for queue in context.snapshot.queues.values():
            other = queue.tenant
            slack = other.slo_ns - latency_ns(other.work(0, 1), start.share.size)
            allowed = min(allowed, max(0, int(slack * slack_share)))
        if needed <= allowed or len(cuts) > 2:
            work, needed = extent(latency_ns, tenant, whole, share.size, needed, allowed)
            return structs.replace(start, work=work, share=share, predicted_ns=needed)
    return start
