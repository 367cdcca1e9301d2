"""The policies of blocks: how those that are published decide, and what all of them have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from typing import Annotated, ClassVar

from msgspec import Meta

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, DropRule, Snapshot
from cotenant.policies.base import CheckedOptions
from cotenant.policies.desk import Key
from cotenant.techniques.layer_blocks.policy.floor import Floor
from cotenant.techniques.layer_blocks.policy.rules_blocks import (
    DYNAMIC,
    FIXED_BLOCKS,
    LAYERS,
    WHOLE,
    decide_blocks,
    decide_prema,
)
from cotenant.techniques.layer_blocks.policy.tables import ModelTables
from cotenant.types import Query, Tenant
from cotenant.work import Share

Target = Annotated[float, Meta(gt=0, le=1)]
"""The share of the SLO that is planned for."""
FEW_LANES = 4
"""Of so many lanes all unions are named as shares, so that executors prepare them."""


@dataclass(frozen=True, slots=True)
class BlockPolicy(CheckedOptions):
    """A policy of blocks without `decide`: it launches in any union of its lanes, which are of one size.

    `drop`: when waiting queries are given up. Raises InvalidValueError when there is no lane, lanes differ in size or
    device, or `drop` is not a DropRule.
    """

    lanes: tuple[Share, ...]
    drop: DropRule = DropRule.HOPELESS
    target: Target = 0.9
    shares: tuple[Share, ...] = field(init=False, repr=False, compare=False)
    """The lanes, and where they are few all unions of them, else the union of all."""

    preempt: ClassVar[bool] = True
    cautious: ClassVar[bool] = False
    adapts: ClassVar[bool] = False
    plans: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.check("lanes", bool(self.lanes), "at least one partition")
        alike = {(lane.size, lane.device, lane.first) for lane in self.lanes}
        self.check("lanes", len(alike) == 1, "partitions of one size on one device: blocks get any number of them")
        self.check("drop", isinstance(self.drop, DropRule), "a DropRule")
        self.check("target", 0 < self.target <= 1, "a share above 0, up to 1")
        count = len(self.lanes)
        sizes = range(1, count + 1) if count <= FEW_LANES else (1, count)
        found = [
            Share(tuple(sorted(core for lane in some for core in lane.cores)), some[0].device, some[0].first)
            for size in sizes
            for some in combinations(self.lanes, size)
        ]
        object.__setattr__(self, "shares", tuple(dict.fromkeys((*self.lanes, *found))))

    @property
    def is_adaptive(self) -> bool:
        """Whether versions are chosen by the pressure of the moment."""
        return self.adapts

    @property
    def byte_price(self) -> float:
        """What traffic costs in plans, as a part of what the whole machine costs for the time that it takes."""
        return 0.0

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """(priority, arrival)."""
        return (tenant.rank, query.id)

    def floor(self, snapshot: Snapshot, memory: object) -> Floor:
        """The rows of a decision, and the tables that it looks up, which are the policy's memory."""
        if not isinstance(memory, ModelTables):
            memory = ModelTables(
                self.lanes,
                adapts=self.is_adaptive,
                target=self.target,
                plans=self.plans,
                memory=self.byte_price,
            )
        return Floor(snapshot, self.lanes, memory, self.drop)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """See Policy."""
        raise NotImplementedError


def decide_by(
    policy: BlockPolicy, snapshot: Snapshot, memory: object, granularity: int, grain: int, capped: bool, replans: bool
) -> Decision:
    """One decision by blocks of a granularity: see rules_blocks."""
    floor = policy.floor(snapshot, memory)
    tables = floor.tables
    count = decide_blocks(
        granularity,
        grain,
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


@dataclass(frozen=True, slots=True)
class ModelWise(BlockPolicy):
    """First come, first served; each model runs whole on Avg_C cores, the fewest on which it takes `target` of its SLO.

    It waits until it finds them.
    """

    name: ClassVar[str] = "model_wise"
    preempt: ClassVar[bool] = False

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """See Policy."""
        return decide_by(self, snapshot, memory, WHOLE, 0, capped=False, replans=False)


@dataclass(frozen=True, slots=True)
class LayerWise(BlockPolicy):
    """Each layer gets Core(l), the fewest cores on which it keeps to its part of `target` of the SLO; the least slack
    goes first where not all fit (Planaria, MICRO 2020).

    `replan`: parts are of what is left to the deadline, as in the original; else they are fixed once and for all.
    """

    replan: bool = True

    name: ClassVar[str] = "layer_wise"

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """See Policy."""
        return decide_by(self, snapshot, memory, LAYERS, 0, capped=False, replans=self.replan)


@dataclass(frozen=True, slots=True)
class FixedBlocks(BlockPolicy):
    """First come, first served in blocks of `units` units: 6 and 11 in VELTAIR, section 3.2. `replan`: as LayerWise."""

    units: Annotated[int, Meta(ge=1)] = 6
    replan: bool = True

    name: ClassVar[str] = "fixed_blocks"

    def __post_init__(self) -> None:
        BlockPolicy.__post_init__(self)
        self.check("units", self.units >= 1, "at least 1")

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """See Policy."""
        return decide_by(self, snapshot, memory, FIXED_BLOCKS, self.units, capped=False, replans=self.replan)


class Variant(StrEnum):
    """What of VELTAIR is in use (its section 5.1)."""

    AS = "AS"
    """Adaptive scheduling alone: dynamic blocks, each unit in its first version."""
    AC = "AC"
    """Adaptive compilation alone: layers as in layer_wise, in the version for the pressure."""
    FULL = "FULL"
    """Both."""


@dataclass(frozen=True, slots=True)
class LayerBlock(BlockPolicy):
    """VELTAIR (ASPLOS 2022, Algorithms 2 and 3): blocks end before units that ask for more than Avg_C + threshold.

    `variant`: AS, AC or FULL. `capped`: no block takes more than Avg_C + threshold cores, which Algorithm 2 means to
    and does not. `replan`: see LayerWise.
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
        """See Policy."""
        granularity = LAYERS if self.variant is Variant.AC else DYNAMIC
        return decide_by(self, snapshot, memory, granularity, 0, capped=self.capped, replans=self.replan)


@dataclass(frozen=True, slots=True)
class Prema(BlockPolicy):
    """One task at a time by tokens, which grow with normalised waiting (PREMA, HPCA 2020).

    `quantum_ms`: how long a task runs at least before another may take its place, at a unit (its time quota).
    """

    quantum_ms: Annotated[float, Meta(gt=0, le=1000)] = 0.25

    name: ClassVar[str] = "prema"

    def __post_init__(self) -> None:
        BlockPolicy.__post_init__(self)
        self.check("quantum_ms", 0 < self.quantum_ms <= 1000, "above 0, up to 1000")

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """See Policy."""
        floor = self.floor(snapshot, memory)
        count = decide_prema(
            round(self.quantum_ms * 1e6),
            self.drop is DropRule.HOPELESS,
            snapshot.now_ns,
            floor.free,
            floor.total,
            floor.tables.dims,
            floor.tables.spans,
            floor.jobs,
            floor.rows,
            floor.out,
        )
        return floor.decision(count)
