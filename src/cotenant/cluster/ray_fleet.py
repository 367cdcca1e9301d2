"""Ray integration: joins or starts a Ray cluster, and runs agents and the gateway as actors.

Ray carries only control calls, about 1 ms each; queries go from the gateway to the nodes over the protocol.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cotenant.cluster.agent import Agent
from cotenant.cluster.gateway import Gateway
from cotenant.cluster.types import Address, ClusterError, GatewayReport, Node, NodeLostError, RoutingTable
from cotenant.techniques.partitions.plan.types import DeviceType

NODE_LABEL = "cotenant-node"
DEVICE_LABEL = "cotenant-device"
LOOPBACK = "127.0.0.1"
_JOIN_S = 60.0
_CALL_S = 30.0
_TABLE_S = 2.0
"""Seconds to wait for a gateway to take its table; a slower gateway takes it when it continues."""
_CONNECT_S = 1.0
_STORE_BYTES = 80_000_000
"""Object store of a local node: the minimum of Ray, as it is not used."""
_CALLS = 4
"""Concurrent calls of an agent: it answers heartbeats during loads."""

_log = logging.getLogger("cotenant.cluster")


def need_ray() -> None:
    """Raise ClusterError if Ray is not installed; does not import it."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("aiohttp") is None:
        raise ClusterError("a cluster needs Ray and aiohttp, which are not installed: pip install 'cotenant[cluster]'")


def _load_ray(*, loopback: bool) -> Any:
    """Import Ray after setting the environment variables that it reads at import."""
    need_ray()
    # Ray's usage reports are off unless the user switches them on.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if loopback:
        # Ray uses the loopback address only if it expects no other machine.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return importlib.import_module("ray")


class RaySession:
    """Connection to an existing Ray cluster, or to one that is started here for the life of this object.

    With `address`, that cluster is joined. Without, a cluster is started on the loopback address of this machine;
    `local_cores`: cores of each node. Raises ClusterError.
    """

    def __init__(self, address: str = "", local_cores: Sequence[Sequence[int]] = ()) -> None:
        self.local_cores: dict[str, tuple[int, ...]] = {}
        self._cluster: Any = None
        loopback = not address or address.startswith((LOOPBACK, "localhost"))
        self.ray = _load_ray(loopback=loopback)
        try:
            if not address:
                address = self._start(local_cores)
            self.ray.init(
                address=address,
                namespace="cotenant",
                log_to_driver=False,
                configure_logging=False,
                **({"_node_ip_address": LOOPBACK} if loopback else {}),
            )
            host, _, port = str(self.ray.get_runtime_context().gcs_address).rpartition(":")
            self._head = host.strip("[]"), int(port)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            self.close()
            raise ClusterError(f"Ray at {address or 'this machine'}: {error}") from None

    def _start(self, local_cores: Sequence[Sequence[int]]) -> str:
        cluster = importlib.import_module("ray.cluster_utils").Cluster(shutdown_at_exit=True)
        self._cluster = cluster
        for number, cores in enumerate(local_cores):
            name = f"node-{number}"
            self.local_cores[name] = tuple(cores)
            cluster.add_node(
                wait=False,
                node_ip_address=LOOPBACK,
                num_cpus=len(cores),
                object_store_memory=_STORE_BYTES,
                include_dashboard=False,
                include_log_monitor=False,
                labels={NODE_LABEL: name},
            )
        cluster.wait_for_nodes()
        return str(cluster.address)

    def check(self) -> None:
        """Check the head of Ray. Raises ClusterError if it refuses a connection, TimeoutError if it does not answer."""
        try:
            socket.create_connection(self._head, _CONNECT_S).close()
        except TimeoutError:
            raise
        except OSError as error:
            raise ClusterError(f"the head of Ray at {self._head[0]}:{self._head[1]}: {error}") from None

    def close(self) -> None:
        """Disconnect; stop the cluster if it was started here. Safe to repeat."""
        self.ray.shutdown()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.shutdown()


