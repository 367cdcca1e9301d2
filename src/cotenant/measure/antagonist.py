"""An antagonist: a process on one core that only copies memory, and reports how much.

It is the neighbour with the largest memory traffic. The slowdown of a model beside it bounds the slowdown beside
another model. Several antagonists together draw the bandwidth of the machine.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

import numpy as np

from cotenant.errors import CotenantError
from cotenant.linux import pin

ARRAY_BYTES = 256 << 20
"""Bytes of the arrays; far larger than the last-level cache."""
CANARY_BYTES = 48 << 20
"""Bytes of a canary, which stays in a server: large enough that each chunk has left the cache before its next copy."""
CHUNK_BYTES = 4 << 20
"""Bytes copied between two checks for orders; takes less than a millisecond."""
WINDOW_S = 0.5
ROUNDS = 5
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Streamed:
    """Bytes that an antagonist moved, and its processor time. A copied byte counts twice: read and written.

    Processor time includes waits for the memory, but not time that other processes took from the core.
    """

    bytes: int
    cpu_ns: int

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth that it drew while it had the core."""
        return self.bytes * 1e9 / max(1, self.cpu_ns)


class Antagonist:
    """Handle of one antagonist, which is idle between `stop` and `start`. Made by `antagonists`."""

    def __init__(self, core: int, array_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.core = core
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_copy, args=(far, core, array_bytes), daemon=True)
        self._process.start()
        far.close()
        self._ask(None, "ready")

    def start(self) -> None:
        """Start copying; returns when it copies. Raises CotenantError when the process has died."""
        self._ask("start", "started")

    def stop(self) -> Streamed:
        """Stop copying; returns the amount since `start`. Raises CotenantError when the process has died."""
        return Streamed(*self._ask("stop", "stopped"))

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(_ANSWER_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, order: str | None, kind: str) -> tuple[int, int]:
        try:
            if order is not None:
                self._pipe.send(order)
            if self._pipe.poll(_ANSWER_S):
                said, moved, cpu_ns = self._pipe.recv()
                if said == kind:
                    return moved, cpu_ns
        except (EOFError, OSError):
            pass
        raise CotenantError(f"the antagonist on core {self.core} has died: is there memory for it?")


@contextmanager
def antagonists(cores: Sequence[int], array_bytes: int = ARRAY_BYTES) -> Iterator[list[Antagonist]]:
    """One idle antagonist for each core, until the block ends. Each takes twice `array_bytes` of memory."""
    with ExitStack() as stack:
        made = []
        for core in cores:
            each = Antagonist(core, array_bytes)
            stack.callback(each.close)
            made.append(each)
        yield made


@contextmanager
def streaming(those: Sequence[Antagonist]) -> Iterator[list[Streamed]]:
    """These antagonists copy inside the block; after it, the list has the amount of each."""
    moved: list[Streamed] = []
    for each in those:
        each.start()
    try:
        yield moved
    finally:
        moved.extend([each.stop() for each in those])


def measure_bandwidth(
    cores: Sequence[int], *, window_s: float = WINDOW_S, rounds: int = ROUNDS, array_bytes: int = ARRAY_BYTES
) -> tuple[int, ...]:
    """Bytes per second drawn by copying on one core, two, ... and all of `cores`: medians over rounds.

    Core counts are measured alternately, so that a slow phase of the machine affects all of them.
    """
    samples: list[list[float]] = [[] for _ in cores]
    with antagonists(cores, array_bytes) as those:
        for _ in range(rounds):
            for count in range(1, len(those) + 1):
                with streaming(those[:count]) as moved:
                    time.sleep(window_s)
                samples[count - 1].append(sum(each.bytes_per_s for each in moved))
    return tuple(max(1, round(median(values))) for values in samples)


class CopiedMemory:
    """Memory that is copied chunk by chunk, cyclically."""

    def __init__(self, array_bytes: int) -> None:
        self._source = np.ones(array_bytes, np.uint8)
        self._target = np.zeros(array_bytes, np.uint8)  # written below before it is timed: its pages are there then
        self._at = 0
        np.copyto(self._target, self._source)

    def copy(self) -> int:
        """Copy a chunk; returns the number of bytes moved."""
        start, end = self._at, min(self._at + CHUNK_BYTES, len(self._source))
        np.copyto(self._target[start:end], self._source[start:end])
        self._at = end % len(self._source)
        return 2 * (end - start)


class Canary:
    """A short memory-bound computation: its time rises with the memory traffic of other launches."""

    def __init__(self, array_bytes: int = CANARY_BYTES) -> None:
        self._memory = CopiedMemory(array_bytes)

    def ns(self) -> int:
        """Processor time of the calling thread for one chunk, about a quarter of a millisecond."""
        began = time.thread_time_ns()
        self._memory.copy()
        return time.thread_time_ns() - began


def _copy(pipe: Connection, core: int, array_bytes: int) -> None:
    pin((core,))
    memory = CopiedMemory(array_bytes)
    pipe.send(("ready", 0, 0))
    try:
        while pipe.recv() == "start":
            moved = 0
            began = time.thread_time_ns()
            pipe.send(("started", 0, 0))
            while not pipe.poll():
                moved += memory.copy()
            cpu_ns = time.thread_time_ns() - began
            pipe.recv()
            pipe.send(("stopped", moved, cpu_ns))
    except (EOFError, KeyboardInterrupt):
        return
