"""Headroom-based control of deterministic operator overlap (Abacus, SC'21, sections 6.1 to 6.3), with choices added.

Launches of several tenants are issued as one group whose latency the predictor knows; the next group starts when the
last launch of this one has ended. It is chosen before that, and may be handed to the device before. The query with the
least headroom leads a group. What runs beside it, how many queries are merged, where a member is cut and how the cores
are shared is chosen by what a group gets done in its time, among the groups that the predictor calls feasible. Where
overlap gains nothing, groups of one member win: tenants that never gain from each other run in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, cast

from msgspec import Meta, Struct

from cotenant.core.predictor import Group, GroupPredictor
from cotenant.core.snapshot import IN_GROUPS, Decision, Drop, DropRule, Snapshot
from cotenant.policies.base import BasePolicy
from cotenant.policies.decision_context import SlackShare
from cotenant.policies.facts import LayoutFacts
from cotenant.policies.ordered.edf import Edf
from cotenant.techniques.overlap.policy.barrier import needs_barrier
from cotenant.techniques.overlap.policy.group_choice import Choice
from cotenant.techniques.overlap.policy.group_jobs import waiting_at
from cotenant.techniques.overlap.policy.group_likely import likely_groups
from cotenant.techniques.overlap.policy.group_search import find_group
from cotenant.techniques.overlap.policy.group_splits import Splits
from cotenant.types import Tenant
from cotenant.work import CPU

MOST_MEMBERS = 4
"""As many as the paper overlaps. The ways to share a device grow quickly with them."""
GPU_ENQUEUE_MS = 1.0
"""Enough to be asked, to choose and to submit, and for a group that ends earlier than predicted."""


class _Ahead(Struct, frozen=True, gc=False):
    """A group chosen while another one ran, to begin at `begin_ns`, and the queries that are beyond help by then."""

    choice: Choice
    begin_ns: int
    drops: tuple[Drop, ...]

    def drops_at(self, snapshot: Snapshot) -> tuple[Drop, ...]:
        """Those that are to be dropped now: none before the time for which they were found hopeless."""
        if not self.drops or snapshot.now_ns < self.begin_ns:
            return ()
        waiting = {query.id for queue in snapshot.queues.values() for query in queue.queries}
        waiting.update([query.id for batch in snapshot.paused for query in batch.queries])
        return tuple([drop for drop in self.drops if drop.query in waiting])


@dataclass(frozen=True, slots=True)
class Overlap(BasePolicy):
    """Groups of segments of several tenants, chosen by headroom.

    `lanes`: smallest shares of the device; a member of a group gets one or several neighbouring ones.
    `drop`: when waiting queries are given up.
    `preempt`: cut members inside their models; else every batch runs to its end in one group.
    `ways`: cuts of a member that are predicted at once in the search for the best one (the paper's m).
    `members`: largest number of launches in a group; 0 stands for one per lane, and no more than MOST_MEMBERS.
    `barrier`: whether launches start in groups at all. Without it every lane is served on its own, in the order of edf:
    where launches on disjoint shares do not slow each other down there is no overlap to predict, and waiting for the
    last launch of a group only costs.
    `enqueue_ms`: how long before the predicted end of the group that runs the next one is started, to wait on the
    device for that end; 0: not before it. It has to be able to begin then with time to spare and to have no batch of
    the group that runs. Given up for that: who arrives later cannot join it, and waits for what is left of one group
    and for the next, which is to leave him enough of his slack therefore; it is not chosen anew when the one before
    takes longer than predicted, and may be late then; and who is beyond help is told so at his deadline, since
    decisions beside a running group drop nobody.
    `tail_aware`: without a barrier, serve those first that are sure to be in time: see ListPolicy.
    `repeat`: whether a tenant may have several launches in a group, each of other queries.
    `slack_share`: the share of the slack (SLO - own latency) of a later arrival that a group may use up, as far as cuts
    allow it.

    Raises InvalidValueError for a value out of its range.
    """

    preempt: bool = True
    ways: Annotated[int, Meta(ge=1, le=64)] = 4
    members: Annotated[int, Meta(ge=0, le=64)] = 0
    slack_share: SlackShare = 1.0
    repeat: bool = True
    barrier: bool = True
    enqueue_ms: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    tail_aware: bool = True
    splits: Splits = field(init=False, repr=False, compare=False)

    lanewise: Edf = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "overlap"
    find: ClassVar[Callable[..., Choice]] = staticmethod(find_group)
    """The search; another one of the same form may stand in its place, to be compared with it."""

    def __post_init__(self) -> None:
        BasePolicy.__post_init__(self)
        self.check("ways", self.ways >= 1, "at least 1")
        expected = f"0 (one per lane, {MOST_MEMBERS} at most) to {len(self.lanes)}"
        self.check("members", 0 <= self.members <= len(self.lanes), expected)
        self.check("enqueue_ms", 0 <= self.enqueue_ms <= 1000, "milliseconds from 0 to 1000")
        self.check("slack_share", 0 <= self.slack_share <= 1, "a share from 0 to 1")
        object.__setattr__(self, "lanewise", Edf(self.lanes, self.drop, self.preempt, tail_aware=self.tail_aware))
        splits = Splits.of(self.lanes, self.members or min(len(self.lanes), MOST_MEMBERS))
        object.__setattr__(self, "splits", splits)
        self.specify(tail_aware=self.tail_aware)
        if self.barrier:
            shares = tuple(dict.fromkeys(share for ways in splits.by_members for split in ways for share in split))
            self.specify(shares=shares, requests=IN_GROUPS, groups=self)

    @classmethod
    def resolve(cls, options: Mapping[str, Any], facts: LayoutFacts) -> Mapping[str, Any]:
        """What was left open: `barrier` as what was measured of pairs of models asks for it, `enqueue_ms` on a GPU.

        There a launch can wait on the device for others, and does not wait for this process besides.
        """
        found = {"barrier": needs_barrier(facts), **options}
        if found["barrier"] and facts.lanes[0].device != CPU:
            found.setdefault("enqueue_ms", GPU_ENQUEUE_MS)
        return found

    @property
    def _window_ns(self) -> int:
        return int(self.enqueue_ms * 1e6)

    def likely_groups(self, tenants: Sequence[Tenant]) -> Iterator[Group]:
        """The groups that decisions are likely to ask the predictor for, see `group_likely`."""
        return likely_groups(tenants, self.splits, self.ways if self.preempt else 0, self.repeat)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Start a group, or choose the next one while a group runs."""
        if not self.barrier:
            return self.lanewise.decide(snapshot, memory)
        predictor, number = cast(GroupPredictor, snapshot.predictor), snapshot.next_launch
        if snapshot.running:
            ends = [run.started_ns + run.launch.predicted_ns for run in snapshot.running.values()]
            begin = max(snapshot.now_ns, *ends)
            choice, drops = self._choose(snapshot, predictor, begin)
            if choice is None:
                return Decision()
            again = 0
            if self.enqueue_ms and begin < choice.latest_ns and choice.is_there(snapshot):
                again = begin - self._window_ns
                if again <= snapshot.now_ns:
                    return Decision(choice.starts(number, tuple(snapshot.running), ahead=True))
            return Decision(memory=_Ahead(choice, begin, drops), again_ns=again)
        if isinstance(memory, _Ahead):
            choice = memory.choice
            if snapshot.now_ns <= choice.latest_ns and choice.is_there(snapshot):
                return Decision(choice.starts(number, ahead=True), memory.drops_at(snapshot))
        choice, drops = self._choose(snapshot, predictor, snapshot.now_ns)
        return Decision(() if choice is None else choice.starts(number), drops)

    def _choose(
        self, snapshot: Snapshot, predictor: GroupPredictor, begin_ns: int
    ) -> tuple[Choice | None, tuple[Drop, ...]]:
        """The group to start at `begin_ns`, and the queries that nothing can help any more by then."""
        drops = self.drop is DropRule.HOPELESS
        candidates, hopeless, slack_ns = waiting_at(snapshot, begin_ns, self.splits.widest, drops, predictor)
        if not candidates:
            return None, hopeless
        ways = self.ways if self.preempt else 0
        # A group as short as this leaves all tenants, whether they wait or not, enough of their slack.
        # Who arrives too late for the next one waits for what is left of this one besides: that, or as much again.
        slack_ns = max(0, slack_ns - self._window_ns, slack_ns // 2)
        short_ns = int(slack_ns * self.slack_share)
        return self.find(candidates, predictor, self.splits, begin_ns, ways, short_ns, self.repeat), hopeless
