"""Memory for the bodies of requests."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import numpy as np

ALIGNMENT = 16
"""Bytes: that of memory as the system gives it."""
_LARGE_BYTES = 64 << 10
_KEPT_BYTES = 64 << 20
_ALONE = 3
"""References to memory that nothing looks into: that of the queue, of the loop over it, and of the call that counts."""


class BodyRooms:
    """Gives memory for bodies. That of large ones is used again once nothing looks into it: the system clears fresh
    memory page by page, which takes longer than to read a body into it. For one event loop, not thread-safe.
    """

    def __init__(self) -> None:
        self._kept: deque[Any] = deque()
        self._kept_bytes = 0

    def room(self, nbytes: int, tensors_at: int = 0) -> memoryview:
        """Memory for a body of so many bytes, in which the first binary tensor is aligned for numbers of all sizes: it
        need not be copied then. It is not cleared: a body is handed over once all of it has come."""
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
