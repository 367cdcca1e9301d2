"""One decision of the policy `duty_cycle`: whose turn it is in each free lane, and who is its guest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import BatchView, Drop, DropRule, QueueView, Snapshot, Start
from cotenant.policies.candidates import Key
from cotenant.types import Query, Tenant
from cotenant.work import Round, Share, Work

_HOPELESS = DropRule.HOPELESS
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Turns:
    """What the policy remembers. `following` has, by lane, the position of the slot whose turn is next; `launched` the
    rows launched by lane and slot, of tenants that have several slots."""

    following: tuple[int, ...]
    launched: tuple[tuple[int, ...], ...]

    @classmethod
    def first(cls, rounds: Sequence[Round]) -> Turns:
        """Before the first turn."""
        return cls((0,) * len(rounds), tuple((0,) * len(each.slots) for each in rounds))


class Rules(Protocol):
    """What a decision asks of the policy; see `DutyCycle`."""

    @property
    def lanes(self) -> tuple[Share, ...]:
        """The partitions."""

    @property
    def complete(self) -> tuple[Round, ...]:
        """A round for every lane."""

    @property
    def slots_of(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Lane and position of each tenant's slots."""

    @property
    def drop(self) -> DropRule:
        """When waiting queries are given up."""

    @property
    def preempt(self) -> bool:
        """Whether guests may be left at a cut."""

    @property
    def lend(self) -> bool:
        """Whether tenants of other lanes may be guests."""

    @property
    def stretch(self) -> float:
        """Share of the spare time that a guest may take."""

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """Order of a waiting query."""


