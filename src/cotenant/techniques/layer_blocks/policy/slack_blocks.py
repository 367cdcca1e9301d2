"""Policy `slack_blocks`: blocks planned over the whole model at a price of time, and lanes by slack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Snapshot
from cotenant.policies.decision_context import Key, SlackShare
from cotenant.techniques.layer_blocks.policy.block_jobs import (
    BlockJob,
    BlockSnapshot,
    BlockStart,
    Change,
    JobDrop,
    percent,
)
from cotenant.techniques.layer_blocks.policy.block_model import BlockModel
from cotenant.techniques.layer_blocks.policy.block_policy import FEW_LANES, BlockPolicy, Target
from cotenant.types import Query, Tenant

FEW_PATIENCE, MANY_PATIENCE = 1.0, 5.0
"""See `SlackBlocks.patience`: tried on two real cores, and on 64 in drawn worlds, where 2 costs a third in mixes."""


@dataclass(frozen=True, slots=True)
class SlackBlocks(BlockPolicy):
    """Who must go on, then deadlines; each block gets the cores that its slack needs and a part of what is left.

    Where its blocks are cut and how many cores each holds is planned over the rest of the model by dynamic programming,
    at a price of time: see `price_plans`.
    `target`: the share of what is left to its deadline that a query is planned to take. A block lasts `slack_share` of
    the shortest SLO at most, never more than `quantum_ms`, as far as cuts allow it. `narrow`: with fewer free cores
    than this part of those that it should have, a query does not begin while others run. `patience`: who has begun goes
    before earlier deadlines where less than so many times what it needs at least is left to its own; left out, 1 on up
    to four lanes, where a heavy model would keep all that there is from the others, and 5 on more. `memory`: what
    traffic costs in plans and in the choice of versions, as a part of what the whole machine costs for the time that it
    takes at full bandwidth.
    """

    target: Target = 0.7
    slack_share: SlackShare = 0.07
    quantum_ms: Annotated[float, Meta(gt=0, le=1000)] = 4.0
    narrow: Annotated[float, Meta(ge=0, le=1)] = 0.2
    patience: Annotated[float, Meta(ge=1)] | None = None
    memory: Annotated[float, Meta(ge=0, le=10)] = 0.5

    name: ClassVar[str] = "slack_blocks"
    adapts: ClassVar[bool] = True
    plans: ClassVar[bool] = True

    def __post_init__(self) -> None:
        BlockPolicy.__post_init__(self)
        self.check("slack_share", 0 <= self.slack_share <= 1, "a share from 0 to 1")
        self.check("quantum_ms", 0 < self.quantum_ms <= 1000, "above 0, up to 1000")
        self.check("narrow", 0 <= self.narrow <= 1, "a share")
        self.check("patience", self.patience is None or self.patience >= 1, "at least 1")
        self.check("memory", 0 <= self.memory <= 10, "a number from 0 to 10")

    def quantum_ns(self, shortest_slo_ns: int) -> float:
        """The longest duration of a block, for the shortest SLO of a tenant."""
        return min(self.quantum_ms * 1e6, self.slack_share * shortest_slo_ns)

    @property
    def used_patience(self) -> float:
        """`patience`, or its default for this number of lanes."""
        if self.patience is not None:
            return self.patience
        return FEW_PATIENCE if len(self.lanes) <= FEW_LANES else MANY_PATIENCE

    @property
    def byte_price(self) -> float:
        """The option `memory`."""
        return self.memory

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """(priority, deadline, arrival)."""
        return (tenant.rank, query.deadline_ns, query.id)

    def changes(self, blocks: BlockSnapshot, snapshot: Snapshot) -> Sequence[Change]:
        """One decision, for the shortest SLO of the tenants."""
        return self.within(self.quantum_ns(min([queue.tenant.slo_ns for queue in snapshot.queues.values()])), blocks)

    def within(self, quantum_ns: float, blocks: BlockSnapshot) -> list[Change]:
        """One decision, with blocks that end after a quantum.

        A job needs the lanes of the lowest price of time at which it takes `target` of the time left to its deadline.
        The lanes that all needs leave are divided equally, as far as they make blocks faster: a job alone uses all
        lanes, many jobs share, and a late job pays with more lanes. If the needs exceed the machine, later jobs in the
        order get the lanes that are left. If fewer than `narrow` of its lanes are free, a job that has not begun waits
        for a running block, and no other job passes it. A waiting job that needs more core time than a new query of its
        tenant, while others wait, is shed.
        """
        changes = blocks.shed_hopeless()
        now, free, total, target = blocks.now_ns, blocks.free, blocks.total, self.target
        byte_cost = self.memory * total / blocks.bandwidth if blocks.bandwidth > 0 else 0.0
        drawn = blocks.drawn()
        needed = self._needed(blocks, blocks.pressure(drawn))
        running, left = len(blocks.running), len(blocks.ready)
        waiting = sum([not job.has_begun for job in blocks.ready])
        for job in self._ordered(blocks.ready, now):
            if free <= 0:
                break
            model, unit, begins = job.model, job.unit, not job.has_begun
            pressure = blocks.pressure(drawn)
            level = model.level_of(pressure)
            plans = model.plans[level][unit]
            price = plans.cheapest_within(target * (job.deadline_ns - now))
            wanted = plans.cores[price]
            if begins and waiting > 1 and blocks.drops and self._is_too_dear(model, level, price):
                changes.append(JobDrop(job, plans.left_ns[price]))
                needed -= wanted
                waiting -= 1
                left -= 1
                continue
            if needed < total:
                fair = min(wanted + (total - needed) // (running + left), plans.cores[-1])
                if fair > wanted:
                    wanted, price = fair, plans.dearest_within(fair)
            cores = wanted
            if cores > free:
                if begins and running > 0 and free < self.narrow * wanted:
                    break
                cores = free
            end = plans.ends[price]
            version = model.cheapest_version(level, byte_cost, unit, end, cores)
            end, takes = model.end_within(version, level, cores, unit, end, quantum_ns)
            changes.append(BlockStart(job, end, version, cores, 0, takes, percent(pressure)))
            waiting -= begins
            running += 1
            left -= 1
            free -= cores
            if free > 0 and left > 0:
                drawn += model.draw(version, cores, unit, end, takes)
        return changes

    def _needed(self, blocks: BlockSnapshot, pressure: float) -> int:
        """The sum of the lanes that jobs need; of running blocks those that they need behind their ends."""
        needed, target, now = 0, self.target, blocks.now_ns
        for job in blocks.ready:
            model = job.model
            plans = model.plans[model.level_of(pressure)][job.unit]
            needed += plans.cores[plans.cheapest_within(target * (job.deadline_ns - now))]
        for block in blocks.running:
            model = block.model
            if block.end < model.units:
                plans = model.plans[model.level_of(pressure)][block.end]
                needed += plans.cores[plans.cheapest_within(target * (block.deadline_ns - block.due_ns))]
        return needed

    def _is_too_dear(self, model: BlockModel, level: int, price: int) -> bool:
        """Whether a query at this price takes more core time than at the price of a new query."""
        own, work = model.preferred[level], model.plans[level][0].work_ns
        return price > own and work[price] > work[own]

    def _ordered(self, jobs: list[BlockJob], now_ns: int) -> list[BlockJob]:
        """The order in which jobs get lanes: by priority, then jobs that have begun and must go on, then by deadline.

        A job that has begun must go on if at most `patience` times its least time, alone on all lanes, is left to its
        deadline. Without that rule heavy models, whose deadlines are far, would begin and never get enough to end.
        Earlier than that they can wait, and would keep jobs with near deadlines from few lanes.
        """
        if len(jobs) < 2:
            return jobs
        patience = self.used_patience

        def key(job: BlockJob) -> tuple[int, bool, int]:
            left = job.deadline_ns - now_ns
            presses = job.has_begun and left <= patience * job.model.rest_ns[job.unit]
            return job.rank, not presses, job.deadline_ns

        return sorted(jobs, key=key)
