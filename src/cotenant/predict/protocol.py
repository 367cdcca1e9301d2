"""The one thing that policies know of the world."""

from __future__ import annotations

from typing import Protocol


class Predictor(Protocol):
    """Believes how long work takes. Pure: equal arguments give equal answers until the predictor is replaced."""

    def latency_ns(self, tenant: str, shape: int, items: int, start: int, end: int, cores: int) -> int:
        """Latency of units [start, end) for a batch of `items` rows at declared shape `shape` on `cores` cores."""
