from __future__ import annotations

import asyncio
import time

import pytest

from cotenant.load import timer as module
from cotenant.load.timer import PreciseTimer
from load_fakes import in_loop

MS = 1_000_000


@pytest.fixture(params=["timerfd", "loop"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "loop":
        monkeypatch.setattr(module, "timer_descriptor", lambda: None)


@pytest.mark.usefixtures("_kind")
@in_loop
async def test_never_wakes_early() -> None:
    timer = PreciseTimer(asyncio.get_running_loop())
    for step in (1, 300_000, 1_100_000, 3 * MS):
        due_ns = time.monotonic_ns() + step
        await timer.wait_until(due_ns)
        assert time.monotonic_ns() >= due_ns
    timer.close()


@pytest.mark.usefixtures("_kind")
@in_loop
async def test_a_time_gone_by_does_not_wait() -> None:
    timer = PreciseTimer(asyncio.get_running_loop())
    await timer.wait_until(0)
    await timer.wait_until(time.monotonic_ns() - 1)
    timer.close()


@pytest.mark.usefixtures("_kind")
@in_loop
async def test_an_interrupt_ends_the_sleep_and_the_next_one_is_whole() -> None:
    loop = asyncio.get_running_loop()
    timer = PreciseTimer(loop)
    loop.call_soon(timer.interrupt)
    far_ns = time.monotonic_ns() + 3_600_000 * MS
    await timer.wait_until(far_ns)
    assert time.monotonic_ns() < far_ns
    due_ns = time.monotonic_ns() + 2 * MS
    await timer.wait_until(due_ns)
    assert time.monotonic_ns() >= due_ns
    timer.close()
