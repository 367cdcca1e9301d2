"""An antagonist: a process on one core that does nothing but copy memory, and says how much it has copied.

It is the neighbour that uses the memory most. What a model loses beside it bounds what it can lose beside another
model, and what several antagonists draw together is the bandwidth of the machine.
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
from cotenant.execute.threads.lanes import pin

ARRAY_BYTES = 256 << 20
"""Far larger than the last-level cache that a core can fill alone."""
CANARY_BYTES = 48 << 20
"""A canary stays in a server: it is as large as to be out of the cache when it comes round again."""
CHUNK_BYTES = 4 << 20
"""Copied between two looks at the orders: less than a millisecond on the machines of today."""
WINDOW_S = 0.5
ROUNDS = 5
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Streamed:
    """What an antagonist moved, and the processor time that it had. A byte copied counts twice: read, and written.

    Processor time includes waiting for the memory, and leaves out what others took of the core.
    """

    bytes: int
    cpu_ns: int

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth that it drew while it had the core."""
        return self.bytes * 1e9 / max(1, self.cpu_ns)


class Antagonist:
    """Handle of one antagonist; it is idle between `stop` and `start`. Made by `antagonists`."""

    def __init__(self, core: int, array_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.core = core
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_copy, args=(far, core, array_bytes), daemon=True)
        self._process.start()
        far.close()
        self._ask(None, "ready")

    def start(self) -> None:
        """Copy from now on; it is under way when this returns. Raises CotenantError when the process has died."""
        self._ask("start", "started")

    def stop(self) -> Streamed:
        """Copy no more; say what was copied since `start`. Raises CotenantError when the process has died."""
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
    """One idle antagonist a core, until the block ends. Each takes twice `array_bytes` of memory."""
    with ExitStack() as stack:
        made = []
        for core in cores:
            each = Antagonist(core, array_bytes)
            stack.callback(each.close)
            made.append(each)
        yield made


@contextmanager
def streaming(those: Sequence[Antagonist]) -> Iterator[list[Streamed]]:
    """They copy inside the block; after it, the list holds what each has moved."""
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
    """Bytes per second that one core, two, ... and all of `cores` draw together, each copying: medians over rounds.

    The counts of cores take turns, so that a slow hour of the machine does not fall on one of them.
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
    """Memory that is copied chunk by chunk, round and round."""

    def __init__(self, array_bytes: int) -> None:
        self._source = np.ones(array_bytes, np.uint8)
        self._target = np.zeros(array_bytes, np.uint8)  # written below before it is timed: its pages are there then
        self._at = 0
        np.copyto(self._target, self._source)

    def copy(self) -> int:
        """Copy a chunk; how many bytes were moved."""
        start, end = self._at, min(self._at + CHUNK_BYTES, len(self._source))
        np.copyto(self._target[start:end], self._source[start:end])
        self._at = end % len(self._source)
        return 2 * (end - start)


class Canary:
    """A short piece of work that waits for the memory: it takes longer the more others use it."""

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
