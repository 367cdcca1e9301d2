"""The candidates of one decision: heads of queues and paused batches, best first by the policy's keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cotenant.core.snapshot import BatchView, QueueView, Snapshot
from cotenant.predict.protocol import Predictor
from cotenant.types import Query

Key = tuple[int, ...]


class Candidates:
    """Local state of one call of `decide`: what it has given away already. Never outlives the call.

    Most decisions give away one candidate and end, so the books are made up only when another one is asked for.
    """

    __slots__ = ("_back", "_heads", "_paused", "_unsettled", "snapshot", "taken")

    def __init__(self, snapshot: Snapshot, batch_key: Callable[[BatchView, Predictor], Key]) -> None:
        self.snapshot = snapshot
        self._back: frozenset[int] = frozenset()
        self.taken: set[int] = set()
        self._heads: dict[str, int] = {}
        """Positions of the heads that are not in front; the length of the queue when all of it is given away."""
        self._unsettled: tuple[QueueView, Sequence[Query]] | None = None
        self._paused: list[tuple[Key, int, BatchView]] = []
        if snapshot.paused:
            predictor = snapshot.predictor
            self._paused = [(batch_key(batch, predictor), batch.id, batch) for batch in snapshot.paused]
            self._paused.sort(key=_first_two, reverse=True)

    def best(self) -> BatchView | tuple[QueueView, int] | None:
        """The best paused batch, or the best queue with the position of its head; a paused batch wins a tie."""
        if self._unsettled is not None:
            self._settle(*self._unsettled)
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

    @property
    def paused_keys(self) -> list[tuple[Key, BatchView]]:
        """The paused batches that are left, with their keys."""
        return [(key, batch) for key, _, batch in self._paused]

    def _best_in_front(self) -> BatchView | tuple[QueueView, int] | None:
        """What `best` gives when some queries are held back."""
        back, taken = self._back, self.taken
        best_rank: tuple[bool, Key] | None = None
        best: BatchView | tuple[QueueView, int] | None = None
        for at, (key, _, batch) in enumerate(self._paused):
            rank = (all(query.id in back for query in batch.queries), key)
            if best_rank is None or rank < best_rank:
                best_rank, best, place = rank, batch, at
        for queue in self.snapshot.queues.values():
            free = [at for at, query in enumerate(queue.queries) if query.id not in taken]
            front = next((at for at in free if queue.queries[at].id not in back), None)
            if free:
                at = free[0] if front is None else front
                rank = (front is None, queue.keys[at])
                if best_rank is None or rank < best_rank:
                    best_rank, best = rank, (queue, at)
        if best is not None and not isinstance(best, tuple):
            self._paused.append(self._paused.pop(place))  # where `take_batch` finds it
        return best

    def take_batch(self) -> Key:
        """Give away the best paused batch; its key."""
        return self._paused.pop()[0]

    def take(self, queue: QueueView, queries: Sequence[Query]) -> None:
        """Give away waiting queries of the queue that `best` gave, its head among them."""
        self._unsettled = (queue, queries)

    def _settle(self, queue: QueueView, queries: Sequence[Query]) -> None:
        self._unsettled = None
        taken = self.taken
        taken.update([query.id for query in queries])
        waiting = queue.queries
        at = self._heads.get(queue.tenant.name, 0)
        while at < len(waiting) and waiting[at].id in taken:
            at += 1
        self._heads[queue.tenant.name] = at


def _first_two(entry: tuple[Key, int, BatchView]) -> tuple[Key, int]:
    return entry[0], entry[1]
