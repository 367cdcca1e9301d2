"""Memory sharing of units on a machine with many cores. Plain functions of numbers and sequences.

They write into given sequences, so that a compiler for such functions can take them unchanged. Work is in fractions of
a nanosecond, `FULL` of them, and speeds are integers up to FULL. So sums are exact in any order; only the division of
the bandwidth is in floating point.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from cotenant.fair_share import fair_shares

FULL = 1 << 30
"""The speed of a unit alone: fractions of a nanosecond of work per nanosecond."""
SLICE_CORES = 4
"""Cores that share a slice of the last-level cache (a CCX of the Threadripper 3990X)."""
SLICE_BYTES = 16 << 20
"""Size of a slice (same machine: 16 slices)."""


def set_rates(
    count: int,
    ns: Sequence[int],
    moved: Sequence[int],
    threads: Sequence[int],
    bandwidth: float,
    demand: MutableSequence[float],
    rate: MutableSequence[int],
) -> None:
    """Set the speeds of `count` units, by time alone, bytes and threads; `bandwidth` is in bytes/ns.

    A unit with demand r and grant s of the bandwidth has speed `s / r`: it takes `max(time alone, bytes / s)`. `demand`
    is scratch space.
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
    """Time until the first of `count` units ends at these speeds; -1 if there is none."""
    span = -1
    for i in range(count):
        wait = -(-left[i] // rate[i])
        if span < 0 or wait < span:
            span = wait
    return span


def slices_of(cores: int) -> int:
    """Cache slices of this number of adjacent cores."""
    return -(-cores // SLICE_CORES)


def moved_bytes(weights: int, inputs: int, outputs: int, slices: int, by_channels: int) -> int:
    """Memory traffic of a layer with its loops divided between slices along one axis.

    Divided by output channels, every slice keeps its part of the weights and reads all inputs; by pixels the reverse. A
    kept part larger than a slice is processed in several passes, each of which reads the other operand again.
    """
    kept, read = (weights, inputs) if by_channels else (inputs, weights)
    passes = max(1, -(-kept // (slices * SLICE_BYTES)))
    return kept + slices * passes * read + outputs


def conflict_at(query: int, unit: int, count: int) -> int:
    """Index of the conflict cost of a query at a unit, the same under every policy."""
    return (query * 7919 + unit * 104729) % count
