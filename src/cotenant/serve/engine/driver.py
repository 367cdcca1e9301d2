"""Serving driver: passes real events to the engine one at a time, and carries out the engine's actions.

It has no polling loop: the thread on which an event happens takes the lock and handles it. That is a thread of a
front-end, a lane or the clock. The driver makes no scheduling decision.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from msgspec import UNSET

from cotenant.core.actions import Action, Enqueue, Expand, Launch, LookAhead, PolicyFault, Release, Respond, SetTimer
from cotenant.core.engine import Engine
from cotenant.core.events import (
    Event,
    LaunchEnded,
    LaunchExpanded,
    LookAheadDue,
    ModelOpening,
    QueryArrived,
    TimerFired,
)
from cotenant.execute.protocol import Executor, Tensors, Timing
from cotenant.serve.engine.clock import Clock
from cotenant.types import ANSWERS, Query
from cotenant.wire.api import ServeError

TIMER_PRIORITY = 1
LAG_BUCKETS_NS = (
    20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000, 50_000_000,
    100_000_000, 200_000_000, 500_000_000,
)  # fmt: skip

Done = Callable[[Respond, Tensors | None], None]
"""Callback of a query, called once with its outcome, and its outputs if it was answered. Must be quick."""

Submission = tuple[Callable[[int, int], Query], Tensors, Done]
"""Factory of a query from its number and the time in ns, its inputs, and the callback for its outcome."""

T = TypeVar("T")
_log = logging.getLogger("cotenant.driver")


class Observer(Protocol):
    """Callback for events, called in order under the driver's lock. Must be quick."""

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """Observe a handled event. `timing` comes with the end of a launch. A returned event is handled next."""


