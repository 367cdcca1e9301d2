"""Below which no plan of a set comes, whatever its chunks, waits and barriers.

A plan takes at least the slot-time, the operations and the bytes of all that it runs; of what cannot share the slots,
at least the sum; at least as long as the longest strand of each member, and as its launches. Each of these *measures*
is a sum over units, of what depends on how a unit is cut. So is any weighted mean of them, and below all plans lies the
sum of what each unit can make of it at least. The weights that make this largest are sought: the plan that is short by
one measure, as a strand of small parts is, pays in another, as many small parts do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cotenant.techniques.granularity.kernel_table import Column, KernelTable
from cotenant.techniques.granularity.predict.cluster_loop import PARTS, SLACK
from cotenant.techniques.granularity.predict.rules import Admission, Issuing, Occupancy

_STEPS = 200
_LISTED_ROWS = 16
"""Up to so many rows all ways to cut a batch are looked at, above it parts of one size, and a share of one."""
_CLASSES = (0.5, 0.4, 1 / 3, 0.25, 0.15)
"""Needs above 1 - e count as all slots and needs below e as none, where a unit waits until its whole need is free."""


def bound_of(tables: Sequence[KernelTable], rules: Occupancy) -> float:
    """A makespan in ns below which no plan of the set can be."""
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
    """What each unit of a member adds to each measure [units, ways to cut it, measures]; a very large one where it
    cannot be cut that way. Measures: longest strand and launches by member, launches of all, slots, classes of needs,
    operations, bytes."""
    table = tables[member]
    counts, longest = _cuts(table.batch)
    need = np.minimum(table.need, 1.0)
    if rules.keeps_slots:  # those of the first unit of a piece, whichever that is
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
    """Ways to cut a batch, the last of them whole: how many parts have so many rows [ways, batch], and the rows of the
    largest part [ways]."""
    if batch <= _LISTED_ROWS:
        ways = [list(parts) for parts in _partitions(batch, batch) if len(parts) <= PARTS]
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
    """Ways to write a number as a sum of numbers up to `most`, each from the largest on."""
    if batch == 0:
        yield ()
    for first in range(min(batch, most), 0, -1):
        for rest in _partitions(batch - first, first):
            yield (first, *rest)
