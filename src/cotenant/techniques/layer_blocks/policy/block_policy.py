"""The base of policies of blocks: lanes of one size, any union of which a launch may get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated, ClassVar

from msgspec import Meta

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, DropRule, PolicySpec, Snapshot
from cotenant.policies.base import CheckedOptions
from cotenant.policies.decision_context import Key
from cotenant.techniques.layer_blocks.policy.block_context import BlockContext
from cotenant.techniques.layer_blocks.policy.block_jobs import BlockSnapshot, Change
from cotenant.techniques.layer_blocks.policy.model_tables import ModelTables
from cotenant.types import Query, Tenant
from cotenant.work import Share

Target = Annotated[float, Meta(gt=0, le=1)]
"""The share of the SLO that is planned for."""
FEW_LANES = 4
"""Up to this number of lanes all unions are named as shares, so that executors prepare them."""


@dataclass(frozen=True, slots=True)
class BlockPolicy(CheckedOptions):
    """Base of block policies: it launches in any union of its lanes, which have one size.

    `drop`: the rule by which waiting queries are shed. Raises InvalidValueError when there is no lane, lanes differ in
    size or device, or `drop` is not a DropRule.
    """

    lanes: tuple[Share, ...]
    drop: DropRule = DropRule.HOPELESS
    target: Target = 0.9
    spec: PolicySpec = field(init=False, repr=False, compare=False)
    """Its shares are the lanes, and where they are few all unions of them, else the union of all."""

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
        shares = tuple(dict.fromkeys((*self.lanes, *found)))
        spec = PolicySpec(name=self.name, lanes=self.lanes, shares=shares, drop=self.drop, preempt=True)
        object.__setattr__(self, "spec", spec)

    @property
    def is_adaptive(self) -> bool:
        """Whether versions are chosen by the pressure of the moment."""
        return self.adapts

    @property
    def byte_price(self) -> float:
        """Cost of traffic in plans, as a share of the cost of the whole machine for the time of the traffic."""
        return 0.0

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """(priority, arrival)."""
        return (tenant.rank, query.id)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Decide once. The memory is the cache of models."""
        if not isinstance(memory, ModelTables):
            memory = ModelTables(
                self.lanes,
                adapts=self.is_adaptive,
                target=self.target,
                plans=self.plans,
                memory=self.byte_price,
            )
        context = BlockContext(snapshot, self.lanes, memory, self.drop)
        return context.decision(self.changes(context.blocks, snapshot))

    def changes(self, blocks: BlockSnapshot, snapshot: Snapshot) -> Sequence[Change]:
        """What the policy starts, expands and sheds. Raises NotImplementedError: subclasses decide."""
        raise NotImplementedError
