"""The batches of an engine: queries of one tenant that go through its model together."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.lifecycle import BatchState, BatchStep, next_batch_state
from cotenant.types import Query, Tenant
from cotenant.work import Share

# The members that every batch meets: looking one up in its enumeration costs 0.1 us in Python 3.11.
_NEW, _PAUSED = BatchState.NEW, BatchState.PAUSED
_LAUNCH, _PAUSE, _END = BatchStep.LAUNCH, BatchStep.PAUSE, BatchStep.END


class Batch:
    """Queries of one tenant that go through the model together; `is_merged`: it was made of several queries.

    `queries` shrinks when a query ends early; the query's rows stay in `items`, since they stay in the tensors.
    `query_ids` and `deadline_ns` (the earliest) follow `queries`: every segment's launch needs them. `open` counts the
    launches of the batch that run or wait; they run units [next_unit, until). `share` is that of the last ended launch.
    """

    __slots__ = (
        "deadline_ns",
        "id",
        "is_merged",
        "items",
        "next_unit",
        "open",
        "queries",
        "query_ids",
        "shape",
        "share",
        "state",
        "tenant",
        "until",
    )

    def __init__(self, batch: int, tenant: Tenant, queries: Sequence[Query]) -> None:
        head = queries[0]
        self.id = batch
        self.tenant = tenant
        self.queries = list(queries)
        self.query_ids: tuple[int, ...] = (head.id,)
        self.deadline_ns = head.deadline_ns
        self.items = head.items
        self.is_merged = len(queries) > 1
        if self.is_merged:
            self.items = sum([query.items for query in queries])
            self._follow()
        self.shape = head.shape
        self.next_unit = self.until = 0
        self.open = 0
        self.share: Share | None = None
        self.state = _NEW

    def remove(self, query: Query) -> None:
        """Remove a query that ended early."""
        self.queries.remove(query)
        if self.queries:
            self._follow()

    def _follow(self) -> None:
        self.query_ids = tuple([query.id for query in self.queries])
        self.deadline_ns = min([query.deadline_ns for query in self.queries])


class BegunBatches:
    """The batches that have begun and not ended, `known` by number; state changes follow the table of `lifecycle`.

    `paused` has the batches at a segment boundary, in the order in which they stopped. `exclusions` counts the sets of
    queries that may not merge with others: their merge keys are negative, while those of clients start at 0.
    """

    __slots__ = ("count", "exclusions", "known", "paused")

    def __init__(self) -> None:
        self.known: dict[int, Batch] = {}
        self.paused: list[Batch] = []
        self.count = 0
        self.exclusions = 0

    def begin(self, tenant: Tenant, queries: Sequence[Query]) -> Batch:
        """Make a batch of these queries."""
        batch = self.known[self.count] = Batch(self.count, tenant, queries)
        self.count += 1
        return batch

    def launch(self, batch: Batch, until: int) -> None:
        """Count a new launch of a batch, which ends at the unit `until`."""
        if not batch.open:
            if batch.state is _PAUSED:
                self.paused.remove(batch)
            batch.state = next_batch_state(batch.state, _LAUNCH, batch.id)
        batch.open += 1
        if until > batch.until:
            batch.until = until

    def pause(self, batch: Batch, share: Share) -> None:
        """Pause a batch: its last open launch ended in this share, before the end of the model."""
        batch.next_unit, batch.share = batch.until, share
        batch.state = next_batch_state(batch.state, _PAUSE, batch.id)
        self.paused.append(batch)

    def end(self, batch: Batch) -> None:
        """Remove a batch that has no open launch."""
        batch.state = next_batch_state(batch.state, _END, batch.id)
        del self.known[batch.id]

    def abandon(self, batch: Batch) -> None:
        """All queries have left a batch: remove a paused batch; a running one stays until its launches have ended."""
        if batch.state is _PAUSED:
            self.paused.remove(batch)
            del self.known[batch.id]
        batch.queries = []
        batch.state = next_batch_state(batch.state, BatchStep.ABANDON, batch.id)
