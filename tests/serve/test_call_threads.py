"""Threads on demand: each piece of work runs once, and waits only where no further thread may be started."""

from __future__ import annotations

import threading

import pytest

from cotenant.serve.frontend.call_threads import LoopThreads


def test_threads_run_every_call_once_and_tell_how_it_ended() -> None:
    threads = LoopThreads(3, "test")
    calls: list[int] = []

    def work(number: int) -> int:
        calls.append(number)
        if number % 7 == 0:
            raise ValueError(number)
        return number

    futures = [threads.submit(lambda number=number: work(number)) for number in range(500)]
    for number, future in enumerate(futures):
        if number % 7 == 0:
            with pytest.raises(ValueError):
                future.result(10)
        else:
            assert future.result(10) == number
    assert sorted(calls) == list(range(500))
    assert threads._started <= 3
    threads.shutdown()


def test_a_call_never_waits_while_a_thread_may_be_started() -> None:
    threads = LoopThreads(50, "test")
    for _ in range(20):
        gate = threading.Barrier(51)
        for _ in range(50):
            threads.submit(lambda gate=gate: gate.wait(10))
        gate.wait(10)
    assert threads._started <= 50
    threads.shutdown()
