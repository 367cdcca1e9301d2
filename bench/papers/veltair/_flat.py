"""Flat rules of blocks of units: cores, pivots, thresholds, pressure. VELTAIR (ASPLOS 2022), sections 4.2 and 4.3.

A copy of the product's rules (`techniques/layer_blocks/policy`) for benchmarks that play millions of decisions. This
module, `_flat_blocks` and `_flat_slack` have ints, floats and flat sequences alone, which numba compiles as they stand.
A test holds both equal. The sequences:

`dims` has four numbers a model m from 4 * m on: units, versions, pressure levels and cores. `spans` is `Spans.ns` of
one model and `moved` its `Spans.moved` (core/predictor.py). Times are ns, `bandwidth` is bytes per ns.

`jobs` has FIELDS numbers a job from FIELDS * row on, by the names below. A job is a batch in one of four states. It
waits (has never run), is paused between two of its blocks, runs a block that can expand, or runs one that cannot. The
last has no stop before its end, or expands already. Rules write their decisions into the rows, so that these stay true.
They report the changes in `out`, with ACTS numbers a change: the row; START, GROW or DROP; the end of the block; its
version; its cores; the cores that it was to have (0 where it has them). Then come its predicted time, and the pressure
of this prediction in per cent.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

FIELDS = 12
MODEL, STATE, ARRIVAL, DEADLINE, UNIT, END, CORES, WANTED, VERSION, SINCE, DUE, RANK = range(12)
"""Columns. UNIT is the first unit of the block that runs, else the next one to run; END that of the block that runs.
CORES are those that it has, or, while it is paused, those of its last block that are free: they are its own to take.
SINCE and DUE are when its block began and is predicted to end. RANK is its priority, the smallest first."""
WAITS, PAUSED, RUNS, FIXED = range(4)
"""States: FIXED runs and cannot grow now."""
GONE = -1
"""The state of a job that has been shed: its row counts no more."""
ACTS = 8
START, GROW, DROP = range(3)
NEVER = 1 << 62
SOON = 0.1
"""A block of which no more than this is left counts no more in the pressure (section 4.3)."""


def base_of(dims: Sequence[int], model: int, version: int, level: int, cores: int) -> int:
    """Where the times of a version at a level on so many cores begin in `spans`; beyond the most cores, of these."""
    at = 4 * model
    most = dims[at + 3]
    if cores > most:
        cores = most
    return ((version * dims[at + 2] + level) * most + cores - 1) * (dims[at] + 1)


def alone_of(dims: Sequence[int], model: int, total: int) -> int:
    """Where the times alone, on all cores and in the first version, begin in `spans`."""
    at = 4 * model
    most = dims[at + 3]
    return ((total if total < most else most) - 1) * (dims[at] + 1)


def moved_base_of(dims: Sequence[int], model: int, version: int, cores: int) -> int:
    """Where the bytes of a version on so many cores begin in `moved`."""
    at = 4 * model
    most = dims[at + 3]
    if cores > most:
        cores = most
    return (version * most + cores - 1) * (dims[at] + 1)


def version_at(dims: Sequence[int], model: int, level: int) -> int:
    """The version that is made for a level: its own number, or the last one that there is."""
    last = dims[4 * model + 1] - 1
    return level if level < last else last


def level_of(pressure: float, levels: int) -> int:
    """The level nearest to a pressure from 0 to 1."""
    return int(pressure * (levels - 1) + 0.5)


def least_cores(
    dims: Sequence[int],
    spans: Sequence[int],
    model: int,
    version: int,
    level: int,
    start: int,
    end: int,
    budget_ns: float,
    most: int,
) -> int:
    """Core(l) of a block [start, end), and Avg_C of a whole model: the fewest cores on which it keeps to its budget.

    Where no number up to `most` does, the fewest on which it takes the least time. Times never rise with cores, so
    both are found by halving.
    """
    stride = dims[4 * model] + 1
    if most > dims[4 * model + 3]:
        most = dims[4 * model + 3]
    begin = base_of(dims, model, version, level, 1) - stride + start
    end += begin - start
    least = spans[end + most * stride] - spans[begin + most * stride]
    if least > budget_ns:
        budget_ns = least
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        at = middle * stride
        if spans[end + at] - spans[begin + at] <= budget_ns:
            high = middle
        else:
            low = middle + 1
    return low


def fill_tight(
    dims: Sequence[int],
    spans: Sequence[int],
    model: int,
    adapts: bool,
    most: int,
    tight: MutableSequence[float],
) -> None:
    """How tight each unit is on each number of cores; 0 where more cores do not help.

    That is the budget, per ns that the unit takes alone, below which it asks for more cores than these. It is in
    `tight[(level * cores + c - 1) * units + u]`. The version is the one for the level where the policy `adapts`, else
    the first.

    The static QoS of a layer is its share of the target by time alone on all cores, so that none is infeasible. Shares
    by operations make small layers infeasible.
    """
    units, levels, cores = dims[4 * model], dims[4 * model + 2], dims[4 * model + 3]
    solo = base_of(dims, model, 0, 0, most)
    for level in range(levels):
        version = version_at(dims, model, level) if adapts else 0
        best = base_of(dims, model, version, level, most)
        for count in range(1, cores + 1):
            at = base_of(dims, model, version, level, count)
            into = (level * cores + count - 1) * units
            for unit in range(units):
                takes = spans[at + unit + 1] - spans[at + unit]
                alone = spans[solo + unit + 1] - spans[solo + unit]
                if takes > spans[best + unit + 1] - spans[best + unit]:
                    tight[into + unit] = takes / (alone if alone > 0 else 1)
                else:
                    tight[into + unit] = 0.0


def fill_averages(
    dims: Sequence[int],
    spans: Sequence[int],
    model: int,
    adapts: bool,
    most: int,
    budget_ns: float,
    averages: MutableSequence[int],
) -> None:
    """Avg_C of a model by level, for the budget of a whole query: the constant number of cores that meets it."""
    for level in range(dims[4 * model + 2]):
        version = version_at(dims, model, level) if adapts else 0
        averages[level] = least_cores(dims, spans, model, version, level, 0, dims[4 * model], budget_ns, most)


def first_pivot(tight: Sequence[float], base: int, units: int, start: int, rate: float) -> int:
    """Algorithm 2: the first unit behind `start` that asks for more cores than those of `base`, `units` where none
    does. `rate` is the budget per ns alone. Core(l) > c, strictly, is the same as a tightness on c cores beyond it."""
    for unit in range(start + 1, units):
        if tight[base + unit] > rate:
            return unit
    return units


def threshold_of(average: int, averages: int, total: int) -> int:
    """Cores that a block may use beyond Avg_C (section 4.3): what all active tasks leave, shared out by their Avg_C.

    `averages` is the sum over the active tasks, this one included. Never below 0.
    """
    left = total - averages
    return left * average // averages if left > 0 else 0


def rate_of(
    dims: Sequence[int],
    spans: Sequence[int],
    jobs: Sequence[int],
    row: int,
    now: int,
    target: float,
    replans: bool,
    total: int,
) -> float:
    """Budget of a job's units per ns that they take alone on all cores.

    Static: the target's share of its SLO, spread over the whole model. With `replans`: the same share of the time that
    is left to its deadline, spread over the units that are left. Once the deadline has passed it is static again.
    """
    at = FIELDS * row
    model = jobs[at + MODEL]
    units = dims[4 * model]
    alone = alone_of(dims, model, total)
    left = jobs[at + DEADLINE] - now
    if replans and left > 0:
        rest = spans[alone + units] - spans[alone + jobs[at + UNIT]]
    else:
        left = jobs[at + DEADLINE] - jobs[at + ARRIVAL]
        rest = spans[alone + units]
    return target * left / (rest if rest > 0 else 1)


def draw_of(
    dims: Sequence[int],
    moved: Sequence[int],
    model: int,
    version: int,
    start: int,
    end: int,
    cores: int,
    takes_ns: int,
) -> float:
    """Bytes per ns that a block draws from the memory, as predicted."""
    at = moved_base_of(dims, model, version, cores)
    return (moved[at + end] - moved[at + start]) / (takes_ns if takes_ns > 0 else 1)


def drawn_now(
    dims: Sequence[int], moved: Sequence[Sequence[int]], jobs: Sequence[int], rows: int, now: int, skipped: int
) -> float:
    """Bytes per ns that the blocks that run draw together: those that will soon have ended, and `skipped`, left out."""
    drawn = 0.0
    for row in range(rows):
        at = FIELDS * row
        if jobs[at + STATE] >= RUNS and row != skipped:
            due = jobs[at + DUE]
            takes = due - jobs[at + SINCE]
            if due - now > SOON * takes:
                model, version, cores = jobs[at + MODEL], jobs[at + VERSION], jobs[at + CORES]
                drawn += draw_of(dims, moved[model], model, version, jobs[at + UNIT], jobs[at + END], cores, takes)
    return drawn


def pressure_of(drawn: float, bandwidth: float, beside: float) -> float:
    """Pressure from 0 to 1: blocks' traffic over the bandwidth, where that is known, and other processes' pressure."""
    pressure = beside + (drawn / bandwidth if bandwidth > 0 else 0.0)
    return pressure if pressure < 1.0 else 1.0


def fastest_ns(dims: Sequence[int], spans: Sequence[int], jobs: Sequence[int], row: int, total: int) -> int:
    """The least time in which a job's remaining units can be done: alone, on all cores."""
    at = FIELDS * row
    model = jobs[at + MODEL]
    base = alone_of(dims, model, total)
    return spans[base + dims[4 * model]] - spans[base + jobs[at + UNIT]]


