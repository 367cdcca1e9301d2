"""Handling of SIGINT, SIGTERM and SIGHUP, while a command loads its libraries and while it serves."""

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
"""Grace period after the deadline of a stop; then the process exits, even with unfinished work."""
EXIT_LATE = 1
_STATUS = 128
"""Exit status of a process ended by a signal, less the number of the signal, as in shells."""
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_ON_LATE_S = 0.3
_WAKE = 0


def _exit_at_once(number: int) -> None:
    """Exit at once, with one line. Libraries do not see the signal: some report it as their own error."""
    os.write(sys.stderr.fileno(), f"cotenant: {_WORDS[signal.Signals(number)]}\n".encode())
    os._exit(_STATUS + number)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """While active, SIGINT and SIGTERM end the process at once, without a traceback. For the time of imports.

    SIGTERM does so afterwards, too, unless the command handles it.
    """
    known = end_at_once()
    try:
        yield
    finally:
        if signal.SIGINT in known:
            signal.signal(signal.SIGINT, known[signal.SIGINT])


def end_at_once() -> dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None]:
    """Let SIGINT and SIGTERM end the process at once if they have their default handlers; return the handlers."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    known = {number: handler for number, handler in usual.items() if signal.getsignal(number) is handler}
    for number in known:
        signal.signal(number, lambda number, _: _exit_at_once(number))
    return known


class StopSignals:
    """Receives SIGINT, SIGTERM and SIGHUP on its own thread, independent of the main thread.

    Before `guard`, a stop ends the process at once. Afterwards it sets `stopped`, and `until_s` to the deadline, in
    seconds of the monotonic clock. A process that has not called `close` by LATE_S after the deadline exits. Create it
    on the main thread.
    """

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.until_s: float | None = None
        self.on_hangup: Callable[[], None] = lambda: None
        self._drain_s: float | None = None
        self._on_stop: Callable[[], None] = lambda: None
        self._on_late: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._is_closed = False
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
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

    def guard(self, drain_s: float, on_stop: Callable[[], None], on_late: Callable[[], None]) -> None:
        """From now on, a stop calls `on_stop` and allows `drain_s` seconds. After that time and LATE_S, the process
        calls `on_late` and exits."""
        with self._lock:
            self._drain_s, self._on_stop, self._on_late = drain_s, on_stop, on_late

    def close(self) -> None:
        """Stop receiving signals, and restore their handlers."""
        if self._is_closed:
            return
        self._is_closed = True
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._sender.send(bytes([_WAKE]))
        self._thread.join()
        self._sender.close()
        self._receiver.close()

    def _listen(self) -> None:
        while not self._is_closed:
            if self.until_s is not None:
                self._receiver.settimeout(max(0.001, self.until_s + LATE_S - time.monotonic()))
            try:
                numbers = self._receiver.recv(64)
            except TimeoutError:
                self._end_late()
                return
            for number in numbers:
                if number == signal.SIGHUP:
                    self._hang_up()
                elif number in _WORDS and self.until_s is None:
                    self._stop(number)

    def _hang_up(self) -> None:
        """Call `on_hangup` and log its exceptions, since the thread has to receive further signals."""
        try:
            self.on_hangup()
        except Exception:
            import logging

            logging.getLogger("cotenant.server").exception("SIGHUP was received, but reloading failed")

    def _stop(self, number: int) -> None:
        with self._lock:
            if self._drain_s is None:
                _exit_at_once(number)
                return
            self.until_s = time.monotonic() + self._drain_s
        self.stopped.set()
        self._on_stop()

    def _end_late(self) -> None:
        import logging

        text = "stopping took %g s longer than drain_s: the process exits; its trace ends with the last line written"
        logging.getLogger("cotenant.server").error(text, LATE_S)
        late = threading.Thread(target=self._on_late, daemon=True)
        late.start()
        late.join(_ON_LATE_S)
        os._exit(EXIT_LATE)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handler without effect: the interpreter writes only signals with a handler to the wake-up descriptor."""
