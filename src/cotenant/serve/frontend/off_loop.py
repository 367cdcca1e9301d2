"""Threads for decoding, encoding and control calls that would block the event loop for too long."""

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
"""Size in bytes from which requests are decoded in a thread: 128 KiB of JSON take about 1 ms."""
OFF_LOOP_NS = 1_000_000
"""Encoding time in ns from which answers are encoded in a thread; the thread switch costs about a tenth of it."""
INFLATE_NICE = 10
"""Nice value of decompression threads, which do not need the interpreter lock: models and scheduling come first."""
_NUMBER_NS, _ITEM_NS, _SCAN_NS, _COMPRESS_NS = 80, 400, 10, 40
"""Encoding costs in ns: a number as text; a class or BYTES element; a candidate of a classification; a byte to
compress. Measured on a core of 2.6 GHz."""
_CONTROL_THREADS = 8
_CODEC_THREADS = 2
T = TypeVar("T")
Failed = Callable[[BaseException], None]


class OffLoop:
    """Thread pools of an event loop, shared by all of its front-ends.

    Each method runs work on a thread. Then it calls `then` with the result, or `failed` with an error of the work or
    of `then`, on the loop. Decoding and encoding are fair to models: `key` is the model's name, `cost` is in bytes.
    Raises CotenantError if no thread can be started.
    """

    def __init__(self) -> None:
        self._control = LoopThreads(_CONTROL_THREADS, "cotenant-control")
        self._codec = LoopThreads(_CODEC_THREADS, "cotenant-codec")
        self._inflate = LoopThreads(1, "cotenant-inflate", INFLATE_NICE)
        self.pending = PendingBytes()
        """Bytes of the requests of all front-ends of the loop. Only for the loop's thread."""
        self._inbox: LoopInbox | None = None

    @property
    def inbox(self) -> LoopInbox:
        """Inbox of the loop. The first access must be on the loop's thread."""
        if self._inbox is None:
            self._inbox = LoopInbox()
        return self._inbox

    def control(self, work: Callable[[], T], then: Callable[[T], None], failed: Failed) -> None:
        """Run a control call that may block."""
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
        """Decode or encode. `held` counts the body until the work ends, even if its request ends earlier."""
        self._follow(self._codec.submit(work, key, cost), then, failed, held)

    def inflate(
        self, key: str, steps: Steps[T], then: Callable[[T], None], failed: Failed, held: Held | None = None
    ) -> None:
        """Decompress a body in steps. `held` as in `convert`."""
        self._follow(self._inflate.submit_steps(steps, key, INFLATE_STEP_BYTES), then, failed, held)

    def _follow(self, future: Future[T], then: Callable[[T], None], failed: Failed, held: Held | None) -> None:
        self.inbox.when_done(future, then, failed)
        if held is not None:
            held.keep()
            future.add_done_callback(lambda _: self.inbox.put(held.release))

    def close(self) -> None:
        """End the threads, without waiting for work in progress."""
        for threads in (self._control, self._codec, self._inflate):
            threads.shutdown()


def writing_ns(wire: WireRequest, result: InferResult, accept: bytes = b"") -> int:
    """Estimate the encoding time of an answer in ns. Raw tensors are views and count 0."""
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
    """Convert an encoding time in ns to a cost in bytes: request bytes with the same decoding time."""
    return took_ns * OFF_LOOP_BYTES // OFF_LOOP_NS
