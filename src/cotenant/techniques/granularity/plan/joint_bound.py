"""A lower bound on the makespan of all plans of a set, whatever their chunks, waits and barriers.

Each of these *measures* is a lower bound: slot-time, operations, bytes, the sum of mutually exclusive units, and
longest stream and launches of each member. Measure k is a sum over units u of `c[u, w, k]`, where w is the way in
which the unit is cut. So for all weights `y[k] >= 0` with sum 1:

    makespan >= sum over u of min over w of sum over k of y[k] * c[u, w, k]

This is a Lagrangian dual. Multiplicative weights search for the y with the largest right side. A plan trades one
measure for another: many small chunks shorten the longest stream and add launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cotenant.techniques.granularity.kernel_table import Column, KernelTable
from cotenant.techniques.granularity.predict.cluster_loop import MAX_CHUNKS, SLACK
from cotenant.techniques.granularity.predict.rules import Admission, Issuing, Occupancy

_STEPS = 200
"""Steps of the multiplicative weights."""
_LISTED_ROWS = 16
"""Up to this batch, all ways to cut it are listed; above it, fractions of chunks of one size, by largest chunk."""
_CLASSES = (0.5, 0.4, 1 / 3, 0.25, 0.15)
"""Thresholds e: a need above 1 - e counts as all slots, below e as none. For rules that admit whole units."""


def bound_of(tables: Sequence[KernelTable], rules: Occupancy) -> float:
    """A lower bound in ns on the makespan of all plans of the set."""
    costs = [_costs_of(member, tables, rules) for member in range(len(tables))]
    count = costs[0].shape[-1]
    alone = sum(units.min(axis=1).sum(axis=0) for units in costs)
    best = float(np.max(alone))
    weights = np.full(count, 0.3 / count)
    weights[np.argmax(alone)] += 0.7
    for step in range(_STEPS):
        total = np.zeros(count)
        for units in costs:
            chosen = np.argmin(units @ weights, axis=1)
            total += units[np.arange(len(chosen)), chosen].sum(axis=0)
        best = max(best, float(total @ weights))
        if not total.max() > 0:
            break
        weights = weights * np.exp((total / total.max() - 1) * 4 / (1 + step) ** 0.5)
        weights /= weights.sum()
    return best * (1 - 1e-12)  # a weighted mean of equal sums may be rounded up


def _costs_of(member: int, tables: Sequence[KernelTable], rules: Occupancy) -> Column:
    """The costs `c` of one member's units [units, ways to cut, measures]; 1e30 where a cut is not possible. Measures:
    longest stream and launches by member, launches of all, slots, classes of needs, operations, bytes."""
    table = tables[member]
    counts, longest = _cuts(table.batch)
    need = np.minimum(table.need, 1.0)
    if rules.keeps_slots:  # a stream keeps the slots of the unit with which it begins, which may be any
        need = np.full_like(need, need.min())
    sums = [table.duration_ns * need]
    if rules.admission is Admission.WHOLE:
        for edge in _CLASSES:
            kept = np.where(need > 1 - edge + SLACK, 1.0, np.where(need < edge, 0.0, need))
            sums.append(table.duration_ns * kept)
    if rules.shares_rates:
        sums += [table.duration_ns * table.compute, table.duration_ns * table.bandwidth]
    parts = np.broadcast_to(counts.sum(axis=1) * rules.launch_ns, (table.size, len(counts)))
    between = min(rules.gap_ns, rules.barrier_ns)  # behind a barrier there is no gap
    path = table.duration_ns[:, longest - 1] + between
    path[0] -= between
    empty = np.zeros_like(path)
    own = [path if m == member else empty for m in range(len(tables))]
    issued = parts if rules.issuing is not Issuing.STREAM else np.full_like(path, rules.launch_ns)
    own += [issued if m == member else empty for m in range(len(tables))]
    own.append(parts if rules.issuing is Issuing.ALL else empty)
    costs = np.stack([*own, *(each @ counts.T for each in sums)], axis=-1)
    whole = len(counts) - 1
    mixes = np.ones(table.size, np.bool_)
    for run in table.splits:
        mixes[run[0] : run[-1]] = False
    costs[mixes, :whole] = 1e30
    return costs


@cache
def _cuts(batch: int) -> tuple[Column, NDArray[np.int64]]:
    """Ways to cut a batch, the uncut one last: counts of chunks by rows [ways, batch], and largest chunk [ways]."""
    if batch <= _LISTED_ROWS:
        ways = [list(parts) for parts in _partitions(batch, batch) if len(parts) <= MAX_CHUNKS]
        counts = np.array([[float(parts.count(rows)) for rows in range(1, batch + 1)] for parts in ways])
        longest = np.array([parts[0] for parts in ways])
    else:
        pairs = [(rows, most) for most in range(1, batch + 1) for rows in range(1, most + 1)]
        counts = np.zeros((len(pairs), batch))
        for way, (rows, _) in enumerate(pairs):
            counts[way, rows - 1] = batch / rows
        longest = np.array([most for _, most in pairs])
    order = np.argsort(longest, kind="stable")
    return counts[order], longest[order]


def _partitions(batch: int, most: int) -> Iterator[tuple[int, ...]]:
    """Integer partitions of a number into parts up to `most`, each in descending order."""
    if batch == 0:
        yield ()
    for first in range(min(batch, most), 0, -1):
        for rest in _partitions(batch - first, first):
            yield (first, *rest)
