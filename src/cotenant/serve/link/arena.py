"""Shared-memory arena for tensors: one process writes them, another process reads them in place."""

from __future__ import annotations

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

from cotenant import linux
from cotenant.errors import CotenantError
from cotenant.execute.worker.shared_tensors import OBJECTS, TensorLayout, dtype_name, dtype_of, pack, unpack
from cotenant.serve.link.blocks import Blocks
from cotenant.shortages import Resource, report

CAPACITY_BYTES = 8 << 30
"""Address space of an arena; only blocks in use take memory."""
INLINE_BYTES = 256
"""Tensors up to this total size travel inside the message, which costs less than a block."""
_ALIGNMENT = 64
_KEPT_BYTES = 64 << 20
"""Free memory that an arena keeps for reuse; above it, pages of large freed blocks return to the system."""
_LARGE_BYTES = 256 << 10
_MOST_FORMS = 256
_INLINE = -1

Tensors = Mapping[str, npt.NDArray[Any]]
_Form = tuple[tuple[str, Any, tuple[int, ...]], ...]


class ArenaFullError(CotenantError):
    """The tensors of live queries leave no room for another query."""


class TensorPlace(Struct, frozen=True, array_like=True, gc=False):
    """Location of tensors: a block of the arena, or `inline` if `block` is -1. Offsets are relative to it."""

    layouts: tuple[TensorLayout, ...] = ()
    block: int = _INLINE
    nbytes: int = 0
    inline: bytes = b""


class Arena:
    """Writing side of an arena in an anonymous file (memfd), which ends with its last process. Not thread-safe. Raises
    OSError when the system refuses the file."""

    def __init__(self, name: str, capacity: int = CAPACITY_BYTES) -> None:
        self.descriptor = linux.anonymous_file(name, capacity)
        try:
            self._memory = mmap.mmap(self.descriptor, capacity)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._blocks = Blocks(capacity)
        self._known: dict[_Form, tuple[tuple[TensorLayout, ...], int]] = {}

    @property
    def used(self) -> int:
        """Bytes of blocks in use."""
        return self._blocks.used

    @property
    def resident(self) -> int:
        """Resident bytes of the arena."""
        return os.fstat(self.descriptor).st_blocks * 512

    def write(self, tensors: Tensors) -> TensorPlace:
        """Write tensors for the other side to read. Raises ArenaFullError."""
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
        """Free a block that the other side has released; unknown offsets are ignored."""
        try:
            size = self._blocks.size(block)
        except KeyError:
            return
        self._blocks.give_back(block)
        if size >= _LARGE_BYTES and self.resident > self._blocks.used + _KEPT_BYTES:
            linux.free_pages(self._memory, block, size)

    def close(self) -> None:
        """Unmap the memory; the other side's mapping stays valid. Safe to repeat."""
        self._close()
        self._memory.close()  # this side keeps no array of it

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
            raise ArenaFullError(
                "shared memory is full: the tensors of live queries leave no room for this one; try again later"
            )
        try:  # without it, a lack of pages would raise SIGBUS later
            os.posix_fallocate(self.descriptor, block, needed)
        except OSError as error:
            self._blocks.give_back(block)
            report(Resource.MEMORY, f"a query with tensors of {needed} bytes is refused")
            raise ArenaFullError(
                f"the system has no {needed} bytes of shared memory ({error.strerror}); try again later"
            ) from None
        return block


class ArenaReader:
    """Reading side of an arena. `on_free` is called, on any thread, when no array refers to a block any more. Raises
    OSError when the memory cannot be mapped."""

    def __init__(self, descriptor: int, on_free: Callable[[int], None]) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._size = len(self._memory)
        self._on_free = on_free
        self._held: dict[int, weakref.ref[Any]] = {}

    def read(self, place: TensorPlace) -> dict[str, Any]:
        """Return the tensors at a place; numeric ones as views. Raises CotenantError if it is outside the arena."""
        if place.block == _INLINE:
            return {each.name: _view(place.inline, len(place.inline), each) for each in place.layouts}
        if not 0 <= place.block <= place.block + place.nbytes <= self._size:
            raise CotenantError(f"a block of {place.nbytes} bytes at {place.block} is outside of the shared memory")
        owner = np.ndarray((place.nbytes,), np.uint8, self._memory, place.block)
        owner.flags.writeable = False
        block, held, on_free = place.block, self._held, self._on_free

        def freed(_: object) -> None:
            held.pop(block, None)
            on_free(block)

        held[block] = weakref.ref(owner, freed)  # the base of all views
        return {each.name: _view(owner, place.nbytes, each) for each in place.layouts}

    @property
    def held(self) -> int:
        """Number of blocks to which arrays refer."""
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
    chunks, at = [], 0
    for layout in layouts:
        chunks.append(bytes(layout.offset - at))
        chunks.append(packed[layout.name] if layout.dtype == OBJECTS else tensors[layout.name].tobytes())
        at = layout.offset + layout.nbytes
    return b"".join(chunks)


class FreedBlocks:
    """Blocks that the reading side has freed and not reported yet. Thread-safe; `wake` is called for the first."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._blocks: deque[int] = deque()
        self._wake = wake
        self._is_woken = False

    def add(self, block: int) -> None:
        """Add a freed block."""
        self._blocks.append(block)
        if not self._is_woken:
            self._is_woken = True
            self._wake()

    def taken(self) -> list[int]:
        """Remove and return all blocks."""
        self._is_woken = False  # before the blocks are taken, so that later ones wake again
        found = []
        while self._blocks:
            found.append(self._blocks.popleft())
        return found
