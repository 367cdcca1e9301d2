"""Flat rules of slack_blocks: a price of time, plans by dynamic programming, cores from slack.

`_flat` says how they are written, and describes `jobs` and `out`. A *plan* of a model is for a level and a price. For
each unit it has the number of cores for a block that begins there, and the unit up to which these are held. Prices are
in cores: a unit that takes t on c cores costs (c + price) * t. So at a price of 0 the least core time wins, and at
higher prices the model ends sooner. `prices` rise; with g for one of them and u for a unit,

    `ends[(level * G + g) * units + u]`, `widths[...]` of the block that begins at u.
    `lefts[(level * G + g) * (units + 1) + u]`, `works[...]`: time and core time from u to the end of the model.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from bench.papers.veltair._flat import (
    DEADLINE,
    DUE,
    END,
    FIELDS,
    GONE,
    MODEL,
    PAUSED,
    RANK,
    STATE,
    UNIT,
    WAITS,
    base_of,
    draw_of,
    drawn_now,
    drop_hopeless,
    fastest_ns,
    level_of,
    moved_base_of,
    pressure_of,
    version_at,
    write_drop,
    write_start,
)

KNOBS = 5
TARGET, QUANTUM_NS, NARROW, PATIENCE, MEMORY = range(KNOBS)
"""The options of slack_blocks as the rules take them."""


def fill_plan(
    dims: Sequence[int],
    spans: Sequence[int],
    moved: Sequence[int],
    model: int,
    level: int,
    price: float,
    switch_ns: float,
    byte_cost: float,
    choices: Sequence[int],
    now_cost: MutableSequence[float],
    now_end: MutableSequence[int],
    now_left: MutableSequence[int],
    now_work: MutableSequence[int],
    ends: MutableSequence[int],
    widths: MutableSequence[int],
    lefts: MutableSequence[int],
    works: MutableSequence[int],
    index: int,
) -> None:
    """Fill the plan number `index` of a model: where its blocks are cut and on how many cores of `choices` each runs.

    Dynamic programming from the last unit back over the number of cores that a unit runs on. The next unit keeps them,
    or takes the best number for `switch_ns` more. Traffic costs `byte_cost` a byte. Exact for the predicted times;
    O(units x choices). The `now_*` are scratch, as long as `choices`, of which none is beyond the cores of the model.
    """
    units, count = dims[4 * model], len(choices)
    version = version_at(dims, model, level)
    first_time = base_of(dims, model, version, level, 1)
    first_byte = moved_base_of(dims, model, version, 1)
    at, into = index * units, index * (units + 1)
    best_cost, best_left, best_work = 0.0, 0, 0
    for number in range(count):
        now_cost[number] = 0.0
        now_end[number] = units
        now_left[number] = now_work[number] = 0
    lefts[into + units] = works[into + units] = 0
    for unit in range(units - 1, -1, -1):
        least, chosen = 0.0, -1
        next_cost, next_left, next_work = best_cost, best_left, best_work
        for number in range(count):
            cores = choices[number]
            base = first_time + (cores - 1) * (units + 1) + unit
            takes = spans[base + 1] - spans[base]
            base = first_byte + (cores - 1) * (units + 1) + unit
            traffic = moved[base + 1] - moved[base]
            cut = next_cost + switch_ns * (cores + price)
            if unit + 1 < units and cut < now_cost[number]:
                now_cost[number], now_end[number] = cut, unit + 1
                now_left[number], now_work[number] = next_left, next_work
            now_cost[number] += (cores + price) * takes + byte_cost * traffic
            now_left[number] += takes
            now_work[number] += cores * takes
            if chosen < 0 or now_cost[number] < least:
                least, chosen = now_cost[number], number
        best_cost, best_left, best_work = least, now_left[chosen], now_work[chosen]
        ends[at + unit], widths[at + unit] = now_end[chosen], choices[chosen]
        lefts[into + unit], works[into + unit] = best_left, best_work


def fill_plans(
    dims: Sequence[int],
    spans: Sequence[int],
    moved: Sequence[int],
    model: int,
    prices: Sequence[float],
    switch_ns: float,
    byte_cost: float,
    choices: Sequence[int],
    target_ns: float,
    now_cost: MutableSequence[float],
    now_end: MutableSequence[int],
    now_left: MutableSequence[int],
    now_work: MutableSequence[int],
    ends: MutableSequence[int],
    widths: MutableSequence[int],
    lefts: MutableSequence[int],
    works: MutableSequence[int],
    preferred: MutableSequence[int],
) -> None:
    """Fill all plans of a model, and by level the price at which a whole query takes `target_ns` at most."""
    count, units = len(prices), dims[4 * model]
    for level in range(dims[4 * model + 2]):
        for number in range(count):
            fill_plan(
                dims,
                spans,
                moved,
                model,
                level,
                prices[number],
                switch_ns,
                byte_cost,
                choices,
                now_cost,
                now_end,
                now_left,
                now_work,
                ends,
                widths,
                lefts,
                works,
                level * count + number,
            )
        preferred[level] = cheapest_in_time(lefts, level * count * (units + 1), units + 1, count, 0, target_ns)


def cheapest_in_time(lefts: Sequence[int], base: int, step: int, count: int, unit: int, left_ns: float) -> int:
    """The lowest price at which what begins at a unit ends in the time left; the highest where it does at none."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if lefts[base + middle * step + unit] <= left_ns:
            high = middle
        else:
            low = middle + 1
    return low


