"""How many threads torch computes with on the calling thread, and which cores they run on."""

from __future__ import annotations

import os
import threading

import torch

from cotenant.execute.threads.names import Threads, thread_count

_mine = threading.local()
_WORK = 1 << 18  # elements: enough for torch to divide the work among its threads


def use_threads(threads: Threads) -> None:
    """Let torch compute with so many threads when it is called from this thread. Quick where nothing changes.

    With several cores, the threads of this thread's pool are started while it may run on all of them: they inherit
    that, and not the one core that it is pinned to.

    Raises ValueError when there are no threads or a core is listed twice.
    """
    if getattr(_mine, "threads", None) == threads and torch.get_num_threads() == _mine.count:
        return
    count = thread_count(threads)
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    if not isinstance(threads, int) and count > 1:
        _start_pool(threads)
    _mine.threads, _mine.count = threads, count


def _start_pool(cores: tuple[int, ...]) -> None:
    if not hasattr(os, "sched_setaffinity"):
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # cores of another machine: nothing to pin to
        return
    try:
        torch.ones(_WORK).exp_()
    finally:
        os.sched_setaffinity(0, before)
