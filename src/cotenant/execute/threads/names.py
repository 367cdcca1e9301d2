"""Threads of a run: a number, or the cores that they are pinned to."""

from __future__ import annotations

Threads = int | tuple[int, ...]
"""Number of threads, or the cores that they run on: the caller is on the first, a thread pool on the others."""


def thread_count(threads: Threads) -> int:
    """The number of threads. Raises ValueError when it is 0, or a core is listed twice."""
    if isinstance(threads, int):
        if threads < 1:
            raise ValueError(f"threads is {threads}, expected 1 or more, or a tuple of cores")
        return threads
    if not threads or len(set(threads)) != len(threads) or min(threads) < 0:
        raise ValueError(f"threads is {threads}, expected different core numbers of 0 or more, at least one")
    return len(threads)
