"""Head of a cluster, run by `cotenant cluster up`: starts and stops Ray, agents, gateway and controller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from cotenant.cluster.interfaces import ClusterSpec, ControllerSettings
from cotenant.cluster.node_home import remove_orphans
from cotenant.cluster.types import Address, ClusterError, PlannedApplication
from cotenant.config import load_server_config
from cotenant.errors import PlanError
from cotenant.repository import SERVER_FILE, readable_versions
from cotenant.repository.application_spec import readable_applications
from cotenant.techniques.partitions.plan.types import DeviceType, Load

_log = logging.getLogger("cotenant.cluster")


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Settings of the head: address of the gateway, and the Ray cluster to join or start.

    Without `address`, a cluster is started on this machine with a node for each entry of `local_cores`.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    address: str = ""
    local_cores: tuple[tuple[int, ...], ...] = ()


def models_of(root: Path, loads: Sequence[Load]) -> dict[str, str]:
    """Repository directory of each load's tenant. Raises PlanError for a tenant without a model."""
    owners = {found.tenant: found.model for found in readable_versions(root) if found.is_default}
    missing = [load.tenant for load in loads if load.tenant not in owners]
    if missing:
        raise PlanError(
            f"tenant {missing[0]!r} owns no model in {root}, expected one of {', '.join(sorted(owners)) or 'none'} "
            "(a load APPLICATION.STAGE needs a tenant of that name, or the tenant of the stage's model)"
        )
    return {load.tenant: owners[load.tenant] for load in loads}


def read_spec(
    tenants: Path, root: Path, profiles: Path | None, planner: str, headroom: float, *, stale: bool = False
) -> ClusterSpec:
    """Read the specification of a cluster from a tenants' file, a repository, and its profile or another one.

    The devices of the file are device types; the cluster determines their numbers. Raises PlanError for an unusable
    request, errors of unreadable files, and StaleProfileError for a changed model unless `stale`.
    """
    from cotenant.techniques.partitions.plan.advice import all_loads
    from cotenant.techniques.partitions.plan.file import read_request
    from cotenant.techniques.partitions.plan.planners import make_planner
    from cotenant.techniques.partitions.plan.sources import basis_of, read_profile_costs
    from cotenant.techniques.partitions.serve.plan_names import check_names, check_slos, shares_of, stage_tenants

    repository = read_profile_costs(root) if profiles is None else None
    tables = repository or read_profile_costs(profiles or root)
    request = read_request(tenants, tables.known, tables.applications)
    kinds: dict[str, DeviceType] = {}
    models = [load.model for load in request.loads]
    models += [stage.model for application in request.applications for stage in application.stages]
    basis = basis_of({"": tables}, request.devices, models, stale=stale)
    for device in basis.devices:
        kinds[device.name] = device
    declared = all_loads(request, tuple(kinds.values()), basis.costs)
    owners = {load.tenant: load.tenant for load in declared} | stage_tenants(root, request)
    check_names(owners, str(tenants))
    check_slos(replace(request, loads=declared), owners.values(), root, str(tenants))
    loads = tuple(structs.replace(load, tenant=owners[load.tenant]) for load in declared)
    folders = models_of(root, loads)
    applications = planned_applications(root, folders, shares_of(replace(request, loads=declared)))
    return ClusterSpec(loads, kinds, folders, basis.costs, make_planner(planner, headroom), applications)


def planned_applications(
    root: Path, models: Mapping[str, str], shares_ns: Mapping[str, Mapping[str, int]]
) -> tuple[PlannedApplication, ...]:
    """Applications of a repository that a cluster can run: all models of their stages are among `models`."""
    served = set(models.values())
    found = []
    for name, spec in sorted(readable_applications(root).items()):
        missing = [stage for stage in spec.stages if stage.model not in served]
        if missing:
            _log.warning("application %r is not served: no tenant of the plan has model %r", name, missing[0].model)
        elif name in models:
            _log.warning("application %r is not served: a tenant has the same name; rename one of them", name)
        else:
            found.append(PlannedApplication(spec, shares_ns.get(name, {})))
    return tuple(found)


class ClusterHead:
    """Running cluster; `close` ends it. Raises ClusterError if it cannot be started.

    `failed` is called with a reason when the cluster cannot continue and must be closed. The server section of the
    repository's `cotenant.toml` applies to gateway and nodes; raises ConfigError for an invalid one.
    """

    def __init__(
        self,
        work: ClusterSpec,
        root: Path,
        settings: HeadSettings,
        control: ControllerSettings,
        failed: Callable[[str], None] = _log.error,
    ) -> None:
        from cotenant.cluster.controller import Controller
        from cotenant.cluster.node_server import STOP_MARGIN_S
        from cotenant.cluster.ray_fleet import RayFleet, RayGateway, RaySession

        server = load_server_config(root / SERVER_FILE).server
        control = replace(control, stop_s=server.drain_s + 2 * STOP_MARGIN_S)
        self._session = RaySession(settings.address, settings.local_cores)
        self._gateway: RayGateway | None = None
        self._controller: Controller | None = None
        try:
            fleet = RayFleet(self._session, root, work.kinds)
            self._gateway = RayGateway(
                *(self._session, settings.host, settings.http_port, settings.grpc_port),
                max_body_bytes=int(server.max_body_mib * (1 << 20)),
            )
            self._controller = Controller(fleet, self._gateway, work, control, failed=failed)
            self._controller.start()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> Address:
        """Address of the gateway."""
        if self._gateway is None:
            raise ClusterError("the cluster has been stopped")
        return self._gateway.address

    def status(self) -> dict[str, Any]:
        """Status of the cluster, from the controller. Raises ClusterError after `close`."""
        if self._controller is None:
            raise ClusterError("the cluster has been stopped")
        return self._controller.status()

    def close(self) -> None:
        """Stop the gateway, then agents, servers and a Ray cluster started here. Safe to repeat."""
        controller, self._controller = self._controller, None
        gateway, self._gateway = self._gateway, None
        if controller is not None:
            controller.halt()
        if gateway is not None:
            gateway.stop()
        if controller is not None:
            controller.stop()
        self._session.close()
        remove_orphans()
