"""The clocks of the serving driver: order of alarms, no wake-up without a reason, and a life after a bad alarm."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from cotenant.serve.engine import clock as clock_module
from cotenant.serve.engine.clock import RealClock, VirtualClock

WAIT_S = 10.0


def test_virtual_alarms_ring_by_time_priority_and_call() -> None:
    clock = VirtualClock()
    rung: list[tuple[str, int]] = []

    def alarm(name: str) -> Callable[[], None]:
        return lambda: rung.append((name, clock.now_ns()))

    clock.call_at(7, 1, alarm("timer"))
    clock.call_at(7, 2, alarm("arrival"))
    clock.call_at(7, 0, alarm("end"))
    clock.call_at(7, 1, alarm("later call"))
    clock.call_at(3, 9, alarm("early"))
    clock.run()
    assert rung == [("early", 3), ("end", 7), ("timer", 7), ("later call", 7), ("arrival", 7)]


def test_virtual_time_never_goes_back() -> None:
    clock = VirtualClock()
    seen: list[int] = []

    def late() -> None:
        seen.append(clock.now_ns())
        clock.call_at(1, 0, lambda: seen.append(clock.now_ns()))

    clock.call_at(5, 0, late)
    clock.run()
    assert seen == [5, 5]
    clock.call_at(9, 0, lambda: seen.append(clock.now_ns()))
    clock.close()
    clock.run()
    assert seen == [5, 5]


class CountingCondition(threading.Condition):
    """Counts how often the clock's thread goes to sleep and is woken, and for how long it sleeps at most."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self.asleep = threading.Semaphore(0)
        self.calls = 0

    def notify(self, n: int = 1) -> None:
        self.calls += 1
        super().notify(n)

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        self.asleep.release()
        return super().wait(timeout)


@pytest.fixture
def condition(monkeypatch: pytest.MonkeyPatch) -> CountingCondition:
    made = CountingCondition()

    class Threading:
        Condition = staticmethod(lambda: made)
        Thread = threading.Thread
        current_thread = staticmethod(threading.current_thread)

    monkeypatch.setattr(clock_module, "threading", Threading)
    return made


def test_with_nothing_to_ring_the_thread_sleeps_without_an_end(condition: CountingCondition) -> None:
    clock = RealClock()
    assert condition.asleep.acquire(timeout=WAIT_S)
    assert condition.waits == [None]
    clock.close()
    assert condition.waits == [None]


def test_the_thread_wakes_for_the_next_alarm_alone(condition: CountingCondition) -> None:
    clock = RealClock()
    assert condition.asleep.acquire(timeout=WAIT_S)
    hour = 3600 * 10**9
    start = clock.now_ns()
    clock.call_at(start + hour, 0, lambda: None)
    assert condition.asleep.acquire(timeout=WAIT_S)
    for number in range(50):  # none of these is next: the thread must not be woken for them
        clock.call_at(start + hour + number, 0, lambda: None)
    assert condition.calls == 1
    assert len(condition.waits) == 2
    assert condition.waits[1] is not None
    assert 3590 < condition.waits[1] <= 3600
    rung = threading.Event()
    clock.call_at(start, 0, rung.set)
    assert rung.wait(WAIT_S)
    assert condition.asleep.acquire(timeout=WAIT_S)
    assert len(condition.waits) == 3  # once more, after the alarm that was due: no other wake-up in between
    clock.close()
    assert len(condition.waits) == 3


def test_alarms_ring_in_order_and_never_early() -> None:
    clock = RealClock()
    start = clock.now_ns()
    rung: list[tuple[int, int]] = []
    done = threading.Event()
    gap = 2_000_000
    for number in (3, 1, 2, 0):
        clock.call_at(start + number * gap, 0, lambda number=number: rung.append((number, clock.now_ns())))  # type: ignore[misc]
    clock.call_at(start + 3 * gap, 1, done.set)
    assert done.wait(WAIT_S)
    clock.close()
    assert [number for number, _ in rung] == [0, 1, 2, 3]
    assert all(at >= start + number * gap for number, at in rung)


def test_an_alarm_that_raises_does_not_stop_the_clock(caplog: pytest.LogCaptureFixture) -> None:
    clock = RealClock()
    done = threading.Event()

    def bad() -> None:
        raise RuntimeError("a bug")

    clock.call_at(0, 0, bad)
    clock.call_at(0, 1, done.set)
    assert done.wait(WAIT_S)
    clock.close()
    assert "an alarm of the clock raised" in caplog.text


def test_close_from_an_alarm_and_close_twice_end_the_thread() -> None:
    clock = RealClock()
    closed = threading.Event()

    def alarm() -> None:
        clock.close()
        closed.set()

    clock.call_at(time.monotonic_ns(), 0, alarm)
    clock.call_at(time.monotonic_ns(), 1, lambda: pytest.fail("rang after close"))
    assert closed.wait(WAIT_S)
    clock.close()
    assert not any(thread.name == "cotenant-clock" and thread is clock._thread for thread in threading.enumerate())
