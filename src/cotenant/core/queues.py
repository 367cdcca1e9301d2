"""The waiting queries of a tenant, kept in the order of the policy's keys."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from msgspec import UNSET

from cotenant.core.batches import Batch
from cotenant.core.lifecycle import QueryState
from cotenant.core.predictor import Predictor
from cotenant.core.rate_limit import RateLimit
from cotenant.types import Query, Tenant


class TenantQueue:
    """The waiting queries of a tenant, sorted by (rank of the request, policy's key); updated by binary search.

    Across tenants the policy's key alone counts. `limit` is the tenant's rate limit, if it has one.
    """

    __slots__ = ("are_alike", "edition", "has_ranks", "keys", "limit", "queries", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.serve(tenant)
        self.are_alike = True
        self.has_ranks = False
        self.edition = object()
        self.queries: list[Query] = []
        self.keys: list[tuple[int, ...]] = []

    def serve(self, tenant: Tenant) -> None:
        """Use the queue for this tenant from now on."""
        self.tenant = tenant
        self.limit = None if tenant.max_rate is UNSET else RateLimit(tenant.max_rate)

    def push(self, key: tuple[int, ...], query: Query) -> None:
        """Insert a query under a unique key of the policy."""
        keys, queries = self.keys, self.queries
        self.edition = object()
        if not keys:
            self.are_alike, self.has_ranks = True, False
            keys.append(key)
            queries.append(query)
            return
        if self.are_alike:
            one = queries[0]
            if query.rank != one.rank:
                self.are_alike, self.has_ranks = False, True
            else:
                self.are_alike = (
                    query.items == one.items and query.shape == one.shape and query.merge_key == one.merge_key
                )
        elif query.rank != queries[0].rank:
            self.has_ranks = True
        if key > keys[-1] and not self.has_ranks:
            keys.append(key)
            queries.append(query)
            return
        at = self._place(key, query)
        keys.insert(at, key)
        queries.insert(at, query)

    def sort(self, keys: Sequence[tuple[int, ...]]) -> None:
        """Replace the keys of the queries, given in their present order, and sort the queries again."""
        ordered = sorted(zip(keys, self.queries, strict=True), key=lambda entry: (entry[1].rank, entry[0]))
        self.keys = [key for key, _ in ordered]
        self.queries = [query for _, query in ordered]
        self.edition = object()

    def remove(self, key: tuple[int, ...], query: Query) -> None:
        """Remove a query, which has this key."""
        at = self._place(key, query)
        del self.keys[at]
        del self.queries[at]
        self.edition = object()

    def _place(self, key: tuple[int, ...], query: Query) -> int:
        """Position of a query in the order."""
        keys, queries = self.keys, self.queries
        if not self.has_ranks:
            return bisect_left(keys, key)
        return bisect_left(range(len(keys)), (query.rank, key), key=lambda at: (queries[at].rank, keys[at]))


class TenantQueues:
    """The queues of all tenants: `known` by name; `served` without the queues of suspended tenants.

    `waiting` counts the queries of `served`; `suspended` has the reasons by tenant. `weights_differ`: the tenants have
    different weights.
    """

    __slots__ = ("known", "served", "suspended", "waiting", "weights_differ")

    def __init__(self) -> None:
        self.known: dict[str, TenantQueue] = {}
        self.served: dict[str, TenantQueue] = {}
        self.suspended: dict[str, str] = {}
        self.waiting = 0
        self.weights_differ = False

    def add(self, tenant: Tenant) -> None:
        """Open a queue for a tenant that is not known."""
        self.known[tenant.name] = self.served[tenant.name] = TenantQueue(tenant)
        self._compare_weights()

    def drop(self, tenant: str) -> None:
        """Remove a known tenant; its queue is empty."""
        del self.known[tenant]
        self.served.pop(tenant, None)
        self.suspended.pop(tenant, None)
        self._compare_weights()

    def suspend(self, tenant: str, reason: str) -> bool:
        """Hide a queue from the policy; False for an unknown or suspended tenant."""
        queue = self.served.pop(tenant, None)
        if queue is None:
            return False
        self.waiting -= len(queue.queries)
        self.suspended[tenant] = reason
        return True

    def change(self, tenant: Tenant) -> None:
        """Replace a known tenant by another one of this name; the queue stays."""
        self.known[tenant.name].serve(tenant)
        self._compare_weights()

    def resume(self, tenant: str) -> None:
        """Show a hidden queue again."""
        if self.suspended.pop(tenant, None) is not None:
            queue = self.served[tenant] = self.known[tenant]
            self.waiting += len(queue.queries)

    def push(self, key: tuple[int, ...], query: Query) -> None:
        """Add a query with a unique key."""
        self.known[query.tenant].push(key, query)
        if query.tenant in self.served:
            self.waiting += 1

    def remove(self, key: tuple[int, ...], query: Query) -> None:
        """Remove a waiting query, which has this key."""
        self.known[query.tenant].remove(key, query)
        if query.tenant in self.served:
            self.waiting -= 1

    def take(self, keys: list[tuple[int, ...]], queries: Sequence[Query], tenant: str) -> None:
        """Remove waiting queries, which have these keys, of a served tenant."""
        queue, count = self.known[tenant], len(keys)
        if queue.keys[:count] == keys:  # usually they are the most urgent ones
            del queue.keys[:count]
            del queue.queries[:count]
            queue.edition = object()
        else:
            for key, query in zip(keys, queries, strict=True):
                queue.remove(key, query)
        self.waiting -= count

    def reorder(
        self, key_of: Callable[[Query, Tenant, Predictor], tuple[int, ...]], predictor: Predictor, tenant: str = ""
    ) -> list[tuple[Query, tuple[int, ...]]]:
        """Compute the keys of all waiting queries, or of one tenant's, and sort again; returns queries with keys.
        Queries of suspended tenants are included."""
        made: list[tuple[Query, tuple[int, ...]]] = []
        for queue in (self.known[tenant],) if tenant else self.known.values():
            queue.sort([key_of(query, queue.tenant, predictor) for query in queue.queries])
            made += zip(queue.queries, queue.keys, strict=True)
        return made

    def _compare_weights(self) -> None:
        self.weights_differ = len({queue.tenant.weight for queue in self.known.values()}) > 1


class Live:
    """A query that has not ended, with its state, key and batch. `timed_ns`: see Expiries."""

    __slots__ = ("batch", "key", "query", "state", "timed_ns")

    def __init__(self, query: Query, key: tuple[int, ...], state: QueryState) -> None:
        self.query = query
        self.key = key
        self.state = state
        self.batch: Batch | None = None
        self.timed_ns: int | None = None


def are_mergeable(tenant: Tenant, queries: Sequence[Query]) -> bool:
    """Whether queries of a tenant may form one batch."""
    head, rows = queries[0], 0
    for query in queries:
        rows += query.items
        if query.merge_key != head.merge_key or query.shape != head.shape:
            return False
    return rows <= tenant.max_batch
