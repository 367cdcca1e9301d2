"""Small models for the rules of blocks: their times by unit, version, level and cores, as a predictor gives them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from cotenant.core.predictor import Spans


def spans_of(ns: Sequence[Sequence[Sequence[Sequence[int]]]], moved: Sequence[Sequence[Sequence[int]]]) -> Spans:
    """From ns[version][level][cores - 1][unit] and moved[version][cores - 1][unit] to prefix sums."""

    def sums(each: Sequence[int]) -> list[int]:
        made = [0]
        for one in each:
            made.append(made[-1] + one)
        return made

    flat = [at for version in ns for level in version for cores in level for at in sums(cores)]
    flat_moved = [at for version in moved for cores in version for at in sums(cores)]
    return Spans(len(ns[0][0][0]), len(ns), len(ns[0]), len(ns[0][0]), flat, flat_moved)


def random_spans(rng: Random, units: int, cores: int, levels: int = 1) -> Spans:
    """Units of different lengths that scale differently; pressure slows the first versions most."""
    sizes = [rng.randint(100, 5000) for _ in range(units)]
    serial = [rng.choice([0.0, 0.05, 0.3]) for _ in range(units)]
    stalls = [rng.choice([0.0, 0.2, 1.0]) for _ in range(units)]
    ns, moved = [], []
    for version in range(levels):
        by_level = []
        for level in range(levels):
            by_cores: list[list[int]] = []
            for count in range(1, cores + 1):
                row = []
                for unit in range(units):
                    factor = 1 + 0.1 * version + stalls[unit] * level / (1 + 2 * version)
                    takes = round(sizes[unit] * factor * (serial[unit] + (1 - serial[unit]) / count))
                    takes += rng.choice([0, 0, 30]) * count
                    row.append(max(1, min(takes, by_cores[-1][unit] if by_cores else takes)))
                by_cores.append(row)
            by_level.append(by_cores)
        ns.append(by_level)
        moved.append([[sizes[unit] * (levels - version) for unit in range(units)] for _ in range(cores)])
    return spans_of(ns, moved)


def unit_ns(spans: Spans, version: int, level: int, cores: int, unit: int) -> int:
    """Time of one unit."""
    return spans.block_ns(unit, unit + 1, version, level, cores)