class RayFleet:
    """Nodes of a Ray cluster with an agent on each. Implements `Fleet`.

    Name of a node: its label `cotenant-node`, else derived from its host. Device type: its label `cotenant-device`,
    else the only entry of `kinds`.
    """

    def __init__(self, session: RaySession, repository: Path, kinds: Mapping[str, DeviceType]) -> None:
        self._session = session
        self._ray = session.ray
        self._repository = repository.resolve()
        self._kinds = dict(kinds)
        self._agents: dict[str, Any] = {}
        self._hosts: dict[str, str] = {}
        self._lock = threading.Lock()

    def nodes(self) -> tuple[Node, ...]:
        """Present nodes, with or without an agent. Raises as `check` does."""
        self.check()  # without a head, Ray would block for a minute and then end this process
        found = []
        for entry in self._ray.nodes():
            if entry["Alive"]:
                node = node_of(entry, self._kinds)
                self._hosts[node.name] = entry["NodeManagerAddress"]
                found.append(node)
        return tuple(sorted(found, key=lambda node: node.name))

    def join(self, node: Node) -> None:
        """Start the agent of a node. Raises ClusterError."""
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        agent = (
            self._ray.remote(Agent)
            .options(
                num_cpus=0,
                max_concurrency=_CALLS,
                max_restarts=0,  # the controller decides whether to use a node again
                scheduling_strategy=affinity(node_id=node.key, soft=False),
            )
            .remote(
                str(self._repository),
                self._hosts[node.name],
                self._kinds[node.device].whole,
                self._session.local_cores.get(node.name, ()),
            )
        )
        try:
            self._get(agent.pid.remote(), _JOIN_S, node.name)
        except (ClusterError, TimeoutError):
            self._ray.kill(agent)
            raise
        with self._lock:
            self._agents[node.name] = agent

    def drop(self, node: str) -> None:
        """Kill the agent of a node, if it exists."""
        with self._lock:
            agent = self._agents.pop(node, None)
        if agent is not None:
            self._ray.kill(agent)

    def check(self) -> None:
        """Check the head of Ray, as `RaySession.check`."""
        self._session.check()

    def call(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a method of an agent. Raises NodeLostError if it has ended, TimeoutError, and the agent's errors."""
        with self._lock:
            agent = self._agents.get(node)
        if agent is None:
            raise NodeLostError(f"node {node!r} has no agent")
        return self._get(getattr(agent, method).remote(*arguments), timeout_s, node)

    def _get(self, reference: Any, timeout_s: float, node: str) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=timeout_s)
        except errors.GetTimeoutError:
            raise TimeoutError(f"node {node!r} did not answer within {timeout_s:g} s") from None
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ClusterError):
                raise cause from None
            raise ClusterError(f"node {node!r}: {cause!r}") from error
        except errors.RayError as error:
            cause = getattr(error, "cause", None)
            text = str(cause or error).strip().splitlines()
            last = next((line.strip() for line in reversed(text) if "ClusterError" in line), "its agent ended")
            raise NodeLostError(f"node {node!r}: {last}") from None


