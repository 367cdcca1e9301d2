"""Who takes over whose place when a plan changes."""

from __future__ import annotations

from collections.abc import Iterable


def match(pairs: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """An old place for each new one, of pairs (likeness, new, old): those most alike first, then in their order.

    No old place is taken twice, and a new one whose old places are all taken has none. Together the pairs chosen are at
    least half as alike as the best choice of all.
    """
    found: dict[int, int] = {}
    taken: set[int] = set()
    for _, new, old in sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2])):
        if new not in found and old not in taken:
            found[new] = old
            taken.add(old)
    return found
