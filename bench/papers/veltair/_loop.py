"""Plays arrivals of several tenants under a policy: the events of engine and many-core world on plain numbers.

Every decision is the policy's own rule in its flat form (see `_flat`), and every rate that of `many_core_rules`. Only
the order of events of `core.engine` and `sim.driver` is written here, for batches of one query. A test plays the same
arrivals through the product, and finds the same ends and outcomes. It is made to be compiled (see `_jit`), so it is one
long function of numbers and arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.papers.veltair._baseline_rules import decide_prema, decide_whole
from bench.papers.veltair._flat import (
    ACTS,
    ARRIVAL,
    CORES,
    DEADLINE,
    DROP,
    END,
    FIELDS,
    FIXED,
    GONE,
    MODEL,
    PAUSED,
    RANK,
    RUNS,
    START,
    STATE,
    UNIT,
    VERSION,
    WAITS,
    WANTED,
)
from bench.papers.veltair._flat_blocks import decide_blocks
from bench.papers.veltair._flat_slack import decide_slack
from cotenant.techniques.layer_blocks.world.many_core_rules import FULL, conflict_at, next_span_ns, set_rates

NEVER = 1 << 62
ANSWERED, LATE, REJECTED, DROPPED = range(4)
"""Outcomes."""
NONE, EXPIRED, HOPELESS = range(3)
"""Drop rules."""
BLOCKS, PREMA, SLACK, WHOLE = range(4)
"""Families of rules."""
HELD, LAUNCHES, CONFLICTS, DECISIONS, GROWTHS, UNITS = range(6)
VERSIONS_FROM = 8
"""The counters of `stats`: core-ns that launches held, launches, those that got too few cores, decisions, expansions,
units. From VERSIONS_FROM on come the units that ran in each version."""
STATS = 32
_LOWEST = 1 << 16


def ones(bits: int) -> int:
    """How many of 32 bits are set."""
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) & 0xFFFFFFFF) >> 24


def lowest(bits: int, count: int) -> int:
    """The lowest `count` of the bits that are set; all of them where there are fewer."""
    made = 0
    while count > 0 and bits != 0:
        bit = bits & -bits
        made |= bit
        bits ^= bit
        count -= 1
    return made


def play(
    times: Any, who: Any, slo: Any, drop: int, admit: Any, most_misses: Any,
    w_units: Any, w_versions: Any, w_at: Any, w_ns: Any, w_moved: Any, w_threads: Any, w_bandwidth: float,
    conflicts: Any,
    family: int, ints: Any, floats: Any, total: int, bandwidth: float, beside: float, dims: Any, spans: Any, moved: Any,
    tight: Any, averages: Any, plans: int, plan_ends: Any, widths: Any, lefts: Any, works: Any, preferred: Any,
    ends: Any, outcomes: Any, stats: Any,
) -> int:  # fmt: skip
    """Play all arrivals and give the time of the last event; -1 when a tenant has missed more than `most_misses`.

    `times` are those of the arrivals in ns, in order, and `who` the number of the tenant of each. `slo` and `admit`,
    the least predicted time of a query, are by tenant. Arguments with w_ are the costs of the world (see
    `profile.version_table.UnitCosts`), one tenant after another from `w_at` on. `family` to `preferred` are the
    arguments of the rules: `ints` and `floats` are the options of the family, the tables of the tenants are rows of
    arrays. Writes the end and the outcome of each query, and adds to `stats`.
    """
    n, tenants = len(times), len(slo)
    misses = np.zeros(tenants, np.int64)
    jobs = np.zeros(FIELDS * (n + 1), np.int64)
    out = np.zeros(ACTS * (n + total + 8), np.int64)
    query_of = np.zeros(n + 1, np.int64)
    had_low, had_high = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)  # cores as bits: 32 low, 32 high ones
    free_low, free_high = (1 << min(total, 32)) - 1, (1 << max(total - 32, 0)) - 1
    rows, gone, waiting = 0, 0, 0
    free, running, pending = total, 0, 0
    x_row, x_unit, x_cores = np.zeros(total, np.int64), np.zeros(total, np.int64), np.zeros(total, np.int64)
    x_wider, x_stall = np.zeros(total, np.int64), np.zeros(total, np.int64)
    x_grew, x_over = np.zeros(total, np.int64), np.zeros(total, np.int64)
    x_ns, x_moved, x_threads = np.zeros(total, np.int64), np.zeros(total, np.int64), np.zeros(total, np.int64)
    x_left, x_rate = np.zeros(total, np.int64), np.zeros(total, np.int64)
    demand = np.zeros(total, np.float64)
    is_stale = True
    now, arrived, timer = 0, 0, NEVER
    while True:
        arrival = times[arrived] if arrived < n else NEVER
        due = NEVER
        if pending > 0:
            due = now
        elif running > 0:
            if is_stale:
                set_rates(running, x_ns, x_moved, x_threads, w_bandwidth, demand, x_rate)
                is_stale = False
            due = now + next_span_ns(running, x_left, x_rate)
        at = min(due, timer, arrival)
        if at == NEVER:
            break
        span = at - now
        now = at
        if span > 0:
            stats[HELD] += (total - free) * span
            for i in range(running):
                x_left[i] -= x_rate[i] * span
                if x_left[i] > 0:
                    continue
                is_stale = True
                job = FIELDS * x_row[i]
                if x_stall[i] > 0:
                    x_stall[i] = 0
                else:
                    x_unit[i] += 1
                    if x_unit[i] == jobs[job + END]:
                        x_over[i] = 1
                        pending += 1
                        continue
                    if x_wider[i] > 0:
                        x_cores[i], x_wider[i], x_grew[i] = x_wider[i], 0, 1
                        pending += 1
                t = jobs[job + MODEL]
                cost = min(jobs[job + VERSION], w_versions[t] - 1) * total + x_cores[i] - 1
                cost = w_at[t] + cost * w_units[t] + x_unit[i]
                x_ns[i], x_moved[i], x_threads[i] = w_ns[cost], w_moved[cost], w_threads[cost]
                x_left[i] = x_ns[i] * FULL
        # One event, in the order of the driver: launches that grow, ends of launches, the timer, arrivals.
        if due <= timer and due <= arrival:
            if pending == 0:
                continue
            pending -= 1
            first = -1
            for i in range(running):
                if x_grew[i] > 0:
                    first = i
                    break
            if first >= 0:
                x_grew[first] = 0
                job = FIELDS * x_row[first]
                jobs[job + STATE] = RUNS if jobs[job + WANTED] > jobs[job + CORES] else FIXED
            else:
                first = 0
                while x_over[first] == 0:
                    first += 1
                row = x_row[first]
                job = FIELDS * row
                t, query = jobs[job + MODEL], query_of[row]
                free += jobs[job + CORES]
                free_low |= had_low[row]
                free_high |= had_high[row]
                if jobs[job + END] == w_units[t]:
                    jobs[job + STATE] = GONE
                    gone += 1
                    ends[query] = now
                    outcomes[query] = ANSWERED
                    if now > jobs[job + DEADLINE]:
                        outcomes[query] = LATE
                        misses[t] += 1
                else:
                    jobs[job + STATE], jobs[job + UNIT] = PAUSED, jobs[job + END]
                    waiting += 1
                running -= 1
                for i in range(first, running):
                    k = i + 1
                    x_row[i], x_unit[i], x_cores[i], x_wider[i] = x_row[k], x_unit[k], x_cores[k], x_wider[k]
                    x_stall[i], x_grew[i], x_over[i], x_left[i] = x_stall[k], x_grew[k], x_over[k], x_left[k]
                    x_ns[i], x_moved[i], x_threads[i], x_rate[i] = x_ns[k], x_moved[k], x_threads[k], x_rate[k]
                is_stale = True
        elif timer <= arrival:
            timer = NEVER
        else:
            t, query = who[arrived], arrived
            arrived += 1
            if drop == HOPELESS and admit[t] > slo[t]:
                outcomes[query] = REJECTED
                ends[query] = now
                misses[t] += 1
            else:
                job = FIELDS * rows
                for i in range(FIELDS):
                    jobs[job + i] = 0
                jobs[job + MODEL], jobs[job + STATE], jobs[job + RANK] = t, WAITS, _LOWEST
                jobs[job + ARRIVAL], jobs[job + DEADLINE] = now, now + slo[t]
                query_of[rows], had_low[rows], had_high[rows] = query, 0, 0
                rows += 1
                waiting += 1
        if drop != NONE and waiting > 0:
            for row in range(rows):
                job = FIELDS * row
                if 0 <= jobs[job + STATE] <= PAUSED and jobs[job + DEADLINE] <= now:
                    jobs[job + STATE] = GONE
                    outcomes[query_of[row]] = DROPPED
                    ends[query_of[row]] = now
                    misses[jobs[job + MODEL]] += 1
                    gone += 1
                    waiting -= 1
        growable = 0
        if waiting == 0:
            for i in range(running):
                growable += 1 if jobs[FIELDS * x_row[i] + STATE] == RUNS else 0
        if free > 0 and (waiting > 0 or growable > 0):
            stats[DECISIONS] += 1
            drops = drop == HOPELESS
            for row in range(rows):
                if jobs[FIELDS * row + STATE] == PAUSED:
                    jobs[FIELDS * row + CORES] = ones(had_low[row] & free_low) + ones(had_high[row] & free_high)
            if family == BLOCKS:
                made = decide_blocks(
                    ints[0], ints[1] > 0, ints[2] > 0, floats[0], ints[3] > 0, ints[4] > 0, drops, now, free, total,
                    bandwidth, beside, dims, spans, moved, tight, averages, jobs, rows, out,
                )  # fmt: skip
            elif family == PREMA:
                made = decide_prema(ints[0], drops, now, free, total, dims, spans, jobs, rows, out)
            elif family == WHOLE:
                made = decide_whole(
                    floats[0], drops, now, free, total, bandwidth, beside, dims, spans, moved, jobs, rows, out
                )
            else:
                made = decide_slack(
                    floats, drops, now, free, total, bandwidth, beside, plans, dims, spans, moved, plan_ends, widths,
                    lefts, works, preferred, jobs, rows, out,
                )  # fmt: skip
            for number in range(made):
                act = ACTS * number
                row = out[act]
                job = FIELDS * row
                t, query = jobs[job + MODEL], query_of[row]
                if out[act + 1] == DROP:
                    outcomes[query] = DROPPED
                    ends[query] = now
                    misses[t] += 1
                    gone += 1
                    waiting -= 1
                elif out[act + 1] == START:
                    i, unit, end, version, cores = running, jobs[job + UNIT], out[act + 2], out[act + 3], out[act + 4]
                    free -= cores
                    own_low, own_high = had_low[row] & free_low, had_high[row] & free_high
                    low = lowest(own_low, cores)
                    high = lowest(own_high, cores - ones(low))
                    low |= lowest(free_low & ~low, cores - ones(low) - ones(high))
                    high |= lowest(free_high & ~high, cores - ones(low) - ones(high))
                    had_low[row], had_high[row] = low, high
                    free_low, free_high = free_low & ~low, free_high & ~high
                    waiting -= 1
                    running += 1
                    x_row[i], x_unit[i], x_cores[i], x_wider[i] = row, unit, cores, 0
                    x_stall[i], x_grew[i], x_over[i] = 0, 0, 0
                    stats[LAUNCHES] += 1
                    stats[UNITS] += end - unit
                    stats[VERSIONS_FROM + version] += end - unit
                    if out[act + 5] > cores:
                        stats[CONFLICTS] += 1
                        x_stall[i] = conflicts[conflict_at(query, unit, len(conflicts))]
                        x_ns[i], x_moved[i], x_threads[i] = x_stall[i], 0, 1
                    else:
                        cost = min(version, w_versions[t] - 1) * total + cores - 1
                        cost = w_at[t] + cost * w_units[t] + unit
                        x_ns[i], x_moved[i], x_threads[i] = w_ns[cost], w_moved[cost], w_threads[cost]
                    x_left[i] = x_ns[i] * FULL
                    is_stale = True
                else:
                    stats[GROWTHS] += 1
                    more = out[act + 4] - ones(had_low[row]) - ones(had_high[row])
                    low = lowest(free_low, more)
                    high = lowest(free_high, more - ones(low))
                    had_low[row], had_high[row] = had_low[row] | low, had_high[row] | high
                    free_low, free_high = free_low & ~low, free_high & ~high
                    free -= more
                    for i in range(running):
                        if x_row[i] == row and x_unit[i] + 1 < jobs[job + END]:
                            x_wider[i] = out[act + 4]
            if free < 0:
                return -2
        left = waiting
        for row in range(rows):
            if left == 0:
                break
            job = FIELDS * row
            if 0 <= jobs[job + STATE] <= PAUSED:
                left -= 1
                if drop != NONE:
                    timer = min(timer, jobs[job + DEADLINE])
        for t in range(tenants):
            if misses[t] > most_misses[t]:
                return -1
        if gone > 8 and 4 * gone > rows:
            kept = 0
            for row in range(rows):
                if jobs[FIELDS * row + STATE] != GONE:
                    if kept < row:
                        for i in range(FIELDS):
                            jobs[FIELDS * kept + i] = jobs[FIELDS * row + i]
                        query_of[kept] = query_of[row]
                        had_low[kept], had_high[kept] = had_low[row], had_high[row]
                        if jobs[FIELDS * kept + STATE] > PAUSED:
                            for i in range(running):
                                if x_row[i] == row:
                                    x_row[i] = kept
                                    break
                    kept += 1
            rows, gone = kept, 0
    return now
