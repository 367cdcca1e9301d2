"""L(b, p) of each model, what its segments take, and how much models slow each other down in disjoint shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement, pairwise

from bench.gpu._context import FRACTIONS, Context, Point
from bench.gpu._journal import Row
from bench.gpu._models import unit_cost
from bench.gpu._runner import Job
from bench.gpu._stats import median, plain, spread
from cotenant.work import Share

LATENCY, SEGMENTS, PARTS, CORUN = "latency", "segments", "units", "corun"
BATCHES = (1, 8, 32, 4, 16, 2)
"""The ends and the middle first: what lies between is interpolated until it is measured."""
_COARSE_BATCHES, _COARSE_SHARES = 2, 3
CORUN_MODELS = 7
CORUN_SPLITS = ((0.5, 0.5), (0.25, 0.75), (0.75, 0.25))
CORUN_BATCH = 4
SEGMENT_COUNTS = (4, 16, 0)
_TURNS, _TURNS_TIMES = 40, 10
"""Turns of whole and cut runs at most, and for no longer than so many times a point of latency."""
_PART_COUNT = 8
_CUT_MODELS = 4


def latency_points(context: Context) -> Iterator[Point]:
    """L(b, p): a coarse grid of all models, then the rest, share by share so that few executors are made."""
    shares = list(dict.fromkeys(context.share(fraction) for fraction in FRACTIONS))
    batches = BATCHES[:2] if context.quick else BATCHES
    coarse = [(s, b) for s in shares[:_COARSE_SHARES] for b in batches[:_COARSE_BATCHES]]
    fine = [(s, b) for s in shares for b in batches if (s, b) not in coarse]
    for grid in (coarse, fine):
        for share in dict.fromkeys(share for share, _ in grid):
            for name in context.names:
                for items in [items for each, items in grid if each == share]:
                    yield Point(_key(context, name, items, share), partial(_latency, context, name, items, share))


def ensure_latency(context: Context, name: str, items: int, share: Share) -> Row:
    """The row of one point, measured now where it is missing. Raises MeasureError when it cannot be measured."""
    key = _key(context, name, items, share)
    return ensured(context, LATENCY, key, partial(_latency, context, name, items, share))[0]


def ensure_parts(context: Context, name: str) -> list[Row]:
    """The rows of a model's segments, measured now where they are missing."""
    return ensured(context, PARTS, name, partial(_parts, context, name))


def ensure_corun(context: Context, pair: Sequence[str]) -> list[Row]:
    """The rows of a pair side by side at the first split, measured now where they are missing; none without shares."""
    splits = _splits(context)
    if not splits:
        return []
    ordered = sorted(pair, key=context.names.index)
    return ensured(context, CORUN, _pair_key(context, ordered, splits[0]), partial(_corun, context, ordered, splits[0]))


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
    return [{"model": name, "items": items, **_size(context, share), **figures, **units}]


def _size(context: Context, share: Share) -> Row:
    return {"asked_sms": share.size, "granted_sms": context.granted(share)}


def segment_points(context: Context) -> Iterator[Point]:
    """A model cut into segments beside the whole: equal outputs, and what the cuts cost."""
    for name in context.names[:_CUT_MODELS]:
        for items in (1, 8):
            yield Point(f"{name}/items{items}", partial(_segments, context, name, items))


def _segments(context: Context, name: str, items: int) -> list[Row]:
    import numpy as np

    subject, share, effort = context.subjects.get(name), context.whole, context.effort
    plans = {count: subject.cuts(count) for count in SEGMENT_COUNTS}
    rows: list[Row] = []
    for graphs in context.rig.graphs:
        runner = context.runner([share], graphs=graphs)
        whole = runner.whole(name, items, share)
        cuts_of = {1: (0, subject.units), **plans}
        times: dict[int, list[int]] = {count: [] for count in cuts_of}
        outputs = {count: runner.chain(whole, cuts)[1] for count, cuts in cuts_of.items()}
        for cuts in cuts_of.values():
            for _ in range(effort.warm_up):
                runner.chain(whole, cuts)
        order = list(cuts_of)
        long = replace(effort, seconds=_TURNS_TIMES * effort.seconds, max_runs=_TURNS)
        began, turn = time.perf_counter(), 0
        while not long.is_enough(turn, time.perf_counter() - began):
            for count in (*order[turn % len(order) :], *order[: turn % len(order)]):
                times[count].append(runner.chain(whole, cuts_of[count])[0])
            turn += 1
        for count, cuts in plans.items():
            error = max(
                float(np.max(np.abs(np.asarray(outputs[count][key], np.float64) - np.asarray(value)), initial=0))
                for key, value in outputs[1].items()
            )
            row: Row = {"model": name, "items": items, "graphs": int(graphs), "segments": len(cuts) - 1}
            row |= {"every_unit": int(count == 0), "runs": len(times[1])}
            row |= {"whole_p50_ms": plain(median(times[1]) / 1e6), "cut_p50_ms": plain(median(times[count]) / 1e6)}
            row["ratio"] = plain(median(a / b for a, b in zip(times[count], times[1], strict=True)))
            rows.append({**row, "max_abs_error": plain(error)})
    return rows


