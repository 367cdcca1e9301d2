"""What the rules of blocks decide on, and the changes that they decide."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from cotenant.core.snapshot import BatchView
from cotenant.techniques.layer_blocks.policy.block_model import BlockModel
from cotenant.types import Query

SOON = 0.1
"""Part of its duration below which the rest of a block no longer counts in the pressure (VELTAIR, section 4.3)."""


class BlockJob(Struct, frozen=True, gc=False):
    """A batch that does not run: it waits, or it is paused between two of its blocks.

    `first` is the number of its first query, by which jobs are ordered. `unit` is the next unit to run. `cores` are
    the free lanes of its last block. `batch` is the paused batch; waiting `queries` have none yet.
    """

    first: int
    model: BlockModel
    has_begun: bool
    arrival_ns: int
    deadline_ns: int
    rank: int
    unit: int = 0
    cores: int = 0
    batch: BatchView | None = None
    queries: tuple[Query, ...] = ()


class RunningBlock(Struct, frozen=True, gc=False):
    """A block under way: units [unit, end) on `cores` lanes, from `since_ns` until `due_ns` as predicted.

    `first` is the number of its first query, `launch` that of its launch. `wanted` lanes if it began with fewer than
    planned, else 0. `is_expandable`: it passes a stop, and no expansion is under way.
    """

    first: int
    model: BlockModel
    launch: int
    unit: int
    end: int
    version: int
    cores: int
    wanted: int
    is_expandable: bool
    since_ns: int
    due_ns: int
    deadline_ns: int

    def expanded_due_ns(self, cores: int, now_ns: int) -> int:
        """When the block is predicted to end if it runs on `cores` lanes from the next unit on that it begins."""
        model, version, since, end = self.model, self.version, self.since_ns, self.end
        level = version if version < model.levels else model.levels - 1
        ns, had, gets = model.ns, model.row(version, level, self.cores), model.row(version, level, cores)
        start = ns[had + self.unit]
        takes = ns[had + end] - start
        if takes <= 0:
            return self.due_ns
        scale = (self.due_ns - since) / takes  # the level at which the block was formed
        unit = self.unit + 1
        while unit < end and since + int((ns[had + unit] - start) * scale) < now_ns:
            unit += 1
        return since + int((ns[had + unit] - start + ns[gets + end] - ns[gets + unit]) * scale)


class BlockStart(Struct, frozen=True, gc=False):
    """Run units [job.unit, end) of a job on `cores` lanes.

    `wanted` is the planned number of lanes if fewer are free, else 0. `takes_ns` is predicted at `pressure_pct`.
    """

    job: BlockJob
    end: int
    version: int
    cores: int
    wanted: int
    takes_ns: int
    pressure_pct: int


class BlockExpansion(Struct, frozen=True, gc=False):
    """Expand a running block to `cores` lanes at its next unit. `takes_ns` is its duration from its start on."""

    block: RunningBlock
    cores: int
    takes_ns: int


class JobDrop(Struct, frozen=True, gc=False):
    """Shed a job that needs `needed_ns`."""

    job: BlockJob
    needed_ns: int


Change = BlockStart | BlockExpansion | JobDrop


@dataclass(slots=True)
class BlockSnapshot:
    """What one decision sees. `ready` and `running` are in the order of `first`.

    `free` of `total` lanes are free. `bandwidth` of the memory is in bytes per ns, 0 if unknown. `beside` is the
    measured pressure of other processes, from 0 to 1. `drops`: jobs that cannot end in time are shed.
    """

    now_ns: int
    free: int
    total: int
    bandwidth: float
    beside: float
    drops: bool
    ready: list[BlockJob]
    running: list[RunningBlock]

    def drawn(self) -> float:
        """Memory bandwidth that the running blocks use together, in bytes per ns, without those that end soon."""
        drawn, now = 0.0, self.now_ns
        for block in self.running:
            takes = block.due_ns - block.since_ns
            if block.due_ns - now > SOON * takes:
                drawn += block.model.draw(block.version, block.cores, block.unit, block.end, takes)
        return drawn

    def pressure(self, drawn: float) -> float:
        """Memory pressure from 0 to 1: used bandwidth over the machine's, plus the pressure of other processes."""
        pressure = self.beside + (drawn / self.bandwidth if self.bandwidth > 0 else 0.0)
        return pressure if pressure < 1.0 else 1.0

    def shed_hopeless(self) -> list[Change]:
        """Take the jobs out of `ready` that miss their deadlines even alone on all lanes, if the policy sheds them."""
        if not self.drops:
            return []
        now = self.now_ns
        late = [job for job in self.ready if job.model.rest_ns[job.unit] > job.deadline_ns - now]
        if late:
            self.ready = [job for job in self.ready if job.model.rest_ns[job.unit] <= job.deadline_ns - now]
        return [JobDrop(job, job.model.rest_ns[job.unit]) for job in late]


def percent(pressure: float) -> int:
    """A pressure from 0 to 1 in per cent."""
    return int(100 * pressure + 0.5)
