"""Maps the partitions of a plan to lanes on the cores of this machine; free cores become lanes for other tenants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from msgspec.structs import replace
from typing_extensions import override

from cotenant.errors import PlanError
from cotenant.repository import profile_path
from cotenant.repository.measured_content import valid_profile
from cotenant.techniques.partitions.plan.file import PlanFile, read_plan
from cotenant.techniques.partitions.plan.match import match
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Load, Plan
from cotenant.techniques.partitions.serve.plan_names import (
    check_kind,
    check_names,
    check_owners,
    check_rates,
    check_slos,
    renamed,
    shares_of,
    stage_tenants,
)
from cotenant.work import CPU, PlanLanes, Round, Share

DIVIDED = "cluster"
"""Planner of plan files for the nodes of a cluster, which divides the rate of a tenant among them."""


class Divisible(Protocol):
    """A device that can be divided into partitions of given sizes."""

    def lanes_of(self, plan: DevicePlan, running: PlanLanes | None = None) -> PlanLanes:
        """Disjoint lanes for the partitions of the plan; unchanged partitions keep their lanes."""


@dataclass(frozen=True, slots=True)
class Cores(Divisible):
    """The cores that models may use; a partition of size n has n of them."""

    cores: tuple[int, ...]

    @override
    def lanes_of(self, plan: DevicePlan, running: PlanLanes | None = None) -> PlanLanes:
        """Lanes of cores. Raises PlanError when the plan needs more cores than there are.

        A partition takes over the cores of a running one of its size. Partitions with most tenants in common are
        matched first, as their caches are warm; equal sizes alone still keep sessions and their thread pools.
        """
        sizes = [partition.size for partition in plan.partitions]
        if sum(sizes) > len(self.cores):
            text = " + ".join(map(str, sizes))
            raise PlanError(
                f"the plan of device {plan.device!r} has partitions of {text} cores, and there are {len(self.cores)} "
                f"({', '.join(map(str, self.cores))}): plan for as many, or name more with --cores"
            )
        rounds = [partition.round for partition in plan.partitions]
        placed = _kept(sizes, rounds, running, self.cores)
        used = {core for lane in placed.values() for core in lane}
        free = [core for core in self.cores if core not in used]
        for number in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
            if number not in placed:
                placed[number], free = tuple(free[: sizes[number]]), free[sizes[number] :]
        lanes = [Share(placed[number]) for number in range(len(sizes))]
        left = [Share((core,)) for core in free]
        return PlanLanes((*lanes, *left), (*rounds, *[Round()] * len(left)))


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """The device of a plan that this machine runs. `device`: its type; `loads`: the loads of the file.

    Loads of stages have the names of the tenants that serve them (`plan_names`). `shares_ns`: stage budgets in ns, by
    application and stage.
    """

    plan: DevicePlan
    device: DeviceType
    loads: tuple[Load, ...]
    lanes: PlanLanes
    shares_ns: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def open_plan(
    path: Path,
    number: int,
    place: Divisible,
    running: PlanLanes | None = None,
    root: Path | None = None,
    *,
    stale: bool = False,
) -> ServedPlan:
    """Read a plan file and lay out its device of that number on this machine.

    `root`: the served repository. Raises PlanError for an unusable file, for a device of another kind, and for tenants
    without a model in `root`, with another SLO or a contradicting rate there. Raises StaleProfileError for a model that
    changed since it was measured, unless `stale`.
    """
    file = read_plan(path)
    if root is None:
        return lay_out(file, str(path), number, place, running)
    served = lay_out(file, str(path), number, place, running, stage_tenants(root, file.request))
    tenants = dict.fromkeys([*served.plan.rates_per_s, *[load.tenant for load in served.loads]])
    check_owners(tenants, root, str(path))
    check_slos(file.request, tenants, root, str(path))
    if file.plan.planner != DIVIDED:
        check_rates(served.loads, served.plan.rates_per_s, root, str(path))
    profile = valid_profile(root, tenants, stale=stale) if profile_path(root).exists() else None
    check_kind(served.device, tenants, profile.device.kind if profile else CPU, root, str(path))
    return served


def lay_out(
    file: PlanFile,
    where: str,
    number: int,
    place: Divisible,
    running: PlanLanes | None = None,
    tenants: Mapping[str, str] = MappingProxyType({}),
) -> ServedPlan:
    """As `open_plan`, for a read file; `where`: its name in errors. Loads of other devices are left out.

    `tenants`: the tenants of loads that have other names.
    """
    devices = file.plan.devices
    if number >= len(devices):
        raise PlanError(f"{where}: has a plan for {len(devices)} devices, and has no device number {number} (from 0)")
    plan = devices[number]
    kind = next((device for device in file.request.devices if device.name == plan.device), None)
    if kind is None:
        raise PlanError(f"{where}: device {number} is a {plan.device!r}, which has no [[device]] table")
    here, elsewhere = plan.rates_per_s, Plan((*devices[:number], *devices[number + 1 :])).rates_per_s
    loads = tuple(load for load in file.request.loads if load.tenant in here or load.tenant not in elsewhere)
    names = {load.tenant: tenants.get(load.tenant, load.tenant) for load in loads}
    check_names(names, where)
    plan = renamed(plan, names)
    loads = tuple(replace(load, tenant=names[load.tenant]) for load in loads)
    return ServedPlan(plan, kind, loads, place.lanes_of(plan, running), shares_of(file.request))


def _kept(
    sizes: Sequence[int], rounds: Sequence[Round], running: PlanLanes | None, cores: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Cores of the partitions that take over those of running ones, by position."""
    if running is None:
        return {}
    pairs = []
    for number, size in enumerate(sizes):
        names = {slot.tenant for slot in rounds[number].slots}
        for other, lane in enumerate(running.lanes):
            if lane.size == size and all(core in cores for core in lane.cores):
                common = sum(slot.tenant in names for slot in running.rounds[other].slots)
                pairs.append((common, number, other))
    return {number: running.lanes[other].cores for number, other in match(pairs).items()}
