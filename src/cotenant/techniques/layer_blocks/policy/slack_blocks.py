"""Ours: who must go on, then deadlines; cores by a price of time; blocks planned over the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, DropRule, Snapshot
from cotenant.policies.desk import Key, Stretch
from cotenant.techniques.layer_blocks.policy.block_policy import FEW_LANES, BlockPolicy, Target
from cotenant.techniques.layer_blocks.policy.rules_slack import decide_slack
from cotenant.techniques.layer_blocks.policy.tables import PRICES
from cotenant.types import Query, Tenant

FEW_PATIENCE, MANY_PATIENCE = 1.0, 5.0
"""See `SlackBlocks.patience`: tried on two real cores, and on 64 in drawn worlds, where 2 costs a third in mixes."""


@dataclass(frozen=True, slots=True)
class SlackBlocks(BlockPolicy):
    """Who must go on, then deadlines; each block gets the cores that its slack needs and a part of what is left.

    Where its blocks are cut and how many cores each holds is planned over the rest of the model by dynamic programming,
    at a price of time: see `rules_slack`.
    `target`: the share of what is left to its deadline that a query is planned to take. A block lasts `stretch` of the
    shortest SLO at most, and never more than `quantum_ms`, as far as cuts allow it. `narrow`: with fewer free cores
    than this part of those that it should have, a query does not begin while others run. `patience`: who has begun goes
    before earlier deadlines where less than so many times what it needs at least is left to its own; left out, 1 on up
    to four lanes, where a heavy model would keep all that there is from the others, and 5 on more. `memory`: what
    traffic costs in plans and in the choice of versions, as a part of what the whole machine costs for the time that it
    takes at full bandwidth.
    """

    target: Target = 0.7
    stretch: Stretch = 0.07
    quantum_ms: Annotated[float, Meta(gt=0, le=1000)] = 4.0
    narrow: Annotated[float, Meta(ge=0, le=1)] = 0.2
    patience: Annotated[float, Meta(ge=1)] | None = None
    memory: Annotated[float, Meta(ge=0, le=10)] = 0.5

    name: ClassVar[str] = "slack_blocks"
    adapts: ClassVar[bool] = True
    plans: ClassVar[bool] = True

    def __post_init__(self) -> None:
        BlockPolicy.__post_init__(self)
        self.check("stretch", 0 <= self.stretch <= 1, "a share from 0 to 1")
        self.check("quantum_ms", 0 < self.quantum_ms <= 1000, "above 0, up to 1000")
        self.check("narrow", 0 <= self.narrow <= 1, "a share")
        self.check("patience", self.patience is None or self.patience >= 1, "at least 1")
        self.check("memory", 0 <= self.memory <= 10, "a number from 0 to 10")

    def knobs(self, shortest_slo_ns: int) -> tuple[float, ...]:
        """The options as the rules take them, for the shortest SLO of a tenant."""
        quantum_ns = min(self.quantum_ms * 1e6, self.stretch * shortest_slo_ns)
        patience = self.patience
        if patience is None:
            patience = FEW_PATIENCE if len(self.lanes) <= FEW_LANES else MANY_PATIENCE
        return self.target, quantum_ns, self.narrow, patience, self.memory

    @property
    def byte_price(self) -> float:
        """See `memory`."""
        return self.memory

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """(priority, deadline, arrival)."""
        return (tenant.rank, query.deadline_ns, query.id)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """See Policy."""
        floor = self.floor(snapshot, memory)
        tables = floor.tables
        count = decide_slack(
            self.knobs(min([queue.tenant.slo_ns for queue in snapshot.queues.values()])),
            self.drop is DropRule.HOPELESS,
            snapshot.now_ns,
            floor.free,
            floor.total,
            tables.bandwidth,
            tables.beside,
            len(PRICES),
            tables.dims,
            tables.spans,
            tables.moved,
            tables.ends,
            tables.widths,
            tables.lefts,
            tables.works,
            tables.preferred,
            floor.jobs,
            floor.rows,
            floor.out,
        )
        return floor.decision(count)
