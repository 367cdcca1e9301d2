"""Tensors in memory that two processes share.

A buffer is an anonymous file (memfd) that both processes map; without a name, it is freed when both have ended. A seal
prevents shrinking: neither side can truncate the file below the other's mapping. Pages that recent launches did not
need are returned to the system as a hole in the file, which reads as zeros.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import ml_dtypes
import msgspec
import numpy as np

from cotenant import linux
from cotenant.errors import CotenantError
from cotenant.execute.runner import RowChunks, joined
from cotenant.shortages import Resource, report

MOST_BYTES = 2 << 30
"""Largest size of a buffer: the inputs, or the outputs, of one launch."""
_LEAST_BYTES = 64 << 10
_KEPT_BYTES = 1 << 20
"""Reserved pages up to this size are kept."""
_CALM_WRITES = 16
"""After so many consecutive writes that each need less than a quarter of the reserved pages, the rest is returned."""
_ALIGNMENT = 64
OBJECTS = "O"
"""The dtype of a BYTES tensor."""
_PLAIN_KINDS = "biufc"
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
"""An extension of numpy; numpy's own name for it is that of untyped two-byte elements."""
_KEPT_FORMS = 32
"""Number of layouts that a buffer remembers; then it starts again."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class SharedMemoryError(CotenantError):
    """Tensors do not fit into shared memory, or a layout names bytes outside of it."""


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """The position of a tensor in a buffer. `dtype` is numpy's name with the byte order, "bfloat16", or "O" for BYTES.

    BYTES are the lengths of the elements as int64, in row-major order, then the elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SharedBuffer:
    """One side's view of a buffer. One side writes and enlarges it, the other reads; they alternate."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._size = 0
        self._reserved = 0
        """Bytes with reserved pages, from the start; for the writing side."""
        self._calm = self._calm_most = 0
        """Consecutive small writes, and the largest of them in bytes."""
        self._memory: mmap.mmap | None = None
        # Most launches have a layout of an earlier one: layouts are kept.
        self._written: dict[tuple[Any, ...], tuple[tuple[TensorLayout, ...], list[Any], int]] = {}
        self._seen: dict[tuple[TensorLayout, ...], dict[str, Any]] = {}

    @classmethod
    def create(cls, name: str) -> SharedBuffer:
        """A new, empty buffer; `name` is only visible in /proc."""
        return cls(linux.anonymous_file(name))

    def write(self, tensors: RowChunks) -> tuple[TensorLayout, ...]:
        """Write tensors from the start of the buffer, replacing its content.

        Raises SharedMemoryError when they do not fit, ValueError when the chunks of a tensor do not fit each other.
        """
        form = tuple([(name, *_form(chunks)) for name, chunks in tensors.items()])
        known = self._written.get(form)
        if known is not None:
            for place, chunks in zip(known[1], tensors.values(), strict=True):
                _fill(place, chunks)
            self._give_back(known[2])
            return known[0]
        layouts: list[TensorLayout] = []
        contents: list[Any] = []
        at = 0
        for name, chunks in tensors.items():
            first = chunks[0]
            if (dtype := dtype_name(first.dtype)) != OBJECTS:
                shape = _form(chunks)[1]
                size = math.prod(shape) * first.dtype.itemsize
                layouts.append(TensorLayout(name, dtype, shape, at, size))
                contents.append(chunks)
            else:
                whole = joined(chunks)
                packed = pack(whole)
                layouts.append(TensorLayout(name, OBJECTS, whole.shape, at, len(packed)))
                contents.append(packed)
            at += -(-layouts[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = self._room(max(at, 1))
        targets: list[Any] = []
        for layout, content in zip(layouts, contents, strict=True):
            if layout.dtype == OBJECTS:
                memory[layout.offset : layout.offset + layout.nbytes] = content
                continue
            target: Any = np.ndarray(layout.shape, dtype_of(layout.dtype), memory, layout.offset)
            _fill(target, content)
            targets.append(target)
        if len(targets) == len(form):
            _keep(self._written, form, (tuple(layouts), targets, at))
        self._give_back(at)
        return tuple(layouts)

    def read(self, layouts: tuple[TensorLayout, ...], *, copy: bool) -> dict[str, Any]:
        """The tensors of these layouts: copies, or (not `copy`) views that the next write changes.

        Raises SharedMemoryError when a layout is outside of the buffer.
        """
        if not layouts:
            return {}
        views = self._seen.get(layouts)
        if views is None:
            memory = self._mapped(max(layout.offset + layout.nbytes for layout in layouts))
            views = {layout.name: _read(memory, layout) for layout in layouts}
            if all(layout.dtype != OBJECTS for layout in layouts):
                _keep(self._seen, layouts, views)
        return copied(views) if copy else dict(views)

    def close(self) -> None:
        """Close the buffer; its memory is freed with the last view."""
        self._memory = None
        self._written.clear()
        self._seen.clear()
        os.close(self.descriptor)

    def _room(self, needed: int) -> mmap.mmap:
        """Memory for so many bytes. Reserves pages now: a later shortage would be a signal instead of an error."""
        if needed > self._reserved:
            if needed > MOST_BYTES:
                raise SharedMemoryError(f"tensors of one launch take {needed} bytes, expected at most {MOST_BYTES}")
            size = _size_for(needed)
            try:
                os.posix_fallocate(self.descriptor, 0, size)
            except OSError as error:
                report(Resource.MEMORY, f"a launch with tensors of {needed} bytes fails")
                raise SharedMemoryError(f"no shared memory of {size} bytes is left ({error.strerror})") from None
            self._reserved = size
        return self._mapped(needed)

    def _give_back(self, needed: int) -> None:
        """Count a write of so many bytes, and return the pages that recent writes did not need."""
        if self._reserved <= _KEPT_BYTES:
            return
        if needed * 4 > self._reserved:
            self._calm = self._calm_most = 0
            return
        self._calm += 1
        self._calm_most = max(self._calm_most, needed)
        if self._calm < _CALM_WRITES:
            return
        kept = max(_KEPT_BYTES, _size_for(self._calm_most))
        self._calm = self._calm_most = 0
        if not linux.free_pages(self._mapped(needed), kept, self._reserved - kept):
            return
        self._reserved = kept
        self._written = {form: known for form, known in self._written.items() if known[2] <= kept}

    def _mapped(self, needed: int) -> mmap.mmap:
        if self._memory is None or needed > self._size:
            size = os.fstat(self.descriptor).st_size
            if needed > size or size == 0:
                raise SharedMemoryError(f"a tensor ends at byte {needed} of a buffer of {size}")
            self._memory = mmap.mmap(self.descriptor, size)
            self._size = size
        return self._memory


def _size_for(needed: int) -> int:
    return max(_LEAST_BYTES, 1 << (needed - 1).bit_length())


def _form(chunks: Sequence[Any]) -> tuple[Any, tuple[int, ...]]:
    """The dtype and shape of the joined chunks."""
    first = chunks[0]
    return first.dtype, first.shape if len(chunks) == 1 else (sum(map(len, chunks)), *first.shape[1:])


def _fill(target: Any, chunks: Sequence[Any]) -> None:
    if len(chunks) == 1:
        target[...] = chunks[0]
    else:
        np.concatenate(chunks, out=target)


def _keep(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    if len(known) >= _KEPT_FORMS:
        known.clear()
    known[key] = value


def _read(memory: mmap.mmap, layout: TensorLayout) -> Any:
    """A view of numbers, or an array of BYTES."""
    if layout.dtype == OBJECTS:
        return unpack(memory[layout.offset : layout.offset + layout.nbytes], layout.shape)
    dtype = dtype_of(layout.dtype)
    if math.prod(layout.shape) * dtype.itemsize != layout.nbytes:
        raise SharedMemoryError(f"tensor {layout.name!r} of shape {layout.shape} does not take {layout.nbytes} bytes")
    return np.ndarray(layout.shape, dtype, memory, layout.offset)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype in TensorLayout."""
    if dtype.kind in _PLAIN_KINDS:
        return dtype.str
    return dtype.name if dtype == _BFLOAT16 else OBJECTS


@functools.lru_cache(maxsize=64)
def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of a tensor of numbers, by its name in TensorLayout."""
    return _BFLOAT16 if name == _BFLOAT16.name else np.dtype(name)


def pack(array: Any) -> bytes:
    """A BYTES tensor as in TensorLayout; text is UTF-8."""
    items = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel()]
    return np.fromiter(map(len, items), np.int64, len(items)).tobytes() + b"".join(items)


def unpack(data: bytes, shape: tuple[int, ...]) -> Any:
    """Inverse of `pack`."""
    count = math.prod(shape)
    ends = np.cumsum(np.frombuffer(data, np.int64, count)) + 8 * count
    array = np.empty(count, np.object_)
    at = 8 * count
    for index, end in enumerate(ends.tolist()):
        array[index] = data[at:end]
        at = end
    return array.reshape(shape)


def copied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of views."""
    return {name: array.copy() for name, array in tensors.items()}
