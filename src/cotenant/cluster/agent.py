"""The agent of a node: what runs there as a Ray actor. Ray carries its calls, never a tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cotenant.cluster.node_server import NodeServer
from cotenant.cluster.types import Address, ClusterError, NodePlan, NodeReport


class Agent:
    """Runs the server of its node. The server ends with the agent, whatever ends that.

    `size` is the number of cores that the server gets: those of `cores`, or the first that the agent may use. Raises
    ClusterError when there are fewer, or the repository is not there.
    """

    def __init__(self, repository: str, host: str, size: int, cores: Sequence[int] = ()) -> None:
        root = Path(repository)
        if not root.is_dir():
            raise ClusterError(f"{repository}: is not a directory here; the repository must be there on every node")
        there = tuple(cores) or tuple(sorted(os.sched_getaffinity(0)))
        if len(there) < size:
            raise ClusterError(f"the device type has {size} cores, and the agent may use {len(there)}")
        self._server = NodeServer(root, there[:size], host)

    def pid(self) -> int:
        """Number of the agent's process."""
        return os.getpid()

    def prepare(self, part: NodePlan) -> Address:
        """See NodeServer."""
        return self._server.prepare(part)

    def apply(self, part: NodePlan) -> None:
        """See NodeServer."""
        self._server.apply(part)

    def release(self, part: NodePlan) -> None:
        """See NodeServer."""
        self._server.release(part)

    def report(self) -> NodeReport:
        """See NodeServer."""
        return self._server.report()

    def pause(self) -> None:
        """See NodeServer."""
        self._server.pause()

    def stop(self) -> None:
        """See NodeServer."""
        self._server.stop()
