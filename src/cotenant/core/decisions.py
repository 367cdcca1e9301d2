"""Whether a decision can be carried out: all of it is looked at before any of it is booked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import NamedTuple

from cotenant.core.launches import Launches
from cotenant.core.lifecycle import BatchState, QueryState, StrandState
from cotenant.core.queues import Batch, Live, TenantQueue, are_mergeable
from cotenant.core.snapshot import Decision, Growth, Start
from cotenant.types import Tenant
from cotenant.work import Work

_QUEUED, _PAUSED = QueryState.QUEUED, BatchState.PAUSED


class _Whole(NamedTuple):
    """What the starts of one batch have to add up to, as far as it is known before they are looked at."""

    tenant: Tenant
    rows: int
    shape: int
    begin: int
    works: list[Work]


def fault_of(
    decision: Decision,
    live: Mapping[int, Live],
    batches: Mapping[int, Batch],
    served: Mapping[str, TenantQueue],
    launches: Launches,
) -> str | None:
    """What a policy does wrong in this decision, as the rest of a sentence; None when nothing is."""
    gone: set[int] = set()
    for drop in decision.drops:
        if drop.query not in live or drop.query in gone:
            return f"drops query {drop.query}, which is not live"
        gone.add(drop.query)
    free, held = launches.free_mask, dict[int, int]()
    wholes: dict[object, _Whole] = {}
    dropped = gone.copy() if gone else gone
    for number, start in enumerate(decision.starts, launches.count):
        mask = start.share.mask
        rest = mask & ~free
        for other in start.after:
            if other not in held:
                if not launches.is_known(other) or _is_dropped(launches, batches, other, dropped):
                    return f"waits for launch {other}, which is not under way"
                held[other] = launches.held_for(other)
            taken = rest & held[other]
            held[other] &= ~taken
            rest &= ~taken
        if rest:
            return f"launches on cores {start.share.cores}, not all free"
        free &= ~mask
        held[number] = mask
        batch = start.batch
        key: object = batch if batch is not None else tuple([query.id for query in start.queries])
        whole = wholes.get(key)
        if whole is None:
            found = _new_whole(start, live, served, gone) if batch is None else _paused_whole(batch, batches, gone)
            if isinstance(found, str):
                return found
            whole = wholes[key] = found
        fault = _work_fault(start.work, whole)
        if fault is not None:
            return fault
        whole.works.append(start.work)
    for whole in wholes.values():
        if len(whole.works) > 1 or whole.works[0].rows or whole.works[0].start != whole.begin:
            fault = _parts_fault(whole)
            if fault is not None:
                return fault
    return _growth_fault(decision.grows, launches, free) if decision.grows else None


def _is_dropped(launches: Launches, batches: Mapping[int, Batch], number: int, dropped: set[int]) -> bool:
    """Whether a launch waits for which nobody waits any more after the drops."""
    launch = launches.waiting.get(number)
    return launch is not None and all(query.id in dropped for query in batches[launch.batch].queries)


def _new_whole(
    start: Start, live: Mapping[int, Live], served: Mapping[str, TenantQueue], gone: set[int]
) -> _Whole | str:
    """The batch that a start begins, or what is wrong with it. Its queries are gone then."""
    queue, queries = served.get(start.work.tenant), start.queries
    if queue is None or not queries:
        return "starts an empty batch, or one of nobody"
    if len(queries) > 1 and not are_mergeable(queue.tenant, queries):
        text = f"differ in shape or key, or have more than {queue.tenant.max_batch} rows"
        return f"merges queries of {start.work.tenant!r} that {text}"
    for query in queries:
        known = live.get(query.id)
        if known is None or known.state is not _QUEUED or query.id in gone or query.tenant != start.work.tenant:
            return f"launches query {query.id}, which is not waiting"
        gone.add(query.id)
    return _Whole(queue.tenant, sum([query.items for query in queries]), queries[0].shape, 0, [])


def _paused_whole(number: int, batches: Mapping[int, Batch], gone: set[int]) -> _Whole | str:
    """The batch that a start resumes, or what is wrong with that."""
    batch = batches.get(number)
    if batch is None or batch.state is not _PAUSED:
        return f"resumes batch {number}, which is not paused"
    if gone and all(query.id in gone for query in batch.queries):
        return f"resumes batch {number}, of which it drops every query"
    return _Whole(batch.tenant, batch.items, batch.shape, batch.next_unit, [])


def _work_fault(work: Work, whole: _Whole) -> str | None:
    """What is wrong with the work of one start of a batch, by itself."""
    tenant, rows = whole.tenant, whole.rows
    start, end, cuts = work.start, work.end, tenant.cuts
    if work.rows:
        rows = work.rows[1] - work.rows[0] if len(work.rows) == 2 and work.rows[0] >= 0 else 0
    if work.tenant != tenant.name or work.items != rows or work.shape != whole.shape or start < whole.begin or not rows:
        return (
            f"starts {work}, expected {rows} rows of {tenant.name!r} at shape {whole.shape} from unit {whole.begin} on"
        )
    if end <= start or (end != cuts[-1] and (end > cuts[-1] or cuts[bisect_left(cuts, end)] != end)):
        return f"ends a segment of {tenant.name!r} at unit {end}"
    if start != whole.begin and cuts[bisect_left(cuts, start)] != start:
        return f"begins a segment of {tenant.name!r} at unit {start}"
    return None


def _parts_fault(whole: _Whole) -> str | None:
    """Whether parts of a batch run each unit up to a cut, for each row, once."""
    spans = [(*(work.rows or (0, whole.rows)), work.start, work.end) for work in whole.works]
    until = max(end for *_, end in spans)
    area = sum((last - first) * (end - start) for first, last, start, end in spans)
    is_apart = all(a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2] for a, b in combinations(spans, 2))
    if is_apart and area == whole.rows * (until - whole.begin) and max(span[1] for span in spans) <= whole.rows:
        return None
    return f"starts parts of a batch of {whole.tenant.name!r} that do not run each unit of each row once: {whole.works}"


def _growth_fault(growths: Iterable[Growth], launches: Launches, free: int) -> str | None:
    """What is wrong with growths, when these slots are left."""
    grown: set[int] = set()
    for growth in growths:
        number, share = growth.launch, growth.share
        run = launches.running.get(number)
        if run is None or not run.launch.stops or run.state is not StrandState.RUNNING or number in grown:
            return f"lets launch {number} grow, which cannot"
        had = run.launch.share
        more = share.mask & ~had.mask
        if had.mask & ~share.mask or not more or (share.device, share.first) != (had.device, had.first):
            return f"lets launch {number} grow from {had.cores} to {share.cores}, which are not more"
        if more & ~free:
            return f"lets launch {number} grow into cores {share.cores}, not all free"
        free &= ~more
        grown.add(number)
    return None
