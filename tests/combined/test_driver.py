"""The serving driver: every query ends exactly once whatever fails, time-outs fire at the deadline, nothing polls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

from cotenant.core.actions import Action, Launch, Respond
from cotenant.core.engine import Engine as ServedEngine
from cotenant.core.events import (
    DrainStarted,
    Event,
    LaunchEnded,
    PredictorChanged,
    QueryArrived,
    QueryCancelled,
    TenantAdded,
    TenantRemoved,
    TimerFired,
)
from cotenant.core.snapshot import Decision, DropRule, Policy, Snapshot
from cotenant.execute.protocol import OnEnd, Tensors, Timing
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.table import TablePredictor
from cotenant.serve.engine.clock import RealClock, VirtualClock
from cotenant.serve.engine.driver import LAG_BUCKETS_NS, Driver, Observer
from cotenant.serve.engine.queries import figures_of
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.types import ANSWERS, Outcome, Query, Tenant
from cotenant.work import Machine, Work
from cotenant.world.simulated import SimulatedExecutor, TableWorld, World
from scenario import CORES, MS, ONE_LANE, TWO_LANES, tables
from strict_engine import StrictEngine as Engine

WAIT_S = 10.0
SLOW = Tenant("slow", 500 * MS, cuts=(0, 1, 2))
QUICK = Tenant("quick", 40 * MS)
LATENCY = TablePredictor(
    {**tables({"slow": 100 * MS}, 2).tables, **tables({"quick": 10 * MS}).tables}, {"slow": 1.0, "quick": 1.0}
)
X = {"x": np.zeros(1, np.float32)}


class Stage:
    """A driver in virtual time, and everything that happens to it."""

    def __init__(self, policy: Policy | None = None, *observers: Observer, **world: Any) -> None:
        self.clock = VirtualClock()
        self.events: list[tuple[int, Event, list[Action]]] = []
        self.answers: list[tuple[int, Respond, Tensors | None]] = []
        self.engine = Engine((SLOW, QUICK), policy or Edf(ONE_LANE), LATENCY, Machine.cpu(CORES))
        self.executor = SimulatedExecutor(TableWorld(LATENCY, **world), self.clock)
        self.driver = Driver(self.engine, self.executor, self.clock, (self._log, *observers))

    def _log(self, now: int, event: Event, actions: list[Action], _: Timing | None) -> None:
        self.events.append((now, event, actions))

    def done(self, respond: Respond, outputs: Tensors | None) -> None:
        self.answers.append((self.clock.now_ns(), respond, outputs))

    def submit(self, tenant: Tenant, timeout_ns: int | None = None, done: Callable[..., None] | None = None) -> int:
        def make(number: int, now: int) -> Query:
            slo = tenant.slo_ns
            expiry = None if timeout_ns is None else now + timeout_ns
            return Query(number, tenant.name, now, now + min(slo, timeout_ns or slo), expiry_ns=expiry)

        return self.driver.submit(make, X, done or self.done)

    @property
    def story(self) -> list[tuple[int, int, Outcome]]:
        return [(now, respond.query, respond.outcome) for now, respond, _ in self.answers]


def test_decision_lags_are_from_when_an_event_could_be_read_until_its_actions_are_carried_out() -> None:
    """Each event takes 3 ms; the end of a launch was read 4 ms before it is handed over, a timer rings 7 ms late."""
    clock: Any = None

    def slow(*_: object) -> None:
        clock._now += 3 * MS

    stage = Stage(None, slow)
    clock = stage.clock
    stage.submit(QUICK)
    clock._now = 10 * MS
    stage.driver.post(LaunchEnded(0, "it broke"), Timing(read_ns=6 * MS))
    stage.submit(SLOW)
    stage.submit(QUICK)  # waits, and times out
    clock._now = stage.driver._timer_ns + 7 * MS
    stage.driver._alarm_rang(stage.driver._alarm_ns)
    assert figures_of(stage.driver)[3:] == (tuple(stage.driver.lags), (3 + 7 + 3 + 3 + 10) * MS)
    lags = {bound: count for bound, count in zip(LAG_BUCKETS_NS, stage.driver.lags, strict=False) if count}
    assert lags == {5 * MS: 3, 10 * MS: 2}


def test_a_query_gets_its_answer_and_its_outputs() -> None:
    stage = Stage()
    assert stage.submit(QUICK) == 0
    assert stage.answers == []
    stage.clock.run()
    [(now, respond, outputs)] = stage.answers
    assert (now, respond) == (10 * MS, Respond(0, Outcome.ANSWERED))
    assert outputs is not None
    assert outputs["x"] is X["x"]


class Recording(SimulatedExecutor):
    """Writes down what it is asked to do with launches and batches."""

    def __init__(self, world: World, clock: VirtualClock) -> None:
        super().__init__(world, clock)
        self.told: list[tuple[str, int]] = []
        self.enqueued: dict[int, Launch] = {}

    def enqueue(self, launch: Launch) -> None:
        self.told.append(("enqueue", launch.id))
        self.enqueued[launch.id] = launch

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        self.told.append(("start", launch.id))
        assert self.enqueued.pop(launch.id, launch) == launch
        super().start(launch, on_end)

    def release(self, batch: int) -> None:
        self.told.append(("release", batch))
        super().release(batch)


def test_an_executor_hears_of_a_launch_before_it_starts_or_that_it_never_does() -> None:
    stage = Stage(Overlap(TWO_LANES, preempt=False, enqueue_ms=1000.0))
    executor = Recording(TableWorld(LATENCY), stage.clock)
    stage.driver = Driver(stage.engine, executor, stage.clock)
    stage.submit(SLOW)
    gone = stage.submit(SLOW)
    assert executor.told == [("start", 0), ("enqueue", 1)]
    stage.driver.post(QueryCancelled(gone))
    assert executor.told[2:] == [("release", 1)]
    stage.submit(SLOW)
    assert executor.told[3:] == [("enqueue", 2)]
    stage.clock.run()
    assert executor.told[4:] == [("start", 2)]
    assert [outcome for _, _, outcome in stage.story] == [Outcome.CANCELLED, Outcome.ANSWERED, Outcome.ANSWERED]
    assert executor.kept == 0


def test_those_that_wait_for_launches_are_waited_for_with_them() -> None:
    stage = Stage(Overlap(TWO_LANES, preempt=False, enqueue_ms=1000.0))
    stage.submit(SLOW)
    stage.submit(SLOW)
    launches = stage.driver.read(lambda engine: engine.launches)
    assert launches == (0, 1)
    seen: list[bool] = []
    for at_ms in (99, 101, 201):  # the second one waits, runs, and has ended
        stage.clock.call_at(at_ms * MS, 2, lambda: seen.append(stage.driver.wait_ended(launches, 0)))
    stage.clock.run()
    assert seen == [False, False, True]


def test_a_time_out_fires_at_its_instant_while_the_device_is_busy() -> None:
    stage = Stage(Edf(ONE_LANE, DropRule.NONE))
    stage.submit(SLOW)
    stage.clock.call_at(3 * MS, 2, lambda: stage.submit(QUICK, timeout_ns=25 * MS) and None)
    stage.clock.run()
    assert stage.story[0] == (28 * MS, 1, Outcome.DROPPED)
    assert stage.story[1] == (100 * MS, 0, Outcome.ANSWERED)
    assert "timed out after 25.0 ms in the queue" in stage.answers[0][1].reason


def test_a_deadline_fires_at_its_instant_while_the_device_is_busy() -> None:
    stage = Stage(Edf(ONE_LANE, DropRule.EXPIRED))
    stage.submit(SLOW)
    stage.submit(QUICK)
    stage.clock.run()
    assert stage.story == [(40 * MS, 1, Outcome.DROPPED), (100 * MS, 0, Outcome.ANSWERED)]


def test_with_nothing_to_do_nothing_is_set() -> None:
    """No alarm is left behind by queries that have ended, but those that were set for their time-outs."""
    stage = Stage()
    stage.clock.run()
    assert stage.events == []
    stage.submit(QUICK)
    stage.submit(SLOW)
    stage.clock.run()
    happened = len(stage.events)
    stage.clock.run()
    assert len(stage.events) == happened
    assert sum(isinstance(event, TimerFired) for _, event, _ in stage.events) <= 2
    assert stage.driver.wait_idle(0)


def test_a_stale_timer_is_no_event() -> None:
    stage = Stage(Edf(ONE_LANE, DropRule.EXPIRED))
    stage.submit(SLOW)
    stage.submit(SLOW, timeout_ns=300 * MS)  # the first timer
    stage.submit(QUICK, timeout_ns=20 * MS)  # an earlier one takes its place
    stage.clock.run()
    assert [now for now, event, _ in stage.events if isinstance(event, TimerFired)] == [20 * MS, 300 * MS]


def test_a_done_that_raises_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()

    def bad(_: Respond, __: object) -> None:
        raise RuntimeError("a front-end's bug")

    stage.submit(QUICK, done=bad)
    stage.submit(QUICK)
    stage.submit(SLOW)
    stage.driver.post(TenantRemoved("quick", "the model was unloaded"))
    stage.clock.run()
    assert [(number, outcome) for _, number, outcome in stage.story] == [(1, Outcome.FAILED), (2, Outcome.ANSWERED)]
    assert "query 0: its answer could not be delivered" in caplog.text
    assert stage.driver.wait_idle(0)


def test_a_failed_execution_fails_its_queries_and_the_lane_goes_on() -> None:
    stage = Stage(failure_rate=1.0)
    stage.submit(QUICK)
    stage.submit(QUICK)
    stage.clock.run()
    assert stage.story == [(10 * MS, 0, Outcome.FAILED), (20 * MS, 1, Outcome.FAILED)]
    assert {respond.reason for _, respond, _ in stage.answers} == {"injected fault"}


def test_an_observer_that_raises_is_logged_once_and_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    stage = Stage(None, full_disk)
    stage.submit(QUICK)
    stage.submit(QUICK)
    stage.clock.run()
    assert [outcome for _, _, outcome in stage.story] == [Outcome.ANSWERED, Outcome.ANSWERED]
    assert caplog.text.count(" failed at event ") == 1


def test_a_query_that_cannot_be_made_leaves_nothing_behind() -> None:
    stage = Stage()

    def bad(_: int, __: int) -> Query:
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        stage.driver.submit(bad, X, stage.done)
    assert stage.driver.read(lambda engine: engine.live) == 0
    assert stage.executor.kept == 0
    assert stage.driver._pending == {}
    assert stage.submit(QUICK) == 1
    stage.clock.run()
    assert stage.story == [(10 * MS, 1, Outcome.ANSWERED)]


def test_what_an_observer_returns_happens_next_and_at_the_same_time() -> None:
    heard: list[Event] = []

    def calibrate(now: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        heard.append(event)
        match event:
            case LaunchEnded():
                assert timing is not None
                return PredictorChanged(LATENCY.scaled({"quick": 100.0}))
            case PredictorChanged():
                return DrainStarted()  # a follow-up of a follow-up
        return None

    stage = Stage(None, calibrate)
    stage.submit(QUICK)
    stage.clock.run()
    assert [(now, type(event)) for now, event, _ in stage.events[1:]] == [
        (10 * MS, LaunchEnded),
        (10 * MS, PredictorChanged),
        (10 * MS, DrainStarted),
    ]
    assert stage.engine.predictor.latency_ns(Work("quick", 0, 1, 0, 1), 2) == 1000 * MS
    stage.submit(QUICK)
    assert stage.story[-1][2] is Outcome.REJECTED
    assert "shutting down" in stage.answers[-1][1].reason
    assert [type(event) for event in heard] == [type(event) for _, event, _ in stage.events]


def test_answers_of_follow_up_events_are_given_too() -> None:
    def remove(now: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        if isinstance(event, LaunchEnded) and event.launch == 0:
            return TenantRemoved("slow", "it failed too often")
        return None

    stage = Stage(None, remove)
    stage.submit(QUICK)
    stage.submit(SLOW)
    stage.clock.run()
    assert {number: outcome for _, number, outcome in stage.story} == {0: Outcome.ANSWERED, 1: Outcome.FAILED}


def test_done_may_submit_and_cancel_again() -> None:
    """Answers are given outside the lock: a client that asks again from its callback does not block the driver."""
    stage = Stage()
    left = [3]

    def again(respond: Respond, outputs: Tensors | None) -> None:
        stage.done(respond, outputs)
        if left[0]:
            left[0] -= 1
            number = stage.submit(QUICK, done=again)
            stage.driver.post(QueryCancelled(number - 1))

    stage.submit(QUICK, done=again)
    stage.clock.run()
    assert stage.story == [((number + 1) * 10 * MS, number, Outcome.ANSWERED) for number in range(4)]


def test_draining_answers_what_is_inside_and_refuses_the_rest() -> None:
    stage = Stage()
    stage.submit(SLOW)
    stage.driver.post(DrainStarted())
    stage.submit(QUICK)
    assert not stage.driver.wait_idle(0)
    stage.clock.run()
    assert [(number, outcome) for _, number, outcome in stage.story] == [(1, Outcome.REJECTED), (0, Outcome.ANSWERED)]
    assert stage.driver.wait_idle(0)


def test_time_never_goes_back_whatever_the_clock_says() -> None:
    class Jumpy(VirtualClock):
        def __init__(self) -> None:
            super().__init__()
            self.readings = iter([each for each in (5, 9, 3, 4, 12, 11) for _ in range(3)])  # of one event each

        def now_ns(self) -> int:
            return next(self.readings)

    seen: list[int] = []
    clock = Jumpy()
    engine = Engine((QUICK,), Edf(ONE_LANE), LATENCY, Machine.cpu(CORES))
    executor = SimulatedExecutor(TableWorld(LATENCY), VirtualClock())
    driver = Driver(engine, executor, clock, (lambda now, *_: seen.append(now),))
    for _ in range(6):
        driver.post(QueryCancelled(99))
    assert seen == [5, 9, 9, 9, 12, 12]


class Account:
    """Counts how often each query ended; says when all have."""

    def __init__(self) -> None:
        self.ended: Counter[int] = Counter()
        self.outcomes: Counter[Outcome] = Counter()
        self.foreign = 0
        self._changed = threading.Condition()

    def done(self, sent: Tensors, respond: Respond, outputs: Tensors | None) -> None:
        with self._changed:
            self.foreign += outputs is not None and outputs["x"].tolist() != sent["x"].tolist()
            self.ended[respond.query] += 1
            self.outcomes[respond.outcome] += 1
            assert (outputs is not None) == (respond.outcome in ANSWERS)
            self._changed.notify_all()
        if respond.query % 7 == 0:
            raise RuntimeError("a front-end's bug")

    def wait(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.ended) == count, WAIT_S)


@pytest.mark.parametrize("drop", list(DropRule))
def test_every_query_ends_once_under_concurrent_submits_cancels_and_faults(
    drop: DropRule, caplog: pytest.LogCaptureFixture
) -> None:
    us = 1000
    tenants = (
        Tenant("a", 3000 * us, cuts=(0, 1, 2, 3)),
        Tenant("b", 1000 * us, max_batch=4, max_queue=20),
        Tenant("c", 500 * us, priority=1),
    )
    found = {
        **tables({"a": 300 * us}, 3).tables,
        **tables({"b": 60 * us}, batch_slope=0.3).tables,
        **tables({"c": 30 * us}).tables,
    }
    world = TableWorld(TablePredictor(found), noise=0.5, failure_rate=0.05, seed=3)
    clock = RealClock()
    times: list[int] = []
    running: set[int] = set()
    ended: Counter[int] = Counter()

    def watch(now: int, event: Event, actions: list[Action], timing: Timing | None) -> None:
        times.append(now)
        if isinstance(event, LaunchEnded):
            running.remove(event.launch)
        for action in actions:
            if isinstance(action, Launch):
                running.add(action.id)
            elif isinstance(action, Respond):
                ended[action.query] += 1

    engine = Engine(
        tenants, Edf(TWO_LANES, drop, preempt=True, slack_share=0.0), TablePredictor(found), Machine.cpu(CORES)
    )
    executor = SimulatedExecutor(world, clock)
    driver = Driver(engine, executor, clock, (watch,))
    account = Account()
    threads, each = 4, 150
    numbers: list[list[int]] = [[] for _ in range(threads)]

    def make(tenant: Tenant, timeout: int | None, number: int, now: int) -> Query:
        expiry = None if timeout is None else now + timeout
        return Query(number, tenant.name, now, now + min(tenant.slo_ns, timeout or tenant.slo_ns), expiry_ns=expiry)

    def client(which: int) -> None:
        rng = Random(which)
        for turn in range(each):
            tenant = rng.choice(tenants)
            timeout = rng.choice([None, None, 50 * us, 400 * us])
            sent = {"x": np.array([which * each + turn])}
            number = driver.submit(partial(make, tenant, timeout), sent, partial(account.done, sent))
            numbers[which].append(number)
            if rng.random() < 0.3:
                driver.post(QueryCancelled(rng.choice(numbers[which])))
            if which == 0 and rng.random() < 0.05:
                driver.post(TenantRemoved("b", "the model was reloaded"))
                driver.post(TenantAdded(tenants[1]))

    clients = [threading.Thread(target=client, args=(which,), daemon=True) for which in range(threads)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(WAIT_S)
    total = threads * each
    assert account.wait(total), (len(account.ended), total)
    assert driver.wait_idle(WAIT_S)
    clock.close()
    assert sorted(number for some in numbers for number in some) == list(range(total))
    assert set(account.ended.values()) == {1}
    assert ended == account.ended
    assert sum(account.outcomes.values()) == total
    assert account.outcomes[Outcome.ANSWERED] + account.outcomes[Outcome.LATE] > 0
    assert times == sorted(times)
    assert not running
    assert driver.read(lambda engine: (engine.live, engine.running)) == (0, 0)
    assert driver._pending == {}
    assert executor.kept == 0
    assert executor._running == {}
    assert account.foreign == 0


def test_events_of_one_moment_are_handled_by_the_thread_that_brings_them() -> None:
    """The driver has no thread of its own: without an event, none of its code runs."""
    before = set(threading.enumerate())
    stage = Stage()
    stage.submit(QUICK)
    seen: list[threading.Thread] = []
    stage.driver._observers = (*stage.driver._observers, lambda *_: seen.append(threading.current_thread()))
    poster = threading.Thread(target=lambda: stage.driver.post(QueryCancelled(0)), daemon=True)
    poster.start()
    poster.join(WAIT_S)
    assert seen == [poster]
    assert set(threading.enumerate()) == before
    assert stage.story == [(0, 0, Outcome.CANCELLED)]
    assert [type(event) for _, event, _ in stage.events] == [QueryArrived, QueryCancelled]


class Faulty:
    """A policy whose every decision fails."""

    def __init__(self, policy: Policy) -> None:
        self.spec, self.queue_key = policy.spec, policy.queue_key

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        raise ValueError("what is this?")


def test_a_fault_of_the_policy_is_logged_once_each_and_everybody_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    faulty: Any = Faulty(Edf(ONE_LANE))
    stage.engine = ServedEngine((SLOW, QUICK), faulty, LATENCY, Machine.cpu(CORES))
    stage.driver._engine = stage.engine
    with caplog.at_level("ERROR", logger="cotenant.driver"):
        for _ in range(4):
            stage.submit(QUICK)
            stage.clock.run()
    lines = [
        record for record in caplog.records if "policy 'edf' failed in decide at event QueryArrived" in record.message
    ]
    assert len(lines) == 3
    assert [bool(record.exc_info) for record in lines] == [True, False, False]
    assert "ValueError: what is this?" in lines[0].message
    assert "a fallback policy that keeps quotas serves" in lines[-1].message
    assert figures_of(stage.driver)[:2] == ({("edf", "decide"): 3}, True)
    assert [respond.outcome for _, respond, _ in stage.answers] == [Outcome.ANSWERED] * 4
