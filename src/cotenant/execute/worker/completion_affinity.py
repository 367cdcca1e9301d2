"""Where a supervisor's thread waits for completions: on the cores of the lanes that run its launches.

A completion then finds it on a core that is awake and has just become free; waking another core takes a virtual machine
longer than all the rest of a dispatch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable


class CompletionAffinity:
    """The cores that one thread may be on now. Not thread-safe: its supervisor has a lock."""

    def __init__(self) -> None:
        self._all = self._near = os.sched_getaffinity(os.getpid())

    def leave(self) -> None:
        """Let the calling thread, which is the one meant, be anywhere."""
        self._near = self._all
        os.sched_setaffinity(0, self._all)

    def follow(self, thread: threading.Thread, cores: Iterable[int]) -> None:
        """Let the thread wait on these cores; beside those where it is, when it is itself that asks."""
        wanted = set(cores)
        if wanted == self._near:
            return
        if threading.current_thread() is thread:
            wanted |= self._near  # to be moved in the middle of its work would cost more than it brings
        if wanted != self._near and thread.native_id is not None:
            self._near = wanted
            try:
                os.sched_setaffinity(thread.native_id, wanted)
            except OSError:  # a core that is not there, or a thread that has just ended
                pass
