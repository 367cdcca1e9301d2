"""Agent of a node: a Ray actor that runs the node's server. Ray carries its calls, but no tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cotenant.cluster.node_server import NodeServer
from cotenant.cluster.types import Address, ClusterError, NodePlan, NodeReport
from cotenant.linux import available_cores


class Agent:
    """Agent that runs the server of its node. The server ends with the agent in every case.

    `size`: number of cores for the server, taken from `cores` or else from the cores that the agent may use. Raises
    ClusterError if there are fewer cores, or if the repository is missing.
    """

    def __init__(self, repository: str, host: str, size: int, cores: Sequence[int] = ()) -> None:
        root = Path(repository)
        if not root.is_dir():
            raise ClusterError(f"{repository}: not a directory here; the repository must be there on every node")
        there = tuple(cores) or available_cores()
        if len(there) < size:
            raise ClusterError(f"the device type has {size} cores, but the agent may use only {len(there)}")
        self._server = NodeServer(root, there[:size], host)

    def pid(self) -> int:
        """Process ID of the agent."""
        return os.getpid()

    def prepare(self, part: NodePlan) -> Address:
        """Load the models of a part; `NodeServer.prepare`."""
        return self._server.prepare(part)

    def apply(self, part: NodePlan) -> None:
        """Serve by the plan of a part; `NodeServer.apply`."""
        self._server.apply(part)

    def release(self, part: NodePlan) -> None:
        """Unload all other models; `NodeServer.release`."""
        self._server.release(part)

    def report(self) -> NodeReport:
        """State and counters of the server; `NodeServer.report`."""
        return self._server.report()

    def pause(self) -> None:
        """Drain and stop the server; `prepare` starts it again."""
        self._server.pause()

    def stop(self) -> None:
        """Drain and stop the server, and remove its files."""
        self._server.stop()
