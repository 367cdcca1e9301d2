"""Rounds of planned batches in every partition: the run-time side of a plan (GPU-let, ATC'22, section 4).

A turn is that of a slot, or of the members of a group, which start together on their parts of the partition
(deterministic overlap as in Abacus, SC'21, inside a partition).

The planner promises that a row waits at most one duty cycle for its turn. That is kept here without a clock: a lane
gives its slots turns in order, passes over empty ones and begins the next turn as soon as the last has ended, so that
one way round never takes longer than all batches of the round together. Nobody waits for a batch to fill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

from cotenant.core.predictor import Group, GroupPredictor, Member
from cotenant.core.snapshot import BatchView, Decision, QueueView, Snapshot, Start
from cotenant.policies.base import BasePolicy
from cotenant.policies.decision_context import NEVER_NS, Key, QueuePosition, SlackShare, quickest_ns
from cotenant.techniques.partitions.policy.group_turn import (
    Seat,
    form_group,
    likely_groups,
    parts_of,
    started,
    steps_of,
)
from cotenant.techniques.partitions.policy.slot_context import SlotContext
from cotenant.types import Query, Tenant
from cotenant.work import Round, Share


@dataclass(frozen=True, slots=True)
class Turns:
    """What the policy remembers. `following` has, by lane, the number of the step whose turn is next; `launched` the
    rows launched by lane and slot, of tenants that have several slots."""

    following: tuple[int, ...]
    launched: tuple[tuple[int, ...], ...]

    @classmethod
    def first(cls, rounds: Sequence[Round]) -> Turns:
        """Before the first turn."""
        return cls((0,) * len(rounds), tuple((0,) * len(each.slots) for each in rounds))


@dataclass(frozen=True, slots=True)
class DutyCycle(BasePolicy):
    """Give the slots of each lane, and the groups of slots, their turns; let others have what a round leaves free.

    `lanes`: the partitions; `rounds`: what each of them runs, in the same order; none for a policy without a plan.
    `drop`: when waiting queries are given up. Under `hopeless` the head of a queue is given up, too, when it would be
    late in its turn's whole batch while more wait than that batch takes: smaller batches for its sake would let
    ever more be late (the early drop of Nexus, SOSP'19, section 6.3).
    `lend`: guests of a lane are tenants without a slot anywhere, and with it also those that have their slots in other
    lanes. A guest is launched only when no slot of the lane waits, and only for as long as the tightest SLO of the
    lane leaves beside all batches of the round, times `slack_share`: whoever comes meanwhile can still have his turn in
    time. Lanes without slots serve guests alone, in the order of their deadlines. A query that no lane could ever serve
    is dropped with that reason, whatever the drop rule.
    `preempt`: a guest may be left at a cut, so that models longer than the spare time can be guests. Planned batches
    always run whole.

    A query is hopeless when no lane that may serve it is quick enough; one that is too slow for it leaves it to others.
    A query of more rows than the planned batch has a turn of its own. Who has nothing waiting when his group's turn
    comes leaves his part of the lane; who is alone then gets the whole lane, where that is believed to be quicker. What
    fits into a group `form_group` says. A batch that a member has at a cut goes on alone. A tenant with slots in
    several lanes is served by whichever is free; where several are, by the one that is most behind its share of the
    rates.

    Raises InvalidValueError for a value out of its range.
    """

    slack_share: SlackShare = 1.0
    rounds: tuple[Round, ...] = ()
    lend: bool = True
    slots_of: dict[str, tuple[tuple[int, int], ...]] = field(init=False, repr=False, compare=False)
    """Lane and position of each tenant's slots."""
    complete: tuple[Round, ...] = field(init=False, repr=False, compare=False)
    """A round for every lane."""
    steps: tuple[tuple[tuple[int, ...], ...], ...] = field(init=False, repr=False, compare=False)
    """Of every lane the positions of the slots that have a turn together: one, or the members of a group."""
    parts: tuple[tuple[Share, ...], ...] = field(init=False, repr=False, compare=False)
    """Of every lane the share of each slot: the lane, or the part that it has in its group."""
    sizes_of: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    """Sizes of the shares that each tenant with slots may get: its own, and those of all lanes if it may be a guest."""

    name: ClassVar[str] = "duty_cycle"
    of_plans: ClassVar[tuple[str, ...]] = ("rounds",)

    def __post_init__(self) -> None:
        BasePolicy.__post_init__(self)
        self.check("slack_share", 0 <= self.slack_share <= 1, "a share from 0 to 1")
        fits = len(self.rounds) in (0, len(self.lanes))
        self.check("rounds", fits, f"one for each of the {len(self.lanes)} lanes")
        complete = self.rounds or (Round(),) * len(self.lanes)
        slots_of: dict[str, tuple[tuple[int, int], ...]] = {}
        for number, made in enumerate(complete):
            for at, slot in enumerate(made.slots):
                slots_of[slot.tenant] = (*slots_of.get(slot.tenant, ()), (number, at))
        parts = tuple([each for each in map(parts_of, self.lanes, complete) if each is not None])
        self.check("rounds", len(parts) == len(complete), "members of groups that fit into their lane, at least 1 each")
        sizes_of: dict[str, tuple[int, ...]] = {}
        for name, slots in slots_of.items():
            own = [each.size for lane, at in slots for each in (self.lanes[lane], parts[lane][at])]
            sizes_of[name] = tuple(dict.fromkeys((*(self.sizes if self.lend else ()), *own)))
        object.__setattr__(self, "complete", complete)
        object.__setattr__(self, "slots_of", slots_of)
        object.__setattr__(self, "steps", tuple(map(steps_of, complete)))
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "sizes_of", sizes_of)
        has_groups = any(len(step) > 1 for steps in self.steps for step in steps)
        shares = dict.fromkeys((*self.lanes, *[part for some in parts for part in some]))
        self.specify(shares=tuple(shares), groups=self if has_groups else None)

    def likely_groups(self, tenants: Sequence[Tenant]) -> Iterator[Group]:
        """The groups of the rounds, and what is left of them where some have nothing waiting; see `likely_groups`."""
        for made, parts, steps in zip(self.complete, self.parts, self.steps, strict=True):
            for step in steps:
                yield from likely_groups(tenants, made.slots, parts, step)

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
        return Decision(tuple(made.starts), tuple(made.drops), made.memory())


