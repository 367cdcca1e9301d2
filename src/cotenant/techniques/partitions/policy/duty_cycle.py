"""Policy `duty_cycle`: each partition runs its planned batches in a cycle (GPU-let, ATC'22, section 2.2).

A *step* of a round is one slot, or a group of slots (deterministic overlap of Abacus, SC'21, inside a partition).
For each free lane of n steps, with `s` its next step:

1. Start the first step of `s, s + 1, ..., s + n - 1 (mod n)` that has queries. A batch never waits until it is full. Of
   several lanes, the lane with the least `launched rows / planned rate` goes first.
2. Let `s = started step + 1 (mod n)`.
3. Without such a step, backfill: start the most urgent query of another tenant that fits into the spare time.
   `spare = (tightest SLO of the lane - latency of all its steps) * slack share`.

The planner promises that a row waits at most one duty cycle. The promise holds without a timer: empty steps are
skipped, and a step starts when the last one ends. So a cycle never takes longer than all planned batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

from cotenant.core.predictor import Group, GroupPredictor, Member
from cotenant.core.snapshot import BatchView, Decision, QueueView, Snapshot, Start
from cotenant.policies.base import BasePolicy
from cotenant.policies.decision_context import NEVER_NS, Key, QueuePosition, SlackShare, quickest_ns
from cotenant.techniques.partitions.policy.slot_context import SlotContext
from cotenant.techniques.partitions.policy.slot_groups import (
    GroupSlot,
    form_group,
    group_starts,
    likely_groups,
    slot_shares_of,
    steps_of,
)
from cotenant.types import Query, Tenant
from cotenant.work import Round, Share


@dataclass(frozen=True, slots=True)
class RoundState:
    """Memory of the policy between decisions. `next_step`: number of the next step, by lane; `launched`: rows launched,
    by lane and slot, counted for tenants with several slots alone."""

    next_step: tuple[int, ...]
    launched: tuple[tuple[int, ...], ...]

    @classmethod
    def first(cls, rounds: Sequence[Round]) -> RoundState:
        """The state before the first step."""
        return cls((0,) * len(rounds), tuple((0,) * len(each.slots) for each in rounds))


@dataclass(frozen=True, slots=True)
class DutyCycle(BasePolicy):
    """Runs the round of each lane and backfills the time that a round leaves free.

    - `lanes`: the partitions. `rounds`: the round of each lane, in the same order; empty for a policy without a plan.
    - `drop`: the load-shedding rule. `hopeless` also sheds the head of a queue that would miss its deadline in the
      planned batch while more rows wait than that batch takes. Smaller batches for such heads would make ever more
      queries late (early drop: Nexus, SOSP'19, section 6.3).
    - `backfill`: backfill also tenants that have their slots in other lanes, not unplanned tenants alone. Lanes without
      slots run backfilled work alone, by deadline. A query that fits into the spare time of no lane is dropped whatever
      the rule; the reason says so.
    - `preempt`: unplanned tenants may be preempted at a cut, so that models longer than the spare time can be
      backfilled. Planned batches always run whole.

    A query is hopeless when no lane that may serve it is fast enough. A query of more rows than the planned batch is
    launched alone. A group runs without members that have no queries; a single remaining member gets the whole lane if
    its predicted latency is lower there. `form_group` chooses the queries of a group. A paused batch of a member
    resumes alone.

    Raises InvalidValueError for a value out of its range.
    """

    slack_share: SlackShare = 1.0
    rounds: tuple[Round, ...] = ()
    backfill: bool = True
    slots_of: dict[str, tuple[tuple[int, int], ...]] = field(init=False, repr=False, compare=False)
    """Lane and position of each tenant's slots."""
    complete: tuple[Round, ...] = field(init=False, repr=False, compare=False)
    """A round for every lane."""
    steps: tuple[tuple[tuple[int, ...], ...], ...] = field(init=False, repr=False, compare=False)
    """Steps of every lane, as positions of slots: one slot, or the members of a group."""
    slot_shares: tuple[tuple[Share, ...], ...] = field(init=False, repr=False, compare=False)
    """Share of each slot, by lane: the lane, or the member's part of it."""
    sizes_of: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    """Sizes of the shares that each planned tenant may get: of its own slots, and of all lanes with `backfill`."""

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
        slot_shares = tuple([each for each in map(slot_shares_of, self.lanes, complete) if each is not None])
        fits = len(slot_shares) == len(complete)
        self.check("rounds", fits, "members of groups that fit into their lane, at least 1 each")
        sizes_of: dict[str, tuple[int, ...]] = {}
        for name, slots in slots_of.items():
            own = [each.size for lane, at in slots for each in (self.lanes[lane], slot_shares[lane][at])]
            sizes_of[name] = tuple(dict.fromkeys((*(self.sizes if self.backfill else ()), *own)))
        object.__setattr__(self, "complete", complete)
        object.__setattr__(self, "slots_of", slots_of)
        object.__setattr__(self, "steps", tuple(map(steps_of, complete)))
        object.__setattr__(self, "slot_shares", slot_shares)
        object.__setattr__(self, "sizes_of", sizes_of)
        has_groups = any(len(step) > 1 for steps in self.steps for step in steps)
        shares = dict.fromkeys((*self.lanes, *[part for some in slot_shares for part in some]))
        self.specify(shares=tuple(shares), groups=self if has_groups else None)

    def likely_groups(self, tenants: Sequence[Tenant]) -> Iterator[Group]:
        """The groups of the rounds, and those of their members that remain when some queues are empty."""
        for made, slot_shares, steps in zip(self.complete, self.slot_shares, self.steps, strict=True):
            for step in steps:
                yield from likely_groups(tenants, made.slots, slot_shares, step)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Start the next step of every free lane, then backfill the lanes that stay free."""
        state = memory if isinstance(memory, RoundState) else RoundState.first(self.complete)
        made = _RoundDecision(self, snapshot, state)
        free = [at for at, lane in enumerate(self.lanes) if lane.mask & snapshot.free_mask == lane.mask]
        while free and (chosen := made.start_next_step(free)) is not None:
            free.remove(chosen)
        made.shed_unplanned()
        while free and (chosen := made.start_backfill(free)) is not None:
            free.remove(chosen)
        return Decision(tuple(made.starts), tuple(made.drops), made.memory())


class _RoundDecision(SlotContext):
    """State of one call of `decide`: the next step of each lane, and the rows launched."""

    def __init__(self, policy: DutyCycle, snapshot: Snapshot, state: RoundState) -> None:
        super().__init__(snapshot, policy.drop)
        self._policy = policy
        self._next_step = list(state.next_step)
        self._launched = state.launched
        self._backfill_ns: dict[tuple[int, str, int, int], int] = {}
        self._too_slow: set[tuple[int, str]] = set()
        """Pairs of lane and tenant where the lane is too slow for every waiting query of the tenant."""

    def memory(self) -> RoundState:
        """The state for the next decision."""
        return RoundState(tuple(self._next_step), self._launched)

    # --- slots ----------------------------------------------------------------------------------------------------

    def start_next_step(self, free: Sequence[int]) -> int | None:
        """Start a step in one of the free lanes and return the lane; None when no slot has queries."""
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
            if self._start_step(*best[1:]):
                return best[1]

    def _waiting_step(self, lane: int) -> tuple[int, list[int]] | None:
        """The first step from the next one on that has slots with queries, and these slots."""
        slots, steps = self._policy.complete[lane].slots, self._policy.steps[lane]
        first = self._next_step[lane]
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

    def _start_step(self, lane: int, number: int, waiting: Sequence[int]) -> bool:
        """Start the `waiting` slots of a step, a paused batch first; whether a launch was started."""
        slots = self._policy.complete[lane].slots
        paused = [(at, batch) for at in waiting if (batch := self.paused_of(slots[at].tenant)) is not None]
        next_step = (number + 1) % len(self._policy.steps[lane])
        begun: list[tuple[int, Start]] = []
        if paused:
            at, batch = paused[0]
            start = self._resumed(batch, lane, NEVER_NS)
            begun = [] if start is None else [(at, start)]
            next_step = number if len(waiting) > 1 else next_step  # the other members have not run
        elif len(waiting) > 1:
            begun = self._start_group(lane, waiting)
        else:
            start = self._start_slot(waiting[0], lane)
            begun = [] if start is None else [(waiting[0], start)]
        if not begun:
            return False
        self._next_step[lane] = next_step
        for at, start in begun:
            if len(self._policy.slots_of[slots[at].tenant]) > 1:
                counts = list(self._launched[lane])
                counts[at] += start.work.items
                self._launched = (*self._launched[:lane], tuple(counts), *self._launched[lane + 1 :])
        self.starts += [start for _, start in begun]
        return True

    def _start_group(self, lane: int, waiting: Sequence[int]) -> list[tuple[int, Start]]:
        """The launches of a group, by slot. Hopeless queries are dropped; a single remaining member starts alone."""
        group_slots = [self._group_slot(lane, at) for at in waiting]
        batches = form_group(self, group_slots)
        if len(batches) == 1:
            at = batches[0].group_slot.at
            start = self._start_slot(at, lane)
            return [] if start is None else [(at, start)]
        if not batches:
            self._too_slow.update([(lane, group_slot.queue.tenant.name) for group_slot in group_slots])
            return []
        self.taken.update([query.id for batch in batches for query in batch.queries])
        starts = group_starts(
            cast(GroupPredictor, self.snapshot.predictor), batches, self.snapshot.next_launch + len(self.starts)
        )
        return [(batch.group_slot.at, start) for batch, start in zip(batches, starts, strict=True)]

    def _group_slot(self, lane: int, at: int) -> GroupSlot:
        policy, slot = self._policy, self._policy.complete[lane].slots[at]
        queue, part = self.snapshot.queues[slot.tenant], policy.slot_shares[lane][at]
        whole = policy.lanes[lane].size
        alone = (whole,) if part.size == whole else (whole, part.size)
        return GroupSlot(at, queue, min(slot.batch, queue.tenant.max_batch), part, alone, self._sizes_of(slot.tenant))

    def _start_slot(self, slot: int, lane: int) -> Start | None:
        """A batch of up to the planned rows for a slot alone. Hopeless queries are dropped."""
        group_slot = self._group_slot(lane, slot)
        queue, most, tenant = group_slot.queue, group_slot.most, group_slot.queue.tenant
        for at, head in self.waiting(queue):
            left = head.deadline_ns - self.now_ns
            work = tenant.work(head.shape, head.items)
            share, part = self._policy.lanes[lane], group_slot.share
            if len(group_slot.alone) > 1 and self.latency_ns(work, part.size) < self.latency_ns(work, share.size):
                share = part
            if self.drops_hopeless and self.needed(work, share) > left:
                self.drop_hopeless((head,), work, group_slot.sizes, left)
                continue
            whole = self.whole_rows(queue, at, most) if self.drops_hopeless else 0
            if whole and (takes := self.needed(tenant.work(head.shape, whole), share)) > left:
                text = f"the batch of {whole} rows takes {takes / 1e6:.1f} ms, and more wait"
                self.drop((head,), f"hopeless: {left / 1e6:.1f} ms to the deadline, {text}")
                continue
            return self.start_batch(queue, at, most, share, NEVER_NS, NEVER_NS)
        self._too_slow.add((lane, tenant.name))
        return None

    # --- backfill -------------------------------------------------------------------------------------------------

    def start_backfill(self, free: Sequence[int]) -> int | None:
        """Start the most urgent work that fits into the spare time of a free lane, and return the lane.

        Lanes without slots come first: backfilled work delays no planned batch there.
        """
        for lane in sorted(free, key=lambda at: bool(self._policy.complete[at].slots)):
            spare = self._spare_ns(lane)
            while (best := self._best_backfill(lane, spare)) is not None:
                start = (
                    self._resumed(best, lane, spare)
                    if not isinstance(best, tuple)
                    else self._backfilled(*best, lane, spare)
                )
                if start is not None:
                    self.starts.append(start)
                    return lane
        return None

    def _backfilled(self, queue: QueueView, at: int, lane: int, spare: int) -> Start:
        most, allowed = self._most_rows(queue.tenant), self._allowed_ns(queue.tenant, spare)
        return self.start_batch(queue, at, most, self._policy.lanes[lane], spare, allowed)

    def _resumed(self, batch: BatchView, lane: int, spare: int) -> Start | None:
        sizes, allowed = self._sizes_of(batch.tenant.name), self._allowed_ns(batch.tenant, spare)
        return self.resume(batch, self._policy.lanes[lane], sizes, allowed)

    def _allowed_ns(self, tenant: Tenant, spare: int) -> int:
        """Longest launch of the tenant in ns, if it may end at a cut."""
        return spare if self._is_cut(tenant) else NEVER_NS

    def _sizes_of(self, tenant: str) -> tuple[int, ...]:
        return self._policy.sizes_of.get(tenant, self._policy.sizes)

    def _best_backfill(self, lane: int, spare: int) -> BatchView | QueuePosition | None:
        best: BatchView | QueuePosition | None = None
        best_key: Key | None = None
        for name, queue in self.snapshot.queues.items():
            slots = self._policy.slots_of.get(name, ())
            if slots and (not self._policy.backfill or any(number == lane for number, _ in slots)):
                continue
            at = self._first_fitting(queue, lane, spare)
            if at is not None and (best_key is None or queue.keys[at] < best_key):
                best, best_key = (queue, at), queue.keys[at]
            batch = self.paused_of(name)
            if batch is not None and not slots:  # a paused batch holds memory
                key = min([(batch.tenant.rank, query.deadline_ns, query.id) for query in batch.queries])
                if best_key is None or key <= best_key:
                    best, best_key = batch, key
        return best

    def _first_fitting(self, queue: QueueView, lane: int, spare: int) -> int | None:
        """Position of the first query that meets its deadline here and fits into the spare time, at least with its
        first segment. Queries before it that do not fit are skipped."""
        tenant, now = queue.tenant, self.now_ns
        for at, query in self.waiting(queue):
            kind = (lane, tenant.name, query.shape, query.items)
            needed = self._backfill_ns.get(kind)
            if needed is None:
                fits = self._fits(tenant, query, lane, spare)
                share = self._policy.lanes[lane]
                needed = self._backfill_ns[kind] = self.needed(tenant.work(*kind[2:]), share) if fits else NEVER_NS
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
        """Whether launches of the tenant may end at a cut: those of unplanned tenants."""
        return self._policy.preempt and tenant.name not in self._policy.slots_of

    def _most_rows(self, tenant: Tenant) -> int:
        """The largest backfilled batch of a tenant: its largest planned batch, if it has one."""
        slots = self._policy.slots_of.get(tenant.name, ())
        planned = [self._policy.complete[lane].slots[at].batch for lane, at in slots]
        return min([tenant.max_batch, max(planned, default=tenant.max_batch)])

    def _spare_ns(self, lane: int) -> int:
        """Spare time of a lane in ns, see the module's docstring; NEVER_NS without slots."""
        busy, tightest, slots = 0, NEVER_NS, self._policy.complete[lane].slots
        for step in self._policy.steps[lane]:
            group_slots = [self._group_slot(lane, at) for at in step if slots[at].tenant in self.snapshot.queues]
            works = [each.queue.tenant.work(0, each.most) for each in group_slots]
            tightest = min([tightest, *[each.queue.tenant.slo_ns for each in group_slots]])
            if len(group_slots) > 1:
                group = tuple([Member(work, each.share.size) for work, each in zip(works, group_slots, strict=True)])
                busy += cast(GroupPredictor, self.snapshot.predictor).longest_ns([group])[0]
            elif group_slots:
                busy += quickest_ns(self.latency_ns, works[0], group_slots[0].alone)
        return NEVER_NS if tightest == NEVER_NS else int(max(0, tightest - busy) * self._policy.slack_share)

    def shed_unplanned(self) -> None:
        """Shed heads of unplanned tenants' queues that are hopeless or fit into no lane's spare time."""
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
                text = f"the rounds leave {max(spares) / 1e6:.1f} ms for backfill, too short for this query"
                self.drop((head,), f"tenant {name!r} is not in the plan: {text}")
