"""What other threads hand to an event loop: woken once, in order, and alive after a bad call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cotenant.serve.frontend.loop_inbox import LoopInbox


def from_another_thread(work: Callable[[], None]) -> None:
    """Do work on another thread while this one, and its event loop, wait."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_the_loop_is_woken_once_for_calls_that_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        loop, inbox = asyncio.get_running_loop(), LoopInbox()
        wakes: list[Any] = []
        made: list[int] = []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (wakes.append(args), wake(*args))[1])

        def put(numbers: range) -> None:
            for number in numbers:
                inbox.put(lambda number=number: made.append(number))  # type: ignore[misc]

        from_another_thread(lambda: put(range(5)))
        assert (len(wakes), made) == (1, [])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert made == list(range(5))
        from_another_thread(lambda: put(range(5, 7)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (len(wakes), made) == (2, list(range(7)))

    asyncio.run(body())


def test_a_call_of_the_loop_s_own_thread_is_made_at_once_and_a_bad_one_costs_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        inbox, made = LoopInbox(), list[int]()
        inbox.put(lambda: made.append(1))
        assert made == [1]

        def put() -> None:
            inbox.put(lambda: made.append(1 // 0))
            inbox.put(lambda: made.append(2))

        from_another_thread(put)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert made == [1, 2]

    asyncio.run(body())
    assert "ZeroDivisionError" in caplog.text


def test_a_call_after_the_loop_has_closed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    found: list[LoopInbox] = []

    async def body() -> None:
        found.append(LoopInbox())

    asyncio.run(body())
    from_another_thread(lambda: found[0].put(lambda: None))
    assert "the server had already stopped" in caplog.text
