"""Work in line by tenant, served in turns: deficit round robin."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairLine(Generic[T]):
    """A queue of work with a key and a cost, in which keys are served in turns of about `quantum` of cost.

    Deficit round robin (Shreedhar and Varghese, 1995), in the form that lets a key overdraw its credit: at its turn a
    key's credit grows by `quantum`, and its pieces of work are taken, first come first served, while the credit is
    positive; each takes its cost off. So between two turns of a key every other key gets at most `quantum` and one
    piece, and a key without debt waits for no more than that. A debt is kept until work of no key is in line. Not
    thread-safe.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._lines: dict[str, deque[tuple[int, T]]] = {}
        self._turns: deque[str] = deque()
        """The keys with work in line; the first one has its turn next, or has it now."""
        self._credits: dict[str, int] = {}
        """Of the keys in line, and the debts of others."""
        self._has_turn = False

    def put(self, key: str, cost: int, work: T, *, is_rest: bool = False) -> None:
        """Put work in line, `is_rest` before all other work of its key. `cost` has the unit of the quantum."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = deque()
            self._turns.append(key)
        if is_rest:
            line.appendleft((cost, work))
        else:
            line.append((cost, work))

    def take(self) -> T | None:
        """Take the next piece of work; None where there is none."""
        turns, credits_ = self._turns, self._credits
        while turns:
            key = turns[0]
            if not self._has_turn:
                self._has_turn = True
                credits_[key] = credits_.get(key, 0) + self._quantum
            if credits_[key] > 0:
                line = self._lines[key]
                cost, work = line.popleft()
                credits_[key] -= cost
                if not line:
                    self._leave(key)
                return work
            self._has_turn = False
            turns.rotate(-1)
        return None

    def _leave(self, key: str) -> None:
        """A key has no more work in line: its credit is lost, its debt is not."""
        self._has_turn = False
        self._turns.popleft()
        del self._lines[key]
        if not self._turns:
            self._credits.clear()
        elif self._credits[key] >= 0:
            del self._credits[key]
