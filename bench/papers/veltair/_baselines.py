"""Baselines that VELTAIR is compared with: model_wise, layer_wise (Planaria), fixed_blocks and prema.

Importing this module registers the four policies. A server has none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from bench.papers.veltair._baseline_rules import decide_prema, decide_whole
from bench.papers.veltair._flat_rows import FlatRows
from cotenant.core.snapshot import Snapshot
from cotenant.policies.registry import register
from cotenant.techniques.layer_blocks.policy.block_jobs import BlockSnapshot, Change
from cotenant.techniques.layer_blocks.policy.block_policy import BlockPolicy
from cotenant.techniques.layer_blocks.policy.published import BlockRules


@dataclass(frozen=True, slots=True)
class ModelWise(BlockPolicy):
    """First come, first served; a model runs whole on Avg_C cores, for which it waits (VELTAIR, section 3.1)."""

    name: ClassVar[str] = "model_wise"

    def __post_init__(self) -> None:
        BlockPolicy.__post_init__(self)
        self.specify(preempt=False)

    def changes(self, blocks: BlockSnapshot, snapshot: Snapshot) -> Sequence[Change]:
        flat = FlatRows(blocks)
        count = decide_whole(
            self.target,
            blocks.drops,
            blocks.now_ns,
            blocks.free,
            blocks.total,
            blocks.bandwidth,
            blocks.beside,
            flat.dims,
            flat.spans,
            flat.moved,
            flat.jobs,
            flat.rows,
            flat.out,
        )
        return flat.changes(count)


@dataclass(frozen=True, slots=True)
class LayerWise(BlockPolicy):
    """Each layer gets Core(l), the fewest cores on which it keeps to its part of `target` of the SLO.

    The least slack goes first where not all fit (Planaria, MICRO 2020). With `replan` the budget of a layer is its part
    of the time that is left to the deadline, as in the original. Else it is its part of the SLO.
    """

    replan: bool = True

    name: ClassVar[str] = "layer_wise"

    def changes(self, blocks: BlockSnapshot, snapshot: Snapshot) -> Sequence[Change]:
        return BlockRules(self.target, self.replan, adapts=False, grain=1, by_slack=True).changes(blocks)


@dataclass(frozen=True, slots=True)
class FixedBlocks(BlockPolicy):
    """First come, first served in blocks of `units` units (6 and 11 in VELTAIR, section 3.2).

    `replan`: as of layer_wise.
    """

    units: Annotated[int, Meta(ge=1)] = 6
    replan: bool = True

    name: ClassVar[str] = "fixed_blocks"

    def __post_init__(self) -> None:
        BlockPolicy.__post_init__(self)
        self.check("units", self.units >= 1, "at least 1")

    def changes(self, blocks: BlockSnapshot, snapshot: Snapshot) -> Sequence[Change]:
        return BlockRules(self.target, self.replan, adapts=False, grain=self.units).changes(blocks)


@dataclass(frozen=True, slots=True)
class Prema(BlockPolicy):
    """One task at a time, by tokens that grow with normalised waiting time (PREMA, HPCA 2020).

    `quantum_ms`: the least time that a task runs before another may take its place, at a unit (its time quota).
    """

    quantum_ms: Annotated[float, Meta(gt=0, le=1000)] = 0.25

    name: ClassVar[str] = "prema"

    def __post_init__(self) -> None:
        BlockPolicy.__post_init__(self)
        self.check("quantum_ms", 0 < self.quantum_ms <= 1000, "above 0, up to 1000")

    def changes(self, blocks: BlockSnapshot, snapshot: Snapshot) -> Sequence[Change]:
        flat = FlatRows(blocks)
        count = decide_prema(
            round(self.quantum_ms * 1e6),
            blocks.drops,
            blocks.now_ns,
            blocks.free,
            blocks.total,
            flat.dims,
            flat.spans,
            flat.jobs,
            flat.rows,
            flat.out,
        )
        return flat.changes(count)


BASELINES = (ModelWise, LayerWise, FixedBlocks, Prema)
for _each in BASELINES:
    register(_each)