def grown_due(dims: Sequence[int], spans: Sequence[int], jobs: Sequence[int], row: int, now: int, cores: int) -> int:
    """When a running block is predicted to end if it goes on with `cores` from the next unit on that it begins."""
    at = FIELDS * row
    model, version, since, due = jobs[at + MODEL], jobs[at + VERSION], jobs[at + SINCE], jobs[at + DUE]
    start, end = jobs[at + UNIT], jobs[at + END]
    levels = dims[4 * model + 2]
    level = version if version < levels else levels - 1
    had = base_of(dims, model, version, level, jobs[at + CORES])
    gets = base_of(dims, model, version, level, cores)
    takes = spans[had + end] - spans[had + start]
    if takes <= 0:
        return due
    scale = (due - since) / takes  # the level at which it was formed
    unit = start + 1
    while unit < end and since + int((spans[had + unit] - spans[had + start]) * scale) < now:
        unit += 1
    begun = spans[had + unit] - spans[had + start]
    return since + int((begun + spans[gets + end] - spans[gets + unit]) * scale)


def write_start(
    jobs: MutableSequence[int],
    row: int,
    now: int,
    end: int,
    version: int,
    cores: int,
    wanted: int,
    takes_ns: int,
    pressure: float,
    out: MutableSequence[int],
    count: int,
) -> int:
    """Let a job run a block from now on. Gives the number of changes."""
    at, into = FIELDS * row, ACTS * count
    short = wanted if wanted > cores else 0
    jobs[at + STATE] = RUNS if short and end - jobs[at + UNIT] > 1 else FIXED
    jobs[at + END], jobs[at + VERSION] = end, version
    jobs[at + CORES], jobs[at + WANTED] = cores, short
    jobs[at + SINCE], jobs[at + DUE] = now, now + takes_ns
    out[into], out[into + 1], out[into + 2], out[into + 3] = row, START, end, version
    out[into + 4], out[into + 5], out[into + 6] = cores, short, takes_ns
    out[into + 7] = int(100 * pressure + 0.5)
    return count + 1


def drop_hopeless(
    dims: Sequence[int],
    spans: Sequence[Sequence[int]],
    jobs: MutableSequence[int],
    rows: int,
    now: int,
    total: int,
    out: MutableSequence[int],
    count: int,
) -> int:
    """Shed the jobs that do not run and that no number of cores can end in time, alone. Gives the number of
    changes."""
    for row in range(rows):
        at = FIELDS * row
        if 0 <= jobs[at + STATE] <= PAUSED:
            needed = fastest_ns(dims, spans[jobs[at + MODEL]], jobs, row, total)
            if needed > jobs[at + DEADLINE] - now:
                count = write_drop(jobs, row, needed, out, count)
    return count


def write_drop(jobs: MutableSequence[int], row: int, needed_ns: int, out: MutableSequence[int], count: int) -> int:
    """Give a job up. Gives the number of changes."""
    into = ACTS * count
    out[into], out[into + 1], out[into + 6] = row, DROP, needed_ns
    jobs[FIELDS * row + STATE] = GONE
    return count + 1
