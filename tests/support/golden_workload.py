"""What the golden traces are traces of: tenants, policies and seeded queries."""

from __future__ import annotations

from random import Random

from bench._clockwork import Clockwork
from cotenant.core.snapshot import DropRule, Policy
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.policies.ordered.selective import Fair, Most, Shares
from cotenant.policies.ordered.sjf import Sjf
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.layer_blocks.policy.published import LayerBlock
from cotenant.techniques.layer_blocks.policy.slack_blocks import SlackBlocks
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.techniques.partitions.policy.duty_cycle import DutyCycle
from cotenant.types import Query, Tenant, priority_rank
from cotenant.work import Round, Slot
from scenario import MS, ONE_LANE, TWO_LANES

MIXED = (Slot("embed", 4, 90.0), Slot("spot", 1, 60.0))
ROUNDS = (Round(40 * MS, MIXED), Round(70 * MS, (Slot("tag", 2, 30.0), Slot("embed", 2, 30.0))))
"""Of a plan in which one tenant has two slots, and one has none."""
RUNS: dict[str, tuple[Policy, float]] = {
    "fcfs": (Fcfs(ONE_LANE, DropRule.EXPIRED), 0.9),
    "fcfs-no-drop": (Fcfs(ONE_LANE, DropRule.NONE), 1.2),
    "sjf": (Sjf(ONE_LANE), 1.1),
    "sjf-preempt-two-lanes": (Sjf(TWO_LANES, preempt=True, slack_share=0.0), 1.1),
    "edf": (Edf(ONE_LANE), 1.1),
    "edf-widened": (Edf(TWO_LANES, preempt=True, widen=2), 0.6),
    "edf-two-lanes": (Edf(TWO_LANES, DropRule.EXPIRED, preempt=False), 1.1),
    "edf-every-cut": (Edf(ONE_LANE, slack_share=0.0), 0.8),
    "shares": (Shares(TWO_LANES), 1.6),
    "most": (Most(TWO_LANES), 1.6),
    "fair": (Fair(ONE_LANE), 1.4),
    "clockwork": (Clockwork(ONE_LANE), 1.1),
    "overlap": (Overlap(TWO_LANES), 1.1),
    "layer-block": (LayerBlock(TWO_LANES), 1.1),
    "slack-blocks": (SlackBlocks(TWO_LANES), 1.1),
    "duty-cycle": (DutyCycle(TWO_LANES, preempt=True, rounds=ROUNDS), 1.1),
}
"""Policy and load of each run."""
TENANTS = (
    Tenant("detect", 250 * MS, cuts=(0, 3, 6, 10, 12), weight=2.0),
    Tenant("embed", 60 * MS, max_batch=8),
    Tenant("spot", 12 * MS, priority=1),
    Tenant("tag", 90 * MS, cuts=(0, 1, 2), max_batch=4, max_queue=4),
)
TABLES = {
    "detect": LatencyTable(
        (
            *(LatencyRow(0, 1, 1, 62 * MS), LatencyRow(0, 1, 2, 40 * MS)),
            *(LatencyRow(1, 1, 1, 55 * MS), LatencyRow(1, 1, 2, 55 * MS)),
        ),
        (4.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 3.0, 1.0, 0.5),
        1.1,
    ),
    "embed": LatencyTable((LatencyRow(0, 1, 2, 6 * MS), LatencyRow(0, 8, 2, 20 * MS), LatencyRow(0, 1, 1, 9 * MS))),
    "spot": LatencyTable((LatencyRow(0, 1, 1, 1 * MS), LatencyRow(0, 1, 2, 1 * MS))),
    "tag": LatencyTable(
        tuple(LatencyRow(0, items, cores, ms * MS) for items, ms in ((1, 10), (4, 22)) for cores in (1, 2)),
        (1.0, 2.0),
        1.05,
    ),
}
MIX = {"detect": (0.2, 44 * MS), "embed": (0.4, 6 * MS), "spot": (0.25, 1 * MS), "tag": (0.15, 10 * MS)}
"""Share of the queries and latency of each tenant."""
COUNT = 60


def workload(load: float) -> list[Query]:
    rng = Random(2026)
    mean_ns = sum(share * latency for share, latency in MIX.values()) / load
    queries, now = [], 0
    for number in range(COUNT):
        now += round(rng.expovariate(1 / mean_ns)) if rng.random() < 0.9 else 0  # some come at the same instant
        tenant = rng.choices(TENANTS, [MIX[tenant.name][0] for tenant in TENANTS])[0]
        slo_ns = tenant.slo_ns if rng.random() < 0.95 else tenant.slo_ns // 20  # some cannot be met at all
        is_batched = tenant.max_batch > 1
        queries.append(
            Query(
                number,
                tenant.name,
                now,
                now + slo_ns,
                priority_rank(tenant.priority),
                items=rng.choice((1, 1, 1, 2)) if is_batched else 1,
                shape=rng.choice((0, 0, 1)) if tenant.name == "detect" else 0,
                merge_key=rng.choice((0, 0, 0, 1)) if is_batched else 0,
                expiry_ns=now + 40 * MS if rng.random() < 0.1 else None,
            )
        )
    return queries
