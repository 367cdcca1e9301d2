"""Earliest deadline first, and plans for models that are there together: with barriers, waits and chunks.

The idea of such plans is that of GACER (2023); when to follow one is ours. A set begins as one decision: each strand of
each member is a launch of its own, which waits for those before it, on other lanes or on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import ClassVar, NamedTuple

from cotenant.core.snapshot import Decision, QueueView, Snapshot, Start
from cotenant.policies.decision_context import DecisionContext, QueuePosition
from cotenant.policies.ordered.edf import Edf
from cotenant.techniques.granularity.joint_plan import JointMember, JointPlan, cuts_of_all
from cotenant.techniques.granularity.policy.joint_strands import Laid, Strand, lay, strands_of
from cotenant.types import Query
from cotenant.work import CPU, Share, Work

_DEAR = 2
"""Times as much as what a set costs its plan has to gain. Chosen by simulation: 1 loses up to 3
points of attainment where chunks cost a fifth of a batch, 4 is no better."""


class _Present(NamedTuple):
    """A member that is there: its queries, where the first of them stands in its queue, and all its work."""

    queue: QueueView
    at: int
    queries: tuple[Query, ...]
    work: Work


class _Lane(NamedTuple):
    """A lane that a set may use, from when on, and the launch that has it until then."""

    share: Share
    free_ns: int
    owner: int | None


@dataclass(frozen=True, slots=True)
class Clustered(Edf):
    """Serve the query whose deadline comes first; where a plan knows its model beside others that wait, too, start
    all of them by the plan.

    `joint_plans` are followed when the query that would start next is of a member, and at least one other member is
    there; absent ones are empty. A member is there with just the rows of its plan. A set is started only where each
    member is predicted in time, each query and batch that is more urgent than a member of it is in time behind it, and,
    with `preempt`, so is each that might arrive and be more urgent than all of it (where it takes a whole device, than
    one of its members); and only where the plan costs little
    time of the lanes for what it gains (`_is_worth`). What does not get its plan is served as by edf, on a CPU on the
    lanes that a set leaves over. Lanes of any other device stand for streams that slow each other: there, what is in no
    set gets all lanes of the device as one. Nobody waits for an arrival.

    A lane may be planned on that is busy: its strands begin when the launches that have it are over.

    Raises InvalidValueError as Edf, and for plans that wait in a circle.
    """

    joint_plans: tuple[JointPlan, ...] = ()
    alone: Edf = field(init=False, repr=False, compare=False)
    """How what is in no set is served, and where: on lanes of a CPU, or all of another device."""

    name: ClassVar[str] = "clustered"
    of_plans: ClassVar[tuple[str, ...]] = ("joint_plans",)

    def __post_init__(self) -> None:
        Edf.__post_init__(self)
        by_device: dict[str, list[Share]] = {}
        for lane in self.lanes:
            by_device.setdefault(lane.device, []).append(lane)
        places = [
            place
            for device, lanes in by_device.items()
            for place in (lanes if device == CPU else [reduce(Share.joined, lanes)])
        ]
        alone = Edf(
            tuple(places),
            self.drop,
            self.preempt,
            slack_share=self.slack_share,
            tail_aware=self.tail_aware,
            widen=self.widen,
        )
        object.__setattr__(self, "alone", alone)
        self.specify(shares=tuple(dict.fromkeys((*self.lanes, *alone.spec.shares))), cuts=self)
        for plan in self.joint_plans:
            models = [member.model for member in plan.members]
            self.check("joint_plans", len(set(models)) == len(models), "plans for different models, each once")
            strands_of(plan, (True,) * len(models))

    def cuts_of(self, tenant: str, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """The units at which a tenant's model may be left, with those of the plans."""
        return cuts_of_all(self.joint_plans, tenant, cuts)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Start a set by its plan if the next query has one, then give what is free to others by deadline."""
        context = self.alone._context(snapshot)
        free = snapshot.free_mask
        for start in self._next_set(context) if self.joint_plans else ():
            context.starts.append(start)
            context.assign(start)
            free &= ~start.share.mask
        self.alone._fill_lanes(context, free)
        return Decision(tuple(context.starts), tuple(context.drops), memory, again_ns=context.again_ns)

    def _next_set(self, context: DecisionContext) -> Sequence[Start]:
        """The starts of a set that the next query is in; none where it has no plan that may be followed now."""
        place = self._next_query(context)
        if place is None:
            return ()
        name, lanes = place[0].tenant.name, self._lanes(context.snapshot)
        if not lanes:
            return ()
        found: list[tuple[int, int, list[_Present | None]]] = []
        for number, plan in enumerate(self.joint_plans):
            if any(member.model == name for member in plan.members):
                there = [self._present(context, member, place) for member in plan.members]
                absent = there.count(None)
                leads = any(each is not None and each.queue is place[0] for each in there)
                if leads and (absent == 0 or len(there) - absent > 1):
                    found.append((absent - len(there), number, there))
        for _, number, there in sorted(found, key=lambda each: each[:2]):
            starts = self._follow(context, self.joint_plans[number], there, lanes)
            if starts:
                return starts
        return ()

    def _next_query(self, context: DecisionContext) -> QueuePosition | None:
        """The waiting query that edf would start next, if it is one; those before it that are hopeless are given up."""
        while isinstance(best := context.best(), tuple):
            if self._head_at(context, best[0]) == best[1]:
                return best
        return None

    def _head_at(self, context: DecisionContext, queue: QueueView) -> int:
        """Where the first query stands that is not hopeless; those before it are given up."""
        at = context.head_at(queue)
        while context.drops_hopeless and at < len(queue.queries):
            head = queue.queries[at]
            work, left_ns = queue.tenant.work(head.shape, head.items), head.deadline_ns - context.now_ns
            if not context.drop_hopeless((head,), work, self.alone.sizes, left_ns):
                break
            at = context.head_at(queue)
        return at

    def _present(self, context: DecisionContext, member: JointMember, first: QueuePosition) -> _Present | None:
        """A member with just the rows of its plan, which the most urgent queries bring that share a launch; None where
        there are no such, or what serves it has other units."""
        queue = context.snapshot.queues.get(member.model)
        if queue is None or queue.tenant.unit_count != member.units:
            return None
        at = first[1] if queue is first[0] else self._head_at(context, queue)
        if at == len(queue.queries):
            return None
        head, tenant = queue.queries[at], queue.tenant
        chosen, items = [head], head.items
        for query in context.behind(queue, at) if member.batch <= tenant.max_batch else ():
            if items >= member.batch:
                break
            if items + query.items <= member.batch:
                chosen.append(query)
                items += query.items
        if items != member.batch:
            return None
        return _Present(queue, at, tuple(chosen), tenant.work(head.shape, items))

    def _lanes(self, snapshot: Snapshot) -> list[_Lane]:
        """The lanes that a set may use: those that are free, and those of launches that have just this lane; of lanes
        that slow each other all or none, when all are free: what a set takes beside another one is not known."""
        now = snapshot.now_ns
        shares: dict[int, Share] = {}
        ends_ns: dict[int, int] = {}
        for number, run in snapshot.running.items():
            shares[number] = run.launch.share
            ends_ns[number] = max(now, run.started_ns + run.launch.predicted_ns)
        for number, launch in sorted(snapshot.waiting.items()):
            shares[number] = launch.share
            ends_ns[number] = launch.predicted_ns + max([ends_ns.get(other, now) for other in launch.after])
        free = snapshot.free_mask
        idle = sum([place.mask for place in self.alone.lanes if place.mask & free == place.mask])
        found = []
        for lane in self.lanes:
            if lane not in self.alone.lanes:
                if lane.mask & idle:
                    found.append(_Lane(lane, now, None))
                continue
            owner = max([number for number, share in shares.items() if share.mask & lane.mask], default=None)
            if owner is not None and shares[owner].mask == lane.mask:
                found.append(_Lane(lane, ends_ns[owner], owner))
            elif lane.mask & free == lane.mask:
                found.append(_Lane(lane, now, None))
        return found

    def _follow(
        self, context: DecisionContext, plan: JointPlan, there: Sequence[_Present | None], lanes: Sequence[_Lane]
    ) -> list[Start]:
        """The starts of those members of a plan that are there; none where it may not be followed now."""
        strands = strands_of(plan, tuple([each is not None for each in there]))
        works = list(_works(strands, there))
        if len(works) < len(strands):
            return []
        sizes = [lane.share.size for lane in lanes]
        times = [[context.latency_ns(work, size) for size in sizes] for work in works]
        laid = lay(strands, [member.rank for member in plan.members], times, [lane.free_ns for lane in lanes])
        if not self._is_in_time(context, strands, there, laid) or not self._is_clear(context, there, laid, lanes):
            return []
        if not self._is_worth(context, plan, there, laid, lanes):
            return []
        return _starts(context.snapshot.next_launch, strands, works, there, laid, lanes)

    def _is_in_time(
        self,
        context: DecisionContext,
        strands: Sequence[Strand],
        there: Sequence[_Present | None],
        laid: Sequence[Laid],
    ) -> bool:
        """Whether all queries of a set are predicted in time."""
        now, ends_ns = context.now_ns, [0] * len(there)
        for each in laid:
            member = strands[each.strand].member
            ends_ns[member] = max(ends_ns[member], each.end_ns)
        for present, end_ns in zip(there, ends_ns, strict=True):
            if present is None:
                continue
            if self.tail_aware:
                tenant = present.queue.tenant
                end_ns = now + context.snapshot.predictor.upper_ns(tenant.name, end_ns - now, tenant.slo_ns)
            if end_ns > min([query.deadline_ns for query in present.queries]):
                return False
        return True

    def _is_worth(
        self,
        context: DecisionContext,
        plan: JointPlan,
        there: Sequence[_Present | None],
        laid: Sequence[Laid],
        lanes: Sequence[_Lane],
    ) -> bool:
        """Whether a set gains enough by its plan for the time of lanes that it costs, both as against its members
        served in no set. Lanes that a plan keeps for later are idle, and parts take longer than the whole.

        On lanes that do not slow each other that counts where others wait; else the gain is known from the plan.
        """
        own = {query.id for each in there if each is not None for query in each.queries}
        others = (query.id for queue in context.snapshot.queues.values() for query in queue.queries)
        if (
            self.alone.lanes == self.lanes
            and not context.snapshot.paused
            and all(each in own or each in context.taken for each in others)
        ):
            return True
        whole = [each for each in enumerate(there) if each[1] is not None]
        streams = [Strand(member, 0, plan.members[member].units, (), ()) for member, _ in whole]
        ranks = [member.rank for member in plan.members]
        free = self._alone([lane.free_ns for lane in lanes], lanes)
        times = [[context.latency_ns(each.work, place.share.size) for place in free] for _, each in whole if each]
        without = _frees_ns(lay(streams, ranks, times, [place.free_ns for place in free]), free)
        planned = [place.free_ns for place in self._alone(_frees_ns(laid, lanes), lanes)]
        return _DEAR * (sum(planned) - sum(without)) <= max(without) - max(planned)

    def _alone(self, frees_ns: Sequence[int], lanes: Sequence[_Lane]) -> list[_Lane]:
        """Where others than sets are served, and from when on, where lanes are free at these times."""
        found = []
        for place in self.alone.lanes:
            inside = [free for free, lane in zip(frees_ns, lanes, strict=True) if lane.share.mask & place.mask]
            if inside:
                found.append(_Lane(place, max(inside), None))
        return found

    def _is_clear(
        self, context: DecisionContext, there: Sequence[_Present | None], laid: Sequence[Laid], lanes: Sequence[_Lane]
    ) -> bool:
        """Whether a set makes nobody late who would have gone before one of its members, or might arrive and go before
        all of them, or where it takes all of a device before one: each is served where it is free first behind it. Who
        is late anyway does not count."""
        snapshot, now = context.snapshot, context.now_ns
        behind = min(self._alone(_frees_ns(laid, lanes), lanes), key=lambda place: place.free_ns)
        wait_ns, size = behind.free_ns - now, behind.share.size
        keys = [each.queue.keys[each.at] for each in there if each is not None]
        last = max(keys)
        arrival = min(keys) if behind.share in self.lanes else last
        own = {query.id for each in there if each is not None for query in each.queries}

        def is_late(work: Work, left_ns: int) -> bool:
            needed_ns = context.latency_ns(work, size)
            return needed_ns <= left_ns < wait_ns + needed_ns

        waiting: list[tuple[Work, int]] = []
        for queue in snapshot.queues.values():
            tenant = queue.tenant
            if self.preempt and self.arrival_key(tenant, now, snapshot.predictor) < arrival:
                waiting.append((tenant.work(0, 1), tenant.slo_ns))
            for key, query in zip(queue.keys, queue.queries, strict=True):
                if key <= last and query.id not in own and query.id not in context.taken:
                    waiting.append((tenant.work(query.shape, query.items), query.deadline_ns - now))
        begun = [(batch, batch.next_unit) for batch in snapshot.paused]
        begun += [
            (run.batch, run.launch.work.end)
            for run in snapshot.running.values()
            if not (run.launch.last or run.launch.part) and run.batch.queries
        ]
        for batch, unit in begun:
            if self.batch_key(batch, snapshot.predictor) < last:
                left_ns = min([query.deadline_ns for query in batch.queries]) - now
                waiting.append((batch.tenant.work(batch.shape, batch.items, unit), left_ns))
        return not any(is_late(work, left_ns) for work, left_ns in waiting)


def _frees_ns(laid: Sequence[Laid], lanes: Sequence[_Lane]) -> list[int]:
    """When each lane is free behind what is laid on them."""
    found = [lane.free_ns for lane in lanes]
    for each in laid:
        found[each.lane] = max(found[each.lane], each.end_ns)
    return found


def _works(strands: Sequence[Strand], there: Sequence[_Present | None]) -> Iterator[Work]:
    """What each strand runs, up to the first that no launch can run: it begins or ends at none of its model's cuts, or
    is of some rows where units mix them."""
    for strand in strands:
        present = there[strand.member]
        assert present is not None  # absent members have no strands
        tenant = present.queue.tenant
        if strand.start not in tenant.cuts or strand.end not in tenant.cuts:
            return
        if strand.rows and not tenant.may_split(strand.start, strand.end):
            return
        whole = present.work
        work = Work(whole.tenant, whole.shape, whole.items, strand.start, strand.end)
        yield work.part(*strand.rows) if strand.rows else work


def _starts(
    first: int,
    strands: Sequence[Strand],
    works: Sequence[Work],
    there: Sequence[_Present | None],
    laid: Sequence[Laid],
    lanes: Sequence[_Lane],
) -> list[Start]:
    """A launch for each strand, in the order in which they begin, numbered from `first` on."""
    numbers: dict[int, int] = {}
    owners = [lane.owner for lane in lanes]
    made = []
    for number, each in enumerate(laid, first):
        strand = strands[each.strand]
        present = there[strand.member]
        assert present is not None  # absent members have no strands
        before = [numbers[other] for other in strand.after]
        owner = owners[each.lane]
        if owner is not None and owner not in before:
            before.append(owner)
        share = lanes[each.lane].share
        made.append(
            Start(
                works[each.strand],
                present.queries,
                share,
                each.end_ns - each.start_ns,
                after=tuple(sorted(before)),
            )
        )
        numbers[each.strand] = owners[each.lane] = number
    return made
