"""The state machine of an application's query: random graphs, random orders of ends, failures and cancels."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.flow import Finish, Flow, StageGraph, StageState, StartStage, Step, WithdrawStage
from cotenant.errors import InvalidValueError, ProtocolViolationError
from cotenant.types import ANSWERS, Outcome

CHAIN = StageGraph(("a", "b", "c"), ((), (0,), (1,)))
DIAMOND = StageGraph(("a", "b", "c", "d"), ((), (0,), (0,), (1, 2)))


@st.composite
def graphs(draw: st.DrawFn) -> StageGraph:
    count = draw(st.integers(1, 7))
    after = [tuple(other for other in range(number) if draw(st.booleans())) for number in range(count)]
    return StageGraph(tuple(f"s{number}" for number in range(count)), tuple(after))


def starts(steps: list[Step]) -> list[int]:
    return [step.stage for step in steps if isinstance(step, StartStage)]


@given(graph=graphs(), data=st.data())
def test_whatever_happens_there_is_one_outcome_and_nothing_runs_on(graph: StageGraph, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(graph.names) - 1), min_size=1))
    needed = graph.needed(wanted)
    flow = Flow(graph, 100, needed)
    running: list[int] = []
    withdrawn: list[int] = []
    started: list[int] = []
    answered: list[int] = []
    finished: list[Finish] = []
    ended_as: list[Outcome] = []

    def follow(steps: list[Step]) -> None:
        for step in steps:
            match step:
                case StartStage():
                    assert not finished
                    assert needed[step.stage]
                    assert step.stage not in started
                    assert all(other in answered for other in graph.after[step.stage])
                    started.append(step.stage)
                    running.append(step.stage)
                case WithdrawStage():
                    assert step.stage in running
                    assert step.stage not in withdrawn
                    withdrawn.append(step.stage)
                case Finish():
                    finished.append(step)

    follow(flow.begin())
    now = 0
    while running:
        now += data.draw(st.integers(0, 40))
        act = data.draw(st.sampled_from(["end", "end", "end", "cancel"]))
        if act == "cancel":
            was_over = bool(finished)
            follow(flow.end(Outcome.CANCELLED, "cancelled by the client"))
            assert finished[0].outcome is Outcome.CANCELLED or was_over
            continue
        stage = running.pop(data.draw(st.integers(0, len(running) - 1)))
        outcome = data.draw(st.sampled_from([*ANSWERS, *ANSWERS, *Outcome]))
        if not finished:
            ended_as.append(outcome)
            if outcome in ANSWERS:
                answered.append(stage)
        follow(flow.stage_ended(stage, outcome, f"{outcome.value}: why", now))
    [finish] = finished
    assert flow.is_over
    assert not any(state in (StageState.RUNNING, StageState.WAITING) for state in flow.states)
    if finish.outcome in ANSWERS:
        assert sorted(answered) == [number for number, each in enumerate(needed) if each]
        assert all(outcome in ANSWERS for outcome in ended_as)
        assert (finish.outcome is Outcome.LATE) == (now > 100)
        assert not withdrawn
    assert flow.end(Outcome.FAILED, "again") == []


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
    flow = Flow(DIAMOND, 10)
    assert starts(flow.begin()) == [0]
    assert starts(flow.stage_ended(0, Outcome.ANSWERED, "", 1)) == [1, 2]
    assert flow.stage_ended(2, Outcome.LATE, "late by 1.0 ms", 2) == []
    assert starts(flow.stage_ended(1, Outcome.ANSWERED, "", 3)) == [3]
    assert flow.stage_ended(3, Outcome.LATE, "late by 1.0 ms", 10) == [Finish(Outcome.ANSWERED)]


def test_late_is_what_is_late_as_a_whole() -> None:
    flow = Flow(StageGraph(("only",), ((),)), 1_000_000)
    flow.begin()
    assert flow.stage_ended(0, Outcome.ANSWERED, "", 3_500_000) == [Finish(Outcome.LATE, "late by 2.5 ms")]


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
    flow = Flow(DIAMOND, 10)
    flow.begin()
    flow.stage_ended(0, Outcome.ANSWERED, "", 1)
    finish, *rest = flow.stage_ended(1, outcome, reason, 2)
    assert finish == Finish(whole, expected)
    assert rest == [WithdrawStage(2, expected)]
    assert flow.stage_ended(2, Outcome.CANCELLED, "withdrawn", 3) == []


def test_a_first_stage_that_is_rejected_rejects_the_whole() -> None:
    flow = Flow(CHAIN, 10)
    flow.begin()
    assert flow.stage_ended(0, Outcome.REJECTED, "full", 0) == [Finish(Outcome.REJECTED, "stage 'a': full")]


def test_what_ends_before_it_begins_starts_nothing() -> None:
    flow = Flow(DIAMOND, 10)
    assert flow.end(Outcome.FAILED, "it was unloaded") == [Finish(Outcome.FAILED, "it was unloaded")]
    assert flow.begin() == []


def test_only_what_is_needed_runs() -> None:
    needed = DIAMOND.needed([1])
    assert needed == (True, True, False, False)
    flow = Flow(DIAMOND, 10, needed)
    flow.begin()
    assert starts(flow.stage_ended(0, Outcome.ANSWERED, "", 1)) == [1]
    assert flow.stage_ended(1, Outcome.ANSWERED, "", 2) == [Finish(Outcome.ANSWERED)]


def test_what_cannot_be_is_refused() -> None:
    flow = Flow(CHAIN, 10)
    flow.begin()
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
