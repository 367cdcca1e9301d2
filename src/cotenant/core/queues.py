"""The waiting queries of a tenant, kept in the order of the policy's keys, and the batches made of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from cotenant.core.lifecycle import BatchState
from cotenant.types import Query, Tenant

_NEW = BatchState.NEW


class TenantQueue:
    """A sorted queue: insertion by binary search, removal by key. Most arrivals go to the end, most leave in front."""

    __slots__ = ("keys", "queries", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.queries: list[Query] = []
        self.keys: list[tuple[int, ...]] = []

    def push(self, key: tuple[int, ...], query: Query) -> None:
        """Insert a query under a unique key."""
        keys = self.keys
        if not keys or key > keys[-1]:
            keys.append(key)
            self.queries.append(query)
            return
        at = bisect_left(keys, key)
        keys.insert(at, key)
        self.queries.insert(at, query)

    def remove(self, key: tuple[int, ...]) -> None:
        """Take out the query with this key, which must be here."""
        at = bisect_left(self.keys, key)
        del self.keys[at]
        del self.queries[at]


class Batch:
    """Queries of one tenant that go through the model together.

    `queries` shrinks when one of them ends early; its rows stay in `items`, since they stay in the tensors.
    `query_ids` and `deadline_ns` (the earliest) follow `queries`: every segment's launch needs them.
    """

    __slots__ = ("deadline_ns", "id", "items", "next_unit", "queries", "query_ids", "shape", "state", "tenant")

    def __init__(self, batch: int, tenant: Tenant, queries: Sequence[Query]) -> None:
        head = queries[0]
        self.id = batch
        self.tenant = tenant
        self.queries = list(queries)
        self.query_ids: tuple[int, ...] = (head.id,)
        self.deadline_ns = head.deadline_ns
        self.items = head.items
        if len(queries) > 1:
            self.items = sum([query.items for query in queries])
            self._follow()
        self.shape = head.shape
        self.next_unit = 0
        self.state = _NEW

    def remove(self, query: Query) -> None:
        """Take out a query that ended early."""
        self.queries.remove(query)
        if self.queries:
            self._follow()

    def _follow(self) -> None:
        self.query_ids = tuple([query.id for query in self.queries])
        self.deadline_ns = min([query.deadline_ns for query in self.queries])
