"""Memory of compiled models: packed weights, and what a run writes."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from cotenant.compile.packing import Array

_HUGE_PAGE = 2 << 20


def floats(count: int) -> Array:
    """Zeros that begin at a huge page, on huge pages where the system has them."""
    size = 4 * count + _HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
    raw: Any = np.frombuffer(memory, np.uint8)
    at = -raw.ctypes.data % _HUGE_PAGE
    made: Array = raw[at : at + 4 * count].view(np.float32)
    return made


def packed(arrays: list[Array]) -> list[Array]:
    """Copies that lie behind each other in one piece of memory, each where vectors may begin."""
    memory = floats(sum(-(-each.size // 16) * 16 for each in arrays))
    made, at = [], 0
    for each in arrays:
        made.append(memory[at : at + each.size])
        made[-1][...] = each.ravel()
        at += -(-each.size // 16) * 16
    return made
