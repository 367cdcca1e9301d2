"""Which ranges of units are worth a recorded graph, and which graphs are kept: a bounded table of captured work.

Capturing costs more than a run, and a graph holds memory of the device: a range is captured when it comes for the
second time, the graph that was not used for longest gives way, and what could not be captured is not tried again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from cotenant.errors import InvalidValueError
from cotenant.work import Share

G = TypeVar("G")

_REMEMBERED_PER_GRAPH = 16


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph is good for. `owner` numbers the loaded model, `tensors` are (name, shape, type) at its start."""

    owner: int
    start: int
    end: int
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    partition: Share
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """What happened to the pool so far."""

    captured: int = 0
    replayed: int = 0
    evicted: int = 0
    failed: int = 0


class GraphPool(Generic[G]):
    """At most `capacity` graphs by key; 0 captures nothing. Thread-safe.

    Raises InvalidValueError for a negative capacity.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise InvalidValueError("pool of graphs", "capacity", capacity, "0 (no graphs) or more")
        self._capacity = capacity
        self._graphs: OrderedDict[GraphKey, G] = OrderedDict()
        self._known: OrderedDict[GraphKey, str] = OrderedDict()  # ranges that came; why they could not be captured
        self._captured = self._replayed = self._evicted = self._failures = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def counts(self) -> GraphCounts:
        """What happened so far."""
        with self._lock:
            return GraphCounts(self._captured, self._replayed, self._evicted, self._failures)

    def find(self, key: GraphKey) -> G | None:
        """The graph to replay, which counts as used now."""
        with self._lock:
            graph = self._graphs.get(key)
            if graph is not None:
                self._graphs.move_to_end(key)
                self._replayed += 1
            return graph

    def is_due(self, key: GraphKey) -> bool:
        """Whether a range that has no graph should be captured now: it came before, and has not failed."""
        with self._lock:
            if not self._capacity:
                return False
            is_due = self._known.get(key) == ""
            self._remember(key, self._known.get(key, ""))
            return is_due

    def add(self, key: GraphKey, graph: G) -> list[G]:
        """Keep a graph. Gives those that had to go; work under way on them needs them until it has ended."""
        with self._lock:
            self._graphs[key] = graph
            self._captured += 1
            gone: list[G] = []
            while len(self._graphs) > self._capacity:
                gone.append(self._graphs.popitem(last=False)[1])
            self._evicted += len(gone)
            return gone

    def fail(self, key: GraphKey, reason: str) -> None:
        """This range cannot be captured."""
        with self._lock:
            self._remember(key, reason or "it failed")
            self._failures += 1

    def reason(self, key: GraphKey) -> str:
        """Why a range could not be captured, or ""."""
        with self._lock:
            return self._known.get(key, "")

    def drop(self, owner: int) -> list[G]:
        """Take out the graphs of a model; what is known of its ranges stays."""
        with self._lock:
            gone = [self._graphs.pop(key) for key in list(self._graphs) if key.owner == owner]
            self._evicted += len(gone)
            return gone

    def clear(self) -> list[G]:
        """Take out all graphs and forget the ranges: streams may be new ones, on which nothing ran yet."""
        with self._lock:
            gone = list(self._graphs.values())
            self._evicted += len(gone)
            self._graphs.clear()
            self._known.clear()
            return gone

    def _remember(self, key: GraphKey, failure: str) -> None:
        self._known[key] = failure
        self._known.move_to_end(key)
        while len(self._known) > self._capacity * _REMEMBERED_PER_GRAPH:
            self._known.popitem(last=False)
