"""L(b, p) of each model, what its segments take, and how much models slow each other down in disjoint shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, combinations_with_replacement, pairwise

from bench.gpu._context import BATCHES, FRACTIONS, PARTS, Context, Point
from bench.gpu._journal import Row
from bench.gpu._models import unit_cost
from bench.gpu._runner import Job
from bench.gpu._stats import median, plain, spread
from cotenant.work import Share

LATENCY, UNITS, CORUN = "latency", "units", "corun"
CORUN_SPLITS = (0.5, 0.25, 0.75)
"""The share of the first; the second has the rest."""
CORUN_BATCH = 4
PAIRS = 5
_PART_RUNS = 7


def latency_points(context: Context) -> Iterator[Point]:
    """L(b, p): first what says how far a share and more rows change it, then a coarse grid, then the rest."""
    shares = list(dict.fromkeys(context.share(fraction) for fraction in FRACTIONS))
    batches = BATCHES[:2] if context.quick else BATCHES
    for name in context.names:
        for share in shares:
            for items in batches:
                tier = 0 if share in shares[:2] and items in batches[:2] else 1 if share in shares[:3] else 2
                measure = partial(_latency, context, name, items, share)
                yield Point(_key(context, name, items, share), measure, tier)


def ensure_latency(context: Context, name: str, items: int, share: Share) -> Row:
    """The row of one point, measured now where it is missing. Raises MeasureError when it cannot be measured."""
    key = _key(context, name, items, share)
    return ensured(context, LATENCY, key, partial(_latency, context, name, items, share))[0]


def ensure_corun(context: Context, pair: Sequence[str]) -> list[Row]:
    """The rows of a pair side by side at the first split, measured now where they are missing; none without shares."""
    splits = _splits(context)
    if not splits:
        return []
    ordered = sorted(pair, key=context.names.index)
    return ensured(context, CORUN, _pair_key(context, ordered, splits[0]), partial(_corun, context, ordered, splits[0]))


def ensure_parts(context: Context, name: str) -> list[Row]:
    """The rows of a model's segments, measured now where they are missing."""
    return ensured(context, UNITS, name, partial(_parts, context, name))


