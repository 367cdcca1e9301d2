"""Flat rules of `layer_block`: dynamic blocks (VELTAIR, ASPLOS 2022, Algorithms 2 and 3), and blocks of a fixed size.

How they are written, and what `jobs` and `out` hold, is in `_flat`.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from bench.papers.veltair._flat import (
    ACTS,
    ARRIVAL,
    CORES,
    DEADLINE,
    DUE,
    END,
    FIELDS,
    FIXED,
    GROW,
    MODEL,
    NEVER,
    PAUSED,
    RANK,
    RUNS,
    SINCE,
    STATE,
    UNIT,
    WAITS,
    WANTED,
    alone_of,
    base_of,
    draw_of,
    drawn_now,
    drop_hopeless,
    fastest_ns,
    first_pivot,
    grown_due,
    least_cores,
    level_of,
    pressure_of,
    rate_of,
    threshold_of,
    version_at,
    write_start,
)

ALGORITHM_2 = 0
"""The `grain` of blocks that end before the next pivot (VELTAIR, Algorithm 2)."""


def averages_of(
    dims: Sequence[int],
    averages: Sequence[Sequence[int]],
    jobs: Sequence[int],
    rows: int,
    this: int,
    pressure: float,
) -> int:
    """The sum of Avg_C over the tasks that have begun, and `this` one. `averages[model][level]`: see fill_averages."""
    summed, levels, level = 0, 1, 0
    for row in range(rows):
        at = FIELDS * row
        if row == this or jobs[at + STATE] >= PAUSED:
            model = jobs[at + MODEL]
            if dims[4 * model + 2] != levels:
                levels = dims[4 * model + 2]
                level = level_of(pressure, levels)
            summed += averages[model][level]
    return summed


def next_block(
    grain: int,
    capped: bool,
    dims: Sequence[int],
    spans: Sequence[Sequence[int]],
    tight: Sequence[Sequence[float]],
    averages: Sequence[Sequence[int]],
    jobs: Sequence[int],
    rows: int,
    row: int,
    now: int,
    total: int,
    target: float,
    replans: bool,
    adapts: bool,
    pressure: float,
) -> tuple[int, int, int, int]:
    """Form the next block of a job: (end, version, cores, predicted time on these).

    Algorithm 2 bounds no block by Avg_C + threshold: one that begins with its pivot, or that scales badly, may take
    more. `capped` keeps it to that number.
    """
    at = FIELDS * row
    model, start = jobs[at + MODEL], jobs[at + UNIT]
    units = dims[4 * model]
    spans_m = spans[model]
    level = level_of(pressure, dims[4 * model + 2])
    version = version_at(dims, model, level) if adapts else 0
    rate = rate_of(dims, spans_m, jobs, row, now, target, replans, total)
    alone = alone_of(dims, model, total)
    most = total
    end = start + grain if start + grain < units else units
    if grain == ALGORITHM_2:
        end = units
        begin = start if replans else 0
        budget = rate * (spans_m[alone + units] - spans_m[alone + begin])
        average = least_cores(dims, spans_m, model, version, level, begin, units, budget, total)
        summed = averages_of(dims, averages, jobs, rows, row, pressure)
        bound = average + threshold_of(average, summed if summed > average else average, total)
        if bound < total and bound < dims[4 * model + 3]:
            # `tight` holds the budget per ns alone at which a unit asks for more than so many cores
            base = (level * dims[4 * model + 3] + bound - 1) * units
            end = first_pivot(tight[model], base, units, start, rate)
        if capped and bound < most:
            most = bound
    budget = rate * (spans_m[alone + end] - spans_m[alone + start])
    cores = least_cores(dims, spans_m, model, version, level, start, end, budget, most)
    into = base_of(dims, model, version, level, cores)
    return end, version, cores, spans_m[into + end] - spans_m[into + start]


def block_ns(
    dims: Sequence[int],
    spans: Sequence[Sequence[int]],
    model: int,
    version: int,
    pressure: float,
    start: int,
    end: int,
    cores: int,
) -> int:
    """Predicted time of a block under a pressure."""
    at = base_of(dims, model, version, level_of(pressure, dims[4 * model + 2]), cores)
    return spans[model][at + end] - spans[model][at + start]


def first_to_go(
    jobs: Sequence[int], rows: int, by_slack: bool, dims: Sequence[int], spans: Sequence[Sequence[int]], total: int
) -> int:
    """The job that goes next among those that do not run; -1 where there is none. A job passed over has CORES of -1.

    Jobs that hold cores of their own come first, then by priority. Then the order is that of arrival, or `by_slack`,
    the least first."""
    best, best_own, best_rank, best_key = -1, 0, 0, 0
    for row in range(rows):
        at = FIELDS * row
        if 0 <= jobs[at + STATE] <= PAUSED and jobs[at + CORES] >= 0:
            key = jobs[at + ARRIVAL]
            if by_slack:
                key = jobs[at + DEADLINE] - fastest_ns(dims, spans[jobs[at + MODEL]], jobs, row, total)
            own = 0 if jobs[at + STATE] == PAUSED else 1
            rank = jobs[at + RANK]
            if (
                best < 0
                or own < best_own
                or (own == best_own and (rank < best_rank or (rank == best_rank and key < best_key)))
            ):
                best, best_own, best_rank, best_key = row, own, rank, key
    return best


def grow_all(
    dims: Sequence[int],
    spans: Sequence[Sequence[int]],
    jobs: MutableSequence[int],
    rows: int,
    now: int,
    free: int,
    out: MutableSequence[int],
    count: int,
) -> tuple[int, int]:
    """Give free cores to the blocks that began with too few, first come first served: (changes, cores left)."""
    while free > 0:
        best, best_since = -1, NEVER
        for row in range(rows):
            at = FIELDS * row
            if jobs[at + STATE] == RUNS and jobs[at + WANTED] > jobs[at + CORES] and jobs[at + SINCE] < best_since:
                best, best_since = row, jobs[at + SINCE]
        if best < 0:
            break
        at = FIELDS * best
        more = jobs[at + WANTED] - jobs[at + CORES]
        if more > free:
            more = free
        count = write_growth(dims, spans, jobs, best, now, jobs[at + CORES] + more, out, count)
        free -= more
    return count, free


def write_growth(
    dims: Sequence[int],
    spans: Sequence[Sequence[int]],
    jobs: MutableSequence[int],
    row: int,
    now: int,
    cores: int,
    out: MutableSequence[int],
    count: int,
) -> int:
    """Let a block take in cores at its next unit. Gives the number of changes."""
    at, into = FIELDS * row, ACTS * count
    jobs[at + DUE] = grown_due(dims, spans[jobs[at + MODEL]], jobs, row, now, cores)
    jobs[at + CORES], jobs[at + STATE] = cores, FIXED
    out[into], out[into + 1], out[into + 2], out[into + 3] = row, GROW, jobs[at + END], 0
    out[into + 4], out[into + 5], out[into + 6] = cores, jobs[at + WANTED], jobs[at + DUE] - jobs[at + SINCE]
    return count + 1


def decide_blocks(
    grain: int,
    by_slack: bool,
    capped: bool,
    target: float,
    replans: bool,
    adapts: bool,
    drops: bool,
    now: int,
    free: int,
    total: int,
    bandwidth: float,
    beside: float,
    dims: Sequence[int],
    spans: Sequence[Sequence[int]],
    moved: Sequence[Sequence[int]],
    tight: Sequence[Sequence[float]],
    averages: Sequence[Sequence[int]],
    jobs: MutableSequence[int],
    rows: int,
    out: MutableSequence[int],
) -> int:
    """One decision of `layer_block`, or of blocks of `grain` units. Gives the number of changes in `out`.

    A job that continues picks first among its own cores. Then blocks that run on too few cores take in free ones, first
    come first served. Then waiting jobs start, in the order of arrival or, with `by_slack`, the least slack first
    (Planaria, MICRO 2020). A block starts with at least one core and grows; without a free core it waits at the head of
    the queue.
    """
    count = 0
    if drops:
        count = drop_hopeless(dims, spans, jobs, rows, now, total, out, count)
    drawn = drawn_now(dims, moved, jobs, rows, now, -1)
    left, growing = 0, 0
    for row in range(rows):
        state = jobs[FIELDS * row + STATE]
        if state == RUNS:
            growing += 1
        elif 0 <= state <= PAUSED:
            left += 1
    has_grown = growing == 0
    while free > 0:
        row = first_to_go(jobs, rows, by_slack, dims, spans, total) if left > 0 else -1
        at = FIELDS * row
        if not has_grown and (row < 0 or jobs[at + STATE] == WAITS or jobs[at + CORES] == 0):
            count, free = grow_all(dims, spans, jobs, rows, now, free, out, count)
            has_grown = True
            continue
        if row < 0:
            break
        pressure = pressure_of(drawn, bandwidth, beside)
        end, version, wanted, takes = next_block(
            grain,
            capped,
            dims,
            spans,
            tight,
            averages,
            jobs,
            rows,
            row,
            now,
            total,
            target,
            replans,
            adapts,
            pressure,
        )
        model = jobs[at + MODEL]
        cores = wanted
        if not has_grown and cores > jobs[at + CORES]:
            cores = jobs[at + CORES]  # its own first; waiting expansions take theirs before it takes more
            if cores > free:
                cores = free
            held = cores
            count, free = grow_all(dims, spans, jobs, rows, now, free - held, out, count)
            free += held
            cores = wanted
        if cores > free:
            cores = free
        if cores < wanted:
            takes = block_ns(dims, spans, model, version, pressure, jobs[at + UNIT], end, cores)
        count = write_start(jobs, row, now, end, version, cores, wanted, takes, pressure, out, count)
        free -= cores
        left -= 1
        if free > 0 and left > 0:
            drawn += draw_of(dims, moved[model], model, version, jobs[at + UNIT], end, cores, takes)
    return count
