"""Event-driven simulation of concurrent units of several models, as an inner loop over flat sequences (`inner_loop`).

Times are floats in ns. A *cluster* is the segment of all members between two barriers. A *stream* x belongs to member
`x // MAX_CHUNKS`; it runs its units, or in chunked units chunk `x % MAX_CHUNKS`.
"""

from __future__ import annotations

from typing import NamedTuple

from cotenant.inner_loop import Floats, Ints

NEVER = 1e300
"""A time that is never reached, in ns."""
TINY = 1e-3
"""Times closer than this, in ns, are equal."""
SLACK = 1e-9
"""Tolerance of sums of shares."""
MAX_CHUNKS = 8
"""Most chunks of a batch, so most streams of a member. A compile-time constant, since the loop often divides by it."""
_WAITS, _RUNS = 1, 2


class FlatSet(NamedTuple):
    """Tables and rules as numbers. `need` is at most 1.

    `modes`: whether blocks fill free slots, whether rates are shared, whether streams keep slots, and the issuing
    threads. The last is 0 for one a stream, 1 for one a member, 2 for one for all. `costs`: launch, gap, event. `first`
    is the first unit of each member, `cell` its first cell. Unit u with r rows is at `cell + u * batch + r - 1`.
    """

    modes: Ints
    costs: Floats
    first: Ints
    cell: Ints
    batch: Ints
    duration: Floats
    need: Floats
    compute: Floats
    bandwidth: Floats
    join: Floats


class FlatPlan(NamedTuple):
    """A plan without its barriers. `chunk_from` and `wait_from` are by member, `rows_from` by chunk, each with one
    entry more for the end."""

    rank: Ints
    chunk_from: Ints
    chunk_start: Ints
    chunk_end: Ints
    rows_from: Ints
    chunk_rows: Ints
    wait_from: Ints
    wait_unit: Ints
    wait_after: Ints
    wait_until: Ints


class ClusterScratch(NamedTuple):
    """Working memory of a run.

    The arrays from `unit` to `rate` are by stream. By member are `chunk` (present or next), `width` (its streams),
    `open` (those that have not ended), and `resume`. That is when the next unit may start, else -1. By unit are `done`
    (its end, -1 before), `ended` (chunks that have ended) and `issued`; by unit and chunk `begin` and `end`. `area` is
    the slot-time, in ns of all slots.
    """

    live: Ints
    unit: Ints
    limit: Ints
    rows: Ints
    state: Ints
    base: Floats
    ready: Floats
    left: Floats
    want: Floats
    held: Floats
    compute: Floats
    bandwidth: Floats
    rate: Floats
    chunk: Ints
    width: Ints
    open: Ints
    resume: Floats
    ended: Ints
    done: Floats
    issued: Floats
    begin: Floats
    end: Floats
    area: Floats


def list_issues(g: FlatSet, p: FlatPlan, w: ClusterScratch, lo: Ints, hi: Ints) -> None:
    """Set when the host issues the first launch of each unit, from the start of the cluster, and reset the ends."""
    launch, issuing = g.costs[0], g.modes[3]
    members, longest = len(lo), 0
    for m in range(members):
        longest = max(longest, hi[m] - lo[m])
        at = launch
        c = p.chunk_from[m]
        for u in range(lo[m], hi[m]):
            i = g.first[m] + u
            w.done[i] = -1.0
            w.ended[i] = 0
            w.issued[i] = at
            while c < p.chunk_from[m + 1] and p.chunk_end[c] <= u:
                c += 1
            if issuing > 0 and c < p.chunk_from[m + 1] and p.chunk_start[c] <= u:
                at += launch * (p.rows_from[c + 1] - p.rows_from[c])
            else:
                at += launch
        w.base[m * MAX_CHUNKS] = at  # borrowed: what the thread of this member is free at
    if issuing == 2:
        total = 0.0
        for step in range(longest):
            for m in range(members):
                u = lo[m] + step
                if u < hi[m]:
                    i = g.first[m] + u
                    after = w.issued[i + 1] if u + 1 < hi[m] else w.base[m * MAX_CHUNKS]
                    spent = after - w.issued[i]
                    w.issued[i] = total + launch
                    total += spent


