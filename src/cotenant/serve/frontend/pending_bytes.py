"""Memory budget for request bodies, shared by models with a dynamic threshold."""

from __future__ import annotations

from collections import Counter

from cotenant.types import LossCause, Outcome
from cotenant.wire.api import ServeError, Status
from cotenant.wire.ending import Ending

COUNTED_FROM_BYTES = 4 << 10
"""Smaller bodies are not counted: the limits of connections and calls bound their memory."""


class PendingBytes:
    """Bytes of bodies that are being read, wait, or belong to live queries, by model.

    Dynamic threshold of Choudhury and Hahne (1998) with factor 1: a model may hold `held <= budget - total` bytes. So
    `n` models that want more get `budget / (n + 1)` each, and as much stays free for another model. For one event
    loop, not thread-safe.
    """

    def __init__(self) -> None:
        self._total = 0
        self._by_model: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Bytes of all models."""
        return self._total

    def hold(self, model: str, nbytes: int, budget: int) -> Held:
        """Count the known or declared bytes of a request. Raises ServeError (UNAVAILABLE) if there is no room."""
        held = Held(self, model, budget)
        held.grow(nbytes)
        return held

    def take(self, model: str, nbytes: int, budget: int) -> None:
        """Count bytes of a model. Raises ServeError (UNAVAILABLE) if there is no room."""
        if nbytes > budget - self._total - nbytes - self._by_model[model]:
            owner = f"requests of model {model!r}" if model else "requests that name no model yet"
            text = (
                f"{owner} hold {self._by_model[model]} bytes of memory for bodies, and there is no room for {nbytes} "
                "more; try again later"
            )
            raise ServeError(Status.UNAVAILABLE, text, Ending(Outcome.REJECTED), LossCause.FRONT_END)
        self._total += nbytes
        self._by_model[model] += nbytes

    def give_back(self, model: str, nbytes: int) -> None:
        """Release bytes of a model."""
        self._total -= nbytes
        self._by_model[model] -= nbytes
        if not self._by_model[model]:
            del self._by_model[model]


class Held:
    """Counted bytes of one request, with a reference count: the request and work on its body hold references."""

    __slots__ = ("_budget", "_keepers", "_model", "_nbytes", "_pending")

    def __init__(self, pending: PendingBytes, model: str, budget: int) -> None:
        self._pending = pending
        self._model = model
        self._budget = budget
        self._nbytes = 0
        self._keepers = 1

    def grow(self, nbytes: int) -> None:
        """Count further bytes of the request. Raises ServeError (UNAVAILABLE) if there is no room."""
        self._pending.take(self._model, nbytes, self._budget)
        self._nbytes += nbytes

    def move(self, model: str) -> None:
        """Charge the bytes to another model. Raises ServeError if it has no room; the old model stays charged then."""
        if model != self._model:
            self._pending.give_back(self._model, self._nbytes)
            try:
                self._pending.take(model, self._nbytes, self._budget)
            except ServeError:
                self._pending.take(self._model, self._nbytes, 1 << 62)
                raise
            self._model = model

    def keep(self) -> None:
        """Add a reference, for work that may outlive the request."""
        self._keepers += 1

    def release(self) -> None:
        """Drop a reference; the last one releases the bytes."""
        self._keepers -= 1
        if not self._keepers:
            self._pending.give_back(self._model, self._nbytes)
