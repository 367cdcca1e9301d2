"""Validation of decisions: a whole decision is checked before any of it takes effect."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from msgspec import Struct, UnsetType

from cotenant.core.batches import Batch
from cotenant.core.launches import Launches
from cotenant.core.lifecycle import BatchState, QueryState, TaskState
from cotenant.core.queues import Live, TenantQueue, are_mergeable
from cotenant.core.snapshot import Decision, Expansion, Start
from cotenant.types import LossCause, Tenant
from cotenant.work import Share, Work

_QUEUED, _PAUSED = QueryState.QUEUED, BatchState.PAUSED
_CAUSES, _NAMES = (LossCause, UnsetType), (str, UnsetType)


_Whole = tuple[Tenant, int, int, int]
"""Tenant, rows, shape and first unit that the starts of one batch have to cover."""


def fault_of(
    decision: Decision,
    live: Mapping[int, Live],
    batches: Mapping[int, Batch],
    served: Mapping[str, TenantQueue],
    launches: Launches,
    devices: Mapping[str, Share],
) -> str | None:
    """First violation of the policy contract in a decision, as the rest of a sentence; None for a valid decision.

    Raises any exception that reading a malformed decision raises.
    """
    if type(decision) is not Decision or type(decision.starts) is not tuple:
        return f"gives {decision!r:.100}, expected a Decision with tuples"
    gone: set[int] = set()
    for drop in decision.drops:
        if drop.query not in live or drop.query in gone:
            return f"drops query {drop.query}, which is not live"
        gone.add(drop.query)
        if type(drop.reason) is not str or not isinstance(drop.cause, _CAUSES) or not isinstance(drop.culprit, _NAMES):
            return f"drops query {drop.query} with a wrong reason, cause or tenant: {drop!r:.100}"
    starts, free = decision.starts, launches.free_mask
    is_one = len(starts) == 1  # as nearly always
    held: dict[int, int] = {}
    wholes: dict[object, tuple[_Whole, list[Work]]] = {}
    dropped = gone.copy() if gone else gone
    for number, start in enumerate(starts, launches.count):
        work, share, batch = start.work, start.share, start.batch
        mask, device = share.mask, devices.get(share.device)
        if device is None or device.first != share.first or mask & ~device.mask:
            return f"launches on {share}, not all free: no share of a device of the machine"
        if type(start.predicted_ns) is not int:
            return f"starts {work} with a number that is no integer: {start!r:.300}"
        if start.basis is not None and not isinstance(start.basis, Struct):
            return f"starts {work} with a basis that is no Struct: {start!r:.300}"
        rest = mask & ~free
        if start.after:
            for other in start.after:
                if other not in held:
                    if not launches.is_known(other) or _is_dropped(launches, batches, other, dropped):
                        return f"waits for launch {other}, which is not under way"
                    held[other] = launches.held_for(other)
                taken = rest & held[other]
                held[other] &= ~taken
                rest &= ~taken
        if rest:
            return f"launches on cores {share.cores}, not all free"
        free &= ~mask
        held[number] = mask
        key: object = None
        if not is_one:
            key = batch if batch is not None else tuple([query.id for query in start.queries])
        if key not in wholes:
            found = _new_whole(start, live, served, gone) if batch is None else _paused_whole(batch, batches, gone)
            if isinstance(found, str):
                return found
            if is_one and not work.rows and work.start == found[3]:  # no other start can be a part of the batch
                if batch is not None or work is not found[0].work(found[2], found[1]):
                    fault = _work_fault(work, found)
                    if fault is not None:
                        return fault
                break
            wholes[key] = found, []
        whole, works = wholes[key]
        fault = _work_fault(work, whole)
        if fault is not None:
            return fault
        works.append(work)
    for whole, works in wholes.values():
        if len(works) > 1 or works[0].rows or works[0].start != whole[3]:
            fault = _parts_fault(whole, works)
            if fault is not None:
                return fault
    return _expansion_fault(decision.expansions, launches, free) if decision.expansions else None


def is_behind(starts: Iterable[Start], launches: Launches) -> bool:
    """Whether every start of a group waits for every running launch. No other launch waits then: the engine asks for no
    group while launches wait."""
    return all(launches.running.keys() <= set(start.after) for start in starts)


def _is_dropped(launches: Launches, batches: Mapping[int, Batch], number: int, dropped: set[int]) -> bool:
    """Whether a waiting launch has no query left after the drops."""
    launch = launches.waiting.get(number)
    return launch is not None and all(query.id in dropped for query in batches[launch.batch].queries)


def _new_whole(
    start: Start, live: Mapping[int, Live], served: Mapping[str, TenantQueue], gone: set[int]
) -> _Whole | str:
    """The new batch of a start, or the error in it. Adds its queries to `gone`."""
    queue, queries = served.get(start.work.tenant), start.queries
    if type(queries) is not tuple:
        return f"starts a batch of {type(queries).__name__}, expected a tuple of queries"
    if queue is None or not queries:
        return "starts an empty batch, or a batch of an unknown tenant"
    if len(queries) > 1 and not are_mergeable(queue.tenant, queries):
        text = f"differ in shape or key, or have more than {queue.tenant.max_batch} rows"
        return f"merges queries of {start.work.tenant!r} that {text}"
    for query in queries:
        known = live.get(query.id)
        if known is None or known.state is not _QUEUED or query.id in gone or query.tenant != start.work.tenant:
            return f"launches query {query.id}, which is not waiting"
        if known.query is not query and known.query != query:
            return f"launches query {query.id} as another one than it is"
        gone.add(query.id)
    head = queries[0]
    return queue.tenant, head.items if len(queries) == 1 else sum([query.items for query in queries]), head.shape, 0


def _paused_whole(number: int, batches: Mapping[int, Batch], gone: set[int]) -> _Whole | str:
    """The paused batch that a start resumes, or the error in it."""
    batch = batches.get(number)
    if batch is None or batch.state is not _PAUSED:
        return f"resumes batch {number}, which is not paused"
    if gone and all(query.id in gone for query in batch.queries):
        return f"resumes batch {number}, of which it drops every query"
    return batch.tenant, batch.items, batch.shape, batch.next_unit


def _work_fault(work: Work, whole: _Whole) -> str | None:
    """Error in the work of one start of a batch, without regard to other starts."""
    tenant, rows, shape, begin = whole
    start, end, cuts = work.start, work.end, tenant.cuts
    if type(work) is not Work or type(start + end) is not int:
        return f"starts {work!r:.300}, expected a Work with integer units"
    if work.rows:
        rows = work.rows[1] - work.rows[0] if len(work.rows) == 2 and work.rows[0] >= 0 else 0
    if work.tenant != tenant.name or work.items != rows or work.shape != shape or start < begin or not rows:
        return f"starts {work}, expected {rows} rows of {tenant.name!r} at shape {shape} from unit {begin} on"
    if end <= start or (end != cuts[-1] and (end > cuts[-1] or cuts[bisect_left(cuts, end)] != end)):
        return f"ends a segment of {tenant.name!r} at unit {end}"
    if start != begin and cuts[bisect_left(cuts, start)] != start:
        return f"begins a segment of {tenant.name!r} at unit {start}"
    if rows != whole[1] and not tenant.may_split(start, end):
        return f"runs some of the rows of units {start} to {end} of {tenant.name!r}, which mix rows"
    return None


def _parts_fault(whole: _Whole, works: Sequence[Work]) -> str | None:
    """Error if the parts of a batch do not run each unit up to one cut exactly once for each row; else None."""
    tenant, rows, _, begin = whole
    spans = [(*(work.rows or (0, rows)), work.start, work.end) for work in works]
    until = max(end for *_, end in spans)
    area = sum((last - first) * (end - start) for first, last, start, end in spans)
    is_disjoint = all(a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2] for a, b in combinations(spans, 2))
    if is_disjoint and area == rows * (until - begin) and max(span[1] for span in spans) <= rows:
        return None
    return f"starts parts of a batch of {tenant.name!r} that do not run each unit of each row once: {works}"


def _expansion_fault(expansions: Iterable[Expansion], launches: Launches, free: int) -> str | None:
    """Error in expansions, when these slots are free; else None."""
    expanded: set[int] = set()
    for expansion in expansions:
        number, share = expansion.launch, expansion.share
        run = launches.running.get(number)
        if type(expansion.predicted_ns) is not int or type(share) is not Share:
            return f"lets launch {number} expand to {expansion!r:.200}, expected an Expansion"
        if run is None or not run.launch.stops or run.state is not TaskState.RUNNING or number in expanded:
            return f"lets launch {number} expand, which cannot"
        had = run.launch.share
        more = share.mask & ~had.mask
        if had.mask & ~share.mask or not more or (share.device, share.first) != (had.device, had.first):
            return f"lets launch {number} expand from {had.cores} to {share.cores}, which are not more"
        if more & ~free:
            return f"lets launch {number} expand into cores {share.cores}, not all free"
        free &= ~more
        expanded.add(number)
    return None
