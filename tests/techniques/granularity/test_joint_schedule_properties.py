"""Random histories of a policy that follows joint plans: it never decides what cannot be carried out, and of all that
may happen to a set, everything happens."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.actions import Action, Enqueue, Launch, Respond
from cotenant.core.events import Event, LaunchEnded, QueryArrived
from cotenant.core.snapshot import DropRule
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, JointPlan, Wait
from cotenant.techniques.granularity.policy.joint_schedule import JointSchedule
from cotenant.types import Outcome, Tenant
from cotenant.work import Machine
from task_books import Books

MACHINE = Machine.of({"cpu": (0, 1, 2), "cuda:0": (0, 1), "cuda:1": (0,)})
LANES = tuple(MACHINE.share((core,)) for core in range(3))
WIDE = (MACHINE.share((0, 1)), MACHINE.share((2,)))
STREAMS = (MACHINE.share((0,), "cuda:0"), MACHINE.share((1,), "cuda:0"), MACHINE.share((0,), "cuda:1"))
TENANTS = {
    "deep": Tenant("deep", 400, cuts=(0, 1, 3, 4, 6), max_batch=4, splits=((0, 1, 3, 4, 6),)),
    "flat": Tenant("flat", 400, cuts=(0, 1, 2), max_batch=2),
    "lone": Tenant("lone", 400),
}
TABLES = {
    "deep": LatencyTable((LatencyRow(0, 1, 1, 24), LatencyRow(0, 1, 2, 14)), (1.0,) * 6),
    "flat": LatencyTable((LatencyRow(0, 1, 1, 12),), (1.0,) * 2),
    "lone": LatencyTable((LatencyRow(0, 1, 1, 9),)),
}
DEEP, FLAT, LONE = JointMember("deep", 2, 6, rank=1), JointMember("flat", 1, 2), JointMember("lone", 1, 1)
PLANS = (
    JointPlan((DEEP, FLAT, LONE), ((3, 1, 0), (4, 1, 1)), (Wait(1, 1, 0, 4),), (Chunk(0, 0, 4, (1, 1)),)),
    JointPlan((JointMember("deep", 3, 6), FLAT), (), (Wait(0, 3, 1, 1),), (Chunk(0, 1, 6, (1, 2)),)),
    JointPlan((JointMember("deep", 4, 6),), (), (), (Chunk(0, 0, 6, (1, 2, 1)),)),
)
SEEN: Counter[str] = Counter()


class Sets(Books):
    """The world around the policy; queries of several models come together, too."""

    rows = (1, 1, 2, 2, 3, 4)
    slo_ns = (400, 400, 60, 30)

    def arrive_together(self) -> None:
        tenants = [name for name in self.tenants if name in {each.name for each in self.engine.tenants}]
        request = [self.query(name) for name in tenants if self.random.random() < 0.8]
        for left, query in zip(range(len(request) - 1, -1, -1), request, strict=True):
            self.tell(QueryArrived(query, more=left > 0))

    def tell(self, event: Event) -> None:
        """As Books, with what is reached counted by sets: groups with launches that wait or run rows."""
        if isinstance(event, LaunchEnded) and event.error and self.running[event.launch].part:
            self.seen["a launch of a set failed"] += 1
        free = self.engine.snapshot(self.now).free_mask
        self.told = self.__dict__.get("told", 0) + 1
        super().tell(event)
        if isinstance(event, QueryArrived) and event.more:
            assert self.engine.snapshot(self.now).free_mask == free, "decided before all were there"

    def carry_out(self, action: Action) -> None:
        launch = action.launch if isinstance(action, Enqueue) else action
        if isinstance(launch, Launch) and launch.id not in self.waited and (launch.after or launch.work.rows):
            groups = self.__dict__.setdefault("groups", {})
            group = groups.setdefault(self.told, set())
            self.__dict__.setdefault("decided", {})[launch.id] = self.told
            before = len(group)
            group.add(launch.work.tenant)
            if before < len(group):
                self.seen[f"a set of {len(group)}"] += 1
            self.seen["a launch of a set on a stream"] += launch.share.device != "cpu"
            self.seen["a chunk"] += bool(launch.work.rows)
            self.seen["behind another set"] += any(
                other in self.waited and self.decided[other] != self.told for other in launch.after
            )
            self.seen["behind one that ran"] += any(other in self.running for other in launch.after)
        if isinstance(action, Respond):
            self.seen[action.outcome] += 1
        super().carry_out(action)


def walk(random: Random, steps: int) -> None:
    drop, lanes = (
        random.choice([*DropRule, DropRule.HOPELESS]),
        random.choice([LANES, LANES[:2], LANES[:1], WIDE, STREAMS]),
    )
    slack_share, preempt = random.choice([0.0, 0.1, 1.0]), random.random() < 0.7

    def policy() -> JointSchedule:
        return JointSchedule(lanes, drop, preempt, slack_share=slack_share, joint_plans=PLANS)

    books = Sets(random, policy, TENANTS, TablePredictor(TABLES), MACHINE, SEEN)
    moves: list[Any] = (
        [books.arrive] * 2 + [books.arrive_together] * 3 + [books.end] * 9 + [books.cancel, books.disturb]
    )
    for _ in range(steps):
        random.choice(moves)()
    books.drain()


@settings(max_examples=40, deadline=None)
@given(random=st.randoms(use_true_random=False), steps=st.integers(1, 60))
def test_any_history_keeps_the_contract(random: Random, steps: int) -> None:
    walk(random, steps)


def test_long_histories_keep_it_too_and_get_everywhere() -> None:
    SEEN.clear()
    for seed in range(90):
        walk(Random(seed), 200)
    floors = {
        "a set of 1": 50,
        "a set of 2": 50,
        "a set of 3": 20,
        "a chunk": 200,
        "a launch of a set on a stream": 20,
        "behind another set": 20,
        "behind one that ran": 50,
        "a launch of a set failed": 50,
        "never ran, as nobody waited for it": 50,
        "suspended while launches waited": 5,
        "another policy while launches waited": 5,
        "answered in parts": 50,
        "enqueued, then released": 50,
        Outcome.ANSWERED: 300,
        Outcome.LATE: 20,
        Outcome.DROPPED: 50,
    }
    short = {name: SEEN[name] for name, floor in floors.items() if SEEN[name] < floor}
    assert not short, dict(SEEN)
