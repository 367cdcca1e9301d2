"""How the device is shared: run-to-run deviation of groups, time to share it anew, and the ways to share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from random import Random

from bench.gpu._context import Context, Point, Way
from bench.gpu._journal import Row
from bench.gpu._latency import ensured
from bench.gpu._runner import Effort, Job, Ran
from bench.gpu._stats import median, plain, spread
from cotenant.work import Share

RESPLIT, WAYS, GROUPS = "resplit", "ways", "groups"
ALONE, SEQUENTIAL = "alone", "sequential"
PAIRS = 5
_WAYS_BATCH = 4
_WAYS_TIMES = 5
"""A point of the ways takes so many times as long as one of latency: it has a 99th percentile."""
_GROUPS, _QUICK_GROUPS = 40, 3
_GROUP_RUNS = 20
_GROUP_BATCHES = (1, 4, 8)
_GROUP_CUTS = 4
_RESPLITS = 5
_MS = 1e6


def resplit_points(context: Context) -> Iterator[Point]:
    """The time until other shares can be launched in, without a new process."""
    if Way.SHARES not in context.rig.ways:
        return
    for count in (2, 4, 1, 6):
        lanes = context.lanes(count)
        if len(lanes) == count:
            for turn in range(_RESPLITS):
                yield Point(f"{count}/{turn}", partial(_resplit, context, lanes, turn))


def _resplit(context: Context, lanes: Sequence[Share], turn: int) -> list[Row]:
    """From shares that differ to these: the split itself, the first launch in them, and a later one."""
    name = context.names[0]
    other = context.lanes(3) if len(lanes) != 3 and len(context.lanes(3)) == 3 else (context.whole,)
    runner = context.runner(other)
    runner.warm([runner.whole(name, 1, other[0])], context.effort)
    split_ns = context.resplit(lanes)
    first = runner.once(runner.whole(name, 1, lanes[0]))
    runner.warm([runner.whole(name, 1, lanes[0])], context.effort)
    later = runner.once(runner.whole(name, 1, lanes[0]))
    granted = [context.granted(lane) for lane in lanes]
    # Once a division: the kernel is told nothing that could differ from turn to turn.
    surveyed = context.rig.survey(context.opened.shares) if turn == 0 else None
    seen, wrong = surveyed or ("", "")
    return [
        {
            "shares": len(lanes),
            "turn": turn,
            "resplit_ms": plain(split_ns / _MS),
            "first_launch_ms": plain(first.latency_ns / _MS),
            "later_launch_ms": plain(later.latency_ns / _MS),
            "asked_sms": lanes[0].size,
            "granted_sms": min(granted),
            "granted_sms_total": sum(granted),
            "seen_sms_total": seen,
            "problems": wrong,
        }
    ]


def pairs_of(context: Context) -> list[tuple[str, str]]:
    """Five pairs of the models, of neighbours in the list first, since those come early and are of different kinds."""
    names = context.names
    order = sorted(combinations(range(len(names)), 2), key=lambda pair: (pair[1], -pair[0]))
    return [(names[a], names[b]) for a, b in order[:PAIRS]]


def way_points(context: Context) -> Iterator[Point]:
    """Throughput and p99 of pairs: one after the other, on plain streams, in shares, each with and without graphs."""
    for graphs in context.rig.graphs:
        for way in (SEQUENTIAL, *context.rig.ways):
            for pair in pairs_of(context):
                key = f"{way}/graphs{int(graphs)}/{'+'.join(pair)}"
                yield Point(key, partial(_way, context, way, graphs, pair))


def _way(context: Context, way: str, graphs: bool, pair: Sequence[str]) -> list[Row]:
    items = [_ways_items(context, name) for name in pair]
    alone = [_alone_rate(context, graphs, name) for name in pair]
    lanes = context.lanes(2)
    sequential = way == SEQUENTIAL or len(lanes) < 2
    if sequential:
        # Both wait for the one lane of the whole device: the lane runs them in turn.
        lanes = (context.whole, context.whole)
    runner = context.runner(list(dict.fromkeys(lanes)), _kind(context, way), graphs)
    jobs = [runner.whole(name, count, lane) for name, count, lane in zip(pair, items, lanes, strict=True)]
    # Two launches wait in every lane, whatever the way: no lane is idle while the host makes the next one ready.
    found = runner.without_pause(jobs if sequential else [*jobs, *jobs], _long(context))
    runs = [[run for each in found[at::2] for run in each] for at in (0, 1)]
    rates = _rates(runs, items)
    return [
        {
            "way": way,
            "graphs": int(graphs),
            "pair": "+".join(pair),
            "model": pair[at],
            "items": items[at],
            "sms": 0 if way == Way.STREAMS else lanes[at].size,
            "rows_per_s": plain(rates[at]),
            "alone_rows_per_s": plain(alone[at]),
            "pair_speedup": plain(sum(rate / whole for rate, whole in zip(rates, alone, strict=True))),
            **spread([run.latency_ns for run in runs[at]]),
        }
        for at in (0, 1)
    ]


def _alone_rate(context: Context, graphs: bool, name: str) -> float:
    """Rows a second of a model that has the whole device, two launches waiting."""

    def measure() -> list[Row]:
        items = _ways_items(context, name)
        runner = context.runner([context.whole], _kind(context, SEQUENTIAL), graphs)
        found = runner.without_pause([runner.whole(name, items, context.whole)] * 2, _long(context))
        runs = [run for each in found for run in each]
        row: Row = {"way": ALONE, "graphs": int(graphs), "pair": "", "model": name, "items": items}
        row |= {"sms": context.whole.size, "rows_per_s": plain(_rates([runs], [items])[0])}
        return [{**row, **spread([run.latency_ns for run in runs])}]

    return float(ensured(context, WAYS, f"{ALONE}/graphs{int(graphs)}/{name}", measure)[0]["rows_per_s"])


def _ways_items(context: Context, name: str) -> int:
    return _WAYS_BATCH if context.subjects.get(name).spec.batched else 1


def _kind(context: Context, way: str) -> Way:
    kind = Way.STREAMS if way == Way.STREAMS else Way.SHARES
    return kind if kind in context.rig.ways else context.rig.ways[0]


def _long(context: Context) -> Effort:
    return replace(context.effort, seconds=context.effort.seconds * _WAYS_TIMES, max_runs=1 << 30)


def _rates(runs: Sequence[Sequence[Ran]], items: Sequence[int]) -> list[float]:
    """Rows a second of each, over the time in which all of them ran."""
    ended = max(run.ended_ns for each in runs for run in each)
    first = min(run.ended_ns - run.latency_ns for each in runs for run in each)
    return [len(each) * count * 1e9 / (ended - first) for each, count in zip(runs, items, strict=True)]


def group_points(context: Context) -> Iterator[Point]:
    """Groups of segments that start together, many times each: how far the same group differs from run to run."""
    random = Random(context.seed)
    for number in range(_QUICK_GROUPS if context.quick else _GROUPS):
        drawn = _draw(context, random)
        yield Point(f"group{number}{context.suffix}", partial(_group, context, number, drawn))


def _draw(context: Context, random: Random) -> list[tuple[str, int, float, float, Share]]:
    """Members as (model, items, first cut, last cut as shares of the cuts, share of the device)."""
    lanes = context.lanes(4)
    count = random.randint(min(2, len(lanes)), len(lanes))
    edges = (0, *sorted(random.sample(range(1, len(lanes)), count - 1)), len(lanes))
    names = context.names[:8]
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
        cuts = subject.cuts(_GROUP_CUTS)
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


def resplit_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Median times of a split and of the first launch after it, and the SMs that all shares had at most.

    `shares_verified` says whether kernels ran on as many SMs as granted, and on none of another share.
    """
    if not rows:
        return {}
    surveyed = [row for row in rows if row["seen_sms_total"] != ""]
    verified = {"shares_verified": float(not any(row["problems"] for row in surveyed))} if surveyed else {}
    return {
        **verified,
        "resplit_ms": plain(median(row["resplit_ms"] for row in rows)),
        "resplit_first_launch_ms": plain(median(row["first_launch_ms"] for row in rows)),
        "granted_sms": max(int(row["granted_sms_total"]) for row in rows),
    }


def group_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Median over the groups."""
    return {"group_deviation_pct": plain(median(row["deviation_pct"] for row in rows))} if rows else {}
