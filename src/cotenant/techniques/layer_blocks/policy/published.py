"""Policy `layer_block`: VELTAIR (ASPLOS 2022) as published, Algorithms 2 and 3."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from cotenant.core.snapshot import Decision, DropRule, Snapshot
from cotenant.techniques.layer_blocks.policy.block_policy import BlockPolicy
from cotenant.techniques.layer_blocks.policy.rules_blocks import ALGORITHM_2, decide_blocks


def decide_by(
    policy: BlockPolicy, snapshot: Snapshot, memory: object, grain: int, by_slack: bool, capped: bool, replans: bool
) -> Decision:
    """One decision by `rules_blocks.decide_blocks` with the options of a policy and these."""
    floor = policy.floor(snapshot, memory)
    tables = floor.tables
    count = decide_blocks(
        grain,
        by_slack,
        capped,
        policy.target,
        replans,
        policy.is_adaptive,
        policy.drop is DropRule.HOPELESS,
        snapshot.now_ns,
        floor.free,
        floor.total,
        tables.bandwidth,
        tables.beside,
        tables.dims,
        tables.spans,
        tables.moved,
        tables.tight,
        tables.averages,
        floor.jobs,
        floor.rows,
        floor.out,
    )
    return floor.decision(count)


class Variant(StrEnum):
    """What of VELTAIR is in use (its section 5.1)."""

    AS = "AS"
    """Adaptive scheduling alone: dynamic blocks, each unit in its first version."""
    AC = "AC"
    """Adaptive compilation alone: each unit a block, the least slack first, in the version for the pressure."""
    FULL = "FULL"
    """Both."""


@dataclass(frozen=True, slots=True)
class LayerBlock(BlockPolicy):
    """VELTAIR (ASPLOS 2022, Algorithms 2 and 3): blocks end before units that ask for more than Avg_C + threshold.

    `variant`: AS, AC or FULL. `capped`: no block takes more than Avg_C + threshold cores, which Algorithm 2 means to
    and does not. `replan`: the budget of a unit is its part of what is left to the deadline; else its part of the SLO.
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

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Decide once, by Algorithm 2 or, for AC, layer by layer."""
        by_layer = self.variant is Variant.AC
        grain = 1 if by_layer else ALGORITHM_2
        return decide_by(self, snapshot, memory, grain, by_layer, capped=self.capped, replans=self.replan)
