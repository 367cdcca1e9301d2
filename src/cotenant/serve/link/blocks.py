"""Buddy allocator for shared memory (Knuth, The Art of Computer Programming, volume 1, section 2.5)."""

from __future__ import annotations

LEAST_BYTES = 4096
"""The smallest block: a page."""
_MOST_READY = 64
"""Free blocks of one size that stay unmerged: most queries need a block size that was just freed."""


class Blocks:
    """Allocator of blocks of `LEAST_BYTES * 2**n` from `capacity` bytes, a size of the same form.

    It manages offsets and does not touch memory. Not thread-safe. Raises ValueError for any other capacity.
    """

    def __init__(self, capacity: int) -> None:
        self._top = (capacity // LEAST_BYTES).bit_length() - 1
        if LEAST_BYTES << self._top != capacity:
            raise ValueError(f"a capacity of {capacity} bytes, expected a power of two of pages of {LEAST_BYTES} bytes")
        self._free: list[set[int]] = [set() for _ in range(self._top + 1)]
        self._free[self._top].add(0)
        self._ready: list[list[int]] = [[] for _ in range(self._top + 1)]
        self._orders: dict[int, int] = {}
        """Orders `n` of the blocks in use, by offset."""
        self.used = 0
        """Bytes of blocks in use."""

    def __len__(self) -> int:
        return len(self._orders)

    def take(self, needed: int) -> int | None:
        """Allocate a block of at least `needed` bytes; returns its offset, None if there is none."""
        order = max(0, (needed - 1) // LEAST_BYTES).bit_length()
        if order > self._top:
            return None
        if self._ready[order]:
            offset = self._ready[order].pop()
        else:
            found = self._split(order)
            if found is None:
                self._merge_ready()
                found = self._split(order)
            if found is None:
                return None
            offset = found
        self._orders[offset] = order
        self.used += LEAST_BYTES << order
        return offset

    def size(self, offset: int) -> int:
        """Size in bytes of the block at `offset`. Raises KeyError for an unknown offset."""
        return LEAST_BYTES << self._orders[offset]

    def give_back(self, offset: int) -> None:
        """Free the block at `offset`. Raises KeyError for an unknown offset."""
        order = self._orders.pop(offset)
        self.used -= LEAST_BYTES << order
        if len(self._ready[order]) < _MOST_READY:
            self._ready[order].append(offset)
        else:
            self._merge(offset, order)

    def _split(self, order: int) -> int | None:
        at = next((each for each in range(order, self._top + 1) if self._free[each]), None)
        if at is None:
            return None
        offset = self._free[at].pop()
        while at > order:
            at -= 1
            self._free[at].add(offset + (LEAST_BYTES << at))
        return offset

    def _merge(self, offset: int, order: int) -> None:
        while order < self._top and (buddy := offset ^ (LEAST_BYTES << order)) in self._free[order]:
            self._free[order].remove(buddy)
            offset = min(offset, buddy)
            order += 1
        self._free[order].add(offset)

    def _merge_ready(self) -> None:
        for order, offsets in enumerate(self._ready):
            while offsets:
                self._merge(offsets.pop(), order)
