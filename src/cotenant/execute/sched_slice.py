"""Time slices of threads: the scheduler runs a thread with a short slice first when it wakes.

Threads of a server run for tens of microseconds at a time, on cores that models use for milliseconds. With equal slices
they wait until a model has used its slice. Linux honours the slice of a thread since 6.12: its scheduler EEVDF lets a
shorter slice preempt. On other systems these functions do nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import create_string_buffer

from cotenant.linux import system_call

SHORT_NS = 100_000
"""Shortest slice that the kernel grants, in ns."""
DEFAULT = 0
"""The kernel's default slice."""
_FORMAT = "=IIQiIQQQII"
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, least and most utilisation."""
_OTHER, _BATCH = 0, 3


def set_slice(slice_ns: int) -> bool:
    """Set the slice of the calling thread and of threads that it starts; return whether the kernel accepted it.

    A kernel before 6.12 accepts it without effect.
    """
    attributes = _attributes()
    if attributes is None:
        return False
    size, policy, _, nice, *_ = attributes
    try:
        system_call("sched_setattr", 0, struct.pack(_FORMAT, size, policy, 0, nice, 0, slice_ns, 0, 0, 0, 0), 0)
    except OSError:
        return False
    return True


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
    found = create_string_buffer(struct.calcsize(_FORMAT))
    try:
        system_call("sched_getattr", thread, found, len(found), 0)
    except OSError:
        return None
    attributes = struct.unpack(_FORMAT, found.raw)
    return attributes if attributes[1] in (_OTHER, _BATCH) else None
