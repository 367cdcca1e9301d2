"""The two threads of a stream lane: one submits work, one sleeps until the device has done it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from cotenant.execute.gpu.streams import StreamLane

Waiting = Callable[[], None]
Submit = Callable[[], Waiting]


class StreamThreads:
    """Calls what is put in order on the submitting thread, and what that gives, in the same order, on the waiting one.

    Neither may raise. `quiet` is held by who drops memory of the lane's streams, and by who records on them.
    """

    def __init__(self, lane: StreamLane, name: str) -> None:
        self.quiet = threading.Lock()
        self._lane = lane
        self._submits: SimpleQueue[Submit | None] = SimpleQueue()
        self._waits: SimpleQueue[Waiting | None] = SimpleQueue()
        self._threads = (
            threading.Thread(target=self._submit, name=f"cotenant-stream-{name}", daemon=True),
            threading.Thread(target=self._wait, name=f"cotenant-waiter-{name}", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    def put(self, submit: Submit) -> None:
        """Queue work; never blocks."""
        self._submits.put(submit)

    def close(self) -> None:
        """Finish what is queued and stop."""
        self._submits.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _submit(self) -> None:
        self._lane.settle()
        with torch.inference_mode():
            while self._submit_one():
                pass
        self._waits.put(None)

    def _submit_one(self) -> bool:
        submit = self._submits.get()
        if submit is not None:
            self._waits.put(submit())
        return submit is not None

    def _wait(self) -> None:
        self._lane.attend()
        with torch.inference_mode():
            while self._wait_one():
                pass

    def _wait_one(self) -> bool:
        """In a method of its own: a variable of the loop would keep the last batch's tensors alive."""
        wait = self._waits.get()
        if wait is not None:
            wait()
        return wait is not None
