"""The steps of a run, and the loop that goes through them while time is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.gpu import _latency, _serving, _sharing
from bench.gpu._context import Context, Step, measure_points
from bench.gpu._journal import Budget

STEPS = (
    Step(_latency.LATENCY, "latency by model, batch and share", _latency.latency_points),
    Step(_latency.CORUN, "slowdown of pairs in disjoint shares", _latency.corun_points),
    Step(_latency.UNITS, "segments that a policy may stop at", _latency.part_points),
    Step(_serving.SERVING, "overlap beside fcfs and edf, end to end", _serving.serving_points),
    Step(_sharing.GROUPS, "run-to-run deviation of groups", _sharing.group_points),
)
"""In every tier in this order: each builds on those before."""
TIERS = 3


def run_steps(
    context: Context,
    steps: Sequence[Step],
    budget: Budget,
    tell: Callable[[str], None],
    after: Callable[[], None],
) -> bool:
    """Measure what the journal lacks, what tells most first; whether all was tried.

    `after` is called after each step of a tier. Raises MeasureError when the device is lost.
    """
    for tier in range(TIERS):
        for step in steps:
            done, is_finished = measure_points(context, step, tier, budget.is_over, tell)
            if done:
                tell(f"{step.name}: {done} points of tier {tier} measured")
                after()
            if not is_finished:
                return False
    return True
