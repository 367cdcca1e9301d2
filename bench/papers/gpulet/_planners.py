"""The planners that others are measured against, for `--planner` too once this module is imported."""

from __future__ import annotations

from bench.papers.gpulet._ideal import Ideal
from bench.papers.gpulet._nexus import SquishyBinPacking
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.planners import register
from cotenant.techniques.partitions.plan.types import Planner


def greedy(headroom: float = 0.0, *, knee_only: bool = False) -> Elastic:
    """Greedy best fit: partitions without time sharing, the guided self-tuning baseline of GPU-let, section 5.1.

    Elastic partitioning with one model a partition, blind to interference. With `knee_only` every partition is of the
    most efficient size. Otherwise the last one of a load has the least size that serves the rest, which is stronger.
    """
    return Elastic(time_sharing=False, knee_only=knee_only, headroom=headroom, label="greedy")


def baselines() -> tuple[Planner, ...]:
    """The planners of the paper, the weakest first."""
    return (SquishyBinPacking(), greedy(), Elastic(), Elastic(with_interference=True))


register("greedy", lambda headroom, _: greedy(headroom), is_blind=True)
register("sbp", lambda headroom, _: SquishyBinPacking(headroom=headroom), is_blind=True)
register("ideal", lambda headroom, _: Ideal(headroom=headroom))
