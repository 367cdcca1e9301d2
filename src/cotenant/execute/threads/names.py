"""How the threads of a run are named."""

from __future__ import annotations

Threads = int | tuple[int, ...]
"""How many threads compute, or the cores they run on: the caller sits on the first, a pool on the others."""


def thread_count(threads: Threads) -> int:
    """How many there are. Raises ValueError when there are none, or a core is listed twice."""
    if isinstance(threads, int):
        if threads < 1:
            raise ValueError(f"threads is {threads}, expected 1 or more, or a tuple of cores")
        return threads
    if not threads or len(set(threads)) != len(threads) or min(threads) < 0:
        raise ValueError(f"threads is {threads}, expected different core numbers of 0 or more, at least one")
    return len(threads)
