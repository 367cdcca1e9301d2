"""Lanes that widen: what starts while nobody waits gets the free lanes beside its own, up to its next boundary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from msgspec import structs

from cotenant.core.snapshot import Start
from cotenant.policies.decision_context import NEVER_NS, DecisionContext, extent
from cotenant.types import Tenant
from cotenant.work import CPU, Share

_WORTH = 0.75
"""Of its latency in one lane that a launch takes at most in twice as many, or it stays where it is. Of the models that
we have, those that gain less have long parts that run on one core. Chosen by hand."""


def unions(lanes: Sequence[Share], most: int) -> tuple[Share, ...]:
    """Neighbouring lanes of cores as one share, 2, 4, 8 and so on of them up to `most`; the largest first.

    No two of one size have a lane in common, so that little is loaded more than once.
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
    """A start in the largest of the shares `wide` that have its lane, whose other lanes are all in the mask `free`, and
    in which it is predicted quicker by enough; as it was where there is none.

    A query that arrives meanwhile finds fewer free lanes. So the launch ends at the last boundary that it reaches
    within the share `slack_share` of every tenant's slack (SLO - own latency), or at its next boundary if none comes so
    soon. Models that are not cut stay in one lane where they would take longer than that.
    """
    cuts, latency_ns = tenant.cuts, context.latency_ns
    whole = start.work.until(cuts[-1])
    narrow_ns = latency_ns(whole, start.share.size)
    for share in wide:
        if start.share.mask & ~share.mask or share.mask & ~(free | start.share.mask):
            continue
        needed, doublings = latency_ns(whole, share.size), (share.size // start.share.size).bit_length() - 1
        if needed > narrow_ns * _WORTH**doublings:
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
