"""What takes so long to read or to write that a thread does it, and not the event loop."""

from __future__ import annotations

from cotenant.wire.api import InferResult
from cotenant.wire.codec import WireRequest, size_bytes

OFF_LOOP_BYTES = 128 << 10
"""Requests from this size on are decoded and checked in a thread: 128 KiB of JSON take about a millisecond."""
OFF_LOOP_NS = 1_000_000
"""Answers that take so long to be written are written in a thread; handing over costs some tenth of it."""
INFLATE_NICE = 10
"""Of the threads that inflate, which need no interpreter: they take what models and decisions leave."""
_NUMBER_NS, _ITEM_NS, _SCAN_NS, _COMPRESS_NS = 80, 400, 10, 40
"""Of a number as text, a class or an element of BYTES, a number to choose classes from, and of a byte to compress:
measured on a core of 2.6 GHz."""


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
