"""The state machine of an application's query: random graphs, random orders of ends, failures and cancels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from cotenant.core.events import ApplicationEnded, QueryWithdrawn
from cotenant.core.flow import Flow, FlowProbes, StageGraph, StageState, StartStages, Step
from cotenant.core.probes import LEAST_NS
from cotenant.errors import InvalidValueError, ProtocolViolationError
from cotenant.types import ANSWERS, Outcome, Query

CHAIN = StageGraph(("a", "b", "c"), ((), (0,), (1,)))
DIAMOND = StageGraph(("a", "b", "c", "d"), ((), (0,), (0,), (1, 2)))


@st.composite
def graphs(draw: st.DrawFn) -> StageGraph:
    count = draw(st.integers(1, 7))
    after = [tuple(other for other in range(number) if draw(st.booleans())) for number in range(count)]
    return StageGraph(tuple(f"s{number}" for number in range(count)), tuple(after))


def begun(graph: StageGraph, deadline_ns: int, wanted: Sequence[int] | None = None) -> Flow:
    """A flow of query 7 of `app`, from 0 on, of models that take no time."""
    return Flow(graph, Query(7, "app", 0, deadline_ns), lambda *_: 0, wanted=wanted)


def starts(steps: list[Step]) -> list[int]:
    return [stage for step in steps if isinstance(step, StartStages) for stage in step.stages]


def ended(outcome: Outcome, now_ns: int, reason: str = "") -> ApplicationEnded:
    return ApplicationEnded(7, outcome, reason, now_ns)


@given(graph=graphs(), data=st.data())
def test_whatever_happens_there_is_one_outcome_and_nothing_runs_on(graph: StageGraph, data: st.DataObject) -> None:
    """Some stages never arrive, since their queries cannot be made: those are not withdrawn."""
    wanted = data.draw(st.lists(st.integers(0, len(graph.names) - 1), min_size=1))
    needed = graph.needed(wanted)
    flow = begun(graph, 100, wanted)
    running: list[int] = []
    arrived: list[int] = []
    withdrawn: list[int] = []
    started: list[int] = []
    answered: list[int] = []
    finished: list[ApplicationEnded] = []
    ended_as: list[Outcome] = []
    now = 0

    def follow(steps: list[Step]) -> None:
        for step in steps:
            match step:
                case StartStages():
                    assert not finished
                    assert step.query == 7
                    for stage in step.stages:
                        assert needed[stage]
                        assert stage not in started
                        assert all(other in answered for other in graph.after[stage])
                        started.append(stage)
                        running.append(stage)
                case QueryWithdrawn():
                    assert finished
                    assert step.query in arrived
                    assert step.query - 10 in running
                    withdrawn.append(step.query)
                case ApplicationEnded():
                    assert step.ended_ns == now
                    finished.append(step)

    follow(flow.begin())
    while running:
        now += data.draw(st.integers(0, 40))
        act = data.draw(st.sampled_from(["end", "end", "end", "arrive", "arrive", "cancel"]))
        if act == "cancel":
            was_over = bool(finished)
            follow(flow.end(Outcome.CANCELLED, "cancelled by the client", now))
            assert finished[0].outcome is Outcome.CANCELLED or was_over
            continue
        stage = data.draw(st.sampled_from(running))
        if act == "arrive":
            if not finished and stage + 10 not in arrived:
                query = flow.stage_query(stage, stage + 10, "m", now, 1, 0, 0)
                assert (query.part_of, query.stage, query.deadline_ns) == (7, graph.names[stage], 100)
                arrived.append(query.id)
            continue
        running.remove(stage)
        outcome = data.draw(st.sampled_from([*ANSWERS, *ANSWERS, *Outcome]))
        if not finished:
            ended_as.append(outcome)
            if outcome in ANSWERS:
                answered.append(stage)
        follow(flow.stage_ended(stage, outcome, f"{outcome.value}: why", now))
    [finish] = finished
    assert flow.is_over
    assert not any(state in (StageState.RUNNING, StageState.WAITING) for state in flow.states)
    assert len(set(withdrawn)) == len(withdrawn)
    if finish.outcome in ANSWERS:
        assert sorted(answered) == [number for number, each in enumerate(needed) if each]
        assert all(outcome in ANSWERS for outcome in ended_as)
        assert (finish.outcome is Outcome.LATE) == (now > 100)
        assert not withdrawn
    assert flow.end(Outcome.FAILED, "again", now) == flow.begin() == []


@given(graph=graphs(), data=st.data())
def test_the_rest_is_the_longest_path(graph: StageGraph, data: st.DataObject) -> None:
    count = len(graph.names)
    times = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))

    def paths(number: int) -> list[list[int]]:
        """Every path of stages from this one on."""
        following = [path for other in range(count) if number in graph.after[other] for path in paths(other)]
        return [[number, *path] for path in following] or [[number]]

    everything = [path for number in range(count) for path in paths(number)]
    for number, rest in enumerate(graph.rest_ns(times)):
        assert rest == max(sum(times[each] for each in path[1:]) for path in paths(number))
    ends = graph.ends_ns(times)
    assert max(ends) == max(sum(times[each] for each in path) for path in everything)
    for path in everything:
        assert all(ends[later] >= ends[sooner] + times[later] for sooner, later in pairwise(path))


def test_a_diamond_starts_its_last_stage_once_when_both_sides_are_there() -> None:
    flow = begun(DIAMOND, 10)
    assert starts(flow.begin()) == [0]
    assert starts(flow.stage_ended(0, Outcome.ANSWERED, "", 1)) == [1, 2]
    assert flow.stage_ended(2, Outcome.LATE, "late by 1.0 ms", 2) == []
    assert starts(flow.stage_ended(1, Outcome.ANSWERED, "", 3)) == [3]
    assert flow.stage_ended(3, Outcome.LATE, "late by 1.0 ms", 10) == [ended(Outcome.ANSWERED, 10)]


def test_late_is_what_is_late_as_a_whole() -> None:
    flow = begun(StageGraph(("only",), ((),)), 1_000_000)
    flow.begin()
    late = ended(Outcome.LATE, 3_500_000, "late by 2.5 ms")
    assert flow.stage_ended(0, Outcome.ANSWERED, "", 3_500_000) == [late]


@pytest.mark.parametrize(
    ("outcome", "reason", "whole", "expected"),
    [
        (Outcome.FAILED, "boom", Outcome.FAILED, "stage 'b': boom"),
        (Outcome.DROPPED, "timed out", Outcome.DROPPED, "stage 'b': timed out"),
        (Outcome.REJECTED, "the queue is full", Outcome.DROPPED, "stage 'b' was rejected: the queue is full"),
    ],
)
def test_the_reason_names_the_stage_and_the_other_side_is_withdrawn(
    outcome: Outcome, reason: str, whole: Outcome, expected: str
) -> None:
    flow = begun(DIAMOND, 10)
    flow.begin()
    flow.stage_ended(0, Outcome.ANSWERED, "", 1)
    for stage in (1, 2):
        flow.stage_query(stage, 10 + stage, "m", 1, 1, 0, 0)
    withdrawn = QueryWithdrawn(12, f"withdrawn: {expected}")
    assert flow.stage_ended(1, outcome, reason, 2) == [ended(whole, 2, expected), withdrawn]
    assert flow.stage_ended(2, Outcome.CANCELLED, "withdrawn", 3) == []


def test_a_first_stage_that_is_rejected_rejects_the_whole() -> None:
    flow = begun(CHAIN, 10)
    flow.begin()
    assert flow.stage_ended(0, Outcome.REJECTED, "full", 0) == [ended(Outcome.REJECTED, 0, "stage 'a': full")]


def test_what_ends_before_it_begins_starts_nothing() -> None:
    flow = begun(DIAMOND, 10)
    assert flow.end(Outcome.FAILED, "it was unloaded", 1) == [ended(Outcome.FAILED, 1, "it was unloaded")]
    assert flow.begin() == []


def test_only_what_is_needed_runs() -> None:
    needed = DIAMOND.needed([1])
    assert needed == (True, True, False, False)
    flow = begun(DIAMOND, 10, [1])
    flow.begin()
    assert starts(flow.stage_ended(0, Outcome.ANSWERED, "", 1)) == [1]
    assert flow.stage_ended(1, Outcome.ANSWERED, "", 2) == [ended(Outcome.ANSWERED, 2)]


def test_outputs_are_awaited_until_all_that_need_them_have_started() -> None:
    flow = begun(DIAMOND, 10)
    flow.begin()
    assert flow.awaited == {0, 1, 2}
    flow.stage_ended(0, Outcome.ANSWERED, "", 1)
    assert flow.awaited == {1, 2}
    flow.end(Outcome.CANCELLED, "", 2)
    assert flow.awaited == set()


def test_deadlines_leave_the_longest_path_its_time_by_what_is_known_of_tensors() -> None:
    """Each stage takes its shape times its rows, and 10."""
    query = Query(7, "app", 100, 1100, items=3)
    graph = replace(DIAMOND, smallest=(4, 1, 5, 2))

    def alone_ns(stage: int, shape: int, rows: int) -> int:
        return 10 + shape * rows

    flow = Flow(graph, query, alone_ns, {0: (7, 2)})
    assert flow.works == [(7, 2), (1, 3), (5, 3), (2, 3)]
    assert flow.deadlines_ns == [1100 - 25 - 16, 1084, 1084, 1100]
    assert Flow(graph, query, alone_ns, wanted=[1]).deadlines_ns[:2] == [1087, 1100]
    shared = graph.divided({"a": 10, "b": 20, "c": 30, "d": 2000})
    assert Flow(shared, query, alone_ns).deadlines_ns == [110, 130, 140, 1100]
    assert graph.divided({"a": 10}) == graph


@pytest.mark.parametrize(
    ("limit_ns", "shares_ns", "fits_ns"),
    [
        (63, {}, 63),
        (62, {}, 62),
        (500, {"a": 22, "b": 13, "c": 25, "d": 16}, 63),
        (500, {"a": 11, "b": 13, "c": 30, "d": 15}, 31),
    ],
)
def test_a_query_fits_where_its_stages_do_together_and_each_in_its_share(
    limit_ns: int, shares_ns: dict[str, int], fits_ns: int
) -> None:
    """Alone they take 22, 13, 25 and 16."""
    graph = replace(DIAMOND, smallest=(4, 1, 5, 2)).divided(shares_ns)
    flow = Flow(graph, Query(7, "app", 0, limit_ns, items=3), lambda stage, shape, rows: 10 + shape * rows)
    assert flow.fit(lambda _, shape, rows: 10 + shape * rows) == (63, fits_ns)


def test_a_probe_follows_a_refusal_and_its_stages_have_a_late_deadline() -> None:
    def query(number: int, now_ns: int) -> Flow:
        return Flow(CHAIN, Query(number, "app", now_ns, now_ns + 100), alone_ns)

    def alone_ns(stage: int, shape: int, rows: int) -> int:
        return 60

    probes, first = FlowProbes(), query(0, 0)
    probes.admit(first, alone_ns, 0)
    assert first.arrived.predicted_ns is UNSET
    probes.refused(first)
    probes.ended(first, Outcome.REJECTED, 0)
    well = query(1, 5)
    probes.admit(well, lambda *_: 1, 5)  # what is believed has changed meanwhile
    assert well.arrived.predicted_ns is UNSET
    probe = query(2, 10)
    probes.admit(probe, alone_ns, 10)
    predicted_ns = probe.arrived.predicted_ns
    assert predicted_ns == 60 * len(CHAIN.names)
    probe.begin()
    stage = probe.stage_query(0, 9, "m", 10, 1, 0, 0)
    assert (stage.deadline_ns, stage.expiry_ns) == (10 + 8 * predicted_ns, 110)
    probes.ended(probe, Outcome.ANSWERED, 70)
    for now_ns, is_one in ((70 + LEAST_NS - 1, False), (70 + LEAST_NS, True)):
        later = query(now_ns, now_ns)
        probes.refused(later)
        probes.admit(later, alone_ns, now_ns)
        assert (later.predicted_ns > 0) is is_one
    probes.forget("app")
    anew = query(5, 71 + LEAST_NS)
    probes.refused(anew)
    probes.admit(anew, alone_ns, 71 + LEAST_NS)
    assert anew.predicted_ns > 0


def test_what_cannot_be_is_refused() -> None:
    flow = begun(CHAIN, 10)
    flow.begin()
    with pytest.raises(ProtocolViolationError, match="stage 'b' arrives while it is WAITING"):
        flow.stage_query(1, 9, "m", 0, 1, 0, 0)
    with pytest.raises(ProtocolViolationError, match="stage 'b' ended while it is WAITING"):
        flow.stage_ended(1, Outcome.ANSWERED, "", 0)
    flow.stage_ended(0, Outcome.ANSWERED, "", 0)
    with pytest.raises(ProtocolViolationError, match="stage 'a' ended while it is ANSWERED"):
        flow.stage_ended(0, Outcome.ANSWERED, "", 0)
    for after in (((), (1,)), ((), (5,)), ((0,), ())):
        with pytest.raises(InvalidValueError, match="stages before stage"):
            StageGraph(("a", "b"), after)
    with pytest.raises(InvalidValueError, match="at least 1"):
        StageGraph((), ())
