"""The cores of a run that may become more while it goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Call = Callable[[Sequence[int]], object]
"""Has the threads of these cores join what runs; quick, from any thread."""


class Team:
    """The cores that a run may use, the caller's first. Thread-safe."""

    def __init__(self, cores: tuple[int, ...]) -> None:
        self._cores = cores
        self._call: Call | None = None
        self._lock = threading.Lock()

    @property
    def cores(self) -> tuple[int, ...]:
        """Those that are in it by now."""
        return self._cores

    def expand(self, cores: Sequence[int]) -> None:
        """Take these in as well: into what runs now, and into all that it runs from here on."""
        with self._lock:
            new = tuple(core for core in cores if core not in self._cores)
            self._cores += new
            if new and self._call is not None:
                self._call(new)

    @contextmanager
    def at_work(self, call: Call) -> Iterator[tuple[int, ...]]:
        """Gives the cores to begin with; `call` is told of those that come until this ends."""
        with self._lock:
            self._call = call
            cores = self._cores
        try:
            yield cores
        finally:
            with self._lock:
                self._call = None
