"""From a snapshot to the rows that the rules decide on, and from what they have decided to a decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

from cotenant.core.admission import hopeless
from cotenant.core.lifecycle import StrandState
from cotenant.core.snapshot import BatchView, Decision, Drop, DropRule, Growth, QueueView, Running, Snapshot, Start
from cotenant.policies.desk import Desk
from cotenant.techniques.layer_blocks.policy.basis import BlockBasis
from cotenant.techniques.layer_blocks.policy.rules import (
    ACTS,
    DEADLINE,
    DROP,
    FIELDS,
    FIXED,
    PAUSED,
    RUNS,
    START,
    WAITS,
    base_of,
)
from cotenant.techniques.layer_blocks.policy.tables import ModelTables
from cotenant.types import Query, Tenant
from cotenant.work import Share, Work

_RUNNING = StrandState.RUNNING
_MOST_WAITING = 32
"""Queries of one queue that one decision looks at, those beyond help apart; what is behind hardly goes before these."""

_Who = tuple[Tenant, int, int, int, BatchView | None, tuple[Query, ...]]
"""Tenant, shape and rows of a job; the number of its launch, or of its paused batch; its batch; its queries while they
wait."""
_Row = tuple[int, tuple[int, ...], _Who]
"""A job with the number of its first query, by which rows are ordered."""
_number = itemgetter(0)


class Floor:
    """Local state of one call of `decide`. Never outlives the call.

    `jobs` are the rows for the rules, `rows` how many they are, `out` where the rules say what they do, and `free` is
    the number of free lanes, of which there are `total`.
    """

    __slots__ = ("_found", "_free_mask", "_lanes", "_snapshot", "free", "jobs", "out", "rows", "tables", "total")

    def __init__(self, snapshot: Snapshot, lanes: Sequence[Share], tables: ModelTables, drop: DropRule) -> None:
        self._snapshot = snapshot
        self._lanes = lanes
        self.tables = tables
        self.total = len(lanes)
        tables.use(snapshot.predictor)
        mask, size = snapshot.free_mask, lanes[0].size
        mask = mask & tables.mask if size == 1 else sum([lane.mask for lane in lanes if lane.mask & mask == lane.mask])
        self._free_mask = mask
        self.free = mask.bit_count() // size
        found: list[_Row] = []
        running, known = snapshot.running, tables.rows
        for number, run in running.items():
            kept = known.get(number)
            if kept is None or kept[0] is not run:
                kept = known[number] = run, self._running_row(number, run)
            found.append(kept[1])
        found += [self._paused_row(batch) for batch in snapshot.paused]
        desk: Desk | None = None
        for queue in snapshot.queues.values():
            if not queue.queries:
                continue
            if queue.tenant.max_batch > 1 and len(queue.queries) > 1:
                desk = Desk(snapshot, drop) if desk is None else desk
                found += [self._waiting_row(queue.tenant, queries) for queries in self._merged(desk, queue)]
            else:
                self._add_first(queue, drop, found)
        if len(known) > 4 * len(found) + 64:
            tables.rows = {number: known[number] for number in running}
        if len(found) > 1:
            found.sort(key=_number)
        self._found = found
        self.rows = len(found)
        self.jobs: list[int] = []
        for _, row, _ in found:
            self.jobs += row
        self.out = [0] * (ACTS * len(found))

    def _running_row(self, number: int, run: Running) -> _Row:
        launch, batch, tenant = run.launch, run.batch, run.batch.tenant
        work, size, since = launch.work, self._lanes[0].size, run.started_ns
        model = self.tables.number_of(tenant, batch.shape, batch.items)
        place = self.tables.places[model]
        basis = launch.basis
        if not isinstance(basis, BlockBasis):  # another policy, or the fallback, has started it
            deadline = min([query.deadline_ns for query in batch.queries], default=since + launch.predicted_ns)
            basis = BlockBasis(deadline - since - launch.predicted_ns)
        can_grow = basis.wanted and launch.stops and run.state is _RUNNING
        row = (
            model,
            RUNS if can_grow else FIXED,
            since,
            since + basis.headroom_ns + launch.predicted_ns,
            place[work.start],
            place[work.end],
            launch.share.size // size,
            basis.wanted // size,
            work.version,
            since,
            since + launch.predicted_ns,
            0,
        )
        return launch.queries[0], row, (tenant, batch.shape, batch.items, number, batch, ())

    def _paused_row(self, batch: BatchView) -> _Row:
        tenant, queries, held = batch.tenant, batch.queries, batch.share
        model = self.tables.number_of(tenant, batch.shape, batch.items)
        first, unit = queries[0], self.tables.places[model][batch.next_unit]
        own = 0 if held is None else (held.mask & self._free_mask).bit_count() // self._lanes[0].size
        deadline = first.deadline_ns
        if len(queries) > 1:
            deadline = self._within_reach(model, unit, [query.deadline_ns for query in queries])
        row = (model, PAUSED, first.arrival_ns, deadline, unit, 0, own, 0, 0, 0, 0, tenant.rank)
        return first.id, row, (tenant, batch.shape, batch.items, batch.id, batch, ())

    def _waiting_row(self, tenant: Tenant, queries: tuple[Query, ...]) -> _Row:
        """That of queries that may begin as one batch."""
        first = queries[0]
        items, deadline = first.items, first.deadline_ns
        if len(queries) > 1:
            items = sum([query.items for query in queries])
        model = self.tables.number_of(tenant, first.shape, items)
        if len(queries) > 1:
            deadline = self._within_reach(model, 0, [query.deadline_ns for query in queries])
        row = (model, WAITS, first.arrival_ns, deadline, 0, 0, 0, 0, 0, 0, 0, tenant.rank)
        return first.id, row, (tenant, first.shape, items, -1, None, queries)

    def decision(self, count: int) -> Decision:
        """The decision of the first `count` changes in `out`."""
        out, found = self.out, self._found
        starts: list[Start] = []
        drops: list[Drop] = []
        grows: list[Growth] = []
        size = self._lanes[0].size
        for at in range(0, ACTS * count, ACTS):
            row, act, end, version, cores, wanted, takes, pressure = out[at : at + ACTS]
            tenant, shape, items, number, batch, queries = found[row][2]
            if act == START:
                held, start, resumed = 0, 0, None
                if batch is not None:
                    start, resumed = batch.next_unit, number
                    held = 0 if batch.share is None else batch.share.mask
                work = Work(tenant.name, shape, items, start, tenant.cuts[end], version)
                share, takes = self._share_of(self._take(cores, held)), takes if takes > 0 else 1
                members = queries if batch is None else batch.queries
                deadline = min([query.deadline_ns for query in members])
                basis = BlockBasis(deadline - self._snapshot.now_ns - takes, wanted * size, pressure)
                starts.append(Start(work, queries, share, takes, resumed, (), wanted > 0, basis))
            elif act == DROP:
                members = queries if batch is None else batch.queries
                reason = hopeless(takes, self.jobs[FIELDS * row + DEADLINE] - self._snapshot.now_ns)
                drops += [Drop(query.id, reason) for query in members]
            else:
                had = self._snapshot.running[number].launch.share
                more = self._share_of(self._take(cores - had.size // size, 0))
                grows.append(Growth(number, had.joined(more), takes))
        return Decision(tuple(starts), tuple(drops), self.tables, tuple(grows))

    def _take(self, count: int, held: int) -> int:
        """Take free lanes: those that it held first, then the first ones. Gives their mask."""
        taken, free = 0, self._free_mask
        if self._lanes[0].size == 1:
            taken = lowest(free & held, count)
            taken |= lowest(free & ~taken, count - taken.bit_count())
            self._free_mask = free & ~taken
            return taken
        for those in (held, -1) if held else (-1,):
            for lane in self._lanes:
                if count and lane.mask & self._free_mask & those == lane.mask:
                    taken |= lane.mask
                    self._free_mask &= ~lane.mask
                    count -= 1
        return taken

    def _share_of(self, mask: int) -> Share:
        shares = self.tables.shares
        found = shares.get(mask)
        if found is None:
            lane = self._lanes[0]
            found = Share.of_mask(mask, lane.device, lane.first)
            if len(shares) < 1 << 12:
                shares[mask] = found
        return found

    def _within_reach(self, model: int, unit: int, deadlines: list[int]) -> int:
        """The earliest of the deadlines of a batch that it can still meet; the last one if it can meet none."""
        over = self._soonest_ns(model, unit)
        met = [deadline for deadline in deadlines if deadline >= over]
        return min(met) if met else max(deadlines)

    def _soonest_ns(self, model: int, unit: int) -> int:
        """When a model can be over that goes on from a unit now."""
        dims, spans = self.tables.dims, self.tables.spans[model]
        base = base_of(dims, model, 0, 0, self.total)
        return self._snapshot.now_ns + spans[base + dims[4 * model]] - spans[base + unit]

    def _add_first(self, queue: QueueView, drop: DropRule, found: list[_Row]) -> None:
        """Find the rows of the first queries of a queue, each by itself. They stay as they are while these wait."""
        tenant, known, left = queue.tenant, self.tables.rows, _MOST_WAITING
        looks = drop is DropRule.HOPELESS and len(queue.queries) > left
        for query in queue.queries:
            kept = known.get(~query.id)
            if kept is None or kept[0] is not query or kept[1][2][0] is not tenant:
                kept = known[~query.id] = query, self._waiting_row(tenant, (query,))
            found.append(kept[1])
            left -= not (looks and self._is_hopeless(tenant, query))
            if not left:
                break

    def _is_hopeless(self, tenant: Tenant, query: Query) -> bool:
        model = self.tables.number_of(tenant, query.shape, query.items)
        return query.deadline_ns < self._soonest_ns(model, 0)

    def _merged(self, desk: Desk, queue: QueueView) -> Iterable[tuple[Query, ...]]:
        """The first waiting queries of a queue as batches, as every policy merges them, for the cores that each gets if
        all share equally: what saves time on all cores may cost a core more than one query after the other."""
        snapshot = self._snapshot
        sharers = len(snapshot.running) + len(snapshot.paused)
        sharers += sum([min(len(each.queries), _MOST_WAITING) for each in snapshot.queues.values()])
        size = max(1, self.total // sharers) * self._lanes[0].size
        left = _MOST_WAITING
        while left:
            at = desk.head_at(queue)
            if at >= len(queue.queries):
                return
            head = queue.queries[at]
            if desk.drops_hopeless and self._is_hopeless(queue.tenant, head):
                desk.taken.add(head.id)
                yield (head,)
                continue
            left -= 1
            alone = desk.latency_ns(queue.tenant.work(head.shape, head.items), size)
            queries, _ = desk.form_batch(queue, at, size, alone)
            desk.taken.update([query.id for query in queries])
            yield queries


def lowest(mask: int, count: int) -> int:
    """The lowest `count` of the bits that are set; all of them where there are fewer."""
    if mask.bit_count() <= count:
        return mask
    taken = 0
    while count > 0:  # one run of set bits after the other
        first = mask & -mask
        rest = mask & (mask + first)
        run = mask ^ rest
        length = run.bit_count()
        taken |= run if length <= count else (first << count) - first
        mask, count = rest, count - length
    return taken