class Driver:
    """Driver of an engine: serialises events, carries out actions, and answers every query exactly once."""

    def __init__(self, engine: Engine, executor: Executor, clock: Clock, observers: tuple[Observer, ...] = ()) -> None:
        self._engine = engine
        self._executor = executor
        self._clock = clock
        self._observers = observers
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._pending: dict[int, Done] = {}
        self._next_query = 0
        self._last_ns = 0
        self._timer_ns = self._alarm_ns = 0
        """Time of the engine's timer, and of the earliest alarm set for it; 0 for none. ns."""
        self._watching = 0
        """Number of threads in `wait_idle` or `wait_ended`."""
        self._are_rates_feasible = True
        """Guaranteed rates need at most all lanes."""
        self._failed_observers: list[Observer] = []
        self.lags, self.lag_ns = [0] * (len(LAG_BUCKETS_NS) + 1), 0
        """Decision lags by bucket, and their total in ns. A lag lasts from when an event was readable until its actions
        are carried out. The event is a request at `submit`, the end of a launch, or a timer. Use `read` for access."""

    def submit(self, make: Callable[[int, int], Query], inputs: Tensors, done: Done) -> int:
        """Submit a query and return its number. `make(number, now_ns)` builds it; `done` is called exactly once."""
        came_ns = self._clock.now_ns()
        with self._lock:
            number = self._next_query
            self._next_query += 1
            now = self._now()
            query = make(number, now)
            self._pending[number] = done
            self._executor.put(number, inputs)
            answers = self._handle(QueryArrived(query), now)
            self._record_lag(came_ns)
        _deliver(answers)
        return number

    def submit_together(self, submissions: Sequence[Submission]) -> list[int | ServeError]:
        """Submit queries that arrive at one instant, with one scheduling decision for all of them. Returns the number
        of each, or the ServeError that its factory raised."""
        found: list[int | ServeError] = []
        queries: list[Query] = []
        came_ns = self._clock.now_ns()
        with self._lock:
            now = self._now()
            for make, inputs, done in submissions:
                number = self._next_query
                self._next_query += 1
                try:
                    queries.append(make(number, now))
                except ServeError as error:
                    found.append(error.with_traceback(None))  # a traceback would keep all inputs alive
                    continue
                found.append(number)
                self._pending[number] = done
                self._executor.put(number, inputs)
            answers = []
            for left, query in zip(range(len(queries) - 1, -1, -1), queries, strict=True):
                answers += self._handle(QueryArrived(query, more=left > 0), now)
            self._record_lag(came_ns)
        _deliver(answers)
        return found

    def begin(self, make: Callable[[int, int], Event]) -> int:
        """Allocate a query number and handle the event that `make(number, now_ns)` builds. Returns the number."""
        with self._lock:
            number = self._next_query
            self._next_query += 1
            now = self._now()
            answers = self._handle(make(number, now), now)
        _deliver(answers)
        return number

    def post(self, event: Event, timing: Timing | None = None) -> None:
        """Handle an event now."""
        came_ns = self._clock.now_ns() if timing is None or not timing.read_ns else timing.read_ns
        with self._lock:
            answers = self._handle(event, self._now(), timing)
            self._record_lag(came_ns)
        _deliver(answers)

    @contextmanager
    def model_loading(self, model: str) -> Iterator[None]:
        """Context in which observers know that a model is being loaded."""
        self.post(ModelOpening(model))
        try:
            yield
        finally:
            self.post(ModelOpening(model, done=True))

    def post_from(self, look: Callable[[Engine], Iterable[Event]]) -> None:
        """Read the engine, and handle the events that `look` returns before any other event."""
        with self._lock:
            answers = [each for event in look(self._engine) for each in self._handle(event, self._now())]
        _deliver(answers)

    def read(self, look: Callable[[Engine], T]) -> T:
        """Read the engine between two events."""
        with self._lock:
            return look(self._engine)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no query is live and no launch runs. Returns False after `timeout_s` seconds."""
        return self._wait(lambda: not (self._engine.live or self._engine.running), timeout_s)

    def wait_ended(self, launches: Collection[int], timeout_s: float) -> bool:
        """Wait until all of these launches have ended. Returns False after `timeout_s` seconds."""
        return self._wait(lambda: not any(each in launches for each in self._engine.launches), timeout_s)

    def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        with self._idle:
            self._watching += 1
            try:
                return self._idle.wait_for(is_so, timeout_s)
            finally:
                self._watching -= 1

    def _now(self) -> int:
        """Current time in ns; monotonic over the events of all threads."""
        now = self._clock.now_ns()
        if now > self._last_ns:
            self._last_ns = now
        return self._last_ns

    def _record_lag(self, came_ns: int) -> None:
        """Record the decision lag of an event that was readable at `came_ns`. Called under the lock."""
        lag_ns = self._clock.now_ns() - came_ns
        self.lags[bisect_left(LAG_BUCKETS_NS, lag_ns)] += 1
        self.lag_ns += lag_ns

    def _handle(
        self, event: Event, now: int, timing: Timing | None = None
    ) -> list[tuple[Done, Respond, Tensors | None]]:
        actions = self._engine.handle(event, now)
        answers: list[tuple[Done, Respond, Tensors | None]] = []
        follow_ups: list[Event] = []
        is_look_ahead_due = False
        for action in actions:
            match action:
                case Launch():
                    self._executor.start(action, self._launch_ended)
                case Enqueue():
                    self._executor.enqueue(action.launch)
                case Expand():
                    if self._executor.expand(action.launch, action.share, self._launch_expanded):
                        follow_ups.append(LaunchExpanded(action.launch))
                case Respond():
                    answers.append(self._end(action))
                case Release():
                    self._executor.release(action.batch)
                case SetTimer():
                    self._timer_ns = action.at_ns
                    self._set_alarm()
                case LookAhead():
                    is_look_ahead_due = True
                case PolicyFault():
                    self._log_fault(action, event)
        if (self._engine.rated_part <= 1) is not self._are_rates_feasible:
            self._log_rates()
        for observer in self._observers:
            try:
                follow_up = observer(now, event, actions, timing)
            except Exception:
                self._log_observer_failure(observer, event)
            else:
                if follow_up is not None:
                    follow_ups.append(follow_up)
        if is_look_ahead_due:
            follow_ups.append(LookAheadDue())
        for follow_up in follow_ups:
            answers += self._handle(follow_up, now)
        if self._watching:
            self._idle.notify_all()
        return answers

    def _log_fault(self, fault: PolicyFault, event: Event) -> None:
        """Log a policy fault in one line; the first fault of a call with its traceback."""
        text = "policy %r failed in %s at event %s: %s; earliest deadline first decides this event instead"
        if fault.falls_back:
            text += (
                ". It has failed too often: a fallback policy that keeps quotas serves from now on (correct the policy "
                "and restart the server; with a plan, change its file and send SIGHUP)"
            )
        is_first = self._engine.guard.faults.get((fault.policy, fault.call)) == 1
        error = self._engine.guard.error if is_first else None
        _log.error(text, fault.policy, fault.call, type(event).__name__, fault.reason, exc_info=error)

    def _log_rates(self) -> None:
        """Log that guaranteed rates have begun, or ceased, to exceed the capacity of all lanes."""
        self._are_rates_feasible = not self._are_rates_feasible
        if self._are_rates_feasible:
            _log.info("the guaranteed rates (tenant.rate) fit the lanes again")
            return
        _log.warning(
            "the guaranteed rates (tenant.rate) need %.2f times the capacity of all lanes: each tenant gets %.0f %% of "
            "its rate, and tenants without a rate have no quota; lower the rates ('cotenant models' lists their needs)",
            *(self._engine.rated_part, 100 / self._engine.rated_part),
        )

    def _log_observer_failure(self, observer: Observer, event: Event) -> None:
        """Log the first failure of an observer (such as a full disk). Queries are still answered."""
        if observer not in self._failed_observers:
            self._failed_observers.append(observer)
            text = "observer %s failed at event %s; queries are not affected, and its further failures are not logged"
            name = getattr(observer, "__qualname__", type(observer).__name__)
            _log.exception(text, name, type(event).__name__)

    def _end(self, respond: Respond) -> tuple[Done, Respond, Tensors | None]:
        done = self._pending.pop(respond.query)
        if respond.outcome in ANSWERS:
            return done, respond, self._executor.take(respond.query)
        self._executor.discard(respond.query)
        return done, respond, None

    def _launch_ended(self, launch: int, error: str | None, timing: Timing) -> None:
        self.post(LaunchEnded(launch, error, timing.task_times or UNSET, timing.steal_ns or UNSET), timing)

    def _launch_expanded(self, launch: int) -> None:
        self.post(LaunchExpanded(launch))

    def _set_alarm(self) -> None:
        """Set an alarm if none rings by the timer's time. Most timers are postponed before they fire."""
        if not self._alarm_ns or self._timer_ns < self._alarm_ns:
            self._alarm_ns = self._timer_ns
            self._clock.call_at(self._alarm_ns, TIMER_PRIORITY, partial(self._alarm_rang, self._alarm_ns))

    def _alarm_rang(self, at_ns: int) -> None:
        with self._lock:
            if at_ns != self._alarm_ns:  # an earlier alarm replaced it
                return
            self._alarm_ns = 0
            if not self._timer_ns:
                return
            now = self._now()
            if self._timer_ns > now:
                self._set_alarm()
                return
            due_ns, self._timer_ns = self._timer_ns, 0
            answers = self._handle(TimerFired(), now)
            self._record_lag(due_ns)
        _deliver(answers)


def _deliver(answers: list[tuple[Done, Respond, Tensors | None]]) -> None:
    """Call the callbacks of ended queries, outside the lock. An error of one callback does not affect the others."""
    for done, respond, outputs in answers:
        try:
            done(respond, outputs)
        except Exception:
            _log.exception("query %d: its answer could not be delivered", respond.query)
