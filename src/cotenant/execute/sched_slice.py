"""Time slices of threads: one with a short slice goes first when it wakes, and is soon done.

A server's threads run for tens of microseconds at a time, on the cores that models keep busy for milliseconds. With
equal slices the kernel lets them wait until a model has had its own. Linux takes a thread's wish since 6.12 (its
scheduler EEVDF then lets the shorter slice preempt); elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SHORT_NS = 100_000
"""The shortest that the kernel grants."""
DEFAULT = 0
"""Whatever the kernel gives to all."""
_FORMAT = "=IIQiIQQQII"
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, least and most utilisation."""
_OTHER, _BATCH = 0, 3
_SET = {"x86_64": 314, "aarch64": 274}
_GET = {"x86_64": 315, "aarch64": 275}


def set_slice(slice_ns: int) -> bool:
    """Wish for a slice of the calling thread, and of those that it will start; say whether the kernel took the wish.

    A kernel before 6.12 takes it and does nothing.
    """
    attributes = _attributes()
    if attributes is None:
        return False
    size, policy, _, nice, *_ = attributes
    return _call(_SET, struct.pack(_FORMAT, size, policy, 0, nice, 0, slice_ns, 0, 0, 0, 0)) is not None


def current_slice(thread: int = 0) -> int | None:
    """Slice of a thread (0: the calling one) in ns as the kernel tells it; None where it tells none."""
    attributes = _attributes(thread)
    return None if attributes is None else attributes[5]


@contextmanager
def default_slice() -> Iterator[None]:
    """Threads started inside, by whatever library, get the default slice."""
    before = current_slice()
    is_changed = before == SHORT_NS and set_slice(DEFAULT)
    try:
        yield
    finally:
        if is_changed:
            set_slice(SHORT_NS)


def _attributes(thread: int = 0) -> tuple[int, ...] | None:
    """What the kernel holds of a thread, if it is scheduled like others."""
    found = _call(_GET, bytes(struct.calcsize(_FORMAT)), thread)
    if found is None:
        return None
    attributes = struct.unpack(_FORMAT, found)
    return attributes if attributes[1] in (_OTHER, _BATCH) else None


def _call(numbers: dict[str, int], content: bytes, thread: int = 0) -> bytes | None:
    number = numbers.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return None
    buffer = ctypes.create_string_buffer(content, len(content))
    last = (len(content), 0) if numbers is _GET else (0,)
    done = ctypes.CDLL(None, use_errno=True).syscall(number, thread, buffer, *last)
    return buffer.raw if done == 0 else None
