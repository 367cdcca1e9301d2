"""Rows of co-runs, as a campaign writes them."""

from __future__ import annotations

from cotenant.techniques.partitions.coruns import ANTAGONIST, CoRunRow, Timed
from scenario import MS


def row(target: str, other: str, factor: float, *, chosen: str = "active", batch: int = 1) -> CoRunRow:
    alone = Timed(100 * MS, 200 * MS, 9)
    beside = Timed(round(100 * factor * MS), round(300 * factor * MS), 9)
    return CoRunRow((target, batch, 1), ((other, 1, 1),), alone, beside, chosen)


def pair(a: str, b: str, factors: tuple[float, float], chosen: str = "active") -> list[CoRunRow]:
    return [row(a, b, factors[0], chosen=chosen), row(b, a, factors[1], chosen=chosen)]


ROWS = (
    *pair("a", ANTAGONIST, (1.5, 1.1), "antagonist"),
    *pair("b", ANTAGONIST, (1.3, 1.2), "antagonist"),
    *pair("a", "b", (1.2, 1.05)),
    *pair("a", "a", (1.1, 1.1)),
)
