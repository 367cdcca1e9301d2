"""Fair queue of work by tenant: deficit round robin."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairLine(Generic[T]):
    """Queue of work items with a key and a cost, served by deficit round robin (Shreedhar and Varghese, 1995).

    In this variant a key may overdraw its credit. In a round, a key's credit grows by `quantum`:
    `credit += quantum; while credit > 0 and queue: credit -= cost(pop(queue))`.
    So in a round every other key gets at most `quantum` plus one item. A debt is kept until the whole queue is empty.
    Not thread-safe.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._lines: dict[str, deque[tuple[int, T]]] = {}
        self._active_keys: deque[str] = deque()
        """Keys with queued work, in round-robin order; the first key is served next."""
        self._credits: dict[str, int] = {}
        """Credits of active keys, and debts of inactive keys."""
        self._is_credited = False
        """The first key has its quantum of this round."""

    def put(self, key: str, cost: int, work: T, *, is_rest: bool = False) -> None:
        """Add work; with `is_rest` ahead of other work of its key. `cost` is in units of the quantum."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = deque()
            self._active_keys.append(key)
        if is_rest:
            line.appendleft((cost, work))
        else:
            line.append((cost, work))

    def take(self) -> T | None:
        """Remove and return the next work item; None if the queue is empty."""
        active_keys, credits_ = self._active_keys, self._credits
        while active_keys:
            key = active_keys[0]
            if not self._is_credited:
                self._is_credited = True
                credits_[key] = credits_.get(key, 0) + self._quantum
            if credits_[key] > 0:
                line = self._lines[key]
                cost, work = line.popleft()
                credits_[key] -= cost
                if not line:
                    self._leave(key)
                return work
            self._is_credited = False
            active_keys.rotate(-1)
        return None

    def _leave(self, key: str) -> None:
        """Remove a key without queued work: its credit is lost, its debt is kept."""
        self._is_credited = False
        self._active_keys.popleft()
        del self._lines[key]
        if not self._active_keys:
            self._credits.clear()
        elif self._credits[key] >= 0:
            del self._credits[key]
