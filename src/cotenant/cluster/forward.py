"""Forwarder of the gateway: node selection, retries, and the single outcome of each query.

It is independent of HTTP and gRPC: a protocol passes an `Attempt`, which sends the bytes to one node. All code runs on
one event loop.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from cotenant.cluster.balance import Balancer
from cotenant.cluster.types import COUNTED, Address, Counts, GatewayReport, PlannedApplication, Route, RoutingTable
from cotenant.types import Outcome
from cotenant.wire.api import ServeError, Status
from cotenant.wire.ending import FAILURE, Ending

MOST_ATTEMPTS = 4
_PAUSE_NS = 500_000_000
"""Time in ns for which a node is skipped after a refused connection."""


class NotRunError(Exception):
    """The node did not run the query. `gone`: no connection was made; otherwise `reply` is its refusal."""

    def __init__(self, reason: str, *, gone: bool, reply: Any = None) -> None:
        super().__init__(reason)
        self.gone = gone
        self.reply = reply


class BrokenError(Exception):
    """The query was sent, but its outcome is unknown: it may have run."""


class NodeReply(Protocol):
    """Answer of a node, forwarded unchanged."""

    @property
    def ending(self) -> Ending:
        """Ending of the query; ANSWERED for every result, even a late one."""
        ...


class Link(Protocol):
    """Connections to one node."""

    async def close(self) -> None:
        """Close all connections; outstanding queries fail."""


R = TypeVar("R", bound=NodeReply)
L = TypeVar("L", bound=Link)
Attempt = Callable[[L, int], Awaitable[R]]
"""Sends a query over a link. Second argument: ns of its time-out that have passed, 0 for the first attempt."""


@dataclass(slots=True)
class _Target:
    """Route of a model with its load balancer."""

    route: Route
    balancer: Balancer


class Forwarder:
    """Forwarder of queries by the routing table. `connect` creates the link to a node; `now_ns`: monotonic clock."""

    def __init__(self, connect: Callable[[str, Address], Any], now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._connect = connect
        self._now_ns = now_ns
        self._name = uuid.uuid4().hex
        self._table = RoutingTable(0, (), {})
        self.applications: Mapping[str, PlannedApplication] = {}
        """Applications of the table by name; `ApplicationBackend` runs them and sends stages by this forwarder."""
        self._targets: dict[str, _Target] = {}
        self._links: dict[str, tuple[Address, Any]] = {}
        self._paused: dict[str, int] = {}
        self._suspects: dict[str, None] = {}
        self._under_way: dict[str, int] = defaultdict(int)
        self._by_model: dict[tuple[str, str], int] = defaultdict(int)
        self._counts: dict[str, Counts] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def models(self) -> Mapping[str, bool]:
        """Whether a node serves it, by model with a route."""
        return {name: bool(target.route.shares) for name, target in self._targets.items()}

    @property
    def version(self) -> int:
        """Version of the current table."""
        return self._table.version

    @property
    def counts(self) -> dict[str, Counts]:
        """Counts by tenant since the start."""
        return dict(self._counts)

    def set_table(self, table: RoutingTable, lost: tuple[str, ...] = ()) -> None:
        """Use this table from now on; a table that is not newer than the current one is ignored.

        Outstanding queries at a node that left the table may finish, but links to `lost` nodes are closed.
        """
        for node in lost:
            self._drop(node)
        if table.version <= self._table.version:
            return
        for node, address in table.addresses.items():
            known = self._links.get(node)
            if known is None or known[0] != address:
                self._drop(node)
                self._links[node] = (address, self._connect(node, address))
                self._paused.pop(node, None)
        for node in [node for node in self._links if node not in table.addresses and not self._under_way[node]]:
            self._drop(node)
        self._table = table
        targets = {}
        for route in table.routes:
            known_target = self._targets.get(route.model)
            same = known_target is not None and known_target.route.shares == route.shares
            balancer = known_target.balancer if known_target and same else Balancer(route.shares)
            targets[route.model] = _Target(route, balancer)
            self._counts.setdefault(route.tenant, Counts())
        self._targets = targets
        self.applications = {each.spec.name: each for each in table.applications}
        for name in self.applications:
            self._counts.setdefault(name, Counts())

    def report(self) -> GatewayReport:
        """Counts, outstanding queries, and nodes suspected since the last report."""
        suspects = tuple(self._suspects)
        self._suspects.clear()
        under_way = {key: count for key, count in self._by_model.items() if count}
        return GatewayReport(dict(self._counts), under_way, suspects, self._table.version, self._name)

    async def close(self) -> None:
        """Close all links."""
        for node in list(self._links):
            self._drop(node)
        while self._closing:
            await asyncio.wait(self._closing)

    async def infer(self, model: str, attempt: Attempt[L, R]) -> R:
        """Send a query, count its outcome, and return the node's answer. Raises ServeError if no node answers."""
        target = self._target(model)
        tenant = target.route.tenant
        began_ns = self._now_ns()
        self.count(tenant, "offered")
        outcome = Outcome.CANCELLED  # unless one of the branches below sets another one
        try:
            reply = await self._send(target, attempt, began_ns)
            outcome = reply.ending.outcome
            if outcome is Outcome.ANSWERED and self._now_ns() - began_ns > target.route.slo_ns:
                outcome = Outcome.LATE
            return reply
        except ServeError as error:
            outcome = error.ending.outcome
            raise
        except Exception:
            outcome = Outcome.FAILED
            raise
        finally:
            self.count(tenant, COUNTED[outcome])

    async def ask(self, model: str, attempt: Attempt[L, R]) -> R:
        """Send a call that is not a query: as `infer`, but not counted."""
        return await self._send(self._target(model), attempt, self._now_ns())

    def count(self, tenant: str, field: str) -> None:
        """Increment a count of a tenant or an application."""
        counts = self._counts.get(tenant, Counts())
        self._counts[tenant] = replace(counts, **{field: getattr(counts, field) + 1})

    def _target(self, model: str) -> _Target:
        target = self._targets.get(model)
        if target is None and not self._table.version:
            raise ServeError(Status.UNAVAILABLE, "the gateway has no routing table yet; try again later")
        if target is None:
            raise ServeError(Status.NOT_FOUND, f"model {model!r} is not in the plan of this cluster")
        return target

    async def _send(self, target: _Target, attempt: Attempt[L, R], began_ns: int) -> R:
        model, reason = target.route.model, ""
        tried: list[str] = []
        lost: BrokenError | None = None
        refusal: R | None = None
        while len(tried) < MOST_ATTEMPTS:
            now_ns = self._now_ns()
            if lost is not None and now_ns - began_ns > target.route.slo_ns:
                break
            paused = [node for node, until_ns in self._paused.items() if now_ns < until_ns]
            target = self._targets.get(model, target)  # the table may have changed since the last attempt
            node = target.balancer.choose(self._under_way, (*tried, *paused, *self._unlinked(target)))
            if node is None:
                break
            if tried:
                self.count(target.route.tenant, "retried")
            if lost is not None:
                self.count(target.route.tenant, "repeated")
            self._under_way[node] += 1
            self._by_model[node, model] += 1
            try:
                return await attempt(self._links[node][1], now_ns - began_ns if tried else 0)
            except NotRunError as error:
                reason, refusal = str(error), error.reply
                if error.gone:
                    self._paused[node] = self._now_ns() + _PAUSE_NS
                    self._suspects[node] = None
            except BrokenError as error:
                self._suspects[node] = None
                if lost is not None:
                    break
                # Inference has no side effects, so one repetition is safe; none once the query is late.
                lost = error
            finally:
                tried.append(node)
                self._under_way[node] -= 1
                self._by_model[node, model] -= 1
                self._tidy(node)
        if lost is not None:
            sentence = f"model {model!r}: the node was lost while the query ran ({lost})"
            raise ServeError(Status.UNAVAILABLE, sentence, FAILURE)
        if refusal is not None:
            return refusal  # every node refused it
        why = f" ({reason})" if reason else ""
        raise ServeError(Status.UNAVAILABLE, f"no node serves model {model!r} now{why}")

    def _unlinked(self, target: _Target) -> list[str]:
        return [node for node, _ in target.route.shares if node not in self._links]

    def _tidy(self, node: str) -> None:
        if node not in self._table.addresses and not self._under_way[node]:
            self._drop(node)

    def _drop(self, node: str) -> None:
        known = self._links.pop(node, None)
        if known is not None:
            task = asyncio.get_running_loop().create_task(known[1].close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
