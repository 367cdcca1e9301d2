"""Policy `layer_block`: VELTAIR (ASPLOS 2022) as published, Algorithms 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import ClassVar

from msgspec import Struct

from cotenant.core.snapshot import Snapshot
from cotenant.techniques.layer_blocks.policy.block_jobs import (
    BlockExpansion,
    BlockJob,
    BlockSnapshot,
    BlockStart,
    Change,
    RunningBlock,
    percent,
)
from cotenant.techniques.layer_blocks.policy.block_model import BlockModel
from cotenant.techniques.layer_blocks.policy.block_policy import BlockPolicy

ALGORITHM_2 = 0
"""The `grain` of blocks that end before the next pivot (VELTAIR, Algorithm 2)."""
_since = attrgetter("since_ns")


class BlockRules(Struct, frozen=True, gc=False):
    """Algorithms 2 and 3 of VELTAIR, and blocks of a fixed number of units.

    `target`: the part of the SLO that is planned for. `replans`: the budget of a unit is its part of the time left to
    the deadline, else its part of the SLO. `adapts`: versions are chosen by pressure. `grain`: ALGORITHM_2, or units of
    a block. `by_slack`: the least slack first (Planaria, MICRO 2020), else in the order of arrival. `capped`: no block
    takes more than Avg_C + threshold lanes. Algorithm 2 means to ensure that and does not: a block that begins with its
    pivot, or that scales badly, has no bound.
    """

    target: float
    replans: bool
    adapts: bool
    grain: int = ALGORITHM_2
    by_slack: bool = False
    capped: bool = False

    def changes(self, blocks: BlockSnapshot) -> list[Change]:
        """Algorithm 3 (section 4.3), one decision:

        1. A job that continues takes its own lanes first.
        2. Running blocks that began with too few lanes expand, first come first served.
        3. Waiting jobs start, in their order, each with the block of `next_block`.

        A block starts with at least one lane and expands later. Without a free lane it waits at the head of the queue.
        """
        changes = blocks.shed_hopeless()
        free, drawn = blocks.free, blocks.drawn()
        expanding = [block for block in blocks.running if block.is_expandable and block.wanted > block.cores]
        expanding.sort(key=_since)
        jobs = self._ordered(blocks.ready)
        begun = [block.model for block in blocks.running] + [job.model for job in jobs if job.has_begun]
        left = len(jobs)
        for job in jobs:
            if expanding and not job.cores:
                free = _expand(expanding, free, blocks.now_ns, changes)
            if free <= 0:
                return changes
            pressure, model = blocks.pressure(drawn), job.model
            end, version, level, wanted = self.next_block(blocks, job, pressure, begun)
            if expanding and wanted > job.cores:
                held = min(job.cores, free)
                free = held + _expand(expanding, free - held, blocks.now_ns, changes)
            cores = wanted if wanted <= free else free
            at = model.row(version, level, cores)
            takes = model.ns[at + end] - model.ns[at + job.unit]
            short = wanted if wanted > cores else 0
            changes.append(BlockStart(job, end, version, cores, short, takes, percent(pressure)))
            free -= cores
            left -= 1
            if not job.has_begun:
                begun.append(model)
            if free > 0 and left > 0:
                drawn += model.draw(version, cores, job.unit, end, takes)
        if expanding:
            _expand(expanding, free, blocks.now_ns, changes)
        return changes

    def next_block(
        self, blocks: BlockSnapshot, job: BlockJob, pressure: float, begun: Sequence[BlockModel]
    ) -> tuple[int, int, int, int]:
        """FormingLBs of Algorithm 2, the next block of a job: (end, version, level, wanted lanes).

        - `Avg_C`: least lanes on which the rest of the model meets its budget.
        - `threshold = (lanes - S) * Avg_C / S`, with S the sum of Avg_C over all begun jobs and this one.
        - `end`: first unit behind the start with `Core(l) > Avg_C + threshold` (the pivot).
        - `wanted`: least lanes on which the units up to `end` meet their budget.

        `begun` are the models of the jobs that have begun, one entry a job.
        """
        model, start = job.model, job.unit
        units, alone, most = model.units, model.rest_ns, blocks.total
        level = model.level_of(pressure)
        version = model.version_at(level) if self.adapts else 0
        rate = self.rate_of(job, blocks.now_ns)
        end = start + self.grain if start + self.grain < units else units
        if self.grain == ALGORITHM_2:
            end, begin = units, start if self.replans else 0
            average = model.least_cores(version, level, begin, units, rate * alone[begin], most)
            summed = sum([each.averages[int(pressure * (each.levels - 1) + 0.5)] for each in begun])
            if not job.has_begun:
                summed += model.averages[level]
            bound = average + threshold_of(average, summed if summed > average else average, most)
            if bound < model.cores:
                end = first_pivot(model.tight[level][bound - 1], start, rate)
            if self.capped and bound < most:
                most = bound
        wanted = model.least_cores(version, level, start, end, rate * (alone[start] - alone[end]), most)
        return end, version, level, wanted

    def rate_of(self, job: BlockJob, now_ns: int) -> float:
        """The budget of a job's units, per ns that they take alone on all lanes.

        Static: the target's part of the SLO, spread over the whole model. With `replans`: the same part of the time
        left to the deadline, spread over the units left. After the deadline it is static again.
        """
        rest, left = job.model.rest_ns[job.unit], job.deadline_ns - now_ns
        if not self.replans or left <= 0:
            rest, left = job.model.rest_ns[0], job.deadline_ns - job.arrival_ns
        return self.target * left / (rest if rest > 0 else 1)

    def _ordered(self, jobs: list[BlockJob]) -> list[BlockJob]:
        """The order in which jobs get lanes: those that have begun, then by priority, then by slack or arrival."""
        if len(jobs) < 2:
            return jobs
        if self.by_slack:
            return sorted(
                jobs, key=lambda job: (not job.has_begun, job.rank, job.deadline_ns - job.model.rest_ns[job.unit])
            )
        return sorted(jobs, key=lambda job: (not job.has_begun, job.rank, job.arrival_ns))


def first_pivot(tight: Sequence[float], start: int, rate: float) -> int:
    """Finding1stPivot of Algorithm 2: the first unit behind `start` that asks for more lanes than a bound.

    `tight` has the tightness of units on as many lanes as the bound, `rate` is the budget per ns alone. Core(l) is
    above the bound exactly if the tightness is above the rate. The number of units if there is no pivot.
    """
    for unit in range(start + 1, len(tight)):
        if tight[unit] > rate:
            return unit
    return len(tight)


def threshold_of(average: int, averages: int, total: int) -> int:
    """Lanes that a block may use beyond its Avg_C (section 4.3): its part, by Avg_C, of the lanes that are left over.

    `averages` is the sum of Avg_C over the active tasks, this one included. Never below 0.
    """
    left = total - averages
    return left * average // averages if left > 0 else 0


def _expand(expanding: list[RunningBlock], free: int, now_ns: int, changes: list[Change]) -> int:
    """Give free lanes to the blocks that wait for some, in their order. Returns the number of lanes left."""
    while free > 0 and expanding:
        block = expanding.pop(0)
        cores = min(block.wanted, block.cores + free)
        free -= cores - block.cores
        changes.append(BlockExpansion(block, cores, block.expanded_due_ns(cores, now_ns) - block.since_ns))
    return free


class Variant(StrEnum):
    """The parts of VELTAIR in use (section 5.1)."""

    AS = "AS"
    """Adaptive scheduling alone: dynamic blocks, each unit in its first version."""
    AC = "AC"
    """Adaptive compilation alone: each unit a block, the least slack first, in the version for the pressure."""
    FULL = "FULL"
    """Both."""


@dataclass(frozen=True, slots=True)
class LayerBlock(BlockPolicy):
    """VELTAIR (ASPLOS 2022, Algorithms 2 and 3): blocks end before units that need more than Avg_C + threshold lanes.

    - `variant`: AS, AC or FULL.
    - `capped`: no block takes more than Avg_C + threshold lanes, which Algorithm 2 intends but does not ensure.
    - `replan`: the budget of a unit is its part of the time left to the deadline; else its part of the SLO.
    """

    variant: Variant = Variant.FULL
    capped: bool = False
    replan: bool = True

    name: ClassVar[str] = "layer_block"

    def __post_init__(self) -> None:
        BlockPolicy.__post_init__(self)
        self.check("variant", isinstance(self.variant, Variant), "AS, AC or FULL")

    @property
    def is_adaptive(self) -> bool:
        """Whether versions are chosen by the pressure of the moment."""
        return self.variant is not Variant.AS

    def changes(self, blocks: BlockSnapshot, snapshot: Snapshot) -> Sequence[Change]:
        """Algorithms 2 and 3; for AC, one unit per block."""
        by_layer = self.variant is Variant.AC
        grain = 1 if by_layer else ALGORITHM_2
        rules = BlockRules(self.target, self.replan, self.is_adaptive, grain, by_layer, self.capped)
        return rules.changes(blocks)
