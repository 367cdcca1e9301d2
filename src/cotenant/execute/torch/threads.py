"""Sets the number of threads that torch uses on the calling thread, and their cores."""

from __future__ import annotations

import threading

import torch

from cotenant.execute.threads.names import Threads, thread_count
from cotenant.linux import available_cores, pin

_mine = threading.local()
_WORK = 1 << 18  # elements: enough for torch to divide the work among its threads


def use_threads(threads: Threads) -> None:
    """Set torch's threads for calls from this thread; quick if they do not change.

    With several cores, the thread pool is started while this thread may run on all of them. The pool's threads inherit
    that; otherwise they would inherit the one core of this thread.

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
    before = available_cores()
    if not pin(cores):  # cores of another machine: leave the threads unpinned
        return
    try:
        torch.ones(_WORK).exp_()
    finally:
        pin(before)
