"""The serving driver: hands events of the real world to the engine, one at a time, and carries out its actions.

There is no loop that looks for work: the thread on which an event happens (a front-end's, a lane's, the clock's) takes
the lock and handles it. Nothing here decides anything about scheduling.
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
"""Called once per query with how it ended, and its outputs if it was answered. Must be quick."""

Asked = tuple[Callable[[int, int], Query], Tensors, Done]
"""What builds a query from its number and the time, its inputs, and whom to tell how it ended."""

T = TypeVar("T")
_log = logging.getLogger("cotenant.driver")


class Observer(Protocol):
    """Is told, under the driver's lock and in order, what happened. Must be quick."""

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """An event was handled; `timing` comes with the end of a launch. What it returns happens next."""


class Driver:
    """Serialises events, carries out actions, and gives every query its one answer."""

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
        """When the engine wants to be asked, and when the clock rings for that, at the latest; 0 for never."""
        self._watching = 0
        """Threads that wait for something to end."""
        self._are_rates_kept = True
        """Guaranteed rates take no more than all lanes."""
        self._failed_observers: list[Observer] = []
        self.lags, self.lag_ns = [0] * (len(LAG_BUCKETS_NS) + 1), 0
        """Decision lags by bucket, and together: from when an event could be read (a request at `submit`, the end of a
        launch, a timer that is due) until its actions are carried out. Read under the lock: see `read`."""

    def submit(self, make: Callable[[int, int], Query], inputs: Tensors, done: Done) -> int:
        """Let a query arrive and give its number. `make(number, now_ns)` builds it; `done` is called exactly once."""
        came_ns = self._clock.now_ns()
        with self._lock:
            number = self._next_query
            self._next_query += 1
            now = self._now()
            query = make(number, now)
            self._pending[number] = done
            self._executor.put(number, inputs)
            answers = self._handle(QueryArrived(query), now)
            self._decided(came_ns)
        _deliver(answers)
        return number

    def submit_together(self, asked: Sequence[Asked]) -> list[int | ServeError]:
        """Let queries arrive at one instant, and decide on all of them at once: as `submit` of each.

        Gives the number of each, or the error that was raised when it was built.
        """
        found: list[int | ServeError] = []
        queries: list[Query] = []
        came_ns = self._clock.now_ns()
        with self._lock:
            now = self._now()
            for make, inputs, done in asked:
                number = self._next_query
                self._next_query += 1
                try:
                    queries.append(make(number, now))
                except ServeError as error:
                    found.append(error.with_traceback(None))  # which would hold this frame, and it all inputs
                    continue
                found.append(number)
                self._pending[number] = done
                self._executor.put(number, inputs)
            answers = []
            for left, query in zip(range(len(queries) - 1, -1, -1), queries, strict=True):
                answers += self._handle(QueryArrived(query, more=left > 0), now)
            self._decided(came_ns)
        _deliver(answers)
        return found

    def begin(self, make: Callable[[int, int], Event]) -> int:
        """Take a query's number, and let what `make(number, now_ns)` says happen with it."""
        with self._lock:
            number = self._next_query
            self._next_query += 1
            now = self._now()
            answers = self._handle(make(number, now), now)
        _deliver(answers)
        return number

    def post(self, event: Event, timing: Timing | None = None) -> None:
        """Let an event happen now."""
        came_ns = self._clock.now_ns() if timing is None or not timing.read_ns else timing.read_ns
        with self._lock:
            answers = self._handle(event, self._now(), timing)
            self._decided(came_ns)
        _deliver(answers)

    @contextmanager
    def opening(self, model: str) -> Iterator[None]:
        """Let those who look on know while a model is being opened."""
        self.post(ModelOpening(model))
        try:
            yield
        finally:
            self.post(ModelOpening(model, done=True))

    def follow(self, look: Callable[[Engine], Iterable[Event]]) -> None:
        """Look at the engine, and let what comes of it happen before anything else does."""
        with self._lock:
            answers = [each for event in look(self._engine) for each in self._handle(event, self._now())]
        _deliver(answers)

    def read(self, look: Callable[[Engine], T]) -> T:
        """Look at the engine between two events."""
        with self._lock:
            return look(self._engine)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no query is inside and nothing runs; say whether that came to be within the time."""
        return self._wait(lambda: not (self._engine.live or self._engine.running), timeout_s)

    def wait_ended(self, launches: Collection[int], timeout_s: float) -> bool:
        """Wait until none of these launches is under way; say whether that came to be within the time."""
        return self._wait(lambda: not any(each in launches for each in self._engine.launches), timeout_s)

    def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        with self._idle:
            self._watching += 1
            try:
                return self._idle.wait_for(is_so, timeout_s)
            finally:
                self._watching -= 1

    def _now(self) -> int:
        """Time never goes back between two events, whatever thread brings them."""
        now = self._clock.now_ns()
        if now > self._last_ns:
            self._last_ns = now
        return self._last_ns

    def _decided(self, came_ns: int) -> None:
        """What could be read at this time has been decided on, and that is carried out; under the lock."""
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
                    self._tell(action, event)
        if (self._engine.rated_part <= 1) is not self._are_rates_kept:
            self._tell_rates()
        for observer in self._observers:
            try:
                follow_up = observer(now, event, actions, timing)
            except Exception:
                self._blame(observer, event)
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

    def _tell(self, fault: PolicyFault, event: Event) -> None:
        """Log a fault of the policy in one line, with its traceback the first time."""
        text = "policy %r failed in %s at %s: %s; earliest deadline first decides this event"
        if fault.falls_back:
            text += (
                ". It has failed too often: a fallback that keeps quotas serves until the policy is set anew (mend it, "
                "then start the server again, or with a plan send SIGHUP after a change of its file)"
            )
        is_first = self._engine.guard.faults.get((fault.policy, fault.call)) == 1
        error = self._engine.guard.error if is_first else None
        _log.error(text, fault.policy, fault.call, type(event).__name__, fault.reason, exc_info=error)

    def _tell_rates(self) -> None:
        """Log in one line that guaranteed rates take more than there is, or no longer do."""
        self._are_rates_kept = not self._are_rates_kept
        if self._are_rates_kept:
            _log.info("the guaranteed rates (tenant.rate) fit again")
            return
        _log.warning(
            "the guaranteed rates (tenant.rate) take %.2f times all lanes together: each is kept only by %.0f %%, and "
            "tenants without a rate have no quota; lower the rates ('cotenant models' lists what each takes)",
            *(self._engine.rated_part, 100 / self._engine.rated_part),
        )

    def _blame(self, observer: Observer, event: Event) -> None:
        """One bad observer (a full disk below the trace) must not cost the queries their answers."""
        if observer not in self._failed_observers:
            self._failed_observers.append(observer)
            _log.exception("an observer failed at %s; further failures of it are not logged", type(event).__name__)

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
        """See to it that the clock rings by the time that is wanted: most timers are put off before they are due."""
        if not self._alarm_ns or self._timer_ns < self._alarm_ns:
            self._alarm_ns = self._timer_ns
            self._clock.call_at(self._alarm_ns, TIMER_PRIORITY, partial(self._alarm_rang, self._alarm_ns))

    def _alarm_rang(self, at_ns: int) -> None:
        with self._lock:
            if at_ns != self._alarm_ns:  # another one rang before
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
            self._decided(due_ns)
        _deliver(answers)


def _deliver(answers: list[tuple[Done, Respond, Tensors | None]]) -> None:
    """Answer outside the lock; one bad callback must not cost the others their answers."""
    for done, respond, outputs in answers:
        try:
            done(respond, outputs)
        except Exception:
            _log.exception("answering query %d failed", respond.query)
