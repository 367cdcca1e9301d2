"""Timer for asyncio with a resolution below a millisecond.

Event loops on Linux round timers up to milliseconds, the unit of epoll. A timerfd is exact, and the loop waits for it
like for any descriptor.
"""

from __future__ import annotations

import asyncio
import os
import time

from cotenant.linux import arm_timer, timer_descriptor


class PreciseTimer:
    """Timer for one coroutine of a loop. Times are those of `time.monotonic_ns`. Close it before the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._fd = timer_descriptor()
        if self._fd is not None:
            loop.add_reader(self._fd, self._expired)

    async def wait_until(self, due_ns: int) -> None:
        """Sleep until `due_ns` or a call of `interrupt`; return at once for a past time."""
        now_ns = time.monotonic_ns()
        if due_ns <= now_ns:
            return
        self._waiter = self._loop.create_future()
        handle = None
        if self._fd is None:
            handle = self._loop.call_later((due_ns - now_ns) / 1e9, self.interrupt)
        else:
            arm_timer(self._fd, due_ns)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if handle is not None:
                handle.cancel()

    def interrupt(self) -> None:
        """End the present sleep, if any."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _expired(self) -> None:
        if self._fd is not None:
            try:
                os.read(self._fd, 8)
            except BlockingIOError:
                return  # armed again between the event and this call
            self.interrupt()
