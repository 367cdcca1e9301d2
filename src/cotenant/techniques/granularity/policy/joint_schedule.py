"""Earliest deadline first, with joint plans for models that wait at the same time.

Joint plans are those of GACER (2023); the rule when to follow one is ours. A set starts in one decision: each task of a
member is one launch, which depends on earlier launches on any lane.
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
from cotenant.techniques.granularity.policy.joint_tasks import JointTask, ScheduledTask, list_schedule, tasks_of
from cotenant.types import Query
from cotenant.work import CPU, Share, Work

_LEAST_GAIN = 2
"""Smallest gain of a plan, in multiples of the lane time that it costs. Chosen by simulation (decision 39)."""


class _Present(NamedTuple):
    """A member with waiting queries: its queue, the position of the first query there, its queries, and their work."""

    queue: QueueView
    at: int
    queries: tuple[Query, ...]
    work: Work


class _Lane(NamedTuple):
    """A lane that a set may use, the time from which it is free, and the launch that has it until then."""

    share: Share
    free_ns: int
    owner: int | None


@dataclass(frozen=True, slots=True)
class JointSchedule(Edf):
    """Earliest deadline first (EDF), with joint plans. A decision is:

    1. Take the query that EDF would start next. Find the plans with its model and at least one other waiting member.
    2. Prefer the plan with the most present members, then the first one. Absent members are empty streams.
    3. Place the plan's tasks on lanes by list scheduling. Tasks on a busy lane start behind its launch.
    4. Start the set if all conditions below hold; else try the next plan.
    5. Serve all other queries by EDF on the lanes that are free.

    The conditions:

    - Each present member has exactly the rows of the plan, in queries that may be merged.
    - Each query of the set is predicted to meet its deadline.
    - No more urgent query or batch becomes late behind the set: see `_delays_no_query`.
    - The plan gains enough for its cost in lane time: see `_gains_enough`.

    Lanes of a CPU are independent; EDF uses those that a set leaves over. On other devices lanes slow each other. There
    a set starts only when all lanes are free, and EDF uses all of them as one. No query waits for an arrival.

    Raises InvalidValueError as Edf, and for plans with circular waits.
    """

    joint_plans: tuple[JointPlan, ...] = ()
    alone: Edf = field(init=False, repr=False, compare=False)
    """The policy for queries outside sets, on CPU lanes or on all lanes of another device as one."""

    name: ClassVar[str] = "joint"
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
            tasks_of(plan, (True,) * len(models))

    def cuts_of(self, tenant: str, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """The units at which a tenant's model may be left, with those of the plans."""
        return cuts_of_all(self.joint_plans, tenant, cuts)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Start a set by its plan if the next query has one, then fill the free lanes by EDF."""
        context = self.alone._context(snapshot)
        free = snapshot.free_mask
        for start in self._next_set(context) if self.joint_plans else ():
            context.starts.append(start)
            context.assign(start)
            free &= ~start.share.mask
        self.alone._fill_lanes(context, free)
        return Decision(tuple(context.starts), tuple(context.drops), memory, again_ns=context.again_ns)

    def _next_set(self, context: DecisionContext) -> Sequence[Start]:
        """The starts of a set with the next query; none if it has no plan that may be followed now."""
        place = self._next_query(context)
        if place is None:
            return ()
        name, lanes = place[0].tenant.name, self._lanes(context.snapshot)
        if not lanes:
            return ()
        found: list[tuple[int, int, list[_Present | None]]] = []
        for number, plan in enumerate(self.joint_plans):
            if any(member.model == name for member in plan.members):
                members = [self._present(context, member, place) for member in plan.members]
                absent = members.count(None)
                leads = any(each is not None and each.queue is place[0] for each in members)
                if leads and (absent == 0 or len(members) - absent > 1):
                    found.append((absent - len(members), number, members))
        for _, number, members in sorted(found, key=lambda each: each[:2]):
            starts = self._follow(context, self.joint_plans[number], members, lanes)
            if starts:
                return starts
        return ()

    def _next_query(self, context: DecisionContext) -> QueuePosition | None:
        """The position of the waiting query that EDF would start next, or None if it is a paused batch. Sheds hopeless
        queries before it."""
        while isinstance(best := context.best(), tuple):
            if self._head_at(context, best[0]) == best[1]:
                return best
        return None

    def _head_at(self, context: DecisionContext, queue: QueueView) -> int:
        """Position of the first query that is not hopeless; sheds those before it."""
        at = context.head_at(queue)
        while context.drops_hopeless and at < len(queue.queries):
            head = queue.queries[at]
            work, left_ns = queue.tenant.work(head.shape, head.items), head.deadline_ns - context.now_ns
            if not context.drop_hopeless((head,), work, self.alone.sizes, left_ns):
                break
            at = context.head_at(queue)
        return at

    def _present(self, context: DecisionContext, member: JointMember, first: QueuePosition) -> _Present | None:
        """A member with exactly the rows of its plan, from the most urgent queries that may be merged. None if no such
        queries wait, or the served model has another number of units."""
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
        """The lanes that a set may use: free ones, and those of launches with exactly this lane. Of lanes that slow
        each other all or none, when all are free: times beside another set are unknown."""
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
        self, context: DecisionContext, plan: JointPlan, members: Sequence[_Present | None], lanes: Sequence[_Lane]
    ) -> list[Start]:
        """The starts of the present members of a plan; none if it may not be followed now."""
        tasks = tasks_of(plan, tuple([each is not None for each in members]))
        works = list(_task_works(tasks, members))
        if len(works) < len(tasks):
            return []
        sizes = [lane.share.size for lane in lanes]
        times = [[context.latency_ns(work, size) for size in sizes] for work in works]
        scheduled = list_schedule(
            tasks, [member.rank for member in plan.members], times, [lane.free_ns for lane in lanes]
        )
        if not self._is_in_time(context, tasks, members, scheduled) or not self._delays_no_query(
            context, members, scheduled, lanes
        ):
            return []
        if not self._gains_enough(context, plan, members, scheduled, lanes):
            return []
        return _starts(context.snapshot.next_launch, tasks, works, members, scheduled, lanes)

    def _is_in_time(
        self,
        context: DecisionContext,
        tasks: Sequence[JointTask],
        members: Sequence[_Present | None],
        scheduled: Sequence[ScheduledTask],
    ) -> bool:
        """Whether all queries of a set are predicted to meet their deadlines."""
        now, ends_ns = context.now_ns, [0] * len(members)
        for each in scheduled:
            member = tasks[each.task].member
            ends_ns[member] = max(ends_ns[member], each.end_ns)
        for present, end_ns in zip(members, ends_ns, strict=True):
            if present is None:
                continue
            if self.tail_aware:
                tenant = present.queue.tenant
                end_ns = now + context.snapshot.predictor.upper_ns(tenant.name, end_ns - now, tenant.slo_ns)
            if end_ns > min([query.deadline_ns for query in present.queries]):
                return False
        return True

    def _gains_enough(
        self,
        context: DecisionContext,
        plan: JointPlan,
        members: Sequence[_Present | None],
        scheduled: Sequence[ScheduledTask],
        lanes: Sequence[_Lane],
    ) -> bool:
        """Whether a plan gains enough against its members as one stream each, outside a set.

            _LEAST_GAIN * (sum of lane ends with plan - without) <= last lane end without plan - with

        A plan costs lane time: reserved lanes are idle, and chunks take longer than the whole batch. On independent
        lanes that cost counts only if other queries wait.
        """
        own = {query.id for each in members if each is not None for query in each.queries}
        others = (query.id for queue in context.snapshot.queues.values() for query in queue.queries)
        if (
            self.alone.lanes == self.lanes
            and not context.snapshot.paused
            and all(each in own or each in context.taken for each in others)
        ):
            return True
        whole = [each for each in enumerate(members) if each[1] is not None]
        streams = [JointTask(member, 0, plan.members[member].units, (), ()) for member, _ in whole]
        ranks = [member.rank for member in plan.members]
        free = self._free_outside_sets([lane.free_ns for lane in lanes], lanes)
        times = [[context.latency_ns(each.work, place.share.size) for place in free] for _, each in whole if each]
        without = _lane_ends_ns(list_schedule(streams, ranks, times, [place.free_ns for place in free]), free)
        planned = [place.free_ns for place in self._free_outside_sets(_lane_ends_ns(scheduled, lanes), lanes)]
        return _LEAST_GAIN * (sum(planned) - sum(without)) <= max(without) - max(planned)

    def _free_outside_sets(self, frees_ns: Sequence[int], lanes: Sequence[_Lane]) -> list[_Lane]:
        """The lanes of EDF and when each is free, if the lanes of sets are free at these times."""
        found = []
        for place in self.alone.lanes:
            inside = [free for free, lane in zip(frees_ns, lanes, strict=True) if lane.share.mask & place.mask]
            if inside:
                found.append(_Lane(place, max(inside), None))
        return found

    def _delays_no_query(
        self,
        context: DecisionContext,
        members: Sequence[_Present | None],
        scheduled: Sequence[ScheduledTask],
        lanes: Sequence[_Lane],
    ) -> bool:
        """Whether no query outside a set becomes late because of it. Each is predicted on the lane that is free first
        behind the set. Counted are queries and begun batches more urgent than a member. With `preempt` also a row of
        each tenant that might arrive and be more urgent than all members (on a whole device: than one). A query that is
        late anyway does not count."""
        snapshot, now = context.snapshot, context.now_ns
        behind = min(self._free_outside_sets(_lane_ends_ns(scheduled, lanes), lanes), key=lambda place: place.free_ns)
        wait_ns, size = behind.free_ns - now, behind.share.size
        keys = [each.queue.keys[each.at] for each in members if each is not None]
        last = max(keys)
        arrival = min(keys) if behind.share in self.lanes else last
        own = {query.id for each in members if each is not None for query in each.queries}

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


def _lane_ends_ns(scheduled: Sequence[ScheduledTask], lanes: Sequence[_Lane]) -> list[int]:
    """When each lane is free behind its scheduled tasks."""
    found = [lane.free_ns for lane in lanes]
    for each in scheduled:
        found[each.lane] = max(found[each.lane], each.end_ns)
    return found


def _task_works(tasks: Sequence[JointTask], members: Sequence[_Present | None]) -> Iterator[Work]:
    """The work of each task, up to the first that cannot run as a launch. A task cannot run if it starts or ends at
    none of its model's cuts, or is a chunk of units that mix rows."""
    for task in tasks:
        present = members[task.member]
        assert present is not None  # absent members have no tasks
        tenant = present.queue.tenant
        if task.start not in tenant.cuts or task.end not in tenant.cuts:
            return
        if task.rows and not tenant.may_split(task.start, task.end):
            return
        whole = present.work
        work = Work(whole.tenant, whole.shape, whole.items, task.start, task.end)
        yield work.part(*task.rows) if task.rows else work


def _starts(
    first: int,
    tasks: Sequence[JointTask],
    works: Sequence[Work],
    members: Sequence[_Present | None],
    scheduled: Sequence[ScheduledTask],
    lanes: Sequence[_Lane],
) -> list[Start]:
    """A launch for each task, in order of start times, numbered from `first` on."""
    numbers: dict[int, int] = {}
    owners = [lane.owner for lane in lanes]
    made = []
    for number, each in enumerate(scheduled, first):
        task = tasks[each.task]
        present = members[task.member]
        assert present is not None  # absent members have no tasks
        before = [numbers[other] for other in task.after]
        owner = owners[each.lane]
        if owner is not None and owner not in before:
            before.append(owner)
        share = lanes[each.lane].share
        made.append(
            Start(
                works[each.task],
                present.queries,
                share,
                each.end_ns - each.start_ns,
                after=tuple(sorted(before)),
            )
        )
        numbers[each.task] = owners[each.lane] = number
    return made
