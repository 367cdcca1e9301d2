"""Tensors of many queries in one memory that two processes share: one writes them, the other reads them in place."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from cotenant.errors import CotenantError
from cotenant.execute.worker.shared_tensors import OBJECTS, TensorLayout, dtype_name, dtype_of, pack, unpack
from cotenant.serve.link.blocks import Blocks
from cotenant.shortages import Resource, report

CAPACITY_BYTES = 8 << 30
"""Of address space: memory is taken for what is in use alone."""
INLINE_BYTES = 256
"""Tensors that take no more than this together go with the message: that costs less than a block."""
_ALIGNMENT = 64
_KEPT_BYTES = 64 << 20
"""Free memory that an arena keeps for the next queries; beyond, the pages of large blocks go back at once."""
_LARGE_BYTES = 256 << 10
_MOST_FORMS = 256
_INLINE = -1

Tensors = Mapping[str, npt.NDArray[Any]]
_Form = tuple[tuple[str, Any, tuple[int, ...]], ...]


class ArenaFullError(CotenantError):
    """The tensors of the queries that are under way leave no room for another one."""


class TensorPlace(Struct, frozen=True, array_like=True, gc=False):
    """Where tensors lie: in a block of the arena, or, where `block` is -1, in `inline`. Offsets count from there."""

    layouts: tuple[TensorLayout, ...] = ()
    block: int = _INLINE
    nbytes: int = 0
    inline: bytes = b""


class Arena:
    """The writing side. The memory is an anonymous file that goes with the last process that has it. Not thread-safe.

    Raises OSError when the system gives no such file.
    """

    def __init__(self, name: str, capacity: int = CAPACITY_BYTES) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, capacity)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._memory = mmap.mmap(self.descriptor, capacity)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._blocks = Blocks(capacity)
        self._known: dict[_Form, tuple[tuple[TensorLayout, ...], int]] = {}

    @property
    def used(self) -> int:
        """Bytes of the blocks in use."""
        return self._blocks.used

    @property
    def resident(self) -> int:
        """Bytes of memory that the arena takes."""
        return os.fstat(self.descriptor).st_blocks * 512

    def write(self, tensors: Tensors) -> TensorPlace:
        """Put tensors where the other side reads them. Raises ArenaFullError."""
        form = tuple([(name, array.dtype, array.shape) for name, array in tensors.items()])
        known = self._known.get(form)
        packed: dict[str, bytes] = {}
        if known is None:
            known = self._laid_out(form, tensors, packed)
        layouts, total = known
        if total <= INLINE_BYTES:
            return TensorPlace(layouts, _INLINE, total, _inline(layouts, tensors, packed, total))
        block = self._block(total)
        memory = self._memory
        for layout in layouts:
            at = block + layout.offset
            if layout.dtype == OBJECTS:
                memory[at : at + layout.nbytes] = packed[layout.name]
            elif layout.nbytes:
                array = tensors[layout.name]
                np.ndarray(array.shape, array.dtype, memory, at)[...] = array
        return TensorPlace(layouts, block, total)

    def free(self, block: int) -> None:
        """The other side has let go of a block; any other number is ignored."""
        try:
            size = self._blocks.size(block)
        except KeyError:
            return
        self._blocks.give_back(block)
        if size >= _LARGE_BYTES and self.resident > self._blocks.used + _KEPT_BYTES:
            self._memory.madvise(mmap.MADV_REMOVE, block, size)

    def close(self) -> None:
        """Let go of the memory; what the other side reads of it stays until it lets go, too. Safe to repeat."""
        self._close()
        self._memory.close()  # no array of this side stays; those of a reader would not hold it open

    def _laid_out(
        self, form: _Form, tensors: Tensors, packed: dict[str, bytes]
    ) -> tuple[tuple[TensorLayout, ...], int]:
        layouts, at = [], 0
        for name, dtype, shape in form:
            if (dtype_text := dtype_name(dtype)) == OBJECTS:
                packed[name] = pack(tensors[name])
                size = len(packed[name])
            else:
                size = math.prod(shape) * dtype.itemsize
            layouts.append(TensorLayout(name, dtype_text, shape, at, size))
            at += size if size <= _ALIGNMENT else -(-size // _ALIGNMENT) * _ALIGNMENT
            at = -(-at // 8) * 8
        made = tuple(layouts), at
        if not packed:
            if len(self._known) >= _MOST_FORMS:
                self._known.clear()
            self._known[form] = made
        return made

    def _block(self, needed: int) -> int:
        block = self._blocks.take(needed)
        if block is None:
            raise ArenaFullError("the tensors of the queries under way leave no room for this one: try again later")
        try:  # a lack of pages would be a signal later
            os.posix_fallocate(self.descriptor, block, needed)
        except OSError as error:
            self._blocks.give_back(block)
            report(Resource.MEMORY, f"a query with tensors of {needed} bytes is refused")
            raise ArenaFullError(f"no shared memory of {needed} bytes is left ({error.strerror})") from None
        return block


class ArenaReader:
    """The reading side. `on_free` is told of each block, from any thread, once nothing here looks into it any more.

    Raises OSError when the memory cannot be mapped.
    """

    def __init__(self, descriptor: int, on_free: Callable[[int], None]) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._size = len(self._memory)
        self._on_free = on_free
        self._held: dict[int, weakref.ref[Any]] = {}

    def read(self, place: TensorPlace) -> dict[str, Any]:
        """The tensors of a place, as views where they are numbers. Raises CotenantError where it lies outside."""
        if place.block == _INLINE:
            return {each.name: _view(place.inline, len(place.inline), each) for each in place.layouts}
        if not 0 <= place.block <= place.block + place.nbytes <= self._size:
            raise CotenantError(f"a block of {place.nbytes} bytes at {place.block} is outside of the shared memory")
        owner = np.ndarray((place.nbytes,), np.uint8, self._memory, place.block)
        owner.flags.writeable = False
        block, held, on_free = place.block, self._held, self._on_free

        def let_go(_: object) -> None:
            held.pop(block, None)
            on_free(block)

        held[block] = weakref.ref(owner, let_go)  # all views have it as their base
        return {each.name: _view(owner, place.nbytes, each) for each in place.layouts}

    @property
    def held(self) -> int:
        """How many blocks something looks into."""
        return len(self._held)


def _view(memory: Any, size: int, layout: TensorLayout) -> Any:
    if layout.offset < 0 or layout.offset + layout.nbytes > size:
        raise CotenantError(f"tensor {layout.name!r} lies outside of its block")
    if layout.dtype == OBJECTS:
        return unpack(bytes(memory[layout.offset : layout.offset + layout.nbytes]), layout.shape)
    try:
        return np.ndarray(layout.shape, dtype_of(layout.dtype), memory, layout.offset)
    except (TypeError, ValueError) as error:
        raise CotenantError(f"tensor {layout.name!r} lies outside of its block ({error})") from None


def _inline(layouts: Sequence[TensorLayout], tensors: Tensors, packed: Mapping[str, bytes], total: int) -> bytes:
    pieces, at = [], 0
    for layout in layouts:
        pieces.append(bytes(layout.offset - at))
        pieces.append(packed[layout.name] if layout.dtype == OBJECTS else tensors[layout.name].tobytes())
        at = layout.offset + layout.nbytes
    return b"".join(pieces)


class FreedBlocks:
    """Blocks that the reading side has let go of, and has not told of. Thread-safe; `wake` is called for the first."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._blocks: deque[int] = deque()
        self._wake = wake
        self._is_woken = False

    def add(self, block: int) -> None:
        """A block is let go of."""
        self._blocks.append(block)
        if not self._is_woken:
            self._is_woken = True
            self._wake()

    def taken(self) -> list[int]:
        """All of them, once."""
        self._is_woken = False  # first: whatever is added from now on wakes again
        found = []
        while self._blocks:
            found.append(self._blocks.popleft())
        return found
