"""What a command does about SIGINT, SIGTERM and SIGHUP: while it loads its libraries, and while it serves."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

LATE_S = 1.5
"""After this time beyond the deadline of a stop the process ends, whatever has not ended by then."""
EXIT_LATE = 1
_STATUS = 128
"""Added to the number of a signal: the exit status of a command that it ended, as shells have it."""
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_LAST_WORDS_S = 0.3
_WAKE = 0


def _end(number: int) -> None:
    """End the process at once, with one line. No library gets to see it: some take a signal for an error of theirs."""
    os.write(sys.stderr.fileno(), f"cotenant: {_WORDS[signal.Signals(number)]}\n".encode())
    os._exit(_STATUS + number)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM end the process at once, without a traceback. For the time of imports.

    SIGTERM goes on to do so behind it: a command that does not hear it would end by it all the same.
    """
    known = end_at_once()
    try:
        yield
    finally:
        if signal.SIGINT in known:
            signal.signal(signal.SIGINT, known[signal.SIGINT])


def end_at_once() -> dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None]:
    """Let SIGINT and SIGTERM end the process at once from now on, where they have their usual handlers; gives those."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    known = {number: handler for number, handler in usual.items() if signal.getsignal(number) is handler}
    for number in known:
        signal.signal(number, lambda number, _: _end(number))
    return known


class StopSignals:
    """Hears SIGINT, SIGTERM and SIGHUP on a thread of its own, whatever the main thread does meanwhile.

    Until `guard` a stop ends the process at once. After that it sets `stopped`, and `until_s` to the deadline, in
    seconds of the monotonic clock. A process that has not come to `close` LATE_S after the deadline is ended. Made on
    the main thread.
    """

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.until_s: float | None = None
        self.on_hangup: Callable[[], None] = lambda: None
        self._drain_s: float | None = None
        self._on_stop: Callable[[], None] = lambda: None
        self._last_words: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._is_closed = False
        self._heard, self._told = socket.socketpair()
        self._told.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, _ignore) for number in numbers}
        self._thread = threading.Thread(target=self._listen, name="cotenant-signals", daemon=True)
        self._thread.start()

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def guard(self, drain_s: float, on_stop: Callable[[], None], last_words: Callable[[], None]) -> None:
        """From now on a stop calls `on_stop` and leaves `drain_s` seconds. `last_words` is called before the process is
        ended because that time, and LATE_S, have passed."""
        with self._lock:
            self._drain_s, self._on_stop, self._last_words = drain_s, on_stop, last_words

    def close(self) -> None:
        """Hear no more; signals do what they did before."""
        if self._is_closed:
            return
        self._is_closed = True
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._told.send(bytes([_WAKE]))
        self._thread.join()
        self._told.close()
        self._heard.close()

    def _listen(self) -> None:
        while not self._is_closed:
            if self.until_s is not None:
                self._heard.settimeout(max(0.001, self.until_s + LATE_S - time.monotonic()))
            try:
                numbers = self._heard.recv(64)
            except TimeoutError:
                self._end_late()
                return
            for number in numbers:
                if number == signal.SIGHUP:
                    self._hang_up()
                elif number in _WORDS and self.until_s is None:
                    self._stop(number)

    def _hang_up(self) -> None:
        """Call `on_hangup`. Whatever it raises is logged: the thread has to hear further signals."""
        try:
            self.on_hangup()
        except Exception:
            import logging

            logging.getLogger("cotenant.server").exception("SIGHUP was heard, but reading again has failed")

    def _stop(self, number: int) -> None:
        with self._lock:
            if self._drain_s is None:
                _end(number)
                return
            self.until_s = time.monotonic() + self._drain_s
        self.stopped.set()
        self._on_stop()

    def _end_late(self) -> None:
        import logging

        text = "stopping has not ended %g s after drain_s: the process ends now, with its trace as far as it is written"
        logging.getLogger("cotenant.server").error(text, LATE_S)
        words = threading.Thread(target=self._last_words, daemon=True)
        words.start()
        words.join(_LAST_WORDS_S)
        os._exit(EXIT_LATE)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The interpreter writes the number of a signal to the wake-up descriptor only where it has a handler."""
