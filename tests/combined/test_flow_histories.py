"""Random histories of applications in a server: stages side by side, failures, cancels, changes of models, drains.

Every query has exactly one outcome, no stage arrives twice, none before all that it needs has been answered, and none
once the whole has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import ClassVar

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from application_world import FakeModel, World, application
from cotenant.core.actions import Respond
from cotenant.core.events import (
    ApplicationArrived,
    ApplicationEnded,
    DrainStarted,
    QueryArrived,
    QueryWithdrawn,
    TenantAdded,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
)
from cotenant.core.flow import StageState
from cotenant.core.snapshot import DropRule
from cotenant.serve.models.served_application import fit
from cotenant.serve.models.served_models import QueryForm
from cotenant.types import ANSWERS, Outcome, StageQuery
from cotenant.wire.api import InferRequest, ServeError
from intruder import Intruder
from scenario import MS, ONE_LANE, TWO_LANES

GRAPHS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((),),
    ((), (0,), (1,)),
    ((), (), ()),
    ((), (0,), (0,), (1, 2)),
    ((), (), (0, 1), (0,), (2, 3)),
)
STEPS, WALKS = 40, 250
FLOORS = {
    **{f"ended: {outcome.value}": 40 for outcome in Outcome},
    "stages arrived together": 500,
    "a stage after several": 100,
    "stages were withdrawn": 500,
    "cancelled while a stage was about to arrive": 20,
    "cancelled while a stage was inside": 100,
    "unloaded": 20,
    "a model had gone when a later stage was to start": 20,
    "a query could not be made": 20,
    "some outputs alone": 100,
    "a stage arrived while the server drained": 10,
    "refused, for the drain": 20,
    "a stage of a model that was loaded anew": 20,
}
"""What the walks must reach, so that they mean something."""


class StopError(Exception):
    """The clock has run as far as it was to."""


class FlowsMachine(RuleBasedStateMachine):
    """A server's flows in virtual time, and a second set of books from what its observers see."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        after=st.sampled_from(GRAPHS),
        number=st.integers(0, 1000),
        drop=st.sampled_from(DropRule),
        lanes=st.sampled_from([ONE_LANE, TWO_LANES]),
        max_batch=st.sampled_from([1, 4]),
    )
    def start(self, after: Sequence[Sequence[int]], number: int, drop: DropRule, lanes: tuple, max_batch: int) -> None:  # type: ignore[type-arg]
        random = Random(number)
        self.after = after
        self.world = World(
            application(random.uniform(30, 150), after, outputs=range(len(after))),
            [random.uniform(1, 20) for _ in after],
            drop=drop,
            lanes=lanes,
            max_batch=max_batch,
            noise=0.5,
            failure_rate=random.choice([0.0, 0.05]),
            seed=number,
        )
        self.asked: list[int] = []
        self.loaded_ns: dict[str, int] = {}
        self.read = 0
        self.draining = False
        self.begun: dict[int, ApplicationArrived] = {}
        self.ended: dict[int, ApplicationEnded] = {}
        self.arrived: dict[int, StageQuery] = {}
        self.stages: dict[int, list[int]] = {}
        """Per query, the stages that have arrived, in order."""
        self.responded: dict[int, Outcome] = {}

    # --- what can happen ------------------------------------------------------------------------------------------

    @rule(timeout_ms=st.sampled_from([None, None, None, 5, 40]), outputs=st.lists(st.integers(0, 4), max_size=2))
    def ask(self, timeout_ms: int | None, outputs: list[int]) -> None:
        chosen = tuple(dict.fromkeys(f"y{each}" for each in outputs if each < len(self.after)))
        timeout = {} if timeout_ms is None else {"timeout_ns": timeout_ms * MS}
        if self.draining:
            with pytest.raises(ServeError, match="shutting down"):
                self.world.ask(outputs=chosen, **timeout)
            self.seen["refused, for the drain"] += 1
        else:
            self.asked.append(self.world.ask(outputs=chosen, **timeout))
            self.seen["some outputs alone"] += bool(chosen)

    @rule(step_ms=st.sampled_from([1, 5, 5, 20, 60]))
    def wait(self, step_ms: int) -> None:
        def stop() -> None:
            raise StopError

        self.world.clock.call_at(self.world.clock.now_ns() + step_ms * MS, 9, stop)
        with suppress(StopError):
            self.world.clock.run()

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 20))
    def cancel(self, pick: int) -> None:
        self.cancel_now(self.asked[-1 - pick % len(self.asked)])

    @precondition(lambda self: self.asked)
    @rule(moment=st.integers(0, 30), step_ms=st.sampled_from([5, 20]))
    def cancel_between(self, moment: int, step_ms: int) -> None:
        """The youngest query that is inside is cancelled by another thread, while a lock is free for a moment."""

        def work() -> None:
            if inside := [*self.world.flows._runs]:
                self.cancel_now(inside[-1])

        intruder = Intruder(self.world.driver, moment, work)
        if not self.draining:
            self.ask(None, [])
        self.wait(step_ms)
        intruder.leave()

    def cancel_now(self, number: int) -> None:
        run = self.world.flows._runs.get(number)
        if run is not None and not run.flow.is_over:
            running = [stage for stage, state in enumerate(run.flow.states) if state is StageState.RUNNING]
            has_come = [stage in run.flow._numbers for stage in running]
            self.seen["cancelled while a stage was about to arrive"] += not all(has_come)
            self.seen["cancelled while a stage was inside"] += any(has_come)
            assert self.world.flows.cancel(number)
            assert run.flow.is_over
            assert [result.outcome for _, result in self.world.results if result.query == number] == [Outcome.CANCELLED]

    @rule(really=st.sampled_from([False] * 5 + [True]))
    def unload(self, really: bool) -> None:
        if really:
            self.seen["unloaded"] += self.world.flows.under_way > 0
            self.world.flows.fail("app", "it was unloaded")
            assert self.world.flows.under_way == 0

    @precondition(lambda self: len(self.world.models) == len(self.after))
    @rule(pick=st.integers(0, 4))
    def remove_model(self, pick: int) -> None:
        model = self.world.models.pop(f"m{pick % len(self.after)}")
        model.is_over = True
        self.world.driver.post(TenantRemoved(model.tenant.name, "the model was unloaded"))

    @precondition(lambda self: len(self.world.models) < len(self.after))
    @rule()
    def load_model(self) -> None:
        """Queries that are inside go on with the application as it was fitted when they came."""
        old = next(each for each in self.world.app.models if each.tenant.name not in self.world.models)
        self.world.models[old.tenant.name] = FakeModel(old.tenant)
        self.loaded_ns[old.tenant.name] = self.world.clock.now_ns()
        self.world.driver.post(TenantAdded(old.tenant))
        self.world.app = fit(self.world.app.spec, self.world.find)  # type: ignore[arg-type]

    @rule(pick=st.integers(0, 4))
    def suspend(self, pick: int) -> None:
        self.world.driver.post(TenantSuspended(f"m{pick % len(self.after)}", "its worker died"))

    @rule()
    def resume(self) -> None:
        for number in range(len(self.after)):
            self.world.driver.post(TenantResumed(f"m{number}"))

    @rule(pick=st.integers(0, 4), step_ms=st.sampled_from([5, 20]))
    def break_model(self, pick: int, step_ms: int) -> None:
        """For a while a model's tensors cannot be looked at."""

        def broken(_: InferRequest) -> QueryForm:
            self.seen["a query could not be made"] += 1
            raise RuntimeError("surprise")

        model = self.world.models.get(f"m{pick % len(self.after)}")
        if model is not None and self.after[pick % len(self.after)]:
            model.form = broken  # type: ignore[method-assign]
            self.wait(step_ms)
            del model.form

    @rule(really=st.sampled_from([False] * 30 + [True]))
    def drain(self, really: bool) -> None:
        if really and not self.draining:
            self.draining = True
            self.world.flows.refuse()
            self.world.driver.post(DrainStarted())

    # --- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "world"):
            return
        seen, self.read = self.world.seen[self.read :], len(self.world.seen)
        for _, event, actions in seen:
            match event:
                case ApplicationArrived():
                    assert event.query not in self.begun
                    self.begun[event.query], self.stages[event.query] = event, []
                case ApplicationEnded():
                    assert event.query in self.begun
                    assert event.query not in self.ended, "a query has two outcomes"
                    self.ended[event.query] = event
                case QueryArrived(query=StageQuery() as query):
                    self.stage_arrives(query, event.more)
                case QueryWithdrawn():
                    assert self.arrived[event.query].part_of in self.ended
                    self.seen["stages were withdrawn"] += 1
            for action in actions:
                if isinstance(action, Respond):
                    assert action.query not in self.responded
                    self.responded[action.query] = action.outcome
        results = {result.query: result for _, result in self.world.results}
        assert len(results) == len(self.world.results), "a query has two answers"
        assert {number: result.outcome for number, result in results.items()} == {
            number: event.outcome for number, event in self.ended.items()
        }
        assert {*self.begun} == {*self.asked} == {*results, *self.world.flows._runs}
        for query in self.arrived.values():
            assert query.id in self.responded or query.part_of not in self.ended, "a stage runs on"
        for number, result in results.items():
            if result.outcome in ANSWERS:
                assert (result.outcome is Outcome.ANSWERED) == (
                    self.ended[number].ended_ns <= self.begun[number].deadline_ns
                )
            else:
                assert result.reason

    def stage_arrives(self, query: StageQuery, more: bool) -> None:
        whole, stage = query.part_of, int(query.stage[1:])
        assert whole in self.begun
        assert whole not in self.ended, "a query that has ended starts a stage"
        assert stage not in self.stages[whole], "a stage starts twice"
        answered = [
            int(each.stage[1:])
            for each in self.arrived.values()
            if each.part_of == whole and self.responded.get(each.id) in ANSWERS
        ]
        assert {*self.after[stage]} <= {*answered}, "a stage starts too early"
        self.stages[whole].append(stage)
        self.arrived[query.id] = query
        self.seen["stages arrived together"] += more
        self.seen["a stage after several"] += len(self.after[stage]) > 1
        self.seen["a stage arrived while the server drained"] += self.draining
        loaded_ns = self.loaded_ns.get(query.tenant, 0)
        is_anew = self.begun[whole].arrival_ns < loaded_ns <= query.arrival_ns
        self.seen["a stage of a model that was loaded anew"] += is_anew

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.resume()
        self.world.run()
        self.books_agree()
        assert {*self.responded} == {*self.arrived}
        for result in (result for _, result in self.world.results):
            self.seen[f"ended: {result.outcome.value}"] += 1
            has_gone = "was rejected" in result.reason and "is not served" in result.reason
            self.seen["a model had gone when a later stage was to start"] += has_gone


