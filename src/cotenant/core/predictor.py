"""The one thing that policies know of the world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from cotenant.work import CPU, Work


class Predictor(Protocol):
    """Believes how long work takes. Pure: equal arguments give equal answers until the predictor is replaced."""

    def latency_ns(self, work: Work, size: int, device: str = CPU) -> int:
        """Latency of work alone on a share of `size` slots of a device."""

    def sure_ns(self, tenant: str, latency_ns: int) -> int:
        """Time until its answer is on its way that nearly all launches of this predicted latency keep; never less."""


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

    def singles_ns(self, cores: int) -> Mapping[str, int]:
        """Latency of the whole model of every tenant for one row of the first declared shape."""

    def merged_ns(self, tenant: str, shape: int, items: int, most: int, cores: int) -> Sequence[int]:
        """Latencies of the whole model for one query of `items` rows, two of them merged, and so on to `most`.

        They never fall, and end before the first batch that would take longer than the one before it and one more query
        in turn; the latency of one query is always there.
        """