def look(g: FlatSet, p: FlatPlan, w: ClusterScratch, x: int, lo: Ints, hi: Ints) -> None:
    """Set when a stream's next unit is ready: its predecessor and its waits have ended, and it is issued."""
    m, u = x // MAX_CHUNKS, w.unit[x]
    ready = w.base[x]
    issued = w.issued[g.first[m] + u]
    if g.modes[3] > 0:
        issued += g.costs[0] * (x % MAX_CHUNKS)
    ready = max(ready, issued)
    for k in range(p.wait_from[m], p.wait_from[m + 1]):
        if p.wait_unit[k] == u:
            after, until = p.wait_after[k], p.wait_until[k]
            if until > lo[after]:
                ended = w.done[g.first[after] + until - 1] if until <= hi[after] else -1.0
                ready = NEVER if ended < 0.0 else max(ready, ended + g.costs[2])
    w.ready[x] = ready


def load(g: FlatSet, p: FlatPlan, w: ClusterScratch, x: int, u: int, base: float, lo: Ints, hi: Ints) -> None:
    """Put a stream before a unit; the predecessor ended at `base`."""
    m = x // MAX_CHUNKS
    i = g.cell[m] + u * g.batch[m] + w.rows[x] - 1
    w.unit[x] = u
    w.state[x] = _WAITS
    w.left[x] = g.duration[i]
    w.want[x] = g.need[i]
    w.compute[x] = g.compute[i]
    w.bandwidth[x] = g.bandwidth[i]
    w.base[x] = base
    look(g, p, w, x, lo, hi)


def enter(g: FlatSet, p: FlatPlan, w: ClusterScratch, m: int, u: int, base: float, lo: Ints, hi: Ints, n: int) -> int:
    """Start the next streams of a member at unit `u`: chunks, or one stream up to the next chunk. Returns the number of
    live streams."""
    c = w.chunk[m]
    while c < p.chunk_from[m + 1] and p.chunk_end[c] <= u:
        c += 1
    w.chunk[m] = c
    limit, count, offset = hi[m], 1, -1
    if c < p.chunk_from[m + 1]:
        if p.chunk_start[c] <= u:
            limit = min(limit, p.chunk_end[c])
            offset = p.rows_from[c]
            count = p.rows_from[c + 1] - offset
        else:
            limit = min(limit, p.chunk_start[c])
    w.open[m] = count
    w.width[m] = count
    for k in range(count):
        x = m * MAX_CHUNKS + k
        w.limit[x] = limit
        w.rows[x] = p.chunk_rows[offset + k] if offset >= 0 else g.batch[m]
        w.held[x] = 0.0
        forks = k > 0 and u > lo[m]
        load(g, p, w, x, u, base + (g.costs[2] if forks else 0.0), lo, hi)
        w.live[n] = x
        n += 1
    return n


def has_wait(p: FlatPlan, m: int, u: int) -> bool:
    """Whether a unit waits for another member."""
    found = False
    for k in range(p.wait_from[m], p.wait_from[m + 1]):
        found = found or p.wait_unit[k] == u
    return found


def level(w: ClusterScratch, demand: Floats, n: int) -> float:
    """The max-min fair share of a rate, when the demand of all running streams exceeds it (progressive filling)."""
    left, count = 1.0, 0
    for i in range(n):
        if w.rate[w.live[i]] > 0.0:
            count += 1
    fair = left / count
    while True:
        spent, over = 0.0, 0
        for i in range(n):
            x = w.live[i]
            if w.rate[x] > 0.0:
                demanded = demand[x] * w.rate[x]
                if demanded <= fair:
                    spent += demanded
                else:
                    over += 1
        if over == 0 or fair * over + spent >= left - SLACK:
            return fair
        fair = (left - spent) / over


