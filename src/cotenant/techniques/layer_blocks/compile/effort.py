"""The effort of a search for kernels."""

from __future__ import annotations

from dataclasses import dataclass

CANDIDATES = 20
"""Default number of candidates of a problem (docs/compile.md)."""


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """Number of candidates, and the time (`time.monotonic`) after which none is started."""

    candidates: int = CANDIDATES
    deadline: float = float("inf")
    workers: int = 1
    """Concurrent compiler processes."""
