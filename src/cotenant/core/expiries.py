"""When waiting queries have to be given up, and the one timer that brings the engine there in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from cotenant.core.actions import Action, SetTimer
from cotenant.core.lifecycle import QueryState
from cotenant.core.queues import Live
from cotenant.core.snapshot import DropRule
from cotenant.types import Query

_NEVER_DROP = DropRule.NONE
_QUEUED = QueryState.QUEUED


def expiry_of(query: Query, drop: DropRule) -> int | None:
    """When a query is given up at the latest: at the client's own time-out, or its deadline if the rule says so."""
    expiry = query.expiry_ns
    if drop is not _NEVER_DROP and (expiry is None or query.deadline_ns < expiry):
        return query.deadline_ns
    return expiry


class Expiries:
    """A heap of (time, query), with the queries that have gone meanwhile still in it, and the timer that is set."""

    __slots__ = ("heap", "timer_ns")

    def __init__(self) -> None:
        self.heap: list[tuple[int, int]] = []
        self.timer_ns: int | None = None

    def push(self, query: Query, drop: DropRule) -> None:
        """A query begins to wait."""
        expiry = expiry_of(query, drop)
        if expiry is not None:
            heappush(self.heap, (expiry, query.id))

    def renew(self, waiting: Iterable[Query], drop: DropRule) -> None:
        """Another rule holds from now on for all who wait. A timer that became needless is left to fire."""
        known = ((expiry_of(query, drop), query.id) for query in waiting)
        self.heap = [(expiry, number) for expiry, number in known if expiry is not None]
        heapify(self.heap)

    def pop_due(self, now_ns: int) -> int | None:
        """The next query whose time has come, waiting or gone; None when there is none."""
        heap = self.heap
        return heappop(heap)[1] if heap and heap[0][0] <= now_ns else None

    def arm(self, live: Mapping[int, Live], actions: list[Action]) -> None:
        """Keep one timer at the earliest expiry. One that became needless is left to fire: cheaper than moving it."""
        heap = self.heap
        while heap:
            expiry, number = heap[0]
            known = live.get(number)
            if known is None or known.state is not _QUEUED:
                heappop(heap)
                continue
            if self.timer_ns is None or expiry < self.timer_ns:
                self.timer_ns = expiry
                actions.append(SetTimer(expiry))
            return
