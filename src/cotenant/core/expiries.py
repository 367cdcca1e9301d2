"""Expiry of queries: a heap of times, and the one timer of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from cotenant.core.actions import Action, SetTimer
from cotenant.core.lifecycle import BatchState
from cotenant.core.queues import Live
from cotenant.core.snapshot import DropRule

_NEVER_DROP = DropRule.NONE
_RUNNING = BatchState.RUNNING


def expiry_of(live: Live, drop: DropRule) -> int | None:
    """Time at which a query is dropped: its client's time-out, or its deadline if that is earlier and the rule drops at
    deadlines. A running query has its time-out alone. None without either."""
    query, batch = live.query, live.batch
    expiry = query.expiry_ns
    if drop is _NEVER_DROP or (batch is not None and batch.state is _RUNNING):
        return expiry
    return query.deadline_ns if expiry is None or query.deadline_ns < expiry else expiry


class Expiries:
    """A heap of (time, query), and the time of the timer that is set.

    A query has at most one valid entry, `Live.timed_ns`, never later than its expiry. A query that begins to run keeps
    the entry of its deadline, which is corrected when that time comes. Outdated entries are skipped (lazy removal).
    """

    __slots__ = ("drop", "heap", "timer_ns")

    def __init__(self, drop: DropRule) -> None:
        self.drop = drop
        self.heap: list[tuple[int, int]] = []
        self.timer_ns: int | None = None

    def watch(self, live: Live) -> None:
        """Watch a query that begins to wait, in a queue or in a paused batch."""
        expiry = expiry_of(live, self.drop)
        if expiry is not None and (live.timed_ns is None or expiry < live.timed_ns):
            live.timed_ns = expiry
            heappush(self.heap, (expiry, live.query.id))

    def renew(self, known: Iterable[Live], drop: DropRule) -> None:
        """Apply another drop rule to all queries. A timer that became needless stays set."""
        self.drop = drop
        self.heap = []
        for live in known:
            live.timed_ns = expiry_of(live, drop)
            if live.timed_ns is not None:
                self.heap.append((live.timed_ns, live.query.id))
        heapify(self.heap)

    def pop_due(self, known: Mapping[int, Live], now_ns: int) -> Live | None:
        """Remove and return the next expired query; None when there is none."""
        first = self._first(known, now_ns)
        if first is not None:
            heappop(self.heap)
            first.timed_ns = None
        return first

    def arm(self, known: Mapping[int, Live], actions: list[Action]) -> None:
        """Set the timer to the earliest expiry. A needless earlier timer stays set: that is cheaper than moving it."""
        if self._first(known, self.timer_ns) is None:
            return
        self.arm_at(self.heap[0][0], actions)

    def arm_at(self, at_ns: int, actions: list[Action]) -> None:
        """Let the timer fire at this time at the latest."""
        if self.timer_ns is None or at_ns < self.timer_ns:
            self.timer_ns = at_ns
            actions.append(SetTimer(at_ns))

    def _first(self, known: Mapping[int, Live], until_ns: int | None) -> Live | None:
        """The query with the earliest expiry, its entry then at the front; None without an expiry up to `until_ns`."""
        heap = self.heap
        while heap:
            at, number = heap[0]
            if until_ns is not None and at > until_ns:
                return None
            live = known.get(number)
            if live is not None and live.timed_ns == at:
                expiry = expiry_of(live, self.drop)
                if expiry == at:
                    return live
                live.timed_ns = None
                heappop(heap)
                self.watch(live)  # it runs: its time-out is later, if it has one
            else:
                heappop(heap)
        return None
