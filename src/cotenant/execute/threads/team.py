"""The cores of a run that can be expanded while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Call = Callable[[Sequence[int]], object]
"""Lets threads on these cores join a run; quick, may be called from any thread."""


class Team:
    """The cores that a run may use, the caller's first. Thread-safe."""

    def __init__(self, cores: tuple[int, ...]) -> None:
        self._cores = cores
        self._call: Call | None = None
        self._lock = threading.Lock()

    @property
    def cores(self) -> tuple[int, ...]:
        """The present cores."""
        return self._cores

    def expand(self, cores: Sequence[int]) -> None:
        """Add cores, to the run under way and to later runs of this team."""
        with self._lock:
            new = tuple(core for core in cores if core not in self._cores)
            self._cores += new
            if new and self._call is not None:
                self._call(new)

    @contextmanager
    def at_work(self, call: Call) -> Iterator[tuple[int, ...]]:
        """Yields the cores to begin with; until the context ends, `call` gets cores that are added."""
        with self._lock:
            self._call = call
            cores = self._cores
        try:
            yield cores
        finally:
            with self._lock:
                self._call = None