def dearest_within(widths: Sequence[int], base: int, step: int, count: int, unit: int, most: int) -> int:
    """The highest price at which the block that begins at a unit takes no more than these cores; 0 where none does."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high + 1) // 2
        if widths[base + middle * step + unit] <= most:
            low = middle
        else:
            high = middle - 1
    return low


def end_within(spans: Sequence[int], base: int, start: int, end: int, quantum_ns: float) -> int:
    """The end of a block that begins at `start`, at `end` at most.

    It is behind the last unit that is over within the quantum, and behind one at least."""
    low, high = start + 1, end
    while low < high:
        middle = (low + high + 1) // 2
        if spans[base + middle] - spans[base + start] <= quantum_ns:
            low = middle
        else:
            high = middle - 1
    return low


def version_for(
    dims: Sequence[int],
    spans: Sequence[int],
    moved: Sequence[int],
    model: int,
    level: int,
    byte_cost: float,
    start: int,
    end: int,
    cores: int,
) -> int:
    """The version of a block that costs least, core time and traffic, of those for this level or a higher one."""
    best = version_at(dims, model, level)
    last = dims[4 * model + 1] - 1
    if best == last:
        return best
    at, bytes_at = base_of(dims, model, best, level, cores), moved_base_of(dims, model, best, cores)
    step = dims[4 * model + 3] * (dims[4 * model] + 1)
    least = -1.0
    for version in range(best, last + 1):
        cost = cores * (spans[at + end] - spans[at + start]) + byte_cost * (
            moved[bytes_at + end] - moved[bytes_at + start]
        )
        if least < 0 or cost < least:
            best, least = version, cost
        at += dims[4 * model + 2] * step
        bytes_at += step
    return best


def most_urgent(
    dims: Sequence[int],
    spans: Sequence[Sequence[int]],
    jobs: Sequence[int],
    rows: int,
    now: int,
    total: int,
    patience: float,
) -> int:
    """The job that goes next, or -1: by priority, then jobs that have begun and must go on, then by deadline.

    A job that has begun must go on when its deadline is near. Then at most `patience` times its least time, alone on
    all cores, is left to the deadline. Without that rule heavy models with far deadlines would begin and never get
    enough to end. Before that time they can wait, and would keep jobs with near deadlines from few cores.
    """
    best, best_rank, best_deadline, best_presses = -1, 0, 0, False
    for row in range(rows):
        at = FIELDS * row
        state = jobs[at + STATE]
        if WAITS <= state <= PAUSED:
            rank, deadline = jobs[at + RANK], jobs[at + DEADLINE]
            if best >= 0 and rank > best_rank:
                continue
            presses = False
            if state == PAUSED:
                needed = fastest_ns(dims, spans[jobs[at + MODEL]], jobs, row, total)
                presses = deadline - now <= patience * needed
            if (
                best < 0
                or rank < best_rank
                or (presses and not best_presses)
                or (presses == best_presses and deadline < best_deadline)
            ):
                best, best_rank, best_deadline, best_presses = row, rank, deadline, presses
    return best


def decide_slack(
    knobs: Sequence[float],
    drops: bool,
    now: int,
    free: int,
    total: int,
    bandwidth: float,
    beside: float,
    prices: int,
    dims: Sequence[int],
    spans: Sequence[Sequence[int]],
    moved: Sequence[Sequence[int]],
    ends: Sequence[Sequence[int]],
    widths: Sequence[Sequence[int]],
    lefts: Sequence[Sequence[int]],
    works: Sequence[Sequence[int]],
    preferred: Sequence[Sequence[int]],
    jobs: MutableSequence[int],
    rows: int,
    out: MutableSequence[int],
) -> int:
    """One decision of slack_blocks. Gives the number of changes in `out`. `knobs` are numbered by TARGET and on.

    1. Jobs that have begun and must go on come first, then deadlines.
    2. A job needs the cores of the least price of time at which it takes `target` of the time left to its deadline.
    3. The cores that the needs of all leave are shared out equally, as far as they make blocks faster. So a job alone
       takes all of them, and many jobs share. A late job pays with more cores. Where the needs are more than the
       machine, later jobs in the order get the rest.
    4. A block ends after `quantum_ns`, so that all is looked at again soon.
    5. Where fewer than `narrow` of its cores are free, a job that has not begun waits for a running block, and no job
       passes it.
    6. A waiting job may come to need more core time than a new one of its class (`preferred[model][level]`). It is shed
       while others wait.
    """
    target, quantum_ns, narrow, patience = knobs[TARGET], knobs[QUANTUM_NS], knobs[NARROW], knobs[PATIENCE]
    byte_cost = knobs[MEMORY] * total / bandwidth if bandwidth > 0 else 0.0
    count = 0
    if drops:
        count = drop_hopeless(dims, spans, jobs, rows, now, total, out, count)
    drawn = drawn_now(dims, moved, jobs, rows, now, -1)
    pressure = pressure_of(drawn, bandwidth, beside)
    active, waiting, running, needed, levels, level = 0, 0, 0, 0, 1, 0
    for row in range(rows):
        at = FIELDS * row
        state = jobs[at + STATE]
        if state == GONE:
            continue
        active += 1
        if state == WAITS:
            waiting += 1
        elif state > PAUSED:
            running += 1
        model, unit, begins = jobs[at + MODEL], jobs[at + UNIT], now
        if state > PAUSED:  # what it needs from its next block on, when this one ends
            unit, begins = jobs[at + END], jobs[at + DUE]
        units = dims[4 * model]
        if unit < units:
            if dims[4 * model + 2] != levels:
                levels = dims[4 * model + 2]
                level = level_of(pressure, levels)
            left_ns = target * (jobs[at + DEADLINE] - begins)
            plan = level * prices
            price = cheapest_in_time(lefts[model], plan * (units + 1), units + 1, prices, unit, left_ns)
            needed += widths[model][(plan + price) * units + unit]
    while free > 0 and active > running:
        row = most_urgent(dims, spans, jobs, rows, now, total, patience)
        at = FIELDS * row
        model, unit = jobs[at + MODEL], jobs[at + UNIT]
        units, levels = dims[4 * model], dims[4 * model + 2]
        pressure = pressure_of(drawn, bandwidth, beside)
        level = level_of(pressure, levels)
        plan, left_at = level * prices * units, level * prices * (units + 1)
        own = preferred[model][level]
        left_ns = target * (jobs[at + DEADLINE] - now)
        price = cheapest_in_time(lefts[model], left_at, units + 1, prices, unit, left_ns)
        if drops and jobs[at + STATE] == WAITS and waiting > 1 and price > own:
            needs = works[model][left_at + price * (units + 1)]
            if needs > works[model][left_at + own * (units + 1)]:
                count = write_drop(jobs, row, lefts[model][left_at + price * (units + 1)], out, count)
                needed -= widths[model][plan + price * units]
                waiting -= 1
                active -= 1
                continue
        wanted = widths[model][plan + price * units + unit]
        if needed < total:
            most = widths[model][plan + (prices - 1) * units + unit]  # beyond these it is no faster
            fair = wanted + (total - needed) // active
            if fair > most:
                fair = most
            if fair > wanted:
                wanted = fair
                price = dearest_within(widths[model], plan, units, prices, unit, fair)
        end = ends[model][plan + price * units + unit]
        cores = wanted
        if cores > free:
            if jobs[at + STATE] == WAITS and free < narrow * wanted and running > 0:
                break
            cores = free
        version = version_for(dims, spans[model], moved[model], model, level, byte_cost, unit, end, cores)
        base = base_of(dims, model, version, level, cores)
        end = end_within(spans[model], base, unit, end, quantum_ns)
        takes = spans[model][base + end] - spans[model][base + unit]
        if jobs[at + STATE] == WAITS:
            waiting -= 1
        count = write_start(jobs, row, now, end, version, cores, 0, takes, pressure, out, count)
        running += 1
        free -= cores
        if free > 0 and active > running:
            drawn += draw_of(dims, moved[model], model, version, unit, end, cores, takes)
    return count