def play(g: FlatSet, p: FlatPlan, w: ClusterScratch, lo: Ints, hi: Ints) -> float:
    """The time of a cluster in ns: units [lo, hi) of each member, all of which start at once. Below 0 if waits are
    circular.

    Until no stream is live:

    1. In order of rank, then readiness, admit ready streams: if their need is free (`WHOLE`), or with the free share
       (`FILL`).
    2. If the demand for operations or bytes exceeds 1, reduce the speeds to the max-min fair share.
    3. Advance to the next end of a unit or next ready time; each running stream does `speed * step` of its unit.
    4. Let streams of ended units load their next unit, or join their chunks.

    `w.area[0]` is the slot-time; the scratch holds start and end of all units.
    """
    members, first, rank = len(lo), g.first, p.rank
    fills, shares, keeps = g.modes[0] > 0, g.modes[1] > 0, g.modes[2] > 0
    gap, event = g.costs[1], g.costs[2]
    live, state, ready, left, want, held, rate = w.live, w.state, w.ready, w.left, w.want, w.held, w.rate
    compute, bandwidth = w.compute, w.bandwidth
    list_issues(g, p, w, lo, hi)
    n = 0
    for m in range(members):
        w.chunk[m] = p.chunk_from[m]
        w.resume[m] = -1.0
        if lo[m] < hi[m]:
            n = enter(g, p, w, m, lo[m], 0.0, lo, hi, n)
    now, last, area, used = 0.0, 0.0, 0.0, 0.0
    while n > 0:
        for i in range(1, n):  # in order of rank, then of readiness, then of number
            x, j = live[i], i - 1
            r, at = rank[x // MAX_CHUNKS], ready[x]
            while j >= 0:
                y = live[j]
                q = rank[y // MAX_CHUNKS]
                if q < r or (q == r and (ready[y] < at or (ready[y] == at and y < x))):
                    break
                live[j + 1] = y
                j -= 1
            live[j + 1] = x
        free, demanded, moved, step = 1.0, 0.0, 0.0, NEVER
        for i in range(n):
            x = live[i]
            if state[x] == _WAITS:
                if ready[x] > now + TINY:
                    step = min(step, ready[x] - now)
                    continue
                if fills:
                    if free <= SLACK:
                        rate[x] = 0.0
                        continue
                elif held[x] > 0.0:
                    want[x] = held[x]
                    used -= held[x]
                    held[x] = 0.0
                elif used + want[x] > 1.0 + SLACK:
                    continue
                used += want[x]
                state[x] = _RUNS
                w.begin[(first[x // MAX_CHUNKS] + w.unit[x]) * MAX_CHUNKS + x % MAX_CHUNKS] = now
            speed = 1.0
            if fills:
                speed = min(1.0, free / want[x])
                free = max(0.0, free - speed * want[x])
            rate[x] = speed
            demanded += compute[x] * speed
            moved += bandwidth[x] * speed
        if shares and (demanded > 1.0 + SLACK or moved > 1.0 + SLACK):
            for i in range(n):
                if state[live[i]] == _WAITS:
                    rate[live[i]] = 0.0
            most_computed = level(w, compute, n) if demanded > 1.0 + SLACK else 2.0
            most_moved = level(w, bandwidth, n) if moved > 1.0 + SLACK else 2.0
            for i in range(n):
                x = live[i]
                speed = rate[x]
                if speed > 0.0:
                    if compute[x] * speed > most_computed:
                        rate[x] = most_computed / compute[x]
                    if bandwidth[x] * speed > most_moved:
                        rate[x] = min(rate[x], most_moved / bandwidth[x])
        for i in range(n):
            x = live[i]
            if state[x] == _RUNS and rate[x] > 0.0 and left[x] < step * rate[x]:
                step = left[x] / rate[x]
        if step >= NEVER:
            return -1.0
        now += step
        area += step * (1.0 - free if fills else used)
        kept = 0
        for i in range(n):
            x = live[i]
            if state[x] == _RUNS:
                left[x] -= rate[x] * step
                if left[x] <= TINY:
                    m, u = x // MAX_CHUNKS, w.unit[x] + 1
                    ended = first[m] + u - 1
                    w.end[ended * MAX_CHUNKS + x % MAX_CHUNKS] = now
                    w.ended[ended] += 1
                    if w.ended[ended] == w.width[m]:
                        w.done[ended] = now
                    if u == w.limit[x]:
                        used -= want[x]
                        w.open[m] -= 1
                        if w.open[m] == 0:
                            c = w.chunk[m]
                            joins = w.width[m] > 1 and p.chunk_end[c] == u
                            w.resume[m] = now + (g.join[ended] + event if joins else 0.0)
                            if u == hi[m]:
                                last = max(last, w.resume[m])
                                w.resume[m] = -1.0
                        continue
                    if keeps and not has_wait(p, m, u):
                        held[x] = want[x]
                    else:
                        used -= want[x]
                    load(g, p, w, x, u, now + gap, lo, hi)
            live[kept] = x
            kept += 1
        n = kept
        for m in range(members):
            if w.resume[m] >= 0.0:
                at = w.resume[m] + gap
                w.resume[m] = -1.0
                n = enter(g, p, w, m, w.limit[m * MAX_CHUNKS], at, lo, hi, n)
        for i in range(n):
            if ready[live[i]] >= NEVER:
                look(g, p, w, live[i], lo, hi)
    w.area[0] = area
    return last
