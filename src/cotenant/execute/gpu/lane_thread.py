"""The thread of a stream lane, which submits the lane's launches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import torch

from cotenant.execute.gpu.streams import StreamLane
from cotenant.execute.threads.lanes import left_s
from cotenant.shortages import start_thread

T = TypeVar("T")


class LaneThread:
    """The streams of a share, and the thread that runs the tasks of the lane in order (`put`)."""

    def __init__(self, lane: StreamLane, name: str) -> None:
        self.streams = lane
        self.count = 0
        """Launches so far; some of them are timed."""
        self.problem: Exception | None = None
        """Why the lane cannot run anything."""
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.put = self._tasks.put
        self._thread = threading.Thread(target=self._run, name=f"cotenant-stream-{name}", daemon=True)
        start_thread(self._thread, f"launches on the stream lane {name} fail")

    def do(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread after the tasks before it; return its result, or raise its exception."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                if self.problem is not None:
                    raise self.problem
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self.put(run)
        return done.result()

    def close(self, until_s: float | None = None) -> bool:
        """Run the queued tasks and stop. Waits until `until_s` at most; returns whether the thread has ended."""
        self._tasks.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(left_s(until_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.streams.settle()
        except Exception as error:
            self.problem = error
        with torch.inference_mode():
            while self._run_one():
                pass

    def _run_one(self) -> bool:
        """Run one task. A method of its own: a variable of the loop would keep the last batch's tensors alive."""
        task = self._tasks.get()
        if task is not None:
            task()
        return task is not None
