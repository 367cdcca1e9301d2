"""Waiting requests of an event loop: results come in from other threads, clients go away, the loop is rarely called."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cotenant.serve.frontend.http_pending import PendingReplies
from cotenant.types import Outcome
from cotenant.wire.api import InferResult

WAIT_S = 10.0
Done = Callable[[InferResult], None]


class Backend:
    """Takes queries, and ends them when it is told to."""

    def __init__(self) -> None:
        self.open: dict[int, Done] = {}
        self.cancelled: list[int] = []

    def submit(self, done: Done) -> int:
        number = len(self.open)
        self.open[number] = done
        return number

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.open[number](InferResult(Outcome.ANSWERED, number))


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, WAIT_S))


async def stays() -> dict[str, Any]:
    """A client that stays connected."""
    await asyncio.Event().wait()
    return {}


def from_another_thread(work: Callable[[], None]) -> None:
    """Do work on another thread while this one, and its event loop, wait."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_the_loop_is_called_once_for_results_that_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        loop, backend = asyncio.get_running_loop(), Backend()
        calls: list[Any] = []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (calls.append(args), call(*args))[1])
        pending = PendingReplies(loop, backend.cancelled.append)
        for batch in range(2):
            tasks = [asyncio.create_task(pending.result(backend.submit, stays)) for _ in range(3)]
            await asyncio.sleep(0)
            numbers = [3 * batch + each for each in range(3)]
            from_another_thread(lambda numbers=numbers: backend.end(*numbers))  # type: ignore[misc]
            assert [result.query for result in await asyncio.gather(*tasks)] == numbers
            assert len(calls) == batch + 1
        assert backend.cancelled == []

    run(body())


def test_a_query_that_ends_while_it_is_submitted_is_answered_at_once() -> None:
    async def body() -> None:
        def submit(done: Done) -> int:
            done(InferResult(Outcome.REJECTED, 7))
            return 7

        pending = PendingReplies(asyncio.get_running_loop(), lambda _: None)
        assert (await pending.result(submit, stays)).outcome is Outcome.REJECTED

    run(body())


def test_a_client_that_goes_away_withdraws_its_query_and_no_other() -> None:
    async def body() -> None:
        backend = Backend()
        left = asyncio.Event()

        async def leaves() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        def cancel(query: int) -> None:
            backend.cancelled.append(query)
            backend.open[query](InferResult(Outcome.CANCELLED, query))

        pending = PendingReplies(asyncio.get_running_loop(), cancel)
        leaving = asyncio.create_task(pending.result(backend.submit, leaves))
        staying = asyncio.create_task(pending.result(backend.submit, stays))
        await asyncio.sleep(0)
        left.set()
        assert (await leaving).outcome is Outcome.CANCELLED
        assert backend.cancelled == [0]
        backend.end(1)
        assert (await staying).outcome is Outcome.ANSWERED

    run(body())


def test_a_request_that_is_given_up_withdraws_its_query_and_a_late_result_does_no_harm() -> None:
    async def body() -> None:
        backend = Backend()
        pending = PendingReplies(asyncio.get_running_loop(), backend.cancelled.append)
        task = asyncio.create_task(pending.result(backend.submit, stays))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.cancelled == [0]
        from_another_thread(lambda: backend.end(0))
        next_one = asyncio.create_task(pending.result(backend.submit, stays))
        await asyncio.sleep(0)
        from_another_thread(lambda: backend.end(1))
        assert (await next_one).query == 1

    run(body())


def test_a_result_after_the_loop_has_closed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    loop, backend = asyncio.new_event_loop(), Backend()
    made: list[PendingReplies] = []

    async def body() -> None:
        made.append(PendingReplies(loop, backend.cancelled.append))
        task = asyncio.create_task(made[0].result(backend.submit, stays))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    loop.run_until_complete(body())
    loop.close()
    from_another_thread(lambda: backend.end(0))
    assert "query 0 ended after the HTTP server had stopped" in caplog.text
