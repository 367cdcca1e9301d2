"""Groups of slots: the batches that start at once, each on its part of a partition.

The latency of a group is the prediction for exactly these launches, or its upper bound where no group of so many
members was measured. A query joins only if every query of the group still meets its deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, product
from typing import cast

from cotenant.core.actions import GroupBasis
from cotenant.core.predictor import Group, GroupPredictor, Member
from cotenant.core.snapshot import QueueView, Start
from cotenant.policies.decision_context import NEVER_NS, DecisionContext, quickest_ns
from cotenant.types import Query, Tenant
from cotenant.work import Round, Share, Slot, Work


def steps_of(made: Round) -> tuple[tuple[int, ...], ...]:
    """The steps of a round, as positions of slots."""
    ends = [0, *accumulate(map(len, made.steps))]
    return tuple(tuple(range(*span)) for span in pairwise(ends))


def slot_shares_of(lane: Share, made: Round) -> tuple[Share, ...] | None:
    """The share of each slot: the whole lane, or for members of a group consecutive parts of it; None if they do not
    fit."""
    slot_shares: list[Share] = []
    for step in made.steps:
        first = 0
        for slot in step:
            until = first + (slot.size or lane.size)
            if until > lane.size:
                return None
            is_all = until - first == lane.size
            slot_shares.append(lane if is_all else Share(lane.cores[first:until], lane.device, lane.first))
            first = until
    return tuple(slot_shares)


def likely_groups(
    tenants: Sequence[Tenant], slots: Sequence[Slot], slot_shares: Sequence[Share], step: Sequence[int]
) -> Iterator[Group]:
    """Every group that members of a step can form, for queries of one row and the first declared shape, the largest
    groups first. Tenants that are not served are left out."""
    known = {tenant.name: tenant for tenant in tenants}
    there = [at for at in step if slots[at].tenant in known]
    for count in range(len(there), 1, -1):
        for few in combinations(there, count):
            owners = [known[slots[at].tenant] for at in few]
            most = [min(slots[at].batch, owner.max_batch) for at, owner in zip(few, owners, strict=True)]
            for rows in product(*[range(each, 0, -1) for each in most]):
                yield tuple(
                    Member(owner.work(0, each), slot_shares[at].size)
                    for at, owner, each in zip(few, owners, rows, strict=True)
                )


@dataclass(frozen=True, slots=True)
class GroupSlot:
    """A slot that has queries: batches of up to `most` rows on `share`.

    `alone`: sizes that its launch may get in this lane without co-runners; `sizes`: sizes in any lane.
    """

    at: int
    queue: QueueView
    most: int
    share: Share
    alone: Sequence[int]
    sizes: Sequence[int]


@dataclass(slots=True)
class SlotBatch:
    """The batch of one member, its head first. `more_wait`: more rows wait than the batch takes."""

    group_slot: GroupSlot
    queries: list[Query]
    rows: int
    place: int
    """Position of the head in its queue."""
    more_wait: bool = False

    @property
    def work(self) -> Work:
        """The work of the launch."""
        return self.group_slot.queue.tenant.work(self.queries[0].shape, self.rows)

    @property
    def member(self) -> Member:
        """The member of a group, for predictors."""
        return Member(self.work, self.group_slot.share.size)

    @property
    def deadline_ns(self) -> int:
        """The earliest deadline of its queries."""
        return min([query.deadline_ns for query in self.queries])


def form_group(context: DecisionContext, group_slots: Sequence[GroupSlot]) -> list[SlotBatch]:
    """Choose the batches of a group; none if no waiting query can meet its deadline.

    1. Drop heads that are hopeless even alone. Fill every batch up to its planned rows.
    2. Drop a head that would be late in this group while more rows wait behind it than its slot takes. Repeat. Smaller
       groups for such heads would make ever more queries late.
    3. If every deadline is met, this is the group.
    4. Else start with the most urgent head. Add the other heads by urgency, then one query of each member by turns,
       each only if all queries of the group stay in time.

    `DecisionContext.form_batch` does not fit: here all batches share one latency.
    """
    batches = [batch for group_slot in group_slots if (batch := _largest(context, group_slot)) is not None]
    latency = _latency_ns(context, batches)
    if not context.drops_hopeless:
        return batches
    while late := [
        each for each in batches if each.more_wait and context.now_ns + latency > each.queries[0].deadline_ns
    ]:
        first, head = late[0], late[0].queries[0]
        left = max(0, head.deadline_ns - context.now_ns) / 1e6
        text = f"the group with its batch of {first.rows} rows takes {latency / 1e6:.1f} ms, and more wait"
        context.drop((head,), f"hopeless: {left:.1f} ms to the deadline, {text}")
        again = _largest(context, first.group_slot)
        batches = [each for old in batches if (each := again if old is first else old) is not None]
        latency = _latency_ns(context, batches)
    if any(context.now_ns + latency > each.deadline_ns for each in batches):
        return _fitted(context, batches)
    return batches


def group_starts(predictor: GroupPredictor, batches: Sequence[SlotBatch], number: int) -> list[Start]:
    """The launches of a group of several members; the first launch has this number."""
    members = tuple([each.member for each in batches])
    [predicted] = predictor.group_ns([members])
    longest = predictor.longest_ns([members])[0] if len(members) in predictor.unmeasured(len(members)) else 0
    basis = GroupBasis(number, longest_ns=longest)
    return [Start(each.work, tuple(each.queries), each.group_slot.share, predicted, basis=basis) for each in batches]


def _largest(context: DecisionContext, group_slot: GroupSlot) -> SlotBatch | None:
    """The largest batch that begins with the first query that can meet its deadline alone; None if no query can."""
    queue, tenant = group_slot.queue, group_slot.queue.tenant
    for place, head in context.waiting(queue):
        work, left = tenant.work(head.shape, head.items), head.deadline_ns - context.now_ns
        if context.drops_hopeless and quickest_ns(context.latency_ns, work, group_slot.alone) > left:
            context.drop_hopeless((head,), work, group_slot.sizes, left)
            continue
        made = SlotBatch(group_slot, [head], head.items, place)
        for query in context.behind(queue, place):
            if made.rows + query.items > group_slot.most:
                made.more_wait = True
                break
            made.queries.append(query)
            made.rows += query.items
        return made
    return None


def _fitted(context: DecisionContext, batches: Sequence[SlotBatch]) -> list[SlotBatch]:
    """The same group without the members and queries that would make one late; the most urgent head always stays."""
    now, made, limit = context.now_ns, list[SlotBatch](), NEVER_NS
    heads = [SlotBatch(each.group_slot, each.queries[:1], each.queries[0].items, each.place) for each in batches]
    for batch in sorted(heads, key=lambda each: each.group_slot.queue.keys[each.place]):
        longer, end = _latency_ns(context, [*made, batch]), min(limit, batch.deadline_ns)
        if not made or now + longer <= end:
            made, limit = [*made, batch], end
    rests = {each.group_slot.at: context.behind(each.group_slot.queue, each.place) for each in made}
    while rests:
        for batch in made:
            rest = rests.get(batch.group_slot.at)
            query = None if rest is None else next(rest, None)
            if query is None or batch.rows + query.items > batch.group_slot.most:
                rests.pop(batch.group_slot.at, None)
                continue
            batch.queries.append(query)
            batch.rows += query.items
            longer = _latency_ns(context, made)
            if now + longer <= min(limit, query.deadline_ns):
                limit = min(limit, query.deadline_ns)
                continue
            batch.rows -= batch.queries.pop().items
            if now + longer > limit:  # else this query alone would be late: it becomes a head later
                del rests[batch.group_slot.at]
    return sorted(made, key=lambda each: each.group_slot.at)


def _latency_ns(context: DecisionContext, batches: Sequence[SlotBatch]) -> int:
    """Upper bound of the latency of the group in ns; 0 for no batches."""
    if not batches:
        return 0
    return cast(GroupPredictor, context.snapshot.predictor).longest_ns([tuple([each.member for each in batches])])[0]
