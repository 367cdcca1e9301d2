"""Greedy matching of the devices or partitions of a new plan to those of the running one."""

from __future__ import annotations

from collections.abc import Iterable


def match(pairs: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """Match new to old numbers by pairs (similarity, new, old), the most similar pairs first, then by number.

    Each number is matched at most once. The total similarity is at least half of the maximum (greedy matching).
    """
    found: dict[int, int] = {}
    taken: set[int] = set()
    for _, new, old in sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2])):
        if new not in found and old not in taken:
            found[new] = old
            taken.add(old)
    return found