def walk(machine: FlowsMachine, random: Random) -> None:
    """A history in which everything is likely."""
    start = random.choice(GRAPHS), random.randrange(1000), random.choice(list(DropRule))
    machine.start(*start, random.choice([ONE_LANE, TWO_LANES]), random.choice([1, 4]))
    for _ in range(STEPS):
        step = random.random()
        if step < 0.35:
            outputs = random.choice([[], [], [0], [random.randrange(5)]])
            machine.ask(random.choice([None, None, None, 5, 40]), outputs)
        elif step < 0.6:
            machine.wait(random.choice([1, 5, 5, 20, 60]))
        elif step < 0.75:
            machine.cancel_between(random.randrange(30), random.choice([5, 20]))
        elif step < 0.8 and machine.asked:
            machine.cancel(random.randrange(5))
        elif step < 0.82:
            machine.unload(True)
        elif step < 0.86 and len(machine.world.models) == len(machine.after):
            machine.remove_model(random.randrange(5))
        elif len(machine.world.models) < len(machine.after) and step < 0.92:
            machine.load_model()
        elif step < 0.95:
            machine.break_model(random.randrange(5), random.choice([5, 20]))
        elif step < 0.97:
            machine.suspend(random.randrange(5))
            machine.wait(5)
            machine.resume()
        elif step < 0.98:
            machine.drain(True)
        machine.books_agree()
    machine.teardown()


def test_every_history_gives_each_query_one_outcome() -> None:
    seen: Counter[str] = Counter()
    machine = type("Machine", (FlowsMachine,), {"seen": seen})
    run_state_machine_as_test(
        seed(74)(machine), settings=settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
    )
    for history in range(WALKS):
        walk(machine(), Random(history))
    short = {name: seen[name] for name, floor in FLOORS.items() if seen[name] < floor}
    assert not short, f"histories that reach too little: {short} of {dict(seen)}"