class RayGateway:
    """Gateway as a Ray actor on the machine of the controller. Implements `GatewayLink`. Thread-safe.

    If its process ends, another one starts at the same ports with the last table: at once, or at the next call.
    Without a gateway, `report` raises ClusterError, and tables are kept for the next one.
    """

    def __init__(self, session: RaySession, host: str, http_port: int, grpc_port: int, max_body_bytes: int) -> None:
        self._ray = session.ray
        self._max_body_bytes = max_body_bytes
        self._wanted = Address(host, http_port, grpc_port)
        self._table: RoutingTable | None = None
        self._status = b""
        self._carried: Any = None
        """Future of the last sent status."""
        self._lock = threading.RLock()
        self._actor: Any = None
        """Running gateway that has the last table; None without one."""
        self._start()

    @property
    def address(self) -> Address:
        """Address of the gateway."""
        return self._wanted

    def set_table(self, table: RoutingTable, lost: tuple[str, ...] = ()) -> None:
        """Set the routing table. Without a gateway it is kept for the next one."""
        with self._lock:
            self._table = table
        try:
            self._call("set_table", table, lost, timeout_s=_TABLE_S)
        except ClusterError as error:
            _log.error("no gateway runs: %s; it is started again at the next call", error)
        except TimeoutError:
            _log.warning("the gateway does not answer: it will use table %d when it continues", table.version)

    def set_status(self, status: bytes) -> None:
        """Send the status, unless the previous one is still unread or no gateway runs.

        The first status is sent synchronously, so a ready cluster always has one. A new gateway gets the last one.
        """
        actor, carried, self._status = self._actor, self._carried, status
        if actor is None or (carried is not None and not self._ray.wait([carried], timeout=0)[0]):
            return
        self._carried = actor.set_status.remote(status)
        if carried is None:
            self._ray.wait([self._carried], timeout=_TABLE_S)

    def report(self) -> GatewayReport:
        """Counters of the gateway. Raises ClusterError without a gateway, TimeoutError if it does not answer."""
        found: GatewayReport = self._call("report", timeout_s=_CALL_S)
        return found

    def drop(self) -> None:
        """Kill the gateway; the next call starts another one."""
        with self._lock:
            actor, self._actor = self._actor, None
        if actor is not None:
            self._ray.kill(actor)

    def stop(self) -> None:
        """Stop the gateway after its outstanding queries."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            self._ray.get(actor.stop.remote(), timeout=_CALL_S)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            _log.warning("the gateway did not stop: %s; it is killed", error)
        self._ray.kill(actor)

    def _start(self) -> None:
        """Start an actor and keep it if it listens; else kill it to free its ports. Raises ClusterError."""
        errors = self._ray.exceptions
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        here = self._ray.get_runtime_context().get_node_id()
        actor = (
            self._ray.remote(Gateway)
            .options(num_cpus=0, max_concurrency=_CALLS, scheduling_strategy=affinity(node_id=here, soft=False))
            .remote(self._max_body_bytes)
        )
        wanted = self._wanted
        try:
            address = self._ray.get(
                actor.start.remote(wanted.host, wanted.http_port, wanted.grpc_port, self._table, self._status),
                timeout=_JOIN_S,
            )
        except errors.RayTaskError as error:
            self._ray.kill(actor)
            if isinstance(error.cause, ClusterError):
                raise error.cause from None
            raise ClusterError(f"the gateway did not start: {error.cause!r}") from error
        except (errors.RayError, TimeoutError) as error:
            self._ray.kill(actor)
            raise ClusterError(f"the gateway did not start: {error}") from None
        self._actor, self._wanted = actor, address

    def _call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        for _ in range(2):
            with self._lock:
                if self._actor is None:
                    self._start()
                    _log.warning("a new gateway listens at the same ports")
                actor = self._actor
            try:
                return self._ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s)
            except self._ray.exceptions.GetTimeoutError:
                raise TimeoutError(f"the gateway did not answer within {timeout_s:g} s") from None
            except self._ray.exceptions.RayActorError:
                with self._lock:
                    if self._actor is actor:
                        _log.error("the gateway process has ended; another one is started")
                        self._actor = None
        raise ClusterError("the gateway ended, and so did its replacement; the log of Ray has the reasons")


def node_of(entry: Mapping[str, Any], kinds: Mapping[str, DeviceType]) -> Node:
    """Convert Ray's description of a node. Raises ClusterError if its device type is ambiguous."""
    labels = entry.get("Labels") or {}
    key = str(entry["NodeID"])
    name = labels.get(NODE_LABEL) or f"{entry['NodeManagerHostname']}-{key[:6]}"
    device = labels.get(DEVICE_LABEL) or (next(iter(kinds)) if len(kinds) == 1 else "")
    if not device:
        raise ClusterError(
            f"node {name!r} has no label {DEVICE_LABEL!r}, expected one of {', '.join(kinds)}: restart it with "
            f"ray start --labels {DEVICE_LABEL}=NAME"
        )
    return Node(name, device, key)
