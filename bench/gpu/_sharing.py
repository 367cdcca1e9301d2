"""Groups of segments that start together: how far the same group differs from run to run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

from bench.gpu._context import SEGMENTS, Context, Point
from bench.gpu._journal import Row
from bench.gpu._runner import Job
from bench.gpu._stats import median, plain, spread
from cotenant.work import Share

GROUPS = "groups"
_GROUPS, _QUICK_GROUPS = 40, 3
_FIRST_GROUPS = 12
_GROUP_RUNS = 20
_GROUP_BATCHES = (1, 4, 8)


def group_points(context: Context) -> Iterator[Point]:
    """Groups of segments that start together, many times each: how far the same group differs from run to run."""
    random = Random(context.seed)
    for number in range(_QUICK_GROUPS if context.quick else _GROUPS):
        drawn = _draw(context, random)
        yield Point(
            f"group{number}{context.suffix}", partial(_group, context, number, drawn), int(number >= _FIRST_GROUPS)
        )


def _draw(context: Context, random: Random) -> list[tuple[str, int, float, float, Share]]:
    """Members as (model, items, first cut, last cut as shares of the cuts, share of the device)."""
    lanes = context.lanes(4)
    count = random.randint(min(2, len(lanes)), len(lanes))
    edges = (0, *sorted(random.sample(range(1, len(lanes)), count - 1)), len(lanes))
    names = context.names
    drawn = []
    for at, (a, b) in enumerate(pairwise(edges)):
        slots = tuple(slot for lane in lanes[a:b] for slot in lane.cores)
        begin = 0.0 if random.random() < 0.5 else random.random()
        end = 1.0 if at == 0 else random.uniform(begin, 1.0)
        share = Share(slots, context.rig.device)
        drawn.append((random.choice(names), random.choice(_GROUP_BATCHES), begin, end, share))
    return drawn


def _group(context: Context, number: int, drawn: Sequence[tuple[str, int, float, float, Share]]) -> list[Row]:
    runner = context.runner([share for *_, share in drawn])
    jobs = []
    for name, items, begin, end, share in drawn:
        subject = context.subjects.get(name)
        cuts = subject.cuts(SEGMENTS)
        first = min(int(begin * (len(cuts) - 1)), len(cuts) - 2)
        last = max(first + 1, round(end * (len(cuts) - 1)))
        jobs.append(Job(name, items if subject.spec.batched else 1, cuts[first], cuts[last], share))
    runs = max(_GROUP_RUNS if not context.quick else 3, context.effort.min_runs)
    effort = replace(context.effort, seconds=0.0, min_runs=runs, max_runs=runs)
    took = [max(run.ended_ns for run in each) - min(run.ended_ns - run.latency_ns for run in each)
            for each in runner.sample(jobs, effort)]  # fmt: skip
    figures = spread(took)
    members = [[job.model, 0, job.items, job.start, job.end, job.partition.size] for job in jobs]
    return [
        {
            "group": number,
            "members": len(jobs),
            **figures,
            "deviation_pct": plain(100 * figures["std_ms"] / figures["mean_ms"]),
            "what": " | ".join(" ".join(map(str, member)) for member in members),
            "runs_ns": " ".join(map(str, took)),
        }
    ]


def group_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Median over the groups."""
    return {"group_deviation_pct": plain(median(row["deviation_pct"] for row in rows))} if rows else {}
