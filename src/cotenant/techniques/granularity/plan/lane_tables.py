"""Kernel tables for the lanes of a CPU, made from measurements.

A lane runs one task at a time: it is one slot, and a unit needs one slot. Memory contention between lanes is not in
these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from cotenant.predict.latency import over_rows
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyTable
from cotenant.techniques.granularity.kernel_table import Column, KernelTable
from cotenant.techniques.granularity.predict.rules import Occupancy
from cotenant.techniques.placement.task_profile import ModelTasks
from cotenant.work import Work

_MIB = 1 << 20


def table_of_tasks(tenant: str, tasks: ModelTasks, batch: int, lanes: int) -> KernelTable:
    """The measured units of a model on lanes of one core. Rows that were not measured are interpolated as in
    LatencyModel; time never falls with rows. Behind a chunk all tensors that cross the boundary are joined, as if the
    chunk had made all of them."""
    measured = {1: tasks.core} | {rows: each.core for rows, each in tasks.batches.items()}
    known = sorted(measured)
    units = zip(*(measured[rows].unit_ns for rows in known), strict=True)
    curves = [tuple(zip(known, times, strict=True)) for times in units]
    times = np.array([[over_rows(curve, rows) for rows in range(1, batch + 1)] for curve in curves], np.float64)
    duration = np.maximum.accumulate(times, axis=1)
    crossing = np.zeros(len(tasks.units))
    for tensor in tasks.tensors:
        crossing[tensor.producer : max(tensor.readers)] += tensor.size_bytes
    join_ns = crossing * batch * tasks.join_ns_per_mib / _MIB
    return replace(lane_table(tenant, tasks.units, duration, lanes, tasks.splits), join_ns=join_ns)


def table_of_latencies(
    tenant: str,
    table: LatencyTable,
    batch: int,
    lanes: int,
    lane_cores: int,
    cuts: Sequence[int],
    splits: Sequence[Sequence[int]],
) -> KernelTable:
    """A table with one unit for each segment between the cuts, for models without task measurements. It divides the
    latency at the first declared shape, on lanes of `lane_cores` cores, by the weights of the units. `splits` are of
    the model's units."""
    believed = TablePredictor({tenant: table})
    duration = [
        [believed.latency_ns(Work(tenant, 0, rows, start, end), lane_cores) for rows in range(1, batch + 1)]
        for start, end in pairwise(cuts)
    ]
    names = tuple(f"units {start} to {end}" for start, end in pairwise(cuts))
    runs = [[at for at, cut in enumerate(cuts) if cut in run] for run in splits]
    columns = np.maximum.accumulate(np.array(duration, np.float64), axis=1)
    return lane_table(tenant, names, columns, lanes, [run for run in runs if len(run) > 1])


def lane_rules(hand_over_ns: int) -> Occupancy:
    """The cost model of CPU lanes: one call runs all units of a task, and each wait or barrier costs a hand-over."""
    return Occupancy(0, 0, hand_over_ns, hand_over_ns, keeps_slots=True)


def hand_over_ns(tasks: Sequence[ModelTasks]) -> int:
    """Measured time from the end of a call to the start of the next call on another lane."""
    return max(each.hand_over_ns + each.core.launch_ns for each in tasks)


def lane_table(
    tenant: str, units: Sequence[str], duration: Column, lanes: int, splits: Sequence[Sequence[int]]
) -> KernelTable:
    """A table of units with times `duration` [units, rows] in ns on one of `lanes` lanes."""
    count, batch = duration.shape
    none = np.zeros_like(duration)
    return KernelTable(
        tenant,
        batch,
        tuple(units),
        duration,
        np.full_like(duration, 1 / lanes),
        none,
        none,
        np.zeros(count),
        tuple(map(tuple, splits)),
    )
