"""Headroom-based query control for deterministic operator overlap (Abacus, SC'21, sections 6.1 to 6.3), extended.

A *group* is a set of launches of several tenants that start together; a predictor gives its latency. One decision:

1. Compute the headroom of each candidate, `deadline - begin - predicted remaining time`. Shed those below 0.
2. The candidate with the highest priority, then the least headroom, leads the group.
3. Add members one by one; vary batches, cuts and the split of the lanes (`find_group`).
4. Of the groups predicted to meet their deadlines, choose the one with the most value per time.
5. While a group runs, choose the next one, and submit it to the device ahead of its start (pipelining, section 6.3).

The paper varies partners and cuts only. Groups of one member win where overlap gains nothing.
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
"""Most members of a group, as in the paper. The number of splits of a device grows fast with them."""
GPU_ENQUEUE_MS = 1.0
"""Default of `enqueue_ms` on a GPU: time to decide and submit, with a reserve for groups that end early."""


class _Ahead(Struct, frozen=True, gc=False):
    """A group chosen for `begin_ns` while another one ran, and the queries that are hopeless by then."""

    choice: Choice
    begin_ns: int
    drops: tuple[Drop, ...]

    def drops_at(self, snapshot: Snapshot) -> tuple[Drop, ...]:
        """The queries to drop now; none before `begin_ns`, the time for which they are hopeless."""
        if not self.drops or snapshot.now_ns < self.begin_ns:
            return ()
        waiting = {query.id for queue in snapshot.queues.values() for query in queue.queries}
        waiting.update([query.id for batch in snapshot.paused for query in batch.queries])
        return tuple([drop for drop in self.drops if drop.query in waiting])


@dataclass(frozen=True, slots=True)
class Overlap(BasePolicy):
    """Groups of segments of several tenants, chosen by headroom.

    - `lanes`: the smallest shares of the device; a member of a group gets one or several adjacent ones.
    - `drop`: the rule by which waiting queries are shed.
    - `preempt`: cut members inside their models; else every batch runs to its end in one group.
    - `ways`: cuts of a member in one call of the predictor (m of the paper).
    - `members`: most launches in a group; 0 for one per lane, up to MOST_MEMBERS.
    - `barrier`: start launches in groups. Without it each lane is served by EDF, which is better where launches on
      disjoint shares do not slow each other.
    - `enqueue_ms`: time before the predicted end of the running group at which the next one is submitted; 0: not ahead.
      A later query cannot join it. The group is not revised if the running one is late, and no query is dropped
      meanwhile.
    - `tail_aware`: without a barrier, as in ListPolicy.
    - `repeat`: a tenant may have several launches in a group, of different queries.
    - `slack_share`: share of the least slack of a tenant (`SLO - latency alone`) within which a group ends, if cuts
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
    """The search; benchmarks replace it by others with the same signature."""

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
        """The open options: `barrier` by the measured pairs of models, `enqueue_ms` on a GPU.

        Launches on a GPU can wait for each other on the device, without this process.
        """
        found = {"barrier": needs_barrier(facts), **options}
        if found["barrier"] and facts.lanes[0].device != CPU:
            found.setdefault("enqueue_ms", GPU_ENQUEUE_MS)
        return found

    @property
    def _window_ns(self) -> int:
        return int(self.enqueue_ms * 1e6)

    def likely_groups(self, tenants: Sequence[Tenant]) -> Iterator[Group]:
        """The groups that decisions are likely to request, see `group_likely`."""
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
        """The group to start at `begin_ns`, and the queries that are hopeless by then."""
        drops = self.drop is DropRule.HOPELESS
        candidates, hopeless, slack_ns = waiting_at(snapshot, begin_ns, self.splits.widest, drops, predictor)
        if not candidates:
            return None, hopeless
        ways = self.ways if self.preempt else 0
        # A query that arrives during a group waits for its rest; one too late for an enqueued group waits for both.
        slack_ns = max(0, slack_ns - self._window_ns, slack_ns // 2)
        short_ns = int(slack_ns * self.slack_share)
        return self.find(candidates, predictor, self.splits, begin_ns, ways, short_ns, self.repeat), hopeless
