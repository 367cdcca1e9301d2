"""A world of groups with latencies by a given function, as a whole: all launches of a group end together."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from random import Random

from cotenant.core.actions import Launch, group_of
from cotenant.core.predictor import Group, Member
from cotenant.errors import ProtocolViolationError
from cotenant.work import Share, Work
from cotenant.world.simulated import WorldEvent

GroupLatency = Callable[[Group], float]
"""Latency of a group in ns, without noise."""


class GroupWorld:
    """Launches of one group start together and end together, after the latency of the group times a log-normal factor.

    `noise` is the standard deviation of the logarithm of that factor, drawn from a generator seeded by `seed`. A group
    may start only when the one before has ended: how groups slow each other down is not known here. Raises
    ProtocolViolationError from `start` otherwise.
    """

    def __init__(self, latency: GroupLatency, *, noise: float = 0.0, seed: int = 0) -> None:
        self._latency = latency
        self._noise = noise
        self._random = Random(seed)
        self._group: int | None = None
        self._members: list[Member] = []
        self._left: list[int] = []
        self._begin_ns = 0
        self._end_ns: int | None = None
        self._has_ended = False
        self._factor = 1.0

    def start(self, launch: Launch, now_ns: int) -> None:
        """See World."""
        if not self._left:
            self._group, self._begin_ns, self._has_ended = group_of(launch), now_ns, False
            self._members.clear()
            self._factor = exp(self._random.gauss(0.0, self._noise)) if self._noise else 1.0
        elif group_of(launch) != self._group or self._has_ended:
            raise ProtocolViolationError(f"launch {launch.id} starts while group {self._group} is running")
        self._end_ns = None  # until all members are known
        self._members.append(member_of(launch))
        self._left.append(launch.id)

    def expand(self, launch: int, share: Share, now_ns: int) -> None:
        """See World: here launches keep the share that they began with."""

    def next_ns(self) -> int | None:
        """See World."""
        if self._left and self._end_ns is None:
            self._end_ns = self._begin_ns + max(1, round(self._latency(tuple(self._members)) * self._factor))
        return self._end_ns

    def pop(self) -> WorldEvent:
        """See World."""
        launch = self._left.pop(0)
        self._has_ended = True
        if not self._left:
            self._end_ns = None
        return WorldEvent(launch)


def member_of(launch: Launch) -> Member:
    """A launch as a predictor sees it."""
    return Member(
        Work(launch.work.tenant, launch.work.shape, launch.work.items, launch.work.start, launch.work.end),
        launch.share.size,
    )
