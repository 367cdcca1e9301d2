"""CPU affinity of a supervisor's thread: it waits for completions on the cores of the lanes that run its launches.

A completion then finds it on a core that does not sleep and has just become free. In a virtual machine, waking another
core takes longer than all other steps of a dispatch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from cotenant import linux


class CompletionAffinity:
    """The cores that one thread may use now. Not thread-safe: its supervisor has a lock."""

    def __init__(self) -> None:
        self._all = self._near = set(linux.available_cores(os.getpid()))

    def leave(self) -> None:
        """Let the calling thread, which must be the supervisor's, use all cores."""
        self._near = self._all
        linux.pin(self._all)

    def follow(self, thread: threading.Thread, cores: Iterable[int]) -> None:
        """Let the thread wait on these cores; if it is the calling thread, also on its present cores."""
        wanted = set(cores)
        if wanted == self._near:
            return
        if threading.current_thread() is thread:
            wanted |= self._near  # migrating a running thread costs more than it gains
        if wanted != self._near and thread.native_id is not None:
            self._near = wanted
            linux.pin(wanted, thread.native_id)
