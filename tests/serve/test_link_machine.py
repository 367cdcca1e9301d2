"""A link under any history: queries, ends, withdrawals, lost links. Each query has one end, and no block is lost."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from cotenant import shortages
from cotenant.core.admission import Gate
from cotenant.serve.directory import Directory, Front, NameState
from cotenant.types import Outcome
from cotenant.wire.api import InferRequest, InferResult, ModelMetadata, ServeError, Status, TensorSpec
from fake_backend import linked, together

WAIT_S = 10.0
MODEL = ModelMetadata("m", ("1",), "fake", (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),), 0)
SIZES = (1, 16, 1000, 100_000)
REACHED: Counter[str] = Counter()


class Engine:
    """A server whose queries end when the test says so. `y` is what `x` was."""

    gates: Mapping[str, Gate] = {}

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inside: dict[int, tuple[InferRequest, Callable[[InferResult], None]]] = {}
        self.cancelled: set[int] = set()
        self.replies: list[int] = []
        self._numbers = itertools.count(100)

    def directory(self) -> Directory:
        return Directory(True, {"m": NameState({"": Front(MODEL)}), "lost": NameState(reason="it was lost")})

    def submit(self, request: InferRequest, done: Callable[[InferResult], None]) -> int:
        if request.priority == 1:
            raise ServeError(Status.UNAVAILABLE, "refused")
        number = next(self._numbers)
        if request.priority == 2:  # it ends before its number is known
            done(InferResult(Outcome.REJECTED, number, reason="at once", status=Status.UNAVAILABLE))
            return number
        with self.changed:
            self.inside[number] = request, done
            self.changed.notify_all()
        return number

    def submit_together(self, requests: Sequence[Any]) -> list[int | ServeError]:
        return together(self, requests)

    def cancel(self, query: int) -> None:
        with self.changed:
            self.cancelled.add(query)
            self.changed.notify_all()
        self.end(query, Outcome.CANCELLED)

    def end(self, number: int, outcome: Outcome) -> None:
        with self.changed:
            request, done = self.inside.pop(number, (None, None))
        if request is None or done is None:
            return
        outputs = {"y": request.inputs["x"]} if outcome is Outcome.ANSWERED else {}
        status = None if outputs else Status.CANCELLED
        done(InferResult(outcome, number, "1", outputs, "" if outputs else "ended", status, 5))

    def replied(self, result: InferResult) -> None:
        self.replied_at(result.query, 0, 0)

    def replied_at(self, query: int, ended_ns: int, at_ns: int) -> None:
        with self.changed:
            self.replies.append(query)
            self.changed.notify_all()


class Asked:
    """A query of the test: what it sent, and its ends."""

    def __init__(self, size: int, value: int) -> None:
        self.x = np.full(size, value, np.float32)
        self.name = 0
        self.ends: list[InferResult] = []

    def check(self) -> None:
        [end] = self.ends
        if end.outcome is Outcome.ANSWERED:
            assert np.array_equal(end.outputs["y"], self.x)


class Links(RuleBasedStateMachine):
    """Both ends on loops of their own; what crosses is waited for, never a time."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.stack = ExitStack()
        self.remote, self.links = self.stack.enter_context(linked(self.engine, with_links=True))
        self.changed = threading.Condition()
        self.asked: list[Asked] = []
        self.values = itertools.count(1)

    def ask(self, size: int, priority: int) -> Asked:
        made = Asked(size, next(self.values))
        self.asked.append(made)

        def done(result: InferResult) -> None:
            if result.outcome is Outcome.ANSWERED:
                self.remote.replied(result)
            with self.changed:
                made.ends.append(result)
                self.changed.notify_all()

        request = InferRequest("m", {"x": made.x}, priority=priority, arrival_ns=7)
        try:
            made.name = self.remote.submit(request, done)
        except ServeError as error:
            made.ends.append(InferResult(error.ending.outcome, 0, refusal=error))
            REACHED["refused here"] += 1
        return made

    def until(self, condition: threading.Condition, is_so: Callable[[], bool]) -> None:
        with condition:
            assert condition.wait_for(is_so, WAIT_S)

    @rule(sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=5))
    def queries_arrive(self, sizes: list[int]) -> None:
        before = len(self.engine.inside)
        made = [self.ask(size, 0) for size in sizes]
        crossed = sum(not each.ends for each in made)
        self.until(self.engine.changed, lambda: len(self.engine.inside) >= before + crossed)
        REACHED["arrived"] += crossed

    @rule(priority=st.sampled_from([1, 2]), size=st.sampled_from(SIZES))
    def a_query_ends_at_once(self, priority: int, size: int) -> None:
        made = self.ask(size, priority)
        self.until(self.changed, lambda: bool(made.ends))
        REACHED[f"ended at once {priority}"] += 1

    @precondition(lambda self: self.engine.inside)
    @rule(data=st.data())
    def an_answer_is_given(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.engine.inside)))
        ended = sum(bool(each.ends) for each in self.asked)
        self.engine.end(number, Outcome.ANSWERED)
        self.until(self.changed, lambda: sum(bool(each.ends) for each in self.asked) > ended)
        self.until(self.engine.changed, lambda: number in self.engine.replies)
        REACHED["answered"] += 1

    @precondition(lambda self: any(not each.ends for each in self.asked))
    @rule(data=st.data())
    def a_query_is_withdrawn(self, data: st.DataObject) -> None:
        waiting = [at for at, each in enumerate(self.asked) if not each.ends]
        made = self.asked[data.draw(st.sampled_from(waiting))]  # what is drawn is kept, and answers with it
        self.remote.cancel(made.name)
        self.until(self.changed, lambda: bool(made.ends))
        assert made.ends[0].outcome is Outcome.CANCELLED
        REACHED["withdrawn"] += 1

    @rule(from_engine=st.booleans())
    def the_link_is_lost(self, from_engine: bool) -> None:
        inside = set(self.engine.inside)
        reopened = self.links.reopened()
        self.links.cut(from_engine)
        assert reopened.wait(WAIT_S)
        self.until(self.engine.changed, lambda: not self.engine.inside)  # what nothing waits for is withdrawn
        assert inside <= self.engine.cancelled
        self.until(self.changed, lambda: all(each.ends for each in self.asked))
        REACHED["lost"] += 1

    def teardown(self) -> None:
        for number in sorted(self.engine.inside):
            self.engine.end(number, Outcome.ANSWERED)
        self.until(self.changed, lambda: all(each.ends for each in self.asked))
        while self.asked:
            self.asked.pop().check()
        assert self.links.are_arenas_empty()
        self.stack.close()


def test_each_query_has_one_end_whatever_happens_to_the_link() -> None:
    run_state_machine_as_test(Links, settings=settings(max_examples=25, stateful_step_count=20))
    assert set(REACHED) >= {"arrived", "answered", "withdrawn", "lost", "ended at once 1", "ended at once 2"}


def test_what_a_front_end_was_short_of_is_counted_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Mapping[str, int]] = []
    came = threading.Event()

    def add(met: Mapping[str, int]) -> None:
        told.append(met)
        came.set()

    monkeypatch.setattr(shortages, "add", add)
    monkeypatch.setattr("cotenant.serve.link.remote_backend._SHORTAGES_EVERY_S", 0.01)
    with linked(Engine()):
        shortages.report(shortages.Resource.DESCRIPTOR, "a test", 3)
        assert came.wait(WAIT_S)
    assert told == [{"descriptor": 3}]
