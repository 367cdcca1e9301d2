"""The policy that follows joint plans: when it does, how its launches wait for each other, and what stays edf's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import UNSET

from cotenant.core.actions import Enqueue, Launch
from cotenant.core.events import LaunchEnded, QueryArrived, QueryCancelled
from cotenant.core.snapshot import DropRule
from cotenant.errors import InvalidValueError
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.margin import SafetyMargin, Spread
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, JointPlan, Wait
from cotenant.techniques.granularity.policy.joint_schedule import JointSchedule
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share
from scenario import CORES, TWO_LANES, play
from strict_engine import StrictEngine as Engine

TENANTS = {
    "a": Tenant("a", 1000, cuts=(0, 1, 2, 3, 4), max_batch=4, splits=((0, 1, 2, 3, 4),)),
    "b": Tenant("b", 1000, cuts=(0, 1, 2)),
    "c": Tenant("c", 1000),
}
MODELS = {
    "a": LatencyTable((LatencyRow(0, 1, 1, 40), LatencyRow(0, 4, 1, 160)), (1.0,) * 4),
    "b": LatencyTable((LatencyRow(0, 1, 1, 60),), (1.0,) * 2),
    "c": LatencyTable((LatencyRow(0, 1, 1, 30),)),
}
BELIEVED = TablePredictor(MODELS)
PLAN = JointPlan((JointMember("a", 4, 4), JointMember("b", 1, 2)), barriers=((2, 1),), chunks=(Chunk(0, 0, 2, (2, 2)),))


class Told:
    """An engine that is told what arrives and ends, and what it launched: by its number, model, units, rows and lane,
    with what it waits for."""

    def __init__(
        self, policy: JointSchedule, tenants: Sequence[Tenant] = tuple(TENANTS.values()), cores: Sequence[int] = CORES
    ) -> None:
        self.engine = Engine(tenants, policy, BELIEVED, Machine.cpu(cores))
        self.count = 0
        self.launches: dict[int, Launch] = {}
        self.decisions = 0
        """Events at which launches were decided."""
        self.running: list[int] = []
        self.now = 0
        self.outcomes: dict[int, Outcome] = {}

    def arrive(self, *request: tuple[str, int, int], at: int = 0) -> None:
        """Queries of models, with rows and deadline, that come together."""
        self.now = at
        for left, (model, items, deadline) in zip(range(len(request) - 1, -1, -1), request, strict=True):
            query = Query(self.count, model, at, deadline, items=items)
            self.count += 1
            self.tell(QueryArrived(query, more=left > 0))

    def tell(self, event: object) -> None:
        before = len(self.launches)
        for action in self.engine.handle(event, self.now):  # type: ignore[arg-type]
            if isinstance(action, Launch):
                self.launches[action.id] = action
                self.running.append(action.id)
            elif isinstance(action, Enqueue):
                self.launches[action.launch.id] = action.launch
            elif hasattr(action, "outcome"):
                self.outcomes[action.query] = action.outcome
        self.decisions += len(self.launches) > before

    def end(self, number: int, at: int, error: str | None = None) -> None:
        self.now = at
        self.running.remove(number)
        self.tell(LaunchEnded(number, error))

    @property
    def story(self) -> list[tuple[object, ...]]:
        return [
            (number, each.work.tenant, (each.work.start, each.work.end), each.work.rows, each.share.cores, each.after)
            for number, each in sorted(self.launches.items())
        ]


def test_a_set_that_is_there_together_starts_by_its_plan_in_one_decision() -> None:
    told = Told(JointSchedule(TWO_LANES, joint_plans=(PLAN,)))
    told.arrive(("a", 4, 900), ("b", 1, 900))
    assert told.story == [
        (0, "a", (0, 2), (0, 2), (0,), ()),
        (1, "a", (0, 2), (2, 4), (1,), ()),
        (2, "b", (0, 1), (), (0,), (0,)),
        (3, "a", (2, 4), (), (1,), (0, 1, 2)),
        (4, "b", (1, 2), (), (0,), (0, 1, 2)),
    ]
    assert told.decisions == 1
    assert told.running == [0, 1]
    told.end(1, 40)
    told.end(0, 41)
    assert told.running == [2]
    told.end(2, 71)
    assert told.running == [3, 4]
    told.end(4, 101)
    told.end(3, 151)
    assert told.outcomes == {0: Outcome.ANSWERED, 1: Outcome.ANSWERED}


def test_without_the_others_or_with_other_rows_it_is_edf() -> None:
    for request in ([("a", 4, 900)], [("a", 3, 900), ("b", 1, 900)], [("b", 1, 900), ("c", 1, 900)]):
        told = Told(JointSchedule(TWO_LANES, joint_plans=(PLAN,)))
        told.arrive(*request)
        assert [(start, end) for _, _, (start, end), *_ in told.story] == [
            (0, TENANTS[model].unit_count) for model, *_ in request
        ]
        assert all(each.after == () for each in told.launches.values())


def test_queries_of_a_member_that_may_be_merged_make_its_rows_together() -> None:
    plan = JointPlan(PLAN.members, chunks=(Chunk(0, 0, 4, (2, 2)),))
    told = Told(JointSchedule(TWO_LANES, joint_plans=(plan,)))
    told.arrive(("a", 1, 900), ("a", 2, 900), ("b", 1, 900), ("a", 2, 900), ("a", 1, 900))
    assert told.launches[0].queries == (0, 1, 4)
    assert len(told.launches) == 3
    assert told.engine.waiting("a") == 1


def test_absent_members_are_empty_where_two_are_there() -> None:
    plan = JointPlan((*PLAN.members, JointMember("c", 1, 1)), waits=(Wait(1, 1, 2, 1), Wait(2, 0, 0, 2)))
    told = Told(JointSchedule(TWO_LANES, joint_plans=(plan,)))
    told.arrive(("a", 4, 900), ("c", 1, 900))
    assert [(model, units, after) for _, model, units, _, _, after in told.story] == [
        ("a", (0, 2), ()),
        ("a", (2, 4), (0,)),
        ("c", (0, 1), (0,)),
    ]


def test_the_plan_of_most_who_are_there_is_followed() -> None:
    wide = JointPlan((*PLAN.members, JointMember("c", 1, 1)), waits=(Wait(2, 0, 0, 2),))
    told = Told(JointSchedule(TWO_LANES, joint_plans=(PLAN, wide)))
    told.arrive(("a", 4, 900), ("b", 1, 900), ("c", 1, 900))
    assert [model for _, model, *_ in told.story].count("c") == 1
    assert not any(each.work.rows for each in told.launches.values())
    told = Told(JointSchedule(TWO_LANES, joint_plans=(wide, PLAN)))
    told.arrive(("a", 4, 900), ("b", 1, 900))
    assert not any(each.work.rows for each in told.launches.values()), "of two that are alike the first"


def test_one_model_alone_may_have_a_plan_of_chunks() -> None:
    plan = JointPlan((JointMember("a", 4, 4),), chunks=(Chunk(0, 0, 3, (2, 2)),))
    told = Told(JointSchedule(TWO_LANES, joint_plans=(plan,)))
    told.arrive(("a", 4, 900))
    assert [(rows, cores, after) for *_, rows, cores, after in told.story] == [
        ((0, 2), (0,), ()),
        ((2, 4), (1,), ()),
        ((), (1,), (0, 1)),
    ]


def test_a_busy_lane_is_planned_on_behind_what_runs_there() -> None:
    told = Told(JointSchedule(TWO_LANES, joint_plans=(PLAN,)))
    told.arrive(("c", 1, 900))
    told.arrive(("a", 4, 900), ("b", 1, 900), at=5)
    first = told.launches[1]
    assert (first.work.rows, first.share.cores, first.after) == ((0, 2), (1,), ())
    other = next(
        each for each in told.launches.values() if each.share.cores == (0,) and each.id > 1 and 0 in each.after
    )
    assert other.id not in told.running
    told.end(0, 30)
    assert other.id in told.running or other.after != (0,)


def test_a_second_set_is_laid_behind_the_first() -> None:
    told = Told(JointSchedule(TWO_LANES, joint_plans=(PLAN,)))
    told.arrive(("a", 4, 900), ("b", 1, 900))
    told.arrive(("a", 4, 900), ("b", 1, 900), at=1)
    assert len(told.launches) == 5, "no lane is free"
    told.end(0, 40)
    told.end(1, 40)
    told.end(2, 70)
    told.end(4, 100)
    assert len(told.launches) == 10
    assert all(set(each.after) - set(range(5)) or 3 in each.after for each in list(told.launches.values())[6:])
    while told.running:
        told.end(told.running[0], told.now + 40)
    assert set(told.outcomes.values()) == {Outcome.ANSWERED}


@pytest.mark.parametrize(("deadline", "count"), [(99, 2), (100, 5)])
def test_a_set_starts_only_where_all_of_it_is_predicted_in_time(deadline: int, count: int) -> None:
    """A's chunks take 40, b's first unit 30 behind one of them, and its second one 30 behind the barrier."""
    told = Told(JointSchedule(TWO_LANES, joint_plans=(PLAN,)))
    told.arrive(("a", 4, 900), ("b", 1, deadline))
    assert len(told.launches) == count


def test_a_tail_aware_one_starts_a_set_only_where_it_is_sure() -> None:
    believed = BELIEVED.with_margin(SafetyMargin({"a": Spread(1.5, 10**6), "b": Spread(1.5, 10**6)}))
    for tail_aware, count in ((False, 5), (True, 2)):
        told = Told(JointSchedule(TWO_LANES, tail_aware=tail_aware, joint_plans=(PLAN,)))
        told.engine.predictor = believed
        told.arrive(("a", 4, 900), ("b", 1, 120))
        assert len(told.launches) == count


@pytest.mark.parametrize(("deadline", "follows"), [(249, False), (250, True)])
def test_who_goes_before_a_member_must_be_in_time_behind_the_set(deadline: int, follows: bool) -> None:
    """C is more urgent than b. By the plan the lane is free when b has ended, at 220."""
    told = Told(
        JointSchedule(TWO_LANES[:1], slack_share=1.0, joint_plans=(JointPlan(PLAN.members, barriers=((4, 0),)),))
    )
    told.arrive(("a", 4, 170), ("b", 1, 900), ("c", 1, deadline))
    assert [each.work.tenant for each in told.launches.values()] == (["a", "b"] if follows else ["a"])


@pytest.mark.parametrize("waits", [False, True])
def test_where_others_wait_lanes_are_not_kept_idle_for_little(waits: bool) -> None:
    """A takes 160 and b 60. The chunks of a's last unit bring 20 for 80 of the second lane; those of all bring 60 for
    none, as b goes first there."""
    others = [("c", 1, 990)] if waits else []
    late = JointPlan(PLAN.members, chunks=(Chunk(0, 3, 4, (2, 2)),))
    early = JointPlan((PLAN.members[0], JointMember("b", 1, 2, rank=1)), chunks=(Chunk(0, 0, 4, (2, 2)),))
    for plan, follows in ((late, not waits), (early, True)):
        told = Told(JointSchedule(TWO_LANES, joint_plans=(plan,)))
        told.arrive(("a", 4, 900), ("b", 1, 900), *others)
        assert any(each.work.rows for each in told.launches.values()) is follows


def test_who_might_arrive_and_go_first_must_be_in_time_behind_the_set() -> None:
    for slo, preempt, count in ((128, True, 2), (131, True, 5), (128, False, 5)):
        tenants = [TENANTS["a"], TENANTS["b"], replace(TENANTS["c"], slo_ns=slo)]
        told = Told(JointSchedule(TWO_LANES, preempt=preempt, joint_plans=(PLAN,)), tenants)
        told.arrive(("a", 4, 900), ("b", 1, 900))
        assert len(told.launches) == count, (slo, preempt)


def test_a_batch_that_is_to_go_on_counts_as_waiting() -> None:
    """B is left at a cut for c, and is more urgent than the set that comes then."""
    for deadline, follows in ((210, False), (400, True)):
        told = Told(JointSchedule((TWO_LANES[0],), slack_share=0.0, joint_plans=(PLAN,)))
        told.arrive(("b", 1, deadline))
        assert told.launches[0].work.end == 1
        plan = JointPlan((JointMember("a", 4, 4), JointMember("c", 1, 1)), waits=(Wait(1, 0, 0, 4),))
        told.engine.guard.policy = JointSchedule((TWO_LANES[0],), slack_share=0.0, joint_plans=(plan,))
        told.arrive(("a", 4, 200), ("c", 1, 900), at=5)
        told.end(0, 30)
        assert (len(told.launches) == 3) is follows


def test_hopeless_queries_do_not_keep_a_set_from_starting() -> None:
    told = Told(JointSchedule(TWO_LANES, joint_plans=(PLAN,)))
    told.arrive(("c", 1, 900), ("c", 1, 900))
    told.arrive(("a", 4, 162), ("b", 1, 62), ("a", 4, 901), ("b", 1, 902), at=1)
    told.end(0, 30)
    assert [told.launches[number].queries for number in (2, 4)] == [(4,), (5,)]
    assert told.outcomes[2] == told.outcomes[3] == Outcome.DROPPED


def test_a_plan_of_other_units_or_at_no_cut_is_not_followed() -> None:
    for members in (
        (JointMember("a", 4, 5), JointMember("b", 1, 2)),
        (JointMember("a", 4, 4), JointMember("b", 1, 2)),
    ):
        tenants = [replace(TENANTS["a"], cuts=(0, 1, 4)), TENANTS["b"], TENANTS["c"]]
        told = Told(JointSchedule(TWO_LANES, joint_plans=(JointPlan(members, barriers=((2, 1),)),)), tenants)
        told.arrive(("a", 4, 900), ("b", 1, 900))
        assert len(told.launches) == 2


def test_chunks_of_units_that_mix_rows_are_not_followed() -> None:
    for splits, follows in ((((0, 2),), True), (((0, 1), (2, 4)), False), (UNSET, False)):
        tenants = [replace(TENANTS["a"], splits=splits), TENANTS["b"], TENANTS["c"]]
        told = Told(JointSchedule(TWO_LANES, joint_plans=(PLAN,)), tenants)
        told.arrive(("a", 4, 900), ("b", 1, 900))
        assert (len(told.launches) == 5) is follows


def test_lanes_that_a_set_leaves_over_are_filled() -> None:
    lanes = (*TWO_LANES, Share((2,)))
    plan = JointPlan((PLAN.members[0], JointMember("b", 1, 2, rank=1)))
    told = Told(JointSchedule(lanes, joint_plans=(plan,)), cores=(0, 1, 2))
    told.arrive(("a", 4, 900), ("b", 1, 800), ("c", 1, 950))
    assert [(model, cores) for _, model, _, _, cores, _ in told.story] == [("a", (0,)), ("b", (1,)), ("c", (2,))]


GPU = Machine.of({"cuda:0": range(2)})
STREAMS = tuple(GPU.share((slot,), "cuda:0") for slot in range(2))
ON_GPU = TablePredictor(
    {
        name: replace(
            table,
            rows=(*table.rows, *(replace(row, cores=2, latency_ns=row.latency_ns * 3 // 4) for row in table.rows)),
        )
        for name, table in MODELS.items()
    }
)
"""All of the device is a quarter quicker than a stream beside others."""


def on_gpu(plan: JointPlan = PLAN, **options: object) -> Told:
    told = Told(JointSchedule(TWO_LANES))
    policy = JointSchedule(STREAMS, joint_plans=(plan,), **options)  # type: ignore[arg-type]
    told.engine = Engine(tuple(TENANTS.values()), policy, ON_GPU, GPU)
    return told


def test_on_a_gpu_what_is_in_no_set_gets_all_of_it() -> None:
    told = on_gpu()
    assert told.engine.policy.spec.shares == (*STREAMS, GPU.devices[0])
    told.arrive(("c", 1, 900))
    told.arrive(("a", 4, 900), ("b", 1, 900), at=5)
    assert [(model, cores) for _, model, _, _, cores, _ in told.story] == [("c", (0, 1))], "a set waits for all of it"
    told.end(0, 15)
    assert [each.share.size for each in told.launches.values()] == [2, 1, 1, 1, 1, 1]
    told.arrive(("c", 1, 400), at=20)
    for number in (1, 2, 3, 4):
        told.end(number, 60 + number)
        assert len(told.launches) == 6, "nothing begins beside a set"
    told.end(5, 180)
    assert told.story[-1][1:5] == ("c", (0, 1), (), (0, 1))


def test_on_a_gpu_a_set_must_end_before_its_members_in_turn() -> None:
    """In turn they take 120 and 45 on all of it; by the plan 150, and 220 where b waits for all of a."""
    for plan, follows in ((PLAN, True), (JointPlan(PLAN.members, waits=(Wait(1, 0, 0, 4),)), False)):
        told = on_gpu(plan)
        told.arrive(("a", 4, 900), ("b", 1, 900))
        assert (told.launches[0].share.size == 1) is follows


@pytest.mark.parametrize(("deadline", "follows"), [(171, False), (172, True)])
def test_on_a_gpu_others_must_be_in_time_when_all_of_it_is_free(deadline: int, follows: bool) -> None:
    """The set has ended at 150; then c takes 22."""
    told = on_gpu(preempt=False)
    told.arrive(("a", 4, 160), ("b", 1, 900), ("c", 1, deadline))
    assert (told.launches[0].share.size == 1) is follows


@pytest.mark.parametrize(("slo", "follows"), [(171, False), (172, True)])
def test_on_a_gpu_who_might_arrive_and_go_before_a_member_must_be_in_time_behind_the_set(
    slo: int, follows: bool
) -> None:
    told = on_gpu()
    tenants = (TENANTS["a"], TENANTS["b"], replace(TENANTS["c"], slo_ns=slo))
    told.engine = Engine(tenants, told.engine.policy, ON_GPU, GPU)
    told.arrive(("a", 4, 160), ("b", 1, 900))
    assert (told.launches[0].share.size == 1) is follows


def test_who_leaves_and_who_fails_lets_the_others_go_on() -> None:
    told = Told(JointSchedule(TWO_LANES, joint_plans=(PLAN,)))
    told.arrive(("a", 4, 900), ("b", 1, 900))
    told.tell(QueryCancelled(1))
    told.end(0, 40)
    told.end(1, 40, "it broke")
    assert told.outcomes == {1: Outcome.CANCELLED, 0: Outcome.FAILED}
    assert told.engine.launches == ()
    assert told.engine.snapshot(50).free_mask == 3


def test_plans_that_cannot_be_followed_are_refused() -> None:
    circle = JointPlan(PLAN.members, waits=(Wait(0, 0, 1, 2), Wait(1, 1, 0, 1)))
    with pytest.raises(InvalidValueError, match="circular"):
        JointSchedule(TWO_LANES, joint_plans=(circle,))
    with pytest.raises(InvalidValueError, match="each once"):
        JointSchedule(TWO_LANES, joint_plans=(JointPlan((JointMember("a", 1, 4), JointMember("a", 2, 4))),))


@pytest.mark.parametrize("drop", list(DropRule))
def test_without_plans_every_decision_is_that_of_edf(drop: DropRule) -> None:
    queries = [
        Query(
            number, name, 10 * number, 10 * number + 40 * (1 + number % 7), items=1 + (number % 3 if name == "a" else 0)
        )
        for number, name in enumerate("abcaabcbbacabccabaacbbca")
    ]
    made, other = (
        play(kind(TWO_LANES, drop), TENANTS.values(), BELIEVED, queries).launches for kind in (JointSchedule, Edf)
    )
    assert made == other