class _RoundDecision(SlotContext):
    """Local state of one call of `decide`: whose turn it is, beside the books."""

    def __init__(self, policy: DutyCycle, snapshot: Snapshot, turns: Turns) -> None:
        super().__init__(snapshot, policy.drop)
        self._policy = policy
        self._following = list(turns.following)
        self._launched = turns.launched
        self._visits: dict[tuple[int, str, int, int], int] = {}
        self._too_slow: set[tuple[int, str]] = set()
        """Lanes and tenants for whose queries the lane is too slow."""

    def memory(self) -> Turns:
        """What to remember."""
        return Turns(tuple(self._following), self._launched)

    # --- slots ----------------------------------------------------------------------------------------------------

    def next_turn(self, free: Sequence[int]) -> int | None:
        """Start the turn of a step in one of the free lanes, and give the lane; None when no slot waits."""
        while True:
            best: tuple[float, int, int, list[int]] | None = None
            for lane in free:
                found = self._waiting_step(lane)
                if found is not None:
                    slots, launched = self._policy.complete[lane].slots, self._launched[lane]
                    ahead = min([launched[at] / slots[at].rate_per_s for at in found[1]])
                    if best is None or (ahead, lane) < best[:2]:
                        best = ahead, lane, *found
            if best is None:
                return None
            if self._turn(*best[1:]):
                return best[1]

    def _waiting_step(self, lane: int) -> tuple[int, list[int]] | None:
        """The first step, from the one whose turn it is, with slots for which something waits, and these."""
        slots, steps = self._policy.complete[lane].slots, self._policy.steps[lane]
        first = self._following[lane]
        order: list[int] = [*range(first, len(steps)), *range(first)]
        for number in order:
            waiting = [at for at in steps[number] if self._is_waiting(slots[at].tenant, lane)]
            if waiting:
                return number, waiting
        return None

    def _is_waiting(self, tenant: str, lane: int) -> bool:
        queue = self.snapshot.queues.get(tenant)
        if queue is None or (lane, tenant) in self._too_slow:
            return False
        return self.head_at(queue) < len(queue.queries) or self.paused_of(tenant) is not None

    def _turn(self, lane: int, number: int, waiting: Sequence[int]) -> bool:
        """One turn of the slots of a step for which something waits, a paused batch first; whether one has begun."""
        slots = self._policy.complete[lane].slots
        paused = [(at, batch) for at in waiting if (batch := self.paused_of(slots[at].tenant)) is not None]
        following = (number + 1) % len(self._policy.steps[lane])
        begun: list[tuple[int, Start]] = []
        if paused:
            at, batch = paused[0]
            start = self._resumed(batch, lane, NEVER_NS)
            begun = [] if start is None else [(at, start)]
            following = number if len(waiting) > 1 else following  # those beside it have not had their turn
        elif len(waiting) > 1:
            begun = self._together(lane, waiting)
        else:
            start = self._planned(waiting[0], lane)
            begun = [] if start is None else [(waiting[0], start)]
        if not begun:
            return False
        self._following[lane] = following
        for at, start in begun:
            if len(self._policy.slots_of[slots[at].tenant]) > 1:
                counts = list(self._launched[lane])
                counts[at] += start.work.items
                self._launched = (*self._launched[:lane], tuple(counts), *self._launched[lane + 1 :])
        self.starts += [start for _, start in begun]
        return True

    def _together(self, lane: int, waiting: Sequence[int]) -> list[tuple[int, Start]]:
        """The launches of a group, by slot. What is hopeless is dropped on the way; one that is left is alone."""
        seats = [self._seat(lane, at) for at in waiting]
        batches = form_group(self, seats)
        if len(batches) == 1:
            at = batches[0].seat.at
            start = self._planned(at, lane)
            return [] if start is None else [(at, start)]
        if not batches:
            self._too_slow.update([(lane, seat.queue.tenant.name) for seat in seats])
            return []
        self.taken.update([query.id for batch in batches for query in batch.queries])
        starts = started(
            cast(GroupPredictor, self.snapshot.predictor), batches, self.snapshot.next_launch + len(self.starts)
        )
        return [(batch.seat.at, start) for batch, start in zip(batches, starts, strict=True)]

    def _seat(self, lane: int, at: int) -> Seat:
        policy, slot = self._policy, self._policy.complete[lane].slots[at]
        queue, part = self.snapshot.queues[slot.tenant], policy.parts[lane][at]
        whole = policy.lanes[lane].size
        alone = (whole,) if part.size == whole else (whole, part.size)
        return Seat(at, queue, min(slot.batch, queue.tenant.max_batch), part, alone, self._sizes_of(slot.tenant))

    def _planned(self, slot: int, lane: int) -> Start | None:
        """A batch of the planned rows for a slot alone. What is hopeless is dropped on the way."""
        seat = self._seat(lane, slot)
        queue, most, tenant = seat.queue, seat.most, seat.queue.tenant
        for at, head in self.waiting(queue):
            left = head.deadline_ns - self.now_ns
            work = tenant.work(head.shape, head.items)
            share = self._policy.lanes[lane]
            if len(seat.alone) > 1 and self.latency_ns(work, seat.share.size) < self.latency_ns(work, share.size):
                share = seat.share
            if self.drops_hopeless and self.needed(work, share) > left:
                self.drop_hopeless((head,), work, seat.sizes, left)
                continue
            whole = self.whole_rows(queue, at, most) if self.drops_hopeless else 0
            if whole and (takes := self.needed(tenant.work(head.shape, whole), share)) > left:
                text = f"the batch of {whole} rows takes {takes / 1e6:.1f} ms, and more wait"
                self.drop((head,), f"hopeless: {left / 1e6:.1f} ms to the deadline, {text}")
                continue
            return self.start_batch(queue, at, most, share, NEVER_NS, NEVER_NS)
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
                    self._resumed(best, lane, spare) if not isinstance(best, tuple) else self._guest(*best, lane, spare)
                )
                if start is not None:
                    self.starts.append(start)
                    return lane
        return None

    def _guest(self, queue: QueueView, at: int, lane: int, spare: int) -> Start:
        most, allowed = self._most_rows(queue.tenant), self._allowed_ns(queue.tenant, spare)
        return self.start_batch(queue, at, most, self._policy.lanes[lane], spare, allowed)

    def _resumed(self, batch: BatchView, lane: int, spare: int) -> Start | None:
        sizes, allowed = self._sizes_of(batch.tenant.name), self._allowed_ns(batch.tenant, spare)
        return self.resume(batch, self._policy.lanes[lane], sizes, allowed)

    def _allowed_ns(self, tenant: Tenant, spare: int) -> int:
        """How long a launch of the tenant may be at most, if it can be cut."""
        return spare if self._is_cut(tenant) else NEVER_NS

    def _sizes_of(self, tenant: str) -> tuple[int, ...]:
        return self._policy.sizes_of.get(tenant, self._policy.sizes)

    def _best_guest(self, lane: int, spare: int) -> BatchView | QueuePosition | None:
        best: BatchView | QueuePosition | None = None
        best_key: Key | None = None
        for name, queue in self.snapshot.queues.items():
            slots = self._policy.slots_of.get(name, ())
            if slots and (not self._policy.lend or any(number == lane for number, _ in slots)):
                continue
            at = self._visitor(queue, lane, spare)
            if at is not None and (best_key is None or queue.keys[at] < best_key):
                best, best_key = (queue, at), queue.keys[at]
            batch = self.paused_of(name)
            if batch is not None and not slots:  # what has begun goes on: it holds memory
                key = min([(batch.tenant.rank, query.deadline_ns, query.id) for query in batch.queries])
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
                share = self._policy.lanes[lane]
                needed = self._visits[kind] = self.needed(tenant.work(*kind[2:]), share) if fits else NEVER_NS
            if needed != NEVER_NS and not (self.drops_hopeless and now + needed > query.deadline_ns):
                return at
        return None

    def _fits(self, tenant: Tenant, query: Query, lane: int, spare: int) -> bool:
        work, share = tenant.work(query.shape, query.items), self._policy.lanes[lane]
        needed = self.needed(work, share)
        if needed > spare and self._is_cut(tenant):
            needed = self.needed(work.until(tenant.cuts[1]), share)
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
        busy, tightest, slots = 0, NEVER_NS, self._policy.complete[lane].slots
        for step in self._policy.steps[lane]:
            seats = [self._seat(lane, at) for at in step if slots[at].tenant in self.snapshot.queues]
            works = [seat.queue.tenant.work(0, seat.most) for seat in seats]
            tightest = min([tightest, *[seat.queue.tenant.slo_ns for seat in seats]])
            if len(seats) > 1:
                group = tuple([Member(work, seat.share.size) for work, seat in zip(works, seats, strict=True)])
                busy += cast(GroupPredictor, self.snapshot.predictor).longest_ns([group])[0]
            elif seats:
                busy += quickest_ns(self.latency_ns, works[0], seats[0].alone)
        return NEVER_NS if tightest == NEVER_NS else int(max(0, tightest - busy) * self._policy.slack_share)

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
