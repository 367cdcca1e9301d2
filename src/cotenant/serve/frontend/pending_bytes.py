"""Bytes of requests that a server holds, by model, against a budget."""

from __future__ import annotations

from collections import Counter

from cotenant.types import LossCause, Outcome
from cotenant.wire.api import ServeError, Status
from cotenant.wire.ending import Ending

COUNTED_FROM_BYTES = 4 << 10
"""Smaller bodies are not counted: the limits of connections and calls bound what they take."""


class PendingBytes:
    """Counts the bytes of bodies that are being read, wait, or belong to live queries, by model.

    Each model may hold as many bytes as are free: the dynamic threshold of Choudhury and Hahne (1998), with a factor of
    1. A model alone may have half of the budget, `n` models that want more a part `1 / (n + 1)` each, and as much stays
    free for the next one. For one event loop, not thread-safe.
    """

    def __init__(self) -> None:
        self._total = 0
        self._by_model: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All bytes that are held."""
        return self._total

    def hold(self, model: str, nbytes: int, budget: int) -> Held:
        """Count the bytes of a request, which are known or declared. Raises ServeError where there is no room."""
        held = Held(self, model, budget)
        held.grow(nbytes)
        return held

    def take(self, model: str, nbytes: int, budget: int) -> None:
        """Count bytes. Raises ServeError (UNAVAILABLE)."""
        if nbytes > budget - self._total - nbytes - self._by_model[model]:
            whose = f"requests of model {model!r}" if model else "requests that name no model yet"
            text = f"{whose} hold {self._by_model[model]} bytes, as many as are free, and {nbytes} more were to come"
            raise ServeError(Status.UNAVAILABLE, text, Ending(Outcome.REJECTED), LossCause.FRONT_END)
        self._total += nbytes
        self._by_model[model] += nbytes

    def give_back(self, model: str, nbytes: int) -> None:
        """Count bytes no more."""
        self._total -= nbytes
        self._by_model[model] -= nbytes
        if not self._by_model[model]:
            del self._by_model[model]


class Held:
    """The bytes of one request, counted until all that keep it have let go: first of all the request itself."""

    __slots__ = ("_budget", "_keepers", "_model", "_nbytes", "_pending")

    def __init__(self, pending: PendingBytes, model: str, budget: int) -> None:
        self._pending = pending
        self._model = model
        self._budget = budget
        self._nbytes = 0
        self._keepers = 1

    def grow(self, nbytes: int) -> None:
        """Count further bytes of the request. Raises ServeError."""
        self._pending.take(self._model, nbytes, self._budget)
        self._nbytes += nbytes

    def move(self, model: str) -> None:
        """The request is one for this model. Raises ServeError where that has no room; the bytes stay counted then."""
        if model != self._model:
            self._pending.give_back(self._model, self._nbytes)
            try:
                self._pending.take(model, self._nbytes, self._budget)
            except ServeError:
                self._pending.take(self._model, self._nbytes, 1 << 62)
                raise
            self._model = model

    def keep(self) -> None:
        """Work on the request has begun that may last longer than the request: it lets go, too."""
        self._keepers += 1

    def let_go(self) -> None:
        """The request, or work on it, is over."""
        self._keepers -= 1
        if not self._keepers:
            self._pending.give_back(self._model, self._nbytes)
