"""The candidates of one decision: heads of queues and paused batches, best first by the policy's keys."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Annotated

from msgspec import Meta

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import BatchView, QueueView, Snapshot
from cotenant.types import Query

Key = tuple[int, ...]
Stretch = Annotated[float, Meta(ge=0, le=1)]
"""A share of the slack of a query that might arrive."""


class Candidates:
    """Local state of one call of `decide`: what it has given away already. Never outlives the call.

    `taken` are the queries that have been given away, up to the last time that something was asked for: most decisions
    give away one candidate and end. What is passed over is no candidate until `bring_back`, but may join a batch; of
    that, what is `put_off` is given by `next_put_off` before.
    """

    __slots__ = (
        "_back",
        "_fronts",
        "_heads",
        "_passed",
        "_paused",
        "_paused_passed",
        "_unsettled",
        "put_off",
        "snapshot",
        "taken",
    )

    def __init__(self, snapshot: Snapshot, batch_key: Callable[[BatchView, Predictor], Key]) -> None:
        self.snapshot = snapshot
        self._back: frozenset[int] = frozenset()
        self.taken: set[int] = set()
        self._heads: dict[str, int] = {}
        """Positions of the heads that are not in front; the length of the queue when all of it is given away."""
        self._passed: set[int] = set()
        self.put_off: list[tuple[QueueView, int]] = []
        self._unsettled: tuple[QueueView, Sequence[Query]] | None = None
        self._paused: list[tuple[Key, int, BatchView]] = []
        if snapshot.paused:
            predictor = snapshot.predictor
            self._paused = [(batch_key(batch, predictor), batch.id, batch) for batch in snapshot.paused]
            self._paused.sort(key=_first_two, reverse=True)
        self._paused_passed: list[tuple[Key, int, BatchView]] = []

    def best(self) -> BatchView | tuple[QueueView, int] | None:
        """The best paused batch, or the best queue with the position of its head; a paused batch wins a tie."""
        if self._unsettled is not None:
            self._settle()
        if self._back:
            return self._best_in_front()
        heads = self._heads
        best_key: Key | None = None
        best_queue: QueueView | None = None
        position = 0
        at = 0
        for name, queue in self.snapshot.queues.items():
            keys = queue.keys
            if heads and (at := heads.get(name, 0)) == len(keys):
                continue
            if keys and (best_key is None or keys[at] < best_key):
                best_key, best_queue, position = keys[at], queue, at
        if self._paused and (best_key is None or self._paused[-1][0] <= best_key):
            return self._paused[-1][2]
        return None if best_queue is None else (best_queue, position)

    def hold_back(self, numbers: frozenset[int]) -> None:
        """The queries of these numbers are candidates only when there are no others."""
        self._back = numbers
        self._fronts: dict[str, int] = {}
        """As `_heads`, for those that are not held back."""

    @property
    def paused_keys(self) -> list[tuple[Key, BatchView]]:
        """The paused batches that are left, with their keys."""
        return [(key, batch) for key, _, batch in self._paused]

    def _best_in_front(self) -> BatchView | tuple[QueueView, int] | None:
        """What `best` gives when some queries are held back."""
        back = self._back
        best_rank: tuple[bool, Key] | None = None
        best: BatchView | tuple[QueueView, int] | None = None
        for at, (key, _, batch) in enumerate(self._paused):
            rank = (all(query.id in back for query in batch.queries), key)
            if best_rank is None or rank < best_rank:
                best_rank, best, place = rank, batch, at
        for name, queue in self.snapshot.queues.items():
            at = self._fronts[name] = self._next(queue, self._fronts.get(name, 0), back)
            is_back = at == len(queue.queries)
            if is_back:
                at = self._heads.get(name, 0)
            if at < len(queue.queries):
                rank = (is_back, queue.keys[at])
                if best_rank is None or rank < best_rank:
                    best_rank, best = rank, (queue, at)
        if best is not None and not isinstance(best, tuple):
            self._paused.append(self._paused.pop(place))  # where `take_batch` finds it
        return best

    def take_batch(self) -> Key:
        """Give away the best paused batch; its key."""
        return self._paused.pop()[0]

    def take(self, queue: QueueView, queries: Sequence[Query]) -> None:
        """Give away waiting queries of the queue that `best` or `next_put_off` gave, its head among them."""
        if self._unsettled is not None:
            self._settle()
        self._unsettled = (queue, queries)

    def pass_over(self, queue: QueueView, at: int, *, put_off: bool = False) -> None:
        """Pass over the queue's query that `best` gave; it may be put off."""
        self._passed.add(queue.queries[at].id)
        self._heads[queue.tenant.name] = self._next(queue, self._heads.get(queue.tenant.name, 0))
        if put_off:
            self.put_off.append((queue, at))

    def pass_over_batch(self) -> None:
        """Pass over the best paused batch."""
        self._paused_passed.append(self._paused.pop())

    def next_put_off(self) -> tuple[QueueView, int] | None:
        """The first query that was put off and has not been given away since; None when there is none."""
        self._settle()
        while self.put_off:
            queue, at = self.put_off.pop(0)
            if queue.queries[at].id not in self.taken:
                return queue, at
        return None

    def bring_back(self) -> None:
        """Make all that was passed over candidates again."""
        self._settle()
        if self._passed:
            self._passed.clear()
            self.put_off.clear()
            if self._back:
                self._fronts.clear()
            self._heads = {name: self._next(queue, 0) for name, queue in self.snapshot.queues.items()}
        if self._paused_passed:
            self._paused = sorted([*self._paused, *self._paused_passed], key=_first_two, reverse=True)
            self._paused_passed = []

    def _settle(self) -> None:
        if self._unsettled is None:
            return
        queue, queries = self._unsettled
        self._unsettled = None
        self.taken.update([query.id for query in queries])
        name = queue.tenant.name
        self._heads[name] = self._next(queue, self._heads.get(name, 0))

    def _next(self, queue: QueueView, at: int, back: Container[int] = ()) -> int:
        """The first position from this one on whose query is free and not held back; the queue's length if none is."""
        waiting, taken, passed = queue.queries, self.taken, self._passed
        while at < len(waiting) and ((number := waiting[at].id) in taken or number in passed or number in back):
            at += 1
        return at


def _first_two(entry: tuple[Key, int, BatchView]) -> tuple[Key, int]:
    return entry[0], entry[1]
