"""What policies derive options from: the lanes, and what is predicted of every pair of models in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cotenant.work import Share


@dataclass(frozen=True, slots=True)
class PairLatency:
    """Two whole models of one row each, in lanes of the smallest size: latency of each alone, and of both together."""

    alone_ns: tuple[int, int]
    together_ns: int

    @property
    def slowdown(self) -> float:
        """Both together over the slower one alone; 1 means that they do not touch each other."""
        return self.together_ns / max(self.alone_ns)


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """The lanes, and every pair of tenants, each once and a tenant beside itself among them; none where groups were
    never measured."""

    lanes: tuple[Share, ...]
    pairs: Mapping[tuple[str, str], PairLatency] = field(default_factory=dict)
