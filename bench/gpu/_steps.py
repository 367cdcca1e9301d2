"""The steps of a run in their order, and the loop that goes through them while time is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.gpu import _latency, _serving, _sharing
from bench.gpu._context import Context, Step, measure_points
from bench.gpu._journal import Budget

Tell = Callable[[str], None]

STEPS = (
    Step(_latency.SEGMENTS, "segments beside the whole model: equal outputs, and what cuts cost", 0.10,
         _latency.segment_points),
    Step(_sharing.RESPLIT, "time until the device is shared anew", 0.04, _sharing.resplit_points),
    Step(_latency.LATENCY, "latency by model, batch and share", 0.20, _latency.latency_points),
    Step(_latency.CORUN, "slowdown of pairs in disjoint shares", 0.16, _latency.corun_points),
    Step(_sharing.WAYS, "throughput and p99 of pairs by the way of sharing", 0.12, _sharing.way_points),
    Step(_serving.SERVING, "overlap beside fcfs and edf, end to end", 0.24, _serving.serving_points),
    Step(_sharing.GROUPS, "run-to-run deviation of groups", 0.06, _sharing.group_points),
    Step(_latency.PARTS, "segments that a policy may stop at", 0.08, _latency.part_points),
)  # fmt: skip
"""Cheap and important ones first. In a first round each may use its share of the time, then all what is left."""


def run_steps(context: Context, steps: Sequence[Step], budget: Budget, tell: Tell, after: Callable[[], None]) -> bool:
    """Measure what the journal lacks, last what failed in earlier runs; whether everything was tried now.

    `after` is called after each step.

    Raises MeasureError when the device is lost.
    """
    total_s = budget.left_s
    unfinished: list[Step] = list(steps)
    for is_first in (True, False):
        todo, unfinished = unfinished, []
        for step in todo:
            if not is_first and budget.is_over():
                return False
            part = budget.part(total_s * step.share if is_first else total_s)
            if not _measure(context, step, part, tell, after):
                unfinished.append(step)
    if budget.is_over() and (unfinished or context.journal.failures):
        return False
    failed = [step for step in steps if any(each["step"] == step.name for each in context.journal.failures)]
    retried = [_measure(context, step, budget, tell, after, retry=True) for step in failed]
    return not unfinished and all(retried)


def _measure(
    context: Context, step: Step, budget: Budget, tell: Tell, after: Callable[[], None], *, retry: bool = False
) -> bool:
    done, finished = measure_points(context, step, budget.is_over, tell, retry)
    failed = sum(each["step"] == step.name for each in context.journal.failures)
    state = "more to do" if not finished else f"{failed} failed" if failed else "all there"
    tell(f"{step.name}: {done} points measured, {state}")
    if done:
        after()
    return finished
