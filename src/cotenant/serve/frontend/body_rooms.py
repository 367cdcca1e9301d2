"""Memory pool for request bodies."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import numpy as np

ALIGNMENT = 16
"""Alignment of system memory in bytes."""
_LARGE_BYTES = 64 << 10
_KEPT_BYTES = 64 << 20
_ALONE = 3
"""Reference count of unused memory: the pool, the loop variable and the argument of `getrefcount`."""


class BodyRooms:
    """Allocator of memory for bodies; large memory is reused once no object refers to it. The system clears fresh
    memory page by page, which takes longer than reading a body into it. For one event loop, not thread-safe."""

    def __init__(self) -> None:
        self._kept: deque[Any] = deque()
        self._kept_bytes = 0

    def room(self, nbytes: int, tensors_at: int = 0) -> memoryview:
        """Allocate uninitialised memory for a body of `nbytes`. The first binary tensor, at offset `tensors_at`, is
        aligned for all number types, so it needs no copy."""
        before = -tensors_at % ALIGNMENT
        needed = before + nbytes
        memory = np.empty(needed, np.uint8) if needed < _LARGE_BYTES else self._large(needed)
        view: memoryview = memory.data[before:needed]
        return view

    def _large(self, needed: int) -> Any:
        for each in self._kept:
            if needed <= each.nbytes <= 2 * needed and sys.getrefcount(each) == _ALONE:
                return each
        made = np.empty(needed, np.uint8)
        self._kept.append(made)
        self._kept_bytes += needed
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= self._kept.popleft().nbytes
        return made
