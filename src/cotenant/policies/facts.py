"""Facts from which policies derive options: the lanes, and predicted latencies of all pairs of models in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cotenant.work import Share


@dataclass(frozen=True, slots=True)
class PairLatency:
    """Latencies in ns of two whole models with one row, in lanes of the smallest size: each alone, and both
    together."""

    alone_ns: tuple[int, int]
    together_ns: int

    @property
    def slowdown(self) -> float:
        """Time of both together over the slower one alone; 1 without interference."""
        return self.together_ns / max(self.alone_ns)


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """The lanes, and the latencies of all unordered pairs of tenants, including a tenant with itself. `pairs` is empty
    where groups were never measured."""

    lanes: tuple[Share, ...]
    pairs: Mapping[tuple[str, str], PairLatency] = field(default_factory=dict)
