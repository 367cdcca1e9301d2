"""The turn of a group of slots: what of each member's queue starts together, each on its part of a partition.

The time that the group takes is that of the predictor for these very launches, and what it may take at most where
nothing was measured of so many; nobody is made late by what joins him.
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


def parts_of(lane: Share, made: Round) -> tuple[Share, ...] | None:
    """The share of each slot: all of the lane, or a member's part of it, one behind the other; None where they do not
    fit."""
    parts: list[Share] = []
    for step in made.steps:
        first = 0
        for slot in step:
            until = first + (slot.size or lane.size)
            if until > lane.size:
                return None
            is_all = until - first == lane.size
            parts.append(lane if is_all else Share(lane.cores[first:until], lane.device, lane.first))
            first = until
    return tuple(parts)


def likely_groups(
    tenants: Sequence[Tenant], slots: Sequence[Slot], parts: Sequence[Share], step: Sequence[int]
) -> Iterator[Group]:
    """Every group that some members of a step can make of queries of single rows of the first declared shape, the
    largest of them first; those of tenants that are not there left out."""
    known = {tenant.name: tenant for tenant in tenants}
    there = [at for at in step if slots[at].tenant in known]
    for count in range(len(there), 1, -1):
        for few in combinations(there, count):
            owners = [known[slots[at].tenant] for at in few]
            most = [min(slots[at].batch, owner.max_batch) for at, owner in zip(few, owners, strict=True)]
            for rows in product(*[range(each, 0, -1) for each in most]):
                yield tuple(
                    Member(owner.work(0, each), parts[at].size)
                    for at, owner, each in zip(few, owners, rows, strict=True)
                )


@dataclass(frozen=True, slots=True)
class Seat:
    """A slot of a group for which something waits: batches of up to `most` rows on `share`.

    `alone` are the sizes that its launch may get here when nobody runs beside it, `sizes` those anywhere.
    """

    at: int
    queue: QueueView
    most: int
    share: Share
    alone: Sequence[int]
    sizes: Sequence[int]


@dataclass(slots=True)
class SeatBatch:
    """The batch of one member, its head first. `more_wait`: the queue has more than a batch takes."""

    seat: Seat
    queries: list[Query]
    rows: int
    place: int
    """Of the head in its queue."""
    more_wait: bool = False

    @property
    def work(self) -> Work:
        """What is launched."""
        return self.seat.queue.tenant.work(self.queries[0].shape, self.rows)

    @property
    def member(self) -> Member:
        """As a predictor sees it."""
        return Member(self.work, self.seat.share.size)

    @property
    def deadline_ns(self) -> int:
        """The earliest of its queries."""
        return min([query.deadline_ns for query in self.queries])


def form_group(context: DecisionContext, seats: Sequence[Seat]) -> list[SeatBatch]:
    """The batches that start together; none where nothing of what waits can be in time.

    As many rows as the slots take, if all of them are in time then. Else the most urgent head comes first, then what
    else leaves everybody in time: the heads of the others, and then a query of each in turn. What is hopeless even
    alone is dropped, and so is a head that would be late in the group as planned while more wait behind it than its
    slot takes: smaller groups for its sake would let ever more be late. Not `Desk.form_batch`: batches of all members
    grow by turns, and share one latency.
    """
    batches = [batch for seat in seats if (batch := _largest(context, seat)) is not None]
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
        again = _largest(context, first.seat)
        batches = [each for old in batches if (each := again if old is first else old) is not None]
        latency = _latency_ns(context, batches)
    if any(context.now_ns + latency > each.deadline_ns for each in batches):
        return _fitted(context, batches)
    return batches


def started(predictor: GroupPredictor, batches: Sequence[SeatBatch], number: int) -> list[Start]:
    """The launches of a group of several members, of which the first gets this number."""
    members = tuple([each.member for each in batches])
    [predicted] = predictor.group_ns([members])
    longest = predictor.longest_ns([members])[0] if len(members) in predictor.unmeasured(len(members)) else 0
    basis = GroupBasis(number, longest_ns=longest)
    return [Start(each.work, tuple(each.queries), each.seat.share, predicted, basis=basis) for each in batches]


def _largest(context: DecisionContext, seat: Seat) -> SeatBatch | None:
    """The largest batch behind the first query that can be in time alone; None where there is none."""
    queue, tenant = seat.queue, seat.queue.tenant
    for place, head in context.waiting(queue):
        work, left = tenant.work(head.shape, head.items), head.deadline_ns - context.now_ns
        if context.drops_hopeless and quickest_ns(context.latency_ns, work, seat.alone) > left:
            context.drop_hopeless((head,), work, seat.sizes, left)
            continue
        made = SeatBatch(seat, [head], head.items, place)
        for query in context.behind(queue, place):
            if made.rows + query.items > seat.most:
                made.more_wait = True
                break
            made.queries.append(query)
            made.rows += query.items
        return made
    return None


def _fitted(context: DecisionContext, batches: Sequence[SeatBatch]) -> list[SeatBatch]:
    """The same with members or queries left out, so that everybody is in time; the most urgent head always stays."""
    now, made, limit = context.now_ns, list[SeatBatch](), NEVER_NS
    heads = [SeatBatch(each.seat, each.queries[:1], each.queries[0].items, each.place) for each in batches]
    for batch in sorted(heads, key=lambda each: each.seat.queue.keys[each.place]):
        longer, end = _latency_ns(context, [*made, batch]), min(limit, batch.deadline_ns)
        if not made or now + longer <= end:
            made, limit = [*made, batch], end
    rests = {each.seat.at: context.behind(each.seat.queue, each.place) for each in made}
    while rests:
        for batch in made:
            rest = rests.get(batch.seat.at)
            query = None if rest is None else next(rest, None)
            if query is None or batch.rows + query.items > batch.seat.most:
                rests.pop(batch.seat.at, None)
                continue
            batch.queries.append(query)
            batch.rows += query.items
            longer = _latency_ns(context, made)
            if now + longer <= min(limit, query.deadline_ns):
                limit = min(limit, query.deadline_ns)
                continue
            batch.rows -= batch.queries.pop().items
            if now + longer > limit:  # else it alone would be late: it is a head of its own later
                del rests[batch.seat.at]
    return sorted(made, key=lambda each: each.seat.at)


def _latency_ns(context: DecisionContext, batches: Sequence[SeatBatch]) -> int:
    """What they take together at most, as far as is known; 0 for none."""
    if not batches:
        return 0
    return cast(GroupPredictor, context.snapshot.predictor).longest_ns([tuple([each.member for each in batches])])[0]
