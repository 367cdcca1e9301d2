"""Starts agents on nodes without one, concurrently and without blocking the planner."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future

from cotenant.cluster.interfaces import Fleet
from cotenant.cluster.types import Node
from cotenant.errors import CotenantError
from cotenant.techniques.partitions.plan.types import DeviceType

PAUSE_NS = 5_000_000_000
"""Time in ns from a lost node or a failed join to the next attempt."""

_log = logging.getLogger("cotenant.cluster")


class Joins:
    """Joins of nodes. `joined` is called on a thread of `pool` for each node with a running agent. Thread-safe."""

    def __init__(
        self,
        fleet: Fleet,
        kinds: Mapping[str, DeviceType],
        pool: Executor,
        joined: Callable[[Node], None],
        now_ns: Callable[[], int],
    ) -> None:
        self._fleet = fleet
        self._kinds = kinds
        self._pool = pool
        self._joined = joined
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[None]] = {}
        self._after_ns: dict[str, int] = {}

    def begin(self, members: Collection[str]) -> None:
        """Start an agent on each present node outside `members`, unless it is paused."""
        nodes = [node for node in self._fleet.nodes() if node.device in self._kinds]
        with self._lock:
            now_ns = self._now_ns()
            self._under_way = {name: future for name, future in self._under_way.items() if not future.done()}
            for node in nodes:
                has_agent = node.name in members or node.name in self._under_way
                if not has_agent and now_ns >= self._after_ns.get(node.name, 0):
                    self._under_way[node.name] = self._pool.submit(self._join, node)

    def under_way(self) -> tuple[Future[None], ...]:
        """Futures of started joins; they never hold errors."""
        with self._lock:
            return tuple(self._under_way.values())

    def pause(self, node: str) -> None:
        """Do not retry a node for PAUSE_NS."""
        with self._lock:
            self._after_ns[node] = self._now_ns() + PAUSE_NS

    def _join(self, node: Node) -> None:
        try:
            self._fleet.join(node)
        except (CotenantError, TimeoutError) as error:
            _log.error("node %r cannot join: %s; retrying in %g s", node.name, error, PAUSE_NS / 1e9)
            self.pause(node.name)
        else:
            self._joined(node)
