"""Time slices of threads: the scheduler runs a thread with a short slice first when it wakes.

Threads of a server run for tens of microseconds at a time, on cores that models use for milliseconds. With equal slices
they wait until a model has used its slice. Linux honours the slice of a thread since 6.12: its scheduler EEVDF lets a
shorter slice preempt. On other systems these functions do nothing.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SHORT_NS = 100_000
"""Shortest slice that the kernel grants, in ns."""
DEFAULT = 0
"""The kernel's default slice."""
_FORMAT = "=IIQiIQQQII"
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, least and most utilisation."""
_OTHER, _BATCH = 0, 3
_SET = {"x86_64": 314, "aarch64": 274}
_GET = {"x86_64": 315, "aarch64": 275}


def set_slice(slice_ns: int) -> bool:
    """Set the slice of the calling thread and of threads that it starts; return whether the kernel accepted it.

    A kernel before 6.12 accepts it without effect.
    """
    attributes = _attributes()
    if attributes is None:
        return False
    size, policy, _, nice, *_ = attributes
    return _call(_SET, struct.pack(_FORMAT, size, policy, 0, nice, 0, slice_ns, 0, 0, 0, 0)) is not None


def current_slice(thread: int = 0) -> int | None:
    """Slice of a thread (0: the calling one) in ns; None if the kernel does not report it."""
    attributes = _attributes(thread)
    return None if attributes is None else attributes[5]


@contextmanager
def default_slice() -> Iterator[None]:
    """Threads started inside, also by libraries, get the default slice."""
    before = current_slice()
    is_changed = before == SHORT_NS and set_slice(DEFAULT)
    try:
        yield
    finally:
        if is_changed:
            set_slice(SHORT_NS)


def _attributes(thread: int = 0) -> tuple[int, ...] | None:
    """The kernel's scheduling attributes of a thread with an ordinary policy; else None."""
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
