"""From the jobs of the product's policies to the rows that flat rules take (see `_flat`), and from `out` to changes."""

from __future__ import annotations

from bench.papers.veltair._flat import ACTS, DROP, FIXED, PAUSED, RUNS, START, WAITS
from cotenant.techniques.layer_blocks.policy.block_jobs import (
    BlockExpansion,
    BlockJob,
    BlockSnapshot,
    BlockStart,
    Change,
    JobDrop,
    RunningBlock,
)


class FlatRows:
    """What one decision sees, as `rows` rows of `jobs` and the tables of their models; room for changes in `out`."""

    def __init__(self, blocks: BlockSnapshot) -> None:
        self.found: list[BlockJob | RunningBlock] = [*blocks.ready, *blocks.running]
        self.found.sort(key=lambda each: each.first)
        self.models = list({id(each.model): each.model for each in self.found}.values())
        self.dims = [n for model in self.models for n in (model.units, model.versions, model.levels, model.cores)]
        self.spans = [model.ns for model in self.models]
        self.moved = [model.moved for model in self.models]
        self.jobs = [number for each in self.found for number in self._row(each)]
        self.rows = len(self.found)
        self.out = [0] * (ACTS * self.rows)

    def _row(self, each: BlockJob | RunningBlock) -> tuple[int, ...]:
        model = next(at for at, model in enumerate(self.models) if model is each.model)
        if isinstance(each, BlockJob):
            state = PAUSED if each.has_begun else WAITS
            own = each.cores
            return (model, state, each.arrival_ns, each.deadline_ns, each.unit, 0, own, 0, 0, 0, 0, each.rank)
        return (
            *(model, RUNS if each.is_expandable else FIXED, each.since_ns, each.deadline_ns, each.unit, each.end),
            *(each.cores, each.wanted, each.version, each.since_ns, each.due_ns, 0),
        )

    def changes(self, count: int) -> list[Change]:
        """The first `count` changes in `out`."""
        made: list[Change] = []
        for at in range(0, ACTS * count, ACTS):
            row, act, end, version, cores, wanted, takes, pressure = self.out[at : at + ACTS]
            found = self.found[row]
            if isinstance(found, RunningBlock):
                made.append(BlockExpansion(found, cores, takes))
            elif act == DROP:
                made.append(JobDrop(found, takes))
            else:
                assert act == START
                made.append(BlockStart(found, end, version, cores, wanted, takes, pressure))
        return made