class RoundDecision:
    """Local state of one call of `decide`: what it has given away already. Never outlives the call."""

    def __init__(self, policy: Rules, snapshot: Snapshot, turns: Turns) -> None:
        self.starts: list[Start] = []
        self.drops: list[Drop] = []
        self._policy = policy
        self._snapshot = snapshot
        self._following = list(turns.following)
        self._launched = turns.launched
        self._taken: set[int] = set()
        self._heads: dict[str, int] = {}
        """Positions before which all of a queue has been given away."""
        self._least: dict[tuple[str, int, int], int] = {}
        self._visits: dict[tuple[int, str, int, int], int] = {}
        self._passed: set[tuple[int, str]] = set()
        """Lanes and tenants for whose queries the lane is too slow."""
        self._paused = {batch.id: batch for batch in snapshot.paused}
        self._drops_hopeless = policy.drop is _HOPELESS

    def turns(self) -> Turns:
        """What to remember."""
        return Turns(tuple(self._following), self._launched)

    # --- slots ----------------------------------------------------------------------------------------------------

    def next_turn(self, free: Sequence[int]) -> int | None:
        """Start the turn of a slot in one of the free lanes, and give the lane; None when no slot waits."""
        while True:
            best: tuple[float, int, int] | None = None
            for lane in free:
                at = self._waiting_slot(lane)
                if at is not None:
                    ahead = self._launched[lane][at] / self._policy.complete[lane].slots[at].rate_per_s
                    if best is None or (ahead, lane) < best[:2]:
                        best = ahead, lane, at
            if best is None:
                return None
            _, lane, at = best
            start = self._turn(lane, at)
            if start is not None:
                self.starts.append(start)
                return lane

    def _waiting_slot(self, lane: int) -> int | None:
        """Position of the first slot, from the one whose turn it is, for which something waits."""
        slots = self._policy.complete[lane].slots
        first = self._following[lane]
        order: list[int] = [*range(first, len(slots)), *range(first)]
        for at in order:
            tenant = slots[at].tenant
            queue = self._snapshot.queues.get(tenant)
            if queue is None or (lane, tenant) in self._passed:
                continue
            if self._head(queue) is not None or self._paused_of(tenant) is not None:
                return at
        return None

    def _turn(self, lane: int, at: int) -> Start | None:
        """One turn of a slot: its paused batch if it has one, else a new one; None when there is nothing for it."""
        slots = self._policy.complete[lane].slots
        slot = slots[at]
        batch = self._paused_of(slot.tenant)
        if batch is not None:
            start = self._resume(batch, lane, _NEVER)
        else:
            queue = self._snapshot.queues[slot.tenant]
            start = self._planned(queue, lane, min(slot.batch, queue.tenant.max_batch))
        if start is not None:
            self._following[lane] = (at + 1) % len(slots)
            if len(self._policy.slots_of[slot.tenant]) > 1:
                rows = batch.items if batch is not None else sum([query.items for query in start.queries])
                counts = list(self._launched[lane])
                counts[at] += rows
                self._launched = (*self._launched[:lane], tuple(counts), *self._launched[lane + 1 :])
        return start

    def _planned(self, queue: QueueView, lane: int, most: int) -> Start | None:
        """A batch of up to `most` rows for a slot. What is hopeless is dropped on the way."""
        tenant, now = queue.tenant, self._snapshot.now_ns
        for head in self._waiting(queue):
            left = head.deadline_ns - now
            if self._drops_hopeless and self._needed(tenant.work(head.shape, head.items), lane) > left:
                self._drop_if_hopeless(tenant, head)
                continue
            whole = self._whole_rows(queue, head, most) if self._drops_hopeless else 0
            if whole and (takes := self._needed(tenant.work(head.shape, whole), lane)) > left:
                text = f"the batch of {whole} rows takes {takes / 1e6:.1f} ms, and more wait"
                self._drop(head, f"hopeless: {left / 1e6:.1f} ms to the deadline, {text}")
                continue
            chosen, rows, needed = self._window(queue, head, most, lane, _NEVER)
            return self._start(queue, head, chosen, rows, needed, lane, _NEVER)
        self._passed.add((lane, tenant.name))
        return None

    # --- guests ---------------------------------------------------------------------------------------------------

    def next_guest(self, free: Sequence[int]) -> int | None:
        """Start what waits most urgently and fits into what one of the free lanes has to spare, and give the lane.

        Lanes without slots come first: there guests are in nobody's way.
        """
        for lane in sorted(free, key=lambda at: bool(self._policy.complete[at].slots)):
            spare = self._spare_ns(lane)
            while (best := self._best_guest(lane, spare)) is not None:
                if isinstance(best, Query):
                    queue = self._snapshot.queues[best.tenant]
                    chosen, rows, needed = self._window(queue, best, self._most_rows(queue.tenant), lane, spare)
                    start: Start | None = self._start(queue, best, chosen, rows, needed, lane, spare)
                else:
                    start = self._resume(best, lane, spare)
                if start is not None:
                    self.starts.append(start)
                    return lane
        return None

    def _best_guest(self, lane: int, spare: int) -> Query | BatchView | None:
        best: Query | BatchView | None = None
        best_key: Key | None = None
        for name, queue in self._snapshot.queues.items():
            slots = self._policy.slots_of.get(name, ())
            if slots and (not self._policy.lend or any(number == lane for number, _ in slots)):
                continue
            head = self._visitor(queue, lane, spare)
            if head is not None:
                key = self._policy.queue_key(head, queue.tenant, self._snapshot.predictor)
                if best_key is None or key < best_key:
                    best, best_key = head, key
            batch = self._paused_of(name)
            if batch is not None and not slots:  # what has begun goes on: it holds memory
                key = min([(query.rank, query.deadline_ns, query.id) for query in batch.queries])
                if best_key is None or key <= best_key:
                    best, best_key = batch, key
        return best

    def _visitor(self, queue: QueueView, lane: int, spare: int) -> Query | None:
        """The first query that is in time in this lane and ends, or whose first segment does, within the time to spare.

        One before it that does not fit here hides nobody.
        """
        tenant, now = queue.tenant, self._snapshot.now_ns
        for query in self._waiting(queue):
            kind = (lane, tenant.name, query.shape, query.items)
            needed = self._visits.get(kind)
            if needed is None:
                fits = self._fits(tenant, query, lane, spare)
                needed = self._visits[kind] = self._needed(tenant.work(*kind[2:]), lane) if fits else _NEVER
            if needed != _NEVER and not (self._drops_hopeless and now + needed > query.deadline_ns):
                return query
        return None

    def _fits(self, tenant: Tenant, query: Query, lane: int, spare: int) -> bool:
        needed = self._needed(tenant.work(query.shape, query.items), lane)
        if needed > spare and self._is_cut(tenant):
            needed = self._needed(tenant.work(query.shape, query.items).until(tenant.cuts[1]), lane)
        return needed <= spare

    def _is_cut(self, tenant: Tenant) -> bool:
        """Whether launches of the tenant may end at a cut: those of guests that the plan does not know."""
        return self._policy.preempt and tenant.name not in self._policy.slots_of

    def _most_rows(self, tenant: Tenant) -> int:
        """The largest batch of a guest: no larger than the plan has of him, if it knows him."""
        slots = self._policy.slots_of.get(tenant.name, ())
        planned = [self._policy.complete[lane].slots[at].batch for lane, at in slots]
        return min([tenant.max_batch, max(planned, default=tenant.max_batch)])

    def _spare_ns(self, lane: int) -> int:
        """How long a guest may hold a lane: what the tightest SLO leaves beside one whole round."""
        busy, tightest = 0, _NEVER
        for slot in self._policy.complete[lane].slots:
            queue = self._snapshot.queues.get(slot.tenant)
            if queue is not None:
                busy += self._needed(queue.tenant.work(0, min(slot.batch, queue.tenant.max_batch)), lane)
                tightest = min(tightest, queue.tenant.slo_ns)
        return _NEVER if tightest == _NEVER else int(max(0, tightest - busy) * self._policy.stretch)

    def drop_strangers(self) -> None:
        """Give up heads of queues, of tenants outside the plan, that are hopeless or fit into no lane's spare time."""
        policy, spares = self._policy, list[int]()
        for name, queue in self._snapshot.queues.items():
            if name in policy.slots_of or not queue.queries:
                continue
            spares = spares or [self._spare_ns(lane) for lane in range(len(policy.lanes))]
            for head in self._waiting(queue):
                if self._drops_hopeless and self._drop_if_hopeless(queue.tenant, head):
                    continue
                if any(self._fits(queue.tenant, head, lane, spare) for lane, spare in enumerate(spares)):
                    break
                text = f"rounds leave {max(spares) / 1e6:.1f} ms to others, too short for it"
                self._drop(head, f"tenant {name!r} is not in the plan, whose {text}")

    # --- both -----------------------------------------------------------------------------------------------------

    def _head(self, queue: QueueView) -> Query | None:
        """The first query that has not been given away."""
        at = self._head_at(queue)
        return queue.queries[at] if at < len(queue.queries) else None

    def _waiting(self, queue: QueueView) -> Iterator[Query]:
        """The queries that have not been given away when their turn comes."""
        waiting, taken = queue.queries, self._taken
        for at in range(self._head_at(queue), len(waiting)):
            query = waiting[at]
            if query.id not in taken:
                yield query

    def _head_at(self, queue: QueueView) -> int:
        """The position of the head; the length of the queue when all of it is given away."""
        taken = self._taken
        if not taken:
            return 0
        name, waiting = queue.tenant.name, queue.queries
        at = self._heads.get(name, 0)
        while at < len(waiting) and waiting[at].id in taken:
            at += 1
        self._heads[name] = at
        return at

    def _behind(self, queue: QueueView, head: Query) -> Iterator[Query]:
        """Those behind the head that may share a launch with it and have not been given away."""
        waiting = self._waiting(queue)
        next(query for query in waiting if query is head)
        return (query for query in waiting if query.merge_key == head.merge_key and query.shape == head.shape)

    def _whole_rows(self, queue: QueueView, head: Query, most: int) -> int:
        """The rows of the whole batch that begins with the head, where more wait than that; 0 where all fit into it."""
        rows = head.items
        for query in self._behind(queue, head):
            if rows + query.items > most:
                return rows
            rows += query.items
        return 0

    def _window(self, queue: QueueView, head: Query, most: int, lane: int, spare: int) -> tuple[list[Query], int, int]:
        """The queries that may share a launch with the head; rows, predicted latency."""
        tenant, now = queue.tenant, self._snapshot.now_ns
        chosen, rows = [head], head.items
        needed = self._needed(tenant.work(head.shape, rows), lane)
        if rows >= most:
            return chosen, rows, needed
        limit = _NEVER
        for query in self._behind(queue, head):
            if rows + query.items > most:
                break
            grown = self._needed(tenant.work(head.shape, rows + query.items), lane)
            if self._drops_hopeless and now + grown > query.deadline_ns:
                continue  # a head of its own later, or hopeless
            if now + grown > limit or grown > spare:
                break
            chosen.append(query)
            rows, needed = rows + query.items, grown
            limit = min(limit, query.deadline_ns) if self._drops_hopeless else limit
        return chosen, rows, needed

    def _start(
        self, queue: QueueView, head: Query, chosen: list[Query], rows: int, needed: int, lane: int, spare: int
    ) -> Start:
        """Launch a window, without its last queries as far as they would make its head late."""
        tenant, now = queue.tenant, self._snapshot.now_ns
        while len(chosen) > 1 and self._drops_hopeless and now + needed > head.deadline_ns:
            rows -= chosen.pop().items
            needed = self._needed(tenant.work(head.shape, rows), lane)
        self._taken.update([query.id for query in chosen])
        work, needed = self._extent(tenant, tenant.work(head.shape, rows), lane, needed, spare)
        return Start(work, tuple(chosen), self._policy.lanes[lane], needed)

    def _paused_of(self, tenant: str) -> BatchView | None:
        if not self._paused:
            return None
        return next((batch for batch in self._paused.values() if batch.tenant.name == tenant), None)

    def _resume(self, batch: BatchView, lane: int, spare: int) -> Start | None:
        """Let a batch go on; None when it was hopeless and is dropped."""
        del self._paused[batch.id]
        tenant = batch.tenant
        work = tenant.work(batch.shape, batch.items, batch.next_unit)
        needed = self._needed(work, lane)
        left = max([query.deadline_ns for query in batch.queries]) - self._snapshot.now_ns
        if self._drops_hopeless and needed > left:
            best = min([self._needed(work, at) for at in self._lanes_of(tenant)])
            if best > left:
                for query in batch.queries:
                    self._drop(query, _hopeless(best, left))
                return None
        work, needed = self._extent(tenant, work, lane, needed, spare)
        return Start(work, (), self._policy.lanes[lane], needed, batch.id)

    def _extent(self, tenant: Tenant, work: Work, lane: int, needed: int, spare: int) -> tuple[Work, int]:
        """What a launch runs of it, and its latency: all, or of a guest what ends at a cut within the time to spare."""
        if needed <= spare or not self._is_cut(tenant):
            return work, needed
        made: Work | None = None
        for cut in tenant.cuts:
            if cut > work.start:
                longer = work.until(cut)
                reach = self._needed(longer, lane)
                if made is not None and reach > spare:
                    break
                made, needed = longer, reach
        return made or work, needed

    def _needed(self, work: Work, lane: int) -> int:
        """Predicted latency in a lane."""
        return self._snapshot.predictor.latency_ns(work, self._policy.lanes[lane].size)

    def _lanes_of(self, tenant: Tenant) -> Sequence[int]:
        """Lanes that may serve a tenant: those of its slots, and all of them if it may be a guest."""
        slots = self._policy.slots_of.get(tenant.name, ())
        if slots and not self._policy.lend:
            return [lane for lane, _ in slots]
        return range(len(self._policy.lanes))

    def _drop_if_hopeless(self, tenant: Tenant, query: Query) -> bool:
        """Give a query up that no lane could answer in time any more."""
        left = query.deadline_ns - self._snapshot.now_ns
        kind = (tenant.name, query.shape, query.items)
        best = self._least.get(kind)
        if best is None:
            best = min([self._needed(tenant.work(query.shape, query.items), lane) for lane in self._lanes_of(tenant)])
            self._least[kind] = best
        if best > left:
            self._drop(query, _hopeless(best, left))
        return best > left

    def _drop(self, query: Query, reason: str) -> None:
        self._taken.add(query.id)
        self.drops.append(Drop(query.id, reason))


def _hopeless(needed_ns: int, left_ns: int) -> str:
    return f"hopeless: {needed_ns / 1e6:.1f} ms of work left, {left_ns / 1e6:.1f} ms to the deadline"
