"""Queries of applications in virtual time: deadlines of stages, drops, cancels, time-outs, and that nothing is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from application_world import CHAIN, DIAMOND, World, X, application
from cotenant.core.actions import Respond
from cotenant.core.events import (
    ApplicationArrived,
    ApplicationEnded,
    DrainStarted,
    PredictorChanged,
    QueryArrived,
    QueryWithdrawn,
    TenantAdded,
    TenantRemoved,
)
from cotenant.core.snapshot import DropRule
from cotenant.policies.registry import rebuild_policy
from cotenant.serve.models.served_models import QueryForm
from cotenant.trace import decode_event, read, replay
from cotenant.trace.explain import ApplicationHistory, QueryHistory, explain
from cotenant.types import ANSWERS, Outcome, Tenant
from cotenant.wire.api import InferRequest, InferResult, ServeError, Status
from cotenant.work import Share
from intruder import Intruder
from scenario import MS, ONE_LANE, TWO_LANES, tables

# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_stage_has_what_the_longest_path_after_it_leaves() -> None:
    world = World(application(100, DIAMOND), [10, 5, 20, 7], lanes=TWO_LANES)
    number = world.ask()
    runs = world.flows._runs[number]
    world.run()
    assert list(runs.outputs) == [3]  # what stages have taken is let go of
    assert [(each.stage, each.deadline_ns / MS) for each in world.stages] == [
        ("s0", 73), ("s1", 93), ("s2", 93), ("s3", 100)
    ]  # fmt: skip
    assert {each.part_of for each in world.stages} == {number}
    assert [each.arrival_ns / MS for each in world.stages] == [0, 10, 10, 30]
    assert world.story == [(37, Outcome.ANSWERED, "")]
    assert world.results[0][1].outputs["y3"] is X["x"]  # nothing was copied on the way


def test_a_plan_says_when_shares_end() -> None:
    world = World(application(100, CHAIN), [10, 10, 10], shares_ms={"s0": 20, "s1": 30, "s2": 40})
    world.ask()
    world.run()
    assert [each.deadline_ns / MS for each in world.stages] == [20, 50, 90]


def test_a_time_out_below_the_slo_is_the_deadline_of_the_whole() -> None:
    world = World(application(100, CHAIN), [10, 10, 10])
    world.ask(timeout_ns=40 * MS)
    world.run()
    assert [(each.deadline_ns / MS, (each.expiry_ns or 0) / MS) for each in world.stages] == [
        (20, 40), (30, 40), (40, 40)
    ]  # fmt: skip
    assert world.story == [(30, Outcome.ANSWERED, "")]


def test_what_nobody_asked_for_does_not_run_and_leaves_its_time_to_the_others() -> None:
    world = World(application(100, DIAMOND, outputs=[1, 3]), [10, 5, 20, 7])
    world.ask(outputs=("y1",))
    world.run()
    assert [(each.stage, each.deadline_ns / MS) for each in world.stages] == [("s0", 95), ("s1", 100)]
    assert list(world.results[0][1].outputs) == ["y1"]


# --- ends -------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_in_time_is_rejected_at_arrival() -> None:
    world = World(application(50, CHAIN), [10, 20, 30])
    world.ask()
    world.run()
    [(now, outcome, reason)] = world.story
    assert (now, outcome) == (0, Outcome.REJECTED)
    assert reason == "stage 's0': 10.0 ms of work do not fit into 0.0 ms"
    assert world.results[0][1].status is Status.UNAVAILABLE
    assert len(world.stages) == 1


def test_a_stage_that_is_late_alone_ends_nothing() -> None:
    """The second stage is believed to be slow, so the first one is late for it; it turns out to be quick."""
    world = World(application(100, CHAIN[:2]), [10, 60], real_ms=[50, 20], drop=DropRule.NONE)
    world.ask()
    world.run()
    first = next(action for _, _, actions in world.seen for action in actions if isinstance(action, Respond))
    assert first.outcome is Outcome.LATE
    assert world.story == [(70, Outcome.ANSWERED, "")]


def test_the_whole_is_late_when_its_slo_has_passed() -> None:
    world = World(application(100, CHAIN), [10, 10, 10], real_ms=[60, 60, 10], drop=DropRule.NONE)
    world.ask()
    world.run()
    assert world.story[0][:2] == (130, Outcome.LATE)
    assert world.counters.by_tenant["app"].outcomes[Outcome.LATE] == 1
    assert world.results[0][1].outputs


def test_a_later_stage_that_is_refused_drops_the_whole() -> None:
    world = World(application(60, CHAIN[:2]), [10, 40], real_ms=[15, 40], drop=DropRule.HOPELESS)
    world.ask()
    world.run()
    assert world.story == [(55, Outcome.ANSWERED, "")]
    late = World(application(60, CHAIN[:2]), [10, 40], real_ms=[25, 40], drop=DropRule.HOPELESS)
    late.ask()
    late.run()
    assert late.story == [(25, Outcome.DROPPED, "stage 's1' was rejected: 40.0 ms of work do not fit into 35.0 ms")]


def test_a_model_that_goes_away_between_two_stages() -> None:
    world = World(application(100, CHAIN[:2]), [10, 10])
    world.ask()
    world.at(5, lambda: world.models.pop("m1"))
    world.run()
    text = "stage 's1' was rejected: model 'm1' is not served: it was unloaded"
    assert world.story == [(10, Outcome.DROPPED, text)]


def test_a_model_that_goes_away_when_a_query_of_a_stage_has_been_checked() -> None:
    world = World(application(100, CHAIN[:2]), [10, 10])
    world.ask()
    world.at(5, lambda: setattr(world.models["m1"], "is_over", True))
    world.run()
    assert world.story == [(10, Outcome.DROPPED, "stage 's1' was rejected: it was reloaded")]


def test_a_model_that_goes_away_below_a_stage_fails_the_whole() -> None:
    world = World(application(100, CHAIN[:2]), [10, 10])
    world.ask()
    world.at(5, lambda: world.driver.post(TenantRemoved("m0", "the model was unloaded")))
    world.run()
    assert world.story == [(5, Outcome.FAILED, "stage 's0': the model was unloaded")]


def test_a_failure_withdraws_the_other_side() -> None:
    world = World(application(100, DIAMOND), [10, 5, 20, 7], lanes=TWO_LANES)
    world.ask()
    world.at(12, lambda: world.driver.post(TenantRemoved("m1", "it broke")))
    world.run()
    assert world.story == [(12, Outcome.FAILED, "stage 's1': it broke")]
    [withdrawn] = world.events(QueryWithdrawn)
    assert withdrawn.reason == "withdrawn: stage 's1': it broke"
    responds = {
        action.query: action for _, _, actions in world.seen for action in actions if isinstance(action, Respond)
    }
    assert responds[withdrawn.query].outcome is Outcome.CANCELLED
    assert [each.stage for each in world.stages] == ["s0", "s1", "s2"]


def test_a_cancel_ends_the_whole_at_once() -> None:
    world = World(application(100, DIAMOND), [10, 5, 20, 7], lanes=TWO_LANES)
    number = world.ask()
    world.at(12, lambda: world.flows.cancel(number))
    world.at(13, lambda: world.flows.cancel(number))
    world.run()
    assert world.story == [(12, Outcome.CANCELLED, "cancelled by the client")]
    assert world.results[0][1].status is Status.CANCELLED
    assert len(world.events(QueryWithdrawn)) == 2
    assert world.counters.by_tenant["app"].attainment is None  # withdrawn in time by the client: counted apart
    assert world.counters.by_tenant["app"].excluded[Outcome.CANCELLED] == 1


def test_a_time_out_withdraws_what_waits() -> None:
    """One lane: the first side runs at the time-out, and the other one has waited for it until then."""
    world = World(application(500, DIAMOND), [10, 5, 5, 7], real_ms=[10, 50, 50, 7], drop=DropRule.NONE)
    world.ask(timeout_ns=30 * MS)
    world.run()
    [(now, outcome, reason)] = world.story
    assert (now, outcome) == (30, Outcome.DROPPED)
    assert reason == "stage 's1': timed out after 20.0 ms while it was running"
    assert len(world.events(QueryWithdrawn)) == 1


def test_the_second_of_two_first_stages_is_refused() -> None:
    """Those that come together with it are withdrawn; what has ended starts nothing more."""
    world = World(application(60, [[], [], []]), [10, 70, 10])
    world.ask()
    world.run()
    assert [result.outcome for _, result in world.results] == [Outcome.REJECTED]
    assert "stage 's1'" in world.results[0][1].reason
    assert [each.stage for each in world.stages] == ["s0", "s1", "s2"]
    assert [each.more for each in world.events(QueryArrived)] == [True, True, False]
    assert len(world.events(QueryWithdrawn)) == 2


def test_unloading_the_application_fails_what_is_under_way() -> None:
    world = World(application(100, CHAIN), [10, 10, 10])
    world.ask()
    world.at(12, lambda: world.flows.fail("other", "no"))
    world.at(15, lambda: world.flows.fail("app", "the application was unloaded"))
    world.run()
    assert world.story == [(15, Outcome.FAILED, "the application was unloaded")]


def test_a_drain_lets_what_is_inside_go_on() -> None:
    world = World(application(100, CHAIN), [10, 10, 10])
    world.ask()

    def drain() -> None:
        world.flows.refuse()
        world.driver.post(DrainStarted())
        with pytest.raises(ServeError, match="the server is shutting down"):
            world.ask()

    world.at(15, drain)
    world.run()
    assert world.story == [(30, Outcome.ANSWERED, "")]


def test_stages_of_several_queries_are_one_batch() -> None:
    world = World(application(1000, CHAIN[:2]), [10, 10], max_batch=4, batch_slope=0.5, drop=DropRule.NONE)
    for _ in range(4):
        world.ask()
    world.run()
    assert [outcome for _, outcome, _ in world.story] == [Outcome.ANSWERED] * 4
    assert world.counters.by_tenant["m1"].launches < 4


def test_a_callback_that_raises_costs_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    world = World(application(100, CHAIN), [10, 10, 10])

    def broken(result: InferResult) -> None:
        world.done(result)
        raise RuntimeError("the client's own fault")

    world.flows.submit(world.app, InferRequest("app", X), broken)
    world.ask()
    world.run()
    assert [outcome for _, outcome, _ in world.story] == [Outcome.ANSWERED] * 2
    assert "query 0: its answer could not be delivered" in caplog.text


def test_a_stage_that_cannot_be_made_fails_with_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    world = World(application(100, CHAIN[:2]), [10, 10])
    world.ask()

    def broken(_: InferRequest) -> QueryForm:
        raise RuntimeError("surprise")

    world.models["m1"].form = broken  # type: ignore[method-assign]
    world.run()
    assert world.story == [(10, Outcome.FAILED, "stage 's1': internal error; the server's log has the details")]
    assert "surprise" in caplog.text


def test_beliefs_that_refuse_everything_fade() -> None:
    """A factor of 8 on the second stage: it never runs again, so refusals have to mend what refuses."""
    world = World(application(100, CHAIN[:2]), [10, 20])
    world.beliefs._adapt = True
    for _ in range(20):
        world.beliefs._calibration.observe("m1", 20 * MS, 160 * MS)
    world.beliefs._use(world.beliefs._calibration.scales)
    assert world.beliefs.alone_ns("m1") > 100 * MS
    for step in range(10):
        world.at(100 * step, world.ask)
    world.run()
    outcomes = [outcome for _, outcome, _ in world.story]
    assert outcomes[0] is Outcome.REJECTED
    assert outcomes[-1] is Outcome.ANSWERED


def load_while_a_belief_fades(moment: int) -> bool:
    """Load a model, as the server does it, at some moment of a query that is refused; say whether it came."""
    world = World(application(100, CHAIN[:2]), [10, 20])
    world.beliefs._adapt = True
    for _ in range(20):
        world.beliefs._calibration.observe("m1", 20 * MS, 160 * MS)
    world.beliefs._use(world.beliefs._calibration.scales)
    world.driver.post(PredictorChanged(world.beliefs.predictor))

    def load() -> None:
        with intruder.inner:
            world.beliefs.add("new", tables({"new": MS}).tables["new"])
            world.driver._handle(PredictorChanged(world.beliefs.predictor), world.clock.now_ns())
            world.driver._handle(TenantAdded(Tenant("new", 10_000 * MS)), world.clock.now_ns())

    intruder = Intruder(world.driver, moment, load)
    world.ask()
    world.run()
    assert [outcome for _, outcome, _ in world.story] == [Outcome.REJECTED]
    assert world.engine.predictor is world.beliefs.predictor
    assert not intruder.came or world.engine.predictor.unit_count("new") == 1
    return intruder.came


def test_a_model_that_is_loaded_while_a_belief_fades_is_predicted() -> None:
    assert sum(map(load_while_a_belief_fades, range(40))) in range(5, 39)


# --- the trace --------------------------------------------------------------------------------------------------------


def told(path: Path, query: int) -> QueryHistory | ApplicationHistory:
    return explain(read(path)[1], query)


def test_the_trace_tells_of_the_whole_and_of_each_stage(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    world = World(application(60, DIAMOND), [10, 5, 20, 7], lanes=TWO_LANES, trace=path)
    number = world.ask()
    world.at(12, lambda: world.driver.post(TenantRemoved("m1", "it broke")))
    world.run()
    story = told(path, number)
    assert isinstance(story, ApplicationHistory)
    assert story.sentences() == [
        "Query 0 of the application 'app' was failed after 12.0 ms; its deadline was 60.0 ms.",
        "Reason given to the client: stage 's1': it broke.",
        "+0.0 ms: stage 's0' as query 1 of 'm0', due at +33.0 ms: answered at +10.0 ms",
        "+10.0 ms: stage 's1' as query 2 of 'm1', due at +53.0 ms: failed at +12.0 ms (it broke)",
        "+10.0 ms: stage 's2' as query 3 of 'm2', due at +53.0 ms: cancelled when the query ended",
        "For details of a stage, run 'cotenant explain' with the number of its query.",
    ]
    stage = told(path, 2).sentences()
    assert stage[1:3] == [
        "It is the stage 's1' of query 0, of an application.",
        "Reason given to the application: it broke.",
    ]


def test_a_trace_with_applications_replays_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    world = World(
        application(90, DIAMOND), [10, 5, 20, 7], lanes=TWO_LANES, trace=path, noise=0.4, failure_rate=0.1, seed=3
    )
    for step in range(12):
        world.at(15 * step, world.ask)
    world.run()
    assert len(Counter(outcome for _, outcome, _ in world.story)) >= 3
    head, records = read(path)
    lines = path.read_bytes().splitlines()[1:]
    assert [line for _, line in replay(head, records, rebuild_policy)] == lines
    kinds = Counter(record.kind for record in read(path)[1])
    assert kinds["ApplicationArrived"] == kinds["ApplicationEnded"] == 12
    events = [decode_event(record.kind, record.event) for record in read(path)[1]]
    arrived = [event.query for event in events if isinstance(event, QueryArrived)]
    assert arrived == world.stages


@given(
    after=st.integers(1, 6).flatmap(
        lambda count: st.tuples(*[st.lists(st.integers(0, max(0, at - 1)), unique=True) for at in range(count)])
    ),
    seed=st.integers(0, 10_000),
    drop=st.sampled_from(list(DropRule)),
    lanes=st.sampled_from([ONE_LANE, TWO_LANES]),
    policy=st.sampled_from(["edf", "fcfs", "sjf"]),
)
def test_whatever_happens_every_query_has_one_outcome(
    after: Sequence[Sequence[int]], seed: int, drop: DropRule, lanes: tuple[Share, ...], policy: str
) -> None:
    random = Random(seed)
    after = [[], *[sorted(needed) for needed in after[1:]]]
    times = [random.uniform(1, 20) for _ in after]
    world = World(
        application(random.uniform(20, 150), after),
        times,
        drop=drop,
        lanes=lanes,
        max_batch=random.choice([1, 4]),
        noise=0.5,
        failure_rate=random.choice([0.0, 0.1]),
        seed=seed,
        policy=policy,
    )
    numbers: list[int] = []
    for _ in range(random.randrange(1, 15)):
        timeout = {"timeout_ns": random.randrange(1, 100) * MS} if random.random() < 0.3 else {}
        world.at(random.uniform(0, 150), lambda more=timeout: numbers.append(world.ask(**more)))
    for _ in range(random.randrange(4)):
        world.at(random.uniform(0, 200), lambda: numbers and world.flows.cancel(random.choice(numbers)))
    if random.random() < 0.2:
        world.at(random.uniform(0, 200), lambda: world.flows.fail("app", "it was unloaded"))
    world.run()
    results = Counter(result.query for _, result in world.results)
    assert results == Counter(numbers)
    arrived = [event.query for event in world.events(ApplicationArrived)]
    ended = {event.query: event.outcome for event in world.events(ApplicationEnded)}
    assert sorted(arrived) == sorted(numbers)
    assert ended == {result.query: result.outcome for _, result in world.results}
    responds = Counter(
        action.query for _, _, actions in world.seen for action in actions if isinstance(action, Respond)
    )
    assert responds == Counter(each.id for each in world.stages)
    done = {result.query: (result, now) for now, result in world.results}
    begun = {event.query: event for event in world.events(ApplicationArrived)}
    for number, (result, now) in done.items():
        if result.outcome in ANSWERS:
            assert (result.outcome is Outcome.ANSWERED) == (now <= begun[number].deadline_ns)
            stages = sorted(each.stage for each in world.stages if each.part_of == number)
            assert stages == [f"s{at}" for at in range(len(after))]
        else:
            assert result.reason
