"""Rules of the baselines model_wise and prema, in the form that `_flat` describes."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from bench.papers.veltair._flat import (
    ARRIVAL,
    FIELDS,
    MODEL,
    NEVER,
    PAUSED,
    RANK,
    STATE,
    UNIT,
    alone_of,
    base_of,
    draw_of,
    drawn_now,
    drop_hopeless,
    fastest_ns,
    least_cores,
    level_of,
    pressure_of,
    rate_of,
    write_start,
)
from bench.papers.veltair._flat_blocks import first_to_go

LOWEST_TOKENS = 1.0
HIGHEST_TOKENS = 9.0
MIDDLE_TOKENS = 3.0
"""Priorities of PREMA (HPCA 2020): the threshold is the largest of these that the tokens of a waiting job reach."""


def decide_whole(
    target: float,
    drops: bool,
    now: int,
    free: int,
    total: int,
    bandwidth: float,
    beside: float,
    dims: Sequence[int],
    spans: Sequence[Sequence[int]],
    moved: Sequence[Sequence[int]],
    jobs: MutableSequence[int],
    rows: int,
    out: MutableSequence[int],
) -> int:
    """One decision of model_wise. Gives the number of changes in `out`.

    Whole models start in the order of arrival, each on Avg_C cores: the fewest on which it takes `target` of its SLO.
    A model that finds fewer free cores waits, and so do all behind it.
    """
    count = 0
    if drops:
        count = drop_hopeless(dims, spans, jobs, rows, now, total, out, count)
    drawn = drawn_now(dims, moved, jobs, rows, now, -1)
    while free > 0:
        row = first_to_go(jobs, rows, False, dims, spans, total)
        if row < 0:
            break
        at = FIELDS * row
        model, start = jobs[at + MODEL], jobs[at + UNIT]
        units = dims[4 * model]
        pressure = pressure_of(drawn, bandwidth, beside)
        level = level_of(pressure, dims[4 * model + 2])
        alone = alone_of(dims, model, total)
        rate = rate_of(dims, spans[model], jobs, row, now, target, False, total)
        budget = rate * (spans[model][alone + units] - spans[model][alone + start])
        cores = least_cores(dims, spans[model], model, 0, level, start, units, budget, total)
        if cores > free:
            break
        base = base_of(dims, model, 0, level, cores)
        takes = spans[model][base + units] - spans[model][base + start]
        count = write_start(jobs, row, now, units, 0, cores, 0, takes, pressure, out, count)
        free -= cores
        drawn += draw_of(dims, moved[model], model, 0, start, units, cores, takes)
    return count


def tokens_of(
    dims: Sequence[int], spans: Sequence[Sequence[int]], jobs: Sequence[int], row: int, now: int, total: int
) -> float:
    """PREMA's tokens: the priority, and as much again for each time alone that a job has waited.

    Ranks 1 and 2 stand for its high and middle priorities, all others for the low one.
    """
    at = FIELDS * row
    model, rank = jobs[at + MODEL], jobs[at + RANK]
    weight = HIGHEST_TOKENS if rank == 1 else MIDDLE_TOKENS if rank == 2 else LOWEST_TOKENS
    alone = alone_of(dims, model, total)
    done = spans[model][alone + jobs[at + UNIT]] - spans[model][alone]
    whole = spans[model][alone + dims[4 * model]] - spans[model][alone]
    waited = now - jobs[at + ARRIVAL] - done
    return weight + weight * (waited if waited > 0 else 0) / (whole if whole > 0 else 1)


def decide_prema(
    quantum_ns: int,
    drops: bool,
    now: int,
    free: int,
    total: int,
    dims: Sequence[int],
    spans: Sequence[Sequence[int]],
    jobs: MutableSequence[int],
    rows: int,
    out: MutableSequence[int],
) -> int:
    """One decision of PREMA (HPCA 2020): one task at a time, on the fewest cores on which it is fastest.

    Of the tasks with enough tokens the shortest goes. It runs up to the first unit that ends `quantum_ns` from now or
    later; then the choice is made anew. Gives the number of changes in `out`.
    """
    count = 0
    if drops:
        count = drop_hopeless(dims, spans, jobs, rows, now, total, out, count)
    if free < total:
        return count
    largest = 0.0
    for row in range(rows):
        if 0 <= jobs[FIELDS * row + STATE] <= PAUSED:
            tokens = tokens_of(dims, spans, jobs, row, now, total)
            if tokens > largest:
                largest = tokens
    bound = HIGHEST_TOKENS if largest >= HIGHEST_TOKENS else MIDDLE_TOKENS if largest >= MIDDLE_TOKENS else 0.0
    best, shortest = -1, NEVER
    for row in range(rows):
        if 0 <= jobs[FIELDS * row + STATE] <= PAUSED and tokens_of(dims, spans, jobs, row, now, total) >= bound:
            rest = fastest_ns(dims, spans[jobs[FIELDS * row + MODEL]], jobs, row, total)
            if rest < shortest:
                best, shortest = row, rest
    if best < 0:
        return count
    model, start = jobs[FIELDS * best + MODEL], jobs[FIELDS * best + UNIT]
    units = dims[4 * model]
    cores = least_cores(dims, spans[model], model, 0, 0, start, units, 0.0, total)
    base = base_of(dims, model, 0, 0, cores)
    end = start + 1
    while end < units and spans[model][base + end] - spans[model][base + start] < quantum_ns:
        end += 1
    takes = spans[model][base + end] - spans[model][base + start]
    return write_start(jobs, best, now, end, 0, cores, 0, takes, 0.0, out, count)
