"""The one thing that policies know of the world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from cotenant.work import CPU, Work


class Predictor(Protocol):
    """Believes how long work takes. Pure: equal arguments give equal answers until the predictor is replaced."""

    def latency_ns(self, work: Work, size: int, device: str = CPU) -> int:
        """Latency of work alone on a share of `size` slots of a device."""

    def upper_ns(self, tenant: str, latency_ns: int, slo_ns: int) -> int:
        """Time until its answer is on its way that nearly all launches of this predicted latency keep, or most where
        that would be much of what the SLO leaves; never less."""


class Member(NamedTuple):
    """One launch of a group, as a predictor sees it: work on a share of `size` slots."""

    work: Work
    size: int


Group = tuple[Member, ...]
"""Launches that start together; their order means nothing."""


class GroupPredictor(Predictor, Protocol):
    """Believes, too, how long launches take that start together."""

    def group_ns(self, groups: Sequence[Group]) -> Sequence[int]:
        """Time from the start of each group to the end of its last member, at the quantile that the predictor promises.

        At least 1. A group of one member may be asked for as well. Many groups at once cost little more than one.
        """

    def unmeasured(self, most: int) -> frozenset[int]:
        """Numbers of members, from 2 to `most`, of which no group was measured, though groups of others were."""

    def longest_ns(self, groups: Sequence[Group]) -> Sequence[int]:
        """What groups take at most as far as anything was measured of them: for numbers of members of which no group
        was measured their members in turn, or a slower part of them; else what `group_ns` says."""

    def singles_ns(self, cores: int) -> Mapping[str, int]:
        """Latency of the whole model of every tenant for one row of the first declared shape."""

    def merged_ns(self, tenant: str, shape: int, items: int, most: int, cores: int) -> Sequence[int]:
        """Latencies of the whole model for one query of `items` rows, two of them merged, and so on to `most`.

        They never fall, and end before the first batch that would take longer than the one before it and one more query
        in turn; the latency of one query is always there. It forms no batch: it does not look at queries or deadlines.
        """


class Spans(NamedTuple):
    """What is believed of a model at one shape and number of rows, unit by unit, on 1 to `cores` cores.

    There are `levels` levels of pressure, evenly spaced from nobody beside (0) to a saturated memory (the last), and
    `versions` versions: in version q every unit runs its implementation made for level q. Both tables are flat sums
    over the units before a unit u from 0 to `units`, so that a block [a, b) takes the difference of two entries.

    `ns` has the time of units [0, u) of version q at level p on c cores at
    `(((q * levels + p) * cores + c - 1) * (units + 1)) + u`; more cores are never believed to be slower.
    `moved` has the bytes that they move to and from the memory at `((q * cores + c - 1) * (units + 1)) + u`.
    """

    units: int
    versions: int
    levels: int
    cores: int
    ns: Sequence[int]
    moved: Sequence[int]

    def block_ns(self, start: int, end: int, version: int, level: int, cores: int) -> int:
        """Time of units [start, end)."""
        at = ((version * self.levels + level) * self.cores + cores - 1) * (self.units + 1)
        return self.ns[at + end] - self.ns[at + start]

    def block_bytes(self, start: int, end: int, version: int, cores: int) -> int:
        """What units [start, end) move."""
        at = (version * self.cores + cores - 1) * (self.units + 1)
        return self.moved[at + end] - self.moved[at + start]


class BlockPredictor(Predictor, Protocol):
    """Believes, too, what blocks of units take in several versions, on any number of cores and under pressure."""

    @property
    def bandwidth_bytes_per_s(self) -> int:
        """Bandwidth of the memory; 0 where it is not known: then the pressure is what `beside` says."""

    @property
    def beside(self) -> float:
        """The pressure that is measured from outside, from 0 to 1."""

    def spans(self, tenant: str, shape: int, items: int) -> Spans:
        """What is believed of a tenant's model: the same object for equal arguments, so that it can be known again."""
