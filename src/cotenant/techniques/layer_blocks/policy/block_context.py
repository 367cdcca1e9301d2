"""From a snapshot to the jobs that the rules of blocks decide on, and from their changes to a decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from cotenant.core.admission import hopeless
from cotenant.core.lifecycle import TaskState
from cotenant.core.snapshot import BatchView, Decision, Drop, DropRule, Expansion, QueueView, Running, Snapshot, Start
from cotenant.policies.decision_context import DecisionContext
from cotenant.techniques.layer_blocks.policy.block_basis import BlockBasis
from cotenant.techniques.layer_blocks.policy.block_jobs import (
    BlockJob,
    BlockSnapshot,
    BlockStart,
    Change,
    JobDrop,
    RunningBlock,
)
from cotenant.techniques.layer_blocks.policy.block_model import BlockModel
from cotenant.techniques.layer_blocks.policy.model_tables import ModelTables
from cotenant.types import Query, Tenant
from cotenant.work import Share, Work

_RUNNING = TaskState.RUNNING
_MOST_WAITING = 32
"""Waiting queries of one queue that one decision considers, without hopeless ones; later ones rarely run first."""
_first = attrgetter("first")


class BlockContext:
    """Local state of one call of `decide`, which it never outlives. `blocks` is what the rules see."""

    __slots__ = ("_free_mask", "_lanes", "_snapshot", "_tables", "blocks")

    def __init__(self, snapshot: Snapshot, lanes: Sequence[Share], tables: ModelTables, drop: DropRule) -> None:
        self._snapshot = snapshot
        self._lanes = lanes
        self._tables = tables
        tables.use(snapshot.predictor)
        mask, size = snapshot.free_mask, lanes[0].size
        mask = mask & tables.mask if size == 1 else sum([lane.mask for lane in lanes if lane.mask & mask == lane.mask])
        self._free_mask = mask
        running, known, blocks = snapshot.running, tables.blocks, list[RunningBlock]()
        for number, run in running.items():
            kept = known.get(number)
            if kept is None or kept[0] is not run:
                kept = known[number] = run, self._running_block(number, run)
            blocks.append(kept[1])
        ready = [self._paused_job(batch) for batch in snapshot.paused]
        drops = drop is DropRule.HOPELESS
        context: DecisionContext | None = None
        for queue in snapshot.queues.values():
            if not queue.queries:
                continue
            if queue.tenant.max_batch > 1 and len(queue.queries) > 1:
                context = DecisionContext(snapshot, drop) if context is None else context
                ready += [self._waiting_job(queue.tenant, queries) for queries in self._merged(context, queue)]
            else:
                self._add_first(queue, drops, ready)
        if len(known) + len(tables.jobs) > 4 * (len(blocks) + len(ready)) + 64:
            tables.blocks = {number: known[number] for number in running}
            tables.jobs = {}
        if len(blocks) > 1:
            blocks.sort(key=_first)
        if len(ready) > 1:
            ready.sort(key=_first)
        free = mask.bit_count() // size
        self.blocks = BlockSnapshot(
            snapshot.now_ns, free, len(lanes), tables.bandwidth, tables.beside, drops, ready, blocks
        )

    def _running_block(self, number: int, run: Running) -> RunningBlock:
        launch, batch, since = run.launch, run.batch, run.started_ns
        work, size = launch.work, self._lanes[0].size
        model = self._tables.model_of(batch.tenant, batch.shape, batch.items)
        basis = launch.basis
        if not isinstance(basis, BlockBasis):  # another policy, or the fallback, has started it
            deadline = min([query.deadline_ns for query in batch.queries], default=since + launch.predicted_ns)
            basis = BlockBasis(deadline - since - launch.predicted_ns)
        is_expandable = bool(basis.wanted and launch.stops) and run.state is _RUNNING
        return RunningBlock(
            launch.queries[0],
            model,
            number,
            model.unit_at[work.start],
            model.unit_at[work.end],
            work.version,
            launch.share.size // size,
            basis.wanted // size,
            is_expandable,
            since,
            since + launch.predicted_ns,
            since + basis.headroom_ns + launch.predicted_ns,
        )

    def _paused_job(self, batch: BatchView) -> BlockJob:
        tenant, queries, held = batch.tenant, batch.queries, batch.share
        model = self._tables.model_of(tenant, batch.shape, batch.items)
        first, unit = queries[0], model.unit_at[batch.next_unit]
        own = 0 if held is None else (held.mask & self._free_mask).bit_count() // self._lanes[0].size
        deadline = first.deadline_ns
        if len(queries) > 1:
            deadline = self._within_reach(model, unit, [query.deadline_ns for query in queries])
        return BlockJob(first.id, model, True, first.arrival_ns, deadline, tenant.rank, unit, own, batch)

    def _waiting_job(self, tenant: Tenant, queries: tuple[Query, ...]) -> BlockJob:
        """The job of queries that may begin as one batch."""
        first = queries[0]
        items, deadline = first.items, first.deadline_ns
        if len(queries) > 1:
            items = sum([query.items for query in queries])
        model = self._tables.model_of(tenant, first.shape, items)
        if len(queries) > 1:
            deadline = self._within_reach(model, 0, [query.deadline_ns for query in queries])
        return BlockJob(first.id, model, False, first.arrival_ns, deadline, tenant.rank, queries=queries)

    def decision(self, changes: Iterable[Change]) -> Decision:
        """The decision that makes these changes."""
        starts: list[Start] = []
        drops: list[Drop] = []
        expansions: list[Expansion] = []
        for change in changes:
            if isinstance(change, BlockStart):
                starts.append(self._start(change))
            elif isinstance(change, JobDrop):
                job = change.job
                members = job.queries if job.batch is None else job.batch.queries
                reason = hopeless(change.needed_ns, job.deadline_ns - self._snapshot.now_ns)
                drops += [Drop(query.id, reason) for query in members]
            else:
                number = change.block.launch
                had = self._snapshot.running[number].launch.share
                more = self._share_of(self._take(change.cores - had.size // self._lanes[0].size, 0))
                expansions.append(Expansion(number, had.joined(more), change.takes_ns))
        return Decision(tuple(starts), tuple(drops), self._tables, tuple(expansions))

    def _start(self, change: BlockStart) -> Start:
        job, takes, wanted = change.job, change.takes_ns, change.wanted
        model, batch = job.model, job.batch
        held, resumed, tenant = 0, None, model.tenant
        if batch is not None:
            resumed = batch.id
            held = 0 if batch.share is None else batch.share.mask
        cuts = tenant.cuts
        work = Work(tenant.name, model.shape, model.items, cuts[job.unit], cuts[change.end], change.version)
        share, takes = self._share_of(self._take(change.cores, held)), takes if takes > 0 else 1
        members = job.queries if batch is None else batch.queries
        deadline = min([query.deadline_ns for query in members])
        wide = wanted * self._lanes[0].size
        basis = BlockBasis(deadline - self._snapshot.now_ns - takes, wide, change.pressure_pct)
        return Start(work, job.queries, share, takes, resumed, (), wanted > 0, basis)

    def _take(self, count: int, held: int) -> int:
        """Assign free lanes: those of the mask `held` first, then the lowest ones. Returns their mask."""
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
        shares = self._tables.shares
        found = shares.get(mask)
        if found is None:
            lane = self._lanes[0]
            found = Share.of_mask(mask, lane.device, lane.first)
            if len(shares) < 1 << 12:
                shares[mask] = found
        return found

    def _within_reach(self, model: BlockModel, unit: int, deadlines: list[int]) -> int:
        """The earliest deadline of a batch that it can still meet; the last one if it can meet none."""
        soonest = self._snapshot.now_ns + model.rest_ns[unit]
        met = [deadline for deadline in deadlines if deadline >= soonest]
        return min(met) if met else max(deadlines)

    def _add_first(self, queue: QueueView, drops: bool, ready: list[BlockJob]) -> None:
        """Add a job for each of the first queries of a queue. A job is the same object while its query waits."""
        tenant, known, left = queue.tenant, self._tables.jobs, _MOST_WAITING
        looks = drops and len(queue.queries) > left
        for query in queue.queries:
            job = known.get(query.id)
            if job is None or job.queries[0] is not query or job.model.tenant is not tenant:
                job = known[query.id] = self._waiting_job(tenant, (query,))
            ready.append(job)
            left -= not (looks and self._is_hopeless(job.model, query))
            if not left:
                break

    def _is_hopeless(self, model: BlockModel, query: Query) -> bool:
        return query.deadline_ns < self._snapshot.now_ns + model.rest_ns[0]

    def _merged(self, context: DecisionContext, queue: QueueView) -> Iterable[tuple[Query, ...]]:
        """The first waiting queries of a queue as batches, merged for an equal part of the lanes.

        Batches that save time on all lanes may cost a single lane more than one query after the other.
        """
        snapshot, model_of = self._snapshot, self._tables.model_of
        sharers = len(snapshot.running) + len(snapshot.paused)
        sharers += sum([min(len(each.queries), _MOST_WAITING) for each in snapshot.queues.values()])
        size = max(1, len(self._lanes) // sharers) * self._lanes[0].size
        left = _MOST_WAITING
        while left:
            at = context.head_at(queue)
            if at >= len(queue.queries):
                return
            head = queue.queries[at]
            if context.drops_hopeless and self._is_hopeless(model_of(queue.tenant, head.shape, head.items), head):
                context.taken.add(head.id)
                yield (head,)
                continue
            left -= 1
            alone = context.latency_ns(queue.tenant.work(head.shape, head.items), size)
            queries, _ = context.form_batch(queue, at, size, alone)
            context.taken.update([query.id for query in queries])
            yield queries


def lowest(mask: int, count: int) -> int:
    """The lowest `count` of the bits that are set; all of them if there are fewer."""
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
