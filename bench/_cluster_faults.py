"""Signals for the parts of a cluster under load, and what became of the queries and of the healthy nodes after each."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench._registry import BenchError
from bench._server import family
from cotenant.load import LiveStats
from cotenant.types import ANSWERS

STOP_S = 9.0
NODE, GATEWAY, CONTROLLER, RAY_HEAD = "node", "gateway", "controller", "head of Ray"
_TITLES = {GATEWAY: "ray::Gateway", RAY_HEAD: "/gcs/gcs_server"}
"""Part of the command line of a process."""


class Cluster(Protocol):
    """A cluster that is up: `pid` is that of `cotenant cluster up`."""

    @property
    def pid(self) -> int: ...
    def status(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """SIGSTOP for `stop_s` seconds, or SIGKILL where that is 0, for all processes of a party."""

    party: str
    stop_s: float = 0.0

    @property
    def name(self) -> str:
        """As in the results."""
        return f"{self.party}, {f'SIGSTOP {self.stop_s:g} s' if self.stop_s else 'SIGKILL'}"

    @property
    def halts_all(self) -> bool:
        """Whether nothing can serve while it lasts."""
        return self.party == GATEWAY and self.stop_s > 0

    @property
    def ends_all(self) -> bool:
        """Whether the cluster cannot go on after it."""
        return self.party in (CONTROLLER, RAY_HEAD) and not self.stop_s


@dataclass(slots=True)
class Strike:
    """A fault that was done, in ns from the start of the load. `healthy` are the agents of the nodes not hit."""

    fault: Fault
    at_ns: int
    resumed_ns: int
    pids: tuple[int, ...]
    healthy: dict[str, int] = field(default_factory=dict)
    """A file descriptor of each process, by node."""
    killed: int = 0

    def look(self) -> None:
        """Count the healthy nodes on which the agent has ended since."""
        self.killed = len(_ended(self.healthy.values()))
        for descriptor in self.healthy.values():
            os.close(descriptor)
        self.healthy = {}


class Faults:
    """Does one fault after the other at its time; called by the load generator's ticks."""

    def __init__(self, up: Cluster, faults: Sequence[Fault], first_s: float, cycle_s: float) -> None:
        self._up = up
        self._due = [(first_s + cycle_s * index, fault) for index, fault in enumerate(faults)]
        self.done: list[Strike] = []
        self._stopped: Strike | None = None

    def tick(self, stats: LiveStats) -> None:
        """Inject the fault, or resume the stopped processes, if it is time."""
        now_ns = stats.elapsed_ns
        stopped = self._stopped
        if stopped is not None and now_ns >= stopped.resumed_ns:
            self.end()
            stopped.resumed_ns = now_ns
        if len(self.done) < len(self._due) and now_ns >= self._due[len(self.done)][0] * 1e9:
            if self.done:
                self.done[-1].look()
            self._strike(self._due[len(self.done)][1], now_ns)

    def end(self) -> None:
        """Resume the stopped processes."""
        stopped, self._stopped = self._stopped, None
        _send(signal.SIGCONT, stopped.pids if stopped else ())

    def _strike(self, fault: Fault, now_ns: int) -> None:
        nodes = serving_nodes(self._up)
        if fault.party == NODE:
            victim = nodes.pop(sum(each.fault.party == NODE for each in self.done) % len(nodes))
            pids = (victim["agent_pid"], victim["pid"])
        elif fault.party == CONTROLLER:
            pids = (self._up.pid,)
        else:
            title = _TITLES[fault.party]
            pids = tuple(pid for pid in family(self._up.pid)[1:] if title in command(pid))
            if not pids:
                raise BenchError(f"no process of the cluster is called {title!r}: the {fault.party} cannot be hit")
        healthy = {node["node"]: os.pidfd_open(node["agent_pid"]) for node in nodes}
        strike = Strike(fault, now_ns, now_ns + round(fault.stop_s * 1e9), pids, healthy)
        _send(signal.SIGSTOP if fault.stop_s else signal.SIGKILL, pids)
        self.done.append(strike)
        self._stopped = strike if fault.stop_s else None


def kill_node(up: Cluster, turn: int) -> None:
    """SIGKILL for agent and server of one of the nodes that serve, as for a node that loses its power."""
    nodes = serving_nodes(up)
    victim = nodes[turn % len(nodes)]
    _send(signal.SIGKILL, (victim["agent_pid"], victim["pid"]))


def serving_nodes(up: Cluster) -> list[dict[str, Any]]:
    """The nodes that serve, with their processes."""
    return [node for node in up.status()["nodes"] if node["state"] == "serving" and node["pid"]]


def command(pid: int) -> str:
    """The command line of a process; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


class Family:
    """The processes of a cluster, to see them end."""

    def __init__(self, pid: int) -> None:
        self._open: list[int] = []
        for each in family(pid):
            try:
                self._open.append(os.pidfd_open(each))
            except ProcessLookupError:
                continue

    def outlived(self, limit_s: float) -> int:
        """How many of them are still there after `limit_s` at most; returns as soon as there are none."""
        deadline = time.monotonic() + limit_s
        left = list(self._open)
        while left and time.monotonic() < deadline:
            ended = _ended(left, 0.1)
            left = [each for each in left if each not in ended]
        for each in self._open:
            os.close(each)
        self._open = []
        return len(left)


def longest_gap_s(queries: Iterable[Any], began_ns: int, ended_ns: int) -> float:
    """The longest time in which a tenant sent queries and none of them was answered.

    It runs from the time of the first of these queries to that of the next one that was answered, or to the end.
    """
    since: dict[str, int] = {}
    longest = 0
    for query in sorted(queries, key=lambda each: each.scheduled_ns):
        if not began_ns <= query.scheduled_ns < ended_ns:
            continue
        if query.outcome in ANSWERS:
            longest = max(longest, query.scheduled_ns - since.pop(query.tenant, query.scheduled_ns))
        else:
            since.setdefault(query.tenant, query.scheduled_ns)
    return max([longest, *(ended_ns - first for first in since.values())]) / 1e9


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it was ended while it was stopped
            continue


def _ended(descriptors: Iterable[int], wait_s: float = 0.0) -> list[int]:
    found: list[int] = select.select(list(descriptors), [], [], wait_s)[0]
    return found
