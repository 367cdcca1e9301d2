"""Latency predictors, as policies see them: protocols of single launches, groups and blocks of units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from cotenant.work import CPU, Work


class Predictor(Protocol):
    """Predicts latencies of single launches. Pure: equal arguments give equal results."""

    def latency_ns(self, work: Work, size: int, device: str = CPU) -> int:
        """Predicted latency in ns of work that runs alone on a share of `size` slots of a device."""

    def upper_ns(self, tenant: str, latency_ns: int, slo_ns: int) -> int:
        """Upper estimate in ns of the time until the response is sent, for work of this predicted latency.

        At least `latency_ns`. The margin is bounded by a part of `slo_ns - latency_ns`, so it may hold less often
        there.
        """


class Member(NamedTuple):
    """One launch of a group for a predictor: work on a share of `size` slots."""

    work: Work
    size: int


Group = tuple[Member, ...]
"""Launches that start together; their order has no meaning."""


class GroupPredictor(Predictor, Protocol):
    """Also predicts latencies of launches that start together."""

    def group_ns(self, groups: Sequence[Group]) -> Sequence[int]:
        """Time in ns from the start of each group to the end of its last member, at the predictor's quantile.

        At least 1. Groups of one member are allowed. A call for many groups costs little more than one for one group.
        """

    def unmeasured(self, most: int) -> frozenset[int]:
        """Numbers of members, from 2 to `most`, of which no group was measured although groups of others were."""

    def longest_ns(self, groups: Sequence[Group]) -> Sequence[int]:
        """Upper bound in ns of each group's time. For an unmeasured number of members: the members one after the other,
        or a slower subset. Else `group_ns`."""

    def singles_ns(self, cores: int) -> Mapping[str, int]:
        """Latency in ns of every tenant's whole model, by name, for one row of the first declared shape."""

    def merged_ns(self, tenant: str, shape: int, items: int, most: int, cores: int) -> Sequence[int]:
        """Latencies in ns of the whole model for 1, 2, ... `most` merged queries of `items` rows each.

        The values never fall. The list ends before the first batch that is slower than the previous batch and one more
        query in sequence. It has at least one entry.
        """


class Spans(NamedTuple):
    """Prefix sums of a model's unit times and memory traffic at one shape and batch size, on 1 to `cores` cores.

    Pressure has `levels` levels, evenly spaced from an idle machine (0) to a saturated memory (the last). In version q
    of `versions`, every unit runs its implementation for level q. A block [a, b) is the difference of two entries.

    Time of units [0, u) of version q at level p on c cores, never increasing in c:
    `ns[((q * levels + p) * cores + c - 1) * (units + 1) + u]`.
    Bytes to and from the memory: `moved[(q * cores + c - 1) * (units + 1) + u]`.
    """

    units: int
    versions: int
    levels: int
    cores: int
    ns: Sequence[int]
    moved: Sequence[int]

    def block_ns(self, start: int, end: int, version: int, level: int, cores: int) -> int:
        """Time in ns of units [start, end)."""
        at = ((version * self.levels + level) * self.cores + cores - 1) * (self.units + 1)
        return self.ns[at + end] - self.ns[at + start]

    def block_bytes(self, start: int, end: int, version: int, cores: int) -> int:
        """Bytes that units [start, end) move."""
        at = (version * self.cores + cores - 1) * (self.units + 1)
        return self.moved[at + end] - self.moved[at + start]


class BlockPredictor(Predictor, Protocol):
    """Also predicts blocks of units in several versions, on any number of cores and under memory pressure."""

    @property
    def bandwidth_bytes_per_s(self) -> int:
        """Memory bandwidth; 0 if unknown, then `beside` is the whole pressure."""

    @property
    def beside(self) -> float:
        """Measured memory pressure of other processes, from 0 to 1."""

    def spans(self, tenant: str, shape: int, items: int) -> Spans:
        """Prefix sums of a tenant's model; the same object for equal arguments, so callers may cache by identity."""
