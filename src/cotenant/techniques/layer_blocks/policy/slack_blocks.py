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
"""Defaults of `SlackBlocks.patience` for few and many lanes. Chosen on two real cores, and by simulation of 64."""


@dataclass(frozen=True, slots=True)
class SlackBlocks(BlockPolicy):
    """Blocks by dynamic programming over the rest of a model at a price of time (`price_plans`), and lanes by slack.

    - `target`: planned share of a query's time to its deadline.
    - `slack_share`: longest block, as a share of the shortest SLO; `quantum_ms` is its limit. Cuts may allow no shorter
      one.
    - `narrow`: a query does not start on less than this share of its lanes while others run.
    - `patience`: a begun query goes before earlier deadlines if less than this multiple of its least time is left. By
      default 1 on up to four lanes, where a heavy model would keep all of them; 5 on more.
    - `memory`: cost of memory traffic in plans, as a share of the cost of all cores for the same time at full
      bandwidth.
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

        1. Shed hopeless jobs. Take the others in the order of `_ordered`.
        2. A job needs the lanes of the lowest price at which it ends within `target` of the time to its deadline.
        3. Lanes that all needs leave are divided equally, as far as they make blocks faster. A late job pays with more
           lanes.
        4. If the needs exceed the machine, later jobs get the lanes that are left.
        5. A job that has not begun waits, and all behind it, if fewer than `narrow` of its lanes are free while others
           run.

        A waiting job that needs more core time than a new query of its tenant is shed if other jobs wait.
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
        """The order in which jobs get lanes: by priority, then begun jobs that must go on, then by deadline.

        A begun job must go on if at most `patience` times its least time, alone on all lanes, is left to its deadline.
        Otherwise heavy models, with far deadlines, would begin and never end. Before that they can wait, and leave
        lanes to jobs with near deadlines.
        """
        if len(jobs) < 2:
            return jobs
        patience = self.used_patience

        def key(job: BlockJob) -> tuple[int, bool, int]:
            left = job.deadline_ns - now_ns
            presses = job.has_begun and left <= patience * job.model.rest_ns[job.unit]
            return job.rank, not presses, job.deadline_ns

        return sorted(jobs, key=key)
