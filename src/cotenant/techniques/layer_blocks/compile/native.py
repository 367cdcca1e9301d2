"""Bindings to compiled code: steps in memory, libraries, teams of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.techniques.layer_blocks.compile.ckernel.dense import KERNEL
from cotenant.techniques.layer_blocks.compile.ckernel.prelude import NUMBERS, POINTERS
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.packing import Array

ALIGNMENT = 64
MOVES = ("pixels_in", "blocks_in", "blocks_out", "rows_in", "pool", "mean", "copy", "apply", "add", "multiply", "scale")


class KernelStep(ctypes.Structure):
    """The C struct `step` of `ckernel.prelude.STEP`."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("p", ctypes.c_void_p * POINTERS),
        ("n", ctypes.c_long * NUMBERS),
        ("f", ctypes.c_float * 4),
    )


def aligned(count: int) -> Array:
    """Zeros, aligned for vectors."""
    raw = np.zeros(4 * count + ALIGNMENT, np.uint8)
    at = -raw.ctypes.data % ALIGNMENT
    return raw[at : at + 4 * count].view(np.float32)


def aligned_copy(values: Array) -> Array:
    """A copy, aligned for vectors."""
    made = aligned(values.size).reshape(values.shape)
    made[...] = values
    return made


def address(library: ctypes.CDLL, name: str = KERNEL) -> int:
    """Address of a function in a library."""
    return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)


def load(path: Path) -> ctypes.CDLL:
    """Load a library. Raises CompileError when it cannot be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(f"{path} cannot be loaded ({error}); remove it and run cotenant compile again") from error


class Runtime:
    """The library of `ckernel.runtime`, which runs steps. Thread-safe."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.moves = {name: address(library, name) for name in MOVES}
        self._library = library
        library.new_block.restype = ctypes.c_void_p
        pointer, long = ctypes.c_void_p, ctypes.c_long
        library.run_block.argtypes = (pointer, pointer, long, pointer, long, long)
        library.run_block.restype = long
        library.open_block.argtypes = (pointer,)
        library.open_block.restype = None
        library.call_cores.argtypes = (pointer, pointer, long)
        library.call_cores.restype = long
        library.time_steps.argtypes = (pointer, long, long, pointer)
        library.time_steps.restype = long

    def block(self) -> int:
        """Memory for a running block of steps. It serves one run at a time and is never freed: reuse it."""
        made = self._library.new_block()
        if not made:
            raise MemoryError("a block of steps")
        return int(made)

    def run(
        self, block: int, steps: Any, first: int, last: int, others: Sequence[int] = (), *, wait: bool = False
    ) -> int:
        """Run steps [first, last) on this thread and those of other cores. Returns the most threads of one step.

        Other threads join once they run; with `wait` the first step starts when all have joined. A block runs once at a
        time. Raises CompileError, and runs nothing, if a step lacks its function, input or output.
        """
        cores = (ctypes.c_int * len(others))(*others)
        at = ctypes.addressof(steps) + first * ctypes.sizeof(KernelStep)
        most: int = self._library.run_block(block, at, last - first, cores, len(others), wait)
        _check_ready(most, first)
        return most

    def open(self, block: int) -> None:
        """Let cores be called to a block before it runs; called by the thread that will run it."""
        self._library.open_block(block)

    def call(self, block: int, cores: Sequence[int]) -> bool:
        """Let threads of these cores join a block that is open or runs; from any thread. False when it has ended."""
        held = (ctypes.c_int * len(cores))(*cores)
        return bool(self._library.call_cores(block, held, len(cores)))

    def cpu_ns(self, steps: Any, repeats: int = 1) -> list[int]:
        """Mean CPU time of each step in ns, over consecutive repeats on this thread.

        Raises CompileError, and runs nothing, if a step lacks its function, input or output.
        """
        found = (ctypes.c_long * len(steps))()
        _check_ready(self._library.time_steps(ctypes.addressof(steps), len(steps), repeats, found))
        return list(found)


def _check_ready(status: int, first: int = 0) -> None:
    """Raises CompileError for the negative status by which the library refuses a step."""
    if status < 0:
        raise CompileError(f"step {first - 1 - status} cannot run: it lacks its function, its input or its output")
