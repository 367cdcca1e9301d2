"""Rounds of planned batches in every partition: the run-time side of a plan (GPU-let, ATC'22, section 4).

The planner promises that a row waits at most one duty cycle for its turn. That is kept here without a clock: a lane
gives its slots turns in order, passes over empty ones and begins the next turn as soon as the last has ended, so that
one way round never takes longer than all batches of the round together. Nobody waits for a batch to fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cotenant.core.snapshot import BatchView, Decision, QueueView, Snapshot, Start
from cotenant.policies.base import BasePolicy
from cotenant.policies.desk import NEVER_NS, Desk, Key, Place, Stretch
from cotenant.types import Query, Tenant
from cotenant.work import Round, Work


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


@dataclass(frozen=True, slots=True)
class DutyCycle(BasePolicy):
    """Give the slots of each lane their turns; let others have what a round leaves free.

    `lanes`: the partitions; `rounds`: what each of them runs, in the same order; none for a policy without a plan.
    `drop`: when waiting queries are given up. Under `hopeless` the head of a queue is given up, too, when it would be
    late in its turn's whole batch while more wait than that batch takes: smaller batches for its sake would let
    ever more be late (the early drop of Nexus, SOSP'19, section 6.3).
    `lend`: guests of a lane are tenants without a slot anywhere, and with it also those that have their slots in other
    lanes. A guest is launched only when no slot of the lane waits, and only for as long as the tightest SLO of the
    lane leaves beside all batches of the round, times `stretch`: whoever comes meanwhile can still have his turn in
    time. Lanes without slots serve guests alone, in the order of their deadlines. A query that no lane could ever serve
    is dropped with that reason, whatever the drop rule.
    `preempt`: a guest may be left at a cut, so that models longer than the spare time can be guests. Planned batches
    always run whole.

    A query is hopeless when no lane that may serve it is quick enough; one that is too slow for it leaves it to others.
    A query of more rows than the planned batch has a turn of its own. A tenant with slots in several lanes is served by
    whichever is free; where several are, by the one that is most behind its share of the rates.

    Raises InvalidValueError for a value out of its range.
    """

    stretch: Stretch = 1.0
    rounds: tuple[Round, ...] = ()
    lend: bool = True
    slots_of: dict[str, tuple[tuple[int, int], ...]] = field(init=False, repr=False, compare=False)
    """Lane and position of each tenant's slots."""
    complete: tuple[Round, ...] = field(init=False, repr=False, compare=False)
    """A round for every lane."""

    cautious: ClassVar[bool] = False
    name: ClassVar[str] = "duty_cycle"
    grouped: ClassVar[bool] = False

    def __post_init__(self) -> None:
        BasePolicy.__post_init__(self)
        self.check("stretch", 0 <= self.stretch <= 1, "a share from 0 to 1")
        fits = len(self.rounds) in (0, len(self.lanes))
        self.check("rounds", fits, f"one for each of the {len(self.lanes)} lanes")
        complete = self.rounds or (Round(),) * len(self.lanes)
        slots_of: dict[str, tuple[tuple[int, int], ...]] = {}
        for number, made in enumerate(complete):
            for at, slot in enumerate(made.slots):
                slots_of[slot.tenant] = (*slots_of.get(slot.tenant, ()), (number, at))
        object.__setattr__(self, "complete", complete)
        object.__setattr__(self, "slots_of", slots_of)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Give every free lane its next turn, then its guests."""
        turns = memory if isinstance(memory, Turns) else Turns.first(self.complete)
        made = _RoundDecision(self, snapshot, turns)
        free = [at for at, lane in enumerate(self.lanes) if lane.mask & snapshot.free_mask == lane.mask]
        while free and (chosen := made.next_turn(free)) is not None:
            free.remove(chosen)
        made.drop_strangers()
        while free and (chosen := made.next_guest(free)) is not None:
            free.remove(chosen)
        return Decision(tuple(made.starts), tuple(made.drops), made.turns())


class _RoundDecision(Desk):
    """Local state of one call of `decide`: whose turn it is, beside the books."""

    def __init__(self, policy: DutyCycle, snapshot: Snapshot, turns: Turns) -> None:
        super().__init__(snapshot, policy.drop)
        self._policy = policy
        self._following = list(turns.following)
        self._launched = turns.launched
        self._visits: dict[tuple[int, str, int, int], int] = {}
        self._too_slow: set[tuple[int, str]] = set()
        """Lanes and tenants for whose queries the lane is too slow."""
        self._stopped = {batch.id: batch for batch in snapshot.paused}

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
            queue = self.snapshot.queues.get(tenant)
            if queue is None or (lane, tenant) in self._too_slow:
                continue
            if self.head_at(queue) < len(queue.queries) or self._paused_of(tenant) is not None:
                return at
        return None

    def _turn(self, lane: int, at: int) -> Start | None:
        """One turn of a slot: its paused batch if it has one, else a new one; None when there is nothing for it."""
        slots = self._policy.complete[lane].slots
        slot = slots[at]
        batch = self._paused_of(slot.tenant)
        if batch is not None:
            start = self._resume(batch, lane, NEVER_NS)
        else:
            queue = self.snapshot.queues[slot.tenant]
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
        tenant = queue.tenant
        for at, head in self.waiting(queue):
            left = head.deadline_ns - self.now_ns
            work = tenant.work(head.shape, head.items)
            if self.drops_hopeless and self._needed(work, lane) > left:
                self.drop_hopeless((head,), work, self._sizes_of(tenant), left)
                continue
            whole = self._whole_rows(queue, at, most) if self.drops_hopeless else 0
            if whole and (takes := self._needed(tenant.work(head.shape, whole), lane)) > left:
                text = f"the batch of {whole} rows takes {takes / 1e6:.1f} ms, and more wait"
                self.drop((head,), f"hopeless: {left / 1e6:.1f} ms to the deadline, {text}")
                continue
            return self._start(queue, at, most, lane, NEVER_NS)
        self._too_slow.add((lane, tenant.name))
        return None

    # --- guests ---------------------------------------------------------------------------------------------------

    def next_guest(self, free: Sequence[int]) -> int | None:
        """Start what waits most urgently and fits into what one of the free lanes has to spare, and give the lane.

        Lanes without slots come first: there guests are in nobody's way.
        """
        for lane in sorted(free, key=lambda at: bool(self._policy.complete[at].slots)):
            spare = self._spare_ns(lane)
            while (best := self._best_guest(lane, spare)) is not None:
                start = (
                    self._resume(best, lane, spare)
                    if not isinstance(best, tuple)
                    else (self._start(*best, self._most_rows(best[0].tenant), lane, spare))
                )
                if start is not None:
                    self.starts.append(start)
                    return lane
        return None

    def _best_guest(self, lane: int, spare: int) -> BatchView | Place | None:
        best: BatchView | Place | None = None
        best_key: Key | None = None
        for name, queue in self.snapshot.queues.items():
            slots = self._policy.slots_of.get(name, ())
            if slots and (not self._policy.lend or any(number == lane for number, _ in slots)):
                continue
            at = self._visitor(queue, lane, spare)
            if at is not None and (best_key is None or queue.keys[at] < best_key):
                best, best_key = (queue, at), queue.keys[at]
            batch = self._paused_of(name)
            if batch is not None and not slots:  # what has begun goes on: it holds memory
                key = min([(query.rank, query.deadline_ns, query.id) for query in batch.queries])
                if best_key is None or key <= best_key:
                    best, best_key = batch, key
        return best

    def _visitor(self, queue: QueueView, lane: int, spare: int) -> int | None:
        """Where the first query stands that is in time here and ends, or its first segment does, within the spare time.

        One before it that does not fit here hides nobody.
        """
        tenant, now = queue.tenant, self.now_ns
        for at, query in self.waiting(queue):
            kind = (lane, tenant.name, query.shape, query.items)
            needed = self._visits.get(kind)
            if needed is None:
                fits = self._fits(tenant, query, lane, spare)
                needed = self._visits[kind] = self._needed(tenant.work(*kind[2:]), lane) if fits else NEVER_NS
            if needed != NEVER_NS and not (self.drops_hopeless and now + needed > query.deadline_ns):
                return at
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
        busy, tightest = 0, NEVER_NS
        for slot in self._policy.complete[lane].slots:
            queue = self.snapshot.queues.get(slot.tenant)
            if queue is not None:
                busy += self._needed(queue.tenant.work(0, min(slot.batch, queue.tenant.max_batch)), lane)
                tightest = min(tightest, queue.tenant.slo_ns)
        return NEVER_NS if tightest == NEVER_NS else int(max(0, tightest - busy) * self._policy.stretch)

    def drop_strangers(self) -> None:
        """Give up heads of queues, of tenants outside the plan, that are hopeless or fit into no lane's spare time."""
        policy, spares = self._policy, list[int]()
        for name, queue in self.snapshot.queues.items():
            if name in policy.slots_of or not queue.queries:
                continue
            spares = spares or [self._spare_ns(lane) for lane in range(len(policy.lanes))]
            for _, head in self.waiting(queue):
                work, left = queue.tenant.work(head.shape, head.items), head.deadline_ns - self.now_ns
                if self.drops_hopeless and self.drop_hopeless((head,), work, policy.sizes, left):
                    continue
                if any(self._fits(queue.tenant, head, lane, spare) for lane, spare in enumerate(spares)):
                    break
                text = f"rounds leave {max(spares) / 1e6:.1f} ms to others, too short for it"
                self.drop((head,), f"tenant {name!r} is not in the plan, whose {text}")

    # --- both -----------------------------------------------------------------------------------------------------

    def _whole_rows(self, queue: QueueView, at: int, most: int) -> int:
        """The rows of the whole batch that begins with the head, where more wait than that; 0 where all fit into it."""
        rows = queue.queries[at].items
        for query in self.behind(queue, at):
            if rows + query.items > most:
                return rows
            rows += query.items
        return 0

    def _start(self, queue: QueueView, at: int, most: int, lane: int, spare: int) -> Start:
        """Launch the query at a position, and those that may share a launch with it and do not make it late."""
        tenant, head, now = queue.tenant, queue.queries[at], self.now_ns
        chosen, rows, limit = [head], head.items, NEVER_NS
        needed = self._needed(tenant.work(head.shape, rows), lane)
        for query in self.behind(queue, at) if rows < most else ():
            if rows + query.items > most:
                break
            grown = self._needed(tenant.work(head.shape, rows + query.items), lane)
            if self.drops_hopeless and now + grown > query.deadline_ns:
                continue  # a head of its own later, or hopeless
            if now + grown > limit or grown > spare:
                break
            chosen.append(query)
            rows, needed = rows + query.items, grown
            limit = min(limit, query.deadline_ns) if self.drops_hopeless else limit
        while len(chosen) > 1 and self.drops_hopeless and now + needed > head.deadline_ns:
            rows -= chosen.pop().items
            needed = self._needed(tenant.work(head.shape, rows), lane)
        self.taken.update([query.id for query in chosen])
        work, share = tenant.work(head.shape, rows), self._policy.lanes[lane]
        work, needed = self.extent(tenant, work, share.size, needed, spare if self._is_cut(tenant) else NEVER_NS)
        return Start(work, tuple(chosen), share, needed)

    def _paused_of(self, tenant: str) -> BatchView | None:
        if not self._stopped:
            return None
        return next((batch for batch in self._stopped.values() if batch.tenant.name == tenant), None)

    def _resume(self, batch: BatchView, lane: int, spare: int) -> Start | None:
        """Let a batch go on; None when it was hopeless and is dropped."""
        del self._stopped[batch.id]
        tenant = batch.tenant
        work = tenant.work(batch.shape, batch.items, batch.next_unit)
        needed = self._needed(work, lane)
        left = max([query.deadline_ns for query in batch.queries]) - self.now_ns
        if (
            self.drops_hopeless
            and needed > left
            and self.drop_hopeless(batch.queries, work, self._sizes_of(tenant), left)
        ):
            return None
        share = self._policy.lanes[lane]
        work, needed = self.extent(tenant, work, share.size, needed, spare if self._is_cut(tenant) else NEVER_NS)
        return Start(work, (), share, needed, batch.id)

    def _needed(self, work: Work, lane: int) -> int:
        """Predicted latency in a lane."""
        return self.latency_ns(work, self._policy.lanes[lane].size)

    def _sizes_of(self, tenant: Tenant) -> Sequence[int]:
        """Sizes of the lanes that may serve a tenant: those of its slots, and all of them if it may be a guest."""
        slots = self._policy.slots_of.get(tenant.name)
        if not slots or self._policy.lend:
            return self._policy.sizes
        return list(dict.fromkeys([self._policy.lanes[lane].size for lane, _ in slots]))
