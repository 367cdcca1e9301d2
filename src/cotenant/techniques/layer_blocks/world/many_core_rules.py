"""How units share the memory of a machine with many cores. Plain functions of numbers and sequences.

They write into sequences that they are given, so that a compiler for such functions can take them as they stand. Work
that is left is in parts of a nanosecond, FULL of them, and speeds are integers up to FULL: sums are exact whatever the
order, and only the division of the bandwidth is in floating point, in one order of operations.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from cotenant.fair_share import fair_shares

FULL = 1 << 30
"""The speed of a unit that is alone; a nanosecond of its work has so many parts."""
SLICE_CORES = 4
"""Cores that share a slice of the last-level cache, and no other core does (a CCX of the Threadripper 3990X)."""
SLICE_BYTES = 16 << 20
"""Size of a slice (same machine: 16 of them)."""


def set_rates(
    count: int,
    ns: Sequence[int],
    moved: Sequence[int],
    threads: Sequence[int],
    bandwidth: float,
    demand: MutableSequence[float],
    rate: MutableSequence[int],
) -> None:
    """Speeds of `count` units, each with its time alone, its bytes and its threads; `bandwidth` in bytes a ns.

    A unit that is granted s of the bandwidth r that it draws alone goes at s / r of its speed, so that it takes
    max(time alone, bytes / s). `demand` is room to work in.
    """
    total = 0.0
    for i in range(count):
        demand[i] = moved[i] / ns[i]
        total += demand[i]
        rate[i] = FULL
    if total > bandwidth:
        granted = fair_shares(demand[:count], threads[:count], bandwidth)
        for i in range(count):
            if granted[i] < demand[i]:
                rate[i] = max(1, int(FULL * (granted[i] / demand[i])))


def next_span_ns(count: int, left: Sequence[int], rate: Sequence[int]) -> int:
    """Time until the first of `count` units ends at these speeds; -1 when there is none."""
    span = -1
    for i in range(count):
        wait = -(-left[i] // rate[i])
        if span < 0 or wait < span:
            span = wait
    return span


def slices_of(cores: int) -> int:
    """Slices of the cache that so many cores have, where they lie side by side."""
    return -(-cores // SLICE_CORES)


def moved_bytes(weights: int, inputs: int, outputs: int, slices: int, by_channels: int) -> int:
    """What a layer moves to and from the memory when its loops are divided between slices along one axis.

    Divided by output channels every slice keeps its part of the weights and reads all of the input; by pixels it keeps
    its part of the input and reads all of the weights. What it keeps and does not fit is taken in several passes, each
    of which reads the other one again.
    """
    kept, read = (weights, inputs) if by_channels else (inputs, weights)
    passes = max(1, -(-kept // (slices * SLICE_BYTES)))
    return kept + slices * passes * read + outputs


def conflict_at(query: int, unit: int, count: int) -> int:
    """Which of `count` drawn costs a launch pays that starts with too few cores: one for each query and unit, so that
    the same query pays the same under every policy."""
    return (query * 7919 + unit * 104729) % count