def ensured(context: Context, step: str, key: str, measure: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a point, measured now where they are missing. Raises MeasureError when they cannot be."""
    found = context.journal.get(step, key)
    if found is None:
        began = time.perf_counter()
        found = measure()
        context.journal.put(step, key, found, time.perf_counter() - began)
    return found


def _pair_key(context: Context, pair: Sequence[str], shares: Sequence[Share]) -> str:
    return f"{pair[0]}+{pair[1]}/sizes{shares[0].size}+{shares[1].size}{context.suffix}"


def _key(context: Context, name: str, items: int, share: Share) -> str:
    suffix = "" if share == context.whole else context.suffix
    return f"{name}/items{items}/size{share.size}{suffix}"


def _latency(context: Context, name: str, items: int, share: Share) -> list[Row]:
    context.subjects.get(name).feeds(items)
    runner = context.runner([share])
    runs = [ran for (ran,) in runner.sample([runner.whole(name, items, share)], context.effort)]
    figures = spread([ran.latency_ns for ran in runs])
    units = {"units_p50_ms": plain(median(ran.infer_ns for ran in runs) / 1e6)}
    return [{"model": name, "items": items, **context.sizes(share), **figures, **units}]


def part_points(context: Context) -> Iterator[Point]:
    """How the latency of each model spreads over its units, and at which cuts a policy may leave it."""
    for name in context.names:
        yield Point(name, partial(_parts, context, name))


def _parts(context: Context, name: str) -> list[Row]:
    subject, share = context.subjects.get(name), context.whole
    cuts = subject.cuts(PARTS)
    runner = context.runner([share])
    whole = median(ran.latency_ns for (ran,) in runner.sample([runner.whole(name, 1, share)], context.effort))
    runs = [runner.chain(runner.whole(name, 1, share), cuts) for _ in range(context.effort.warm_up + _PART_RUNS)]
    rows: list[Row] = []
    for at, (start, end) in enumerate(pairwise(cuts)):
        took = median(run[at].latency_ns for run in runs[context.effort.warm_up :])
        row: Row = {"model": name, "start": start, "end": end, "p50_ms": plain(took / 1e6)}
        # Units inside a segment are not measured: the estimate parts its latency among them.
        costs = [unit_cost(unit) for unit in subject.model.dfg.units[start:end]]
        spread_ns = [max(1, round(took * cost / sum(costs))) for cost in costs]
        rows.append({**row, "whole_p50_ms": plain(whole / 1e6), "units_ns": " ".join(map(str, spread_ns))})
    return rows


def pairs_of(context: Context) -> list[tuple[str, str]]:
    """Five pairs of the models, of neighbours in the list first, since those come early and are of different kinds."""
    names = context.names
    order = sorted(combinations(range(len(names)), 2), key=lambda pair: (pair[1], -pair[0]))
    return [(names[a], names[b]) for a, b in order[:PAIRS]]


def corun_points(context: Context) -> Iterator[Point]:
    """Pairs of models side by side in disjoint shares, without pause, against each alone in the same share."""
    splits, served = _splits(context), [set(pair) for pair in pairs_of(context)]
    for shares in splits:
        for pair in combinations_with_replacement(context.names, 2):
            if pair[0] == pair[1] and shares[0].size > shares[1].size:
                continue  # the same as the other way round
            tier = 2 if shares != splits[0] else 0 if set(pair) in served else 1
            yield Point(_pair_key(context, pair, shares), partial(_corun, context, pair, shares), tier)


def _splits(context: Context) -> list[tuple[Share, Share]]:
    found = []
    for left in CORUN_SPLITS:
        first = context.share(left)
        rest = len(context.rig.parted) - first.size
        size = rest // context.rig.granule * context.rig.granule
        if size:
            slots = context.rig.parted[first.size : first.size + size]
            found.append((first, Share(slots, context.rig.device)))
    return list(dict.fromkeys(found))


def _corun(context: Context, pair: Sequence[str], shares: Sequence[Share]) -> list[Row]:
    items = [CORUN_BATCH if context.subjects.get(name).spec.batched else 1 for name in pair]
    runner = context.runner(shares)
    jobs = [runner.whole(name, count, share) for name, count, share in zip(pair, items, shares, strict=True)]

    def run(jobs: Sequence[Job]) -> list[tuple[Row, float]]:
        # Two launches wait in every lane: none is idle, and the other one alone, while the host makes the next ready.
        found = runner.without_pause([*jobs, *jobs], context.effort)
        both = [[*one, *two] for one, two in zip(found, found[len(jobs) :], strict=False)]
        return [(spread([ran.latency_ns for ran in ran_]), median(ran.infer_ns for ran in ran_) / 1e6) for ran_ in both]

    alone = [run([job])[0] for job in jobs]
    beside = run(jobs)
    return [
        {
            "model": pair[at],
            "beside": pair[1 - at],
            "items": items[at],
            "beside_items": items[1 - at],
            **context.sizes(shares[at]),
            "beside_asked_sms": shares[1 - at].size,
            "alone_p50_ms": alone[at][0]["p50_ms"],
            **beside[at][0],
            "alone_units_p50_ms": plain(alone[at][1]),
            "units_p50_ms": plain(beside[at][1]),
            "slowdown": plain(beside[at][0]["p50_ms"] / alone[at][0]["p50_ms"]),
            "units_slowdown": plain(beside[at][1] / alone[at][1]),
        }
        for at in (0, 1)
    ]


def corun_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Median and largest slowdown, by what the executor tells and by the device's time of the units."""
    found: dict[str, float] = {}
    for column in ("slowdown", "units_slowdown") if rows else ():
        values = [float(row[column]) for row in rows]
        found |= {f"{column}_median": plain(median(values)), f"{column}_max": max(values)}
    return found
