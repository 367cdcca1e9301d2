"""Timer for asyncio with a resolution below a millisecond.

Event loops on Linux round timers up to milliseconds, the unit of epoll. A timerfd is exact, and the loop waits for it
like for any descriptor. Python has it since 3.13; for older versions this module calls the C library.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class PreciseTimer:
    """Timer for one coroutine of a loop. Times are those of `time.monotonic_ns`. Close it before the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._fd = _timerfd()
        if self._fd is not None:
            self._libc = ctypes.CDLL(None, use_errno=True)
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
            self._arm(due_ns)
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

    def _arm(self, due_ns: int) -> None:
        seconds, nanoseconds = divmod(due_ns, 1_000_000_000)
        at = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(at), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def _expired(self) -> None:
        if self._fd is not None:
            try:
                os.read(self._fd, 8)
            except BlockingIOError:
                return  # armed again between the event and this call
            self.interrupt()


def _timerfd() -> int | None:
    """Create a timerfd; None on a system without it."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        create = ctypes.CDLL(None, use_errno=True).timerfd_create
    except (OSError, AttributeError):
        return None
    fd = int(create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
    return fd if fd >= 0 else None