def part_points(context: Context) -> Iterator[Point]:
    """How the latency of each model spreads over its units, and at which cuts a policy may leave it."""
    for name in context.names:
        yield Point(name, partial(_parts, context, name))


def _parts(context: Context, name: str) -> list[Row]:
    subject, share = context.subjects.get(name), context.whole
    cuts = subject.cuts(_PART_COUNT)
    runner = context.runner([share])
    runner.warm([runner.whole(name, 1, share)], context.effort)
    whole = median(runner.chain(runner.whole(name, 1, share), (0, subject.units))[0] for _ in range(7))
    times: list[list[int]] = [[] for _ in cuts[1:]]
    for _ in range(context.effort.warm_up + max(3, context.effort.min_runs)):
        for at, (start, end) in enumerate(pairwise(cuts)):
            times[at].append(runner.once(Job(name, 1, start, end, share)).latency_ns)
    rows: list[Row] = []
    for (start, end), values in zip(pairwise(cuts), times, strict=True):
        took = median(values[context.effort.warm_up :])
        row: Row = {"model": name, "start": start, "end": end, "p50_ms": plain(took / 1e6)}
        # Units inside a segment are not measured: the estimate parts its latency among them.
        costs = [unit_cost(unit) for unit in subject.model.dfg.units[start:end]]
        spread_ns = [max(1, round(took * cost / sum(costs))) for cost in costs]
        rows.append({**row, "whole_p50_ms": plain(whole / 1e6), "units_ns": " ".join(map(str, spread_ns))})
    return rows


def corun_points(context: Context) -> Iterator[Point]:
    """Pairs of models side by side in disjoint shares, without pause, against each alone in the same share."""
    names = context.names[:CORUN_MODELS]
    splits = _splits(context)
    for shares in splits:
        for pair in combinations_with_replacement(names, 2):
            if pair[0] == pair[1] and shares[0].size > shares[1].size:
                continue  # the same as the other way round
            yield Point(_pair_key(context, pair, shares), partial(_corun, context, pair, shares))


def _splits(context: Context) -> list[tuple[Share, Share]]:
    found = []
    for left, _ in CORUN_SPLITS:
        first = context.share(left)
        rest = len(context.rig.slots) - first.size
        size = rest // context.rig.granule * context.rig.granule
        if size:
            slots = context.rig.slots[first.size : first.size + size]
            found.append((first, Share(slots, context.rig.device)))
    return list(dict.fromkeys(found))


def _corun(context: Context, pair: Sequence[str], shares: Sequence[Share]) -> list[Row]:
    items = [CORUN_BATCH if context.subjects.get(name).spec.batched else 1 for name in pair]
    runner = context.runner(shares)
    jobs = [runner.whole(name, count, share) for name, count, share in zip(pair, items, shares, strict=True)]
    alone = [
        spread([run.latency_ns for run in runner.without_pause([job], context.effort)[0]])["p50_ms"] for job in jobs
    ]
    beside = [spread([run.latency_ns for run in runs]) for runs in runner.without_pause(jobs, context.effort)]
    return [
        {
            "model": pair[at],
            "beside": pair[1 - at],
            "items": items[at],
            "beside_items": items[1 - at],
            **_size(context, shares[at]),
            "beside_asked_sms": shares[1 - at].size,
            "alone_p50_ms": alone[at],
            **beside[at],
            "slowdown": plain(beside[at]["p50_ms"] / alone[at]),
        }
        for at in (0, 1)
    ]


def segment_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Largest error, and the ratio of the first model in its largest number of segments below that of its units."""
    if not rows:
        return {}
    found = {"max_abs_error": max(float(row["max_abs_error"]) for row in rows)}
    for row in rows:
        if (
            row["model"] == rows[0]["model"]
            and row["items"] == 1
            and row["graphs"] == rows[0]["graphs"]
            and not row["every_unit"]
        ):
            found[f"{row['model']}_ratio_{row['segments']}"] = float(row["ratio"])
    return found


def corun_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Median and largest slowdown."""
    found = [float(row["slowdown"]) for row in rows]
    return {"slowdown_median": plain(median(found)), "slowdown_max": max(found)} if found else {}
