"""Agents that are started on the nodes that have none, side by side, without holding up the planner."""

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
"""Between the loss of a node, or a join that failed, and the next join."""

_log = logging.getLogger("cotenant.cluster")


class Joins:
    """Starts agents. `joined` is called on a thread of `pool` for each node with an agent that runs. Thread-safe."""

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
        """Start an agent on each node that is there, is none of `members`, and may be tried now."""
        nodes = [node for node in self._fleet.nodes() if node.device in self._kinds]
        with self._lock:
            now_ns = self._now_ns()
            self._under_way = {name: future for name, future in self._under_way.items() if not future.done()}
            for node in nodes:
                has_agent = node.name in members or node.name in self._under_way
                if not has_agent and now_ns >= self._after_ns.get(node.name, 0):
                    self._under_way[node.name] = self._pool.submit(self._join, node)

    def under_way(self) -> tuple[Future[None], ...]:
        """The joins that have begun; their futures hold no errors."""
        with self._lock:
            return tuple(self._under_way.values())

    def pause(self, node: str) -> None:
        """Do not try a node for a while."""
        with self._lock:
            self._after_ns[node] = self._now_ns() + PAUSE_NS

    def _join(self, node: Node) -> None:
        try:
            self._fleet.join(node)
        except (CotenantError, TimeoutError) as error:
            _log.error("node %r cannot join: %s", node.name, error)
            self.pause(node.name)
        else:
            self._joined(node)
