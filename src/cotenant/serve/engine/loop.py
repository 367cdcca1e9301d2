"""Event loop of a server on its own thread. Requests arrive and launches end there, without a thread switch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from cotenant.errors import CotenantError

T = TypeVar("T")
_END_S = 1.0
"""Seconds that `stop` waits for the loop to end."""


class _Closable(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=_Closable)


class ServeLoop:
    """An asyncio loop that runs until `stop`. Implements `Readers`. Its methods are thread-safe."""

    def __init__(self) -> None:
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="cotenant-loop", daemon=True)
        self._shared: dict[type[_Closable], _Closable] = {}

    def start(self) -> None:
        """Start the loop. Raises CotenantError when no thread can be started."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise CotenantError(f"no thread can be started for the server's event loop: {error}") from None

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def shared(self, kind: type[K]) -> K:
        """Return the loop's single instance of a class; `stop` closes it. Call on one thread only."""
        found = self._shared.get(kind)
        if found is None:
            found = self._shared[kind] = kind()
        assert isinstance(found, kind)
        return found

    def add(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call `call` on the loop whenever the descriptor is readable."""
        self._call(lambda: self._loop.add_reader(descriptor, call))

    def remove(self, descriptor: int) -> None:
        """Stop watching a descriptor; returns when no further call happens."""
        self._call(lambda: self._loop.remove_reader(descriptor))

    def stop(self) -> None:
        """Stop the loop; pending calls are dropped. Safe to repeat."""
        while self._shared:
            self._shared.popitem()[1].close()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join(_END_S)

    def _call(self, work: Callable[[], object]) -> None:
        """Run `work` on the loop and wait for its end."""
        if threading.current_thread() is self._thread:
            work()
            return
        done = threading.Event()

        def do() -> None:
            try:
                work()
            finally:
                done.set()

        try:
            self._loop.call_soon_threadsafe(do)
        except RuntimeError:  # the loop has ended and reads nothing
            return
        while not done.wait(_END_S) and self._thread.is_alive():
            pass

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # as on Windows
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
