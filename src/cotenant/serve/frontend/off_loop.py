"""What takes so long to read or to write that a thread does it, and not the event loop, and the threads for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from cotenant.serve.frontend.call_threads import LoopThreads, Steps
from cotenant.serve.frontend.loop_inbox import LoopInbox
from cotenant.serve.frontend.pending_bytes import Held, PendingBytes
from cotenant.wire.api import InferResult
from cotenant.wire.codec import WireRequest, size_bytes
from cotenant.wire.codec_http import INFLATE_STEP_BYTES

OFF_LOOP_BYTES = 128 << 10
"""Requests from this size on are decoded and checked in a thread: 128 KiB of JSON take about a millisecond."""
OFF_LOOP_NS = 1_000_000
"""Answers that take so long to be written are written in a thread; handing over costs some tenth of it."""
INFLATE_NICE = 10
"""Of the threads that inflate, which need no interpreter: they take what models and decisions leave."""
_NUMBER_NS, _ITEM_NS, _SCAN_NS, _COMPRESS_NS = 80, 400, 10, 40
"""Of a number as text, a class or an element of BYTES, a number to choose classes from, and of a byte to compress:
measured on a core of 2.6 GHz."""
_CONTROL_THREADS = 8
_CODEC_THREADS = 2
T = TypeVar("T")
Failed = Callable[[BaseException], None]


class OffLoop:
    """The threads beside an event loop, and the way back to it: one object for all front-ends of the loop.

    Each method has work done by a thread, and calls `then` with what it made, or `failed` with its error or that of
    `then`, on the loop. Work on bodies and answers is served round robin by tenant: `key` is the name of the model,
    `cost` is in bytes. Raises CotenantError where no thread can be started.
    """

    def __init__(self) -> None:
        self._control = LoopThreads(_CONTROL_THREADS, "cotenant-control")
        self._codec = LoopThreads(_CODEC_THREADS, "cotenant-codec")
        self._inflate = LoopThreads(1, "cotenant-inflate", INFLATE_NICE)
        self.pending = PendingBytes()
        """Bytes of the requests of all front-ends of the loop. For its thread alone."""
        self._inbox: LoopInbox | None = None

    @property
    def inbox(self) -> LoopInbox:
        """Calls for the loop. To be asked for on its thread first."""
        if self._inbox is None:
            self._inbox = LoopInbox()
        return self._inbox

    def control(self, work: Callable[[], T], then: Callable[[T], None], failed: Failed) -> None:
        """Answer a call that may block."""
        self.inbox.when_done(self._control.submit(work), then, failed)

    def convert(
        self,
        key: str,
        cost: int,
        work: Callable[[], T],
        then: Callable[[T], None],
        failed: Failed,
        held: Held | None = None,
    ) -> None:
        """Decode or encode. `held` counts the body until then, whatever becomes of its request."""
        self._follow(self._codec.submit(work, key, cost), then, failed, held)

    def inflate(
        self, key: str, steps: Steps[T], then: Callable[[T], None], failed: Failed, held: Held | None = None
    ) -> None:
        """Undo the compression of a body, step by step. `held` as in `convert`."""
        self._follow(self._inflate.submit_steps(steps, key, INFLATE_STEP_BYTES), then, failed, held)

    def _follow(self, future: Future[T], then: Callable[[T], None], failed: Failed, held: Held | None) -> None:
        self.inbox.when_done(future, then, failed)
        if held is not None:
            held.keep()
            future.add_done_callback(lambda _: self.inbox.put(held.let_go))

    def close(self) -> None:
        """Let the idle threads end; work in progress is not waited for."""
        for threads in (self._control, self._codec, self._inflate):
            threads.shutdown()


def writing_ns(wire: WireRequest, result: InferResult, accept: bytes = b"") -> int:
    """Return roughly how long an answer takes to be written, in nanoseconds. Raw tensors are views and take none."""
    total = 0
    for name, array in result.outputs.items():
        output = next((output for output in wire.requested if output.name == name), None)
        is_binary, classes = (output.binary, output.classes) if output else (wire.binary_default, 0)
        if classes:
            rows = array.shape[0] if array.ndim else 1
            total += _SCAN_NS * array.size + _ITEM_NS * min(array.size, classes * rows)
        elif array.dtype.kind in "OSU":
            total += _ITEM_NS * array.size
            if total < OFF_LOOP_NS:
                total += size_bytes(array)
        elif not is_binary:
            total += _NUMBER_NS * array.size
        if accept:
            total += _COMPRESS_NS * array.nbytes
    return total


def writing_cost(took_ns: int) -> int:
    """The cost of writing an answer that takes so long, in bytes of a request that take as long to be decoded."""
    return took_ns * OFF_LOOP_BYTES // OFF_LOOP_NS
