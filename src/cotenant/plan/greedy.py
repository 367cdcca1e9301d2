"""Greedy best fit: partitions without time sharing, the guided self-tuning baseline of GPU-let, section 5.1."""

from __future__ import annotations

from cotenant.plan.elastic import Elastic


def greedy(headroom: float = 0.0, *, knee_only: bool = False) -> Elastic:
    """Elastic partitioning with one model a partition, blind to interference.

    With `knee_only` every partition is of the most efficient size; otherwise the last one of a load is of the least
    size that serves the rest, which is stronger.
    """
    return Elastic(time_sharing=False, knee_only=knee_only, headroom=headroom, label="greedy")
