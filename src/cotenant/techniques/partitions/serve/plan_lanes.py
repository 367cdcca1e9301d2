"""From the partitions of a plan to lanes of this machine: which cores each gets, and what is left for other tenants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from msgspec.structs import replace

from cotenant.errors import PlanError
from cotenant.repository import profile_path
from cotenant.repository.measured_content import valid_profile
from cotenant.techniques.partitions.plan.file import PlanFile, read_plan
from cotenant.techniques.partitions.plan.match import match
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Load, Plan
from cotenant.techniques.partitions.serve.plan_names import (
    check_names,
    check_owners,
    check_slos,
    renamed,
    shares_of,
    stage_tenants,
)
from cotenant.work import PlanLanes, Round, Share


class Divisible(Protocol):
    """A device that can be divided into partitions of given sizes. A GPU will be one: its sizes are percents."""

    def lanes_of(self, plan: DevicePlan, running: PlanLanes | None = None) -> PlanLanes:
        """Disjoint partitions for those of the plan; what stays as it runs now stays where it is."""


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores that the models may use. Implements `Divisible`: a partition of size n is n of them."""

    cores: tuple[int, ...]

    def lanes_of(self, plan: DevicePlan, running: PlanLanes | None = None) -> PlanLanes:
        """See Divisible. Raises PlanError when the plan needs more cores than there are.

        A partition of the size of a running one takes its cores over: first those with most tenants in common, since
        theirs are warm there, and then whatever has the size, since sessions with a pool of threads belong to cores.
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
    """The part of a plan that this machine runs. `device` is the type of its device, `loads` are all in the file.

    Stages of applications are called like the tenants that serve them; see `plan_names`. `shares_ns` says how the SLO
    of each application is divided, by stage.
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
    """Read a plan file and lay its device of that number out here. Raises PlanError.

    `root` is the repository that is served, which says whose queries the stages of its applications are. A plan is
    refused with a tenant who owns no model there, or has another SLO. It is refused with StaleProfileError, which
    `stale` allows, for a model that changed since it was measured; a plan for a repository without a profile rests on
    another one.
    """
    file = read_plan(path)
    if root is None:
        return lay_out(file, str(path), number, place, running)
    served = lay_out(file, str(path), number, place, running, stage_tenants(root, file.request))
    tenants = dict.fromkeys([*served.plan.rates_per_s, *[load.tenant for load in served.loads]])
    check_owners(tenants, root, str(path))
    check_slos(file.request, tenants, root, str(path))
    if profile_path(root).exists():
        valid_profile(root, tenants, stale=stale)
    return served


def lay_out(
    file: PlanFile,
    where: str,
    number: int,
    place: Divisible,
    running: PlanLanes | None = None,
    tenants: Mapping[str, str] = MappingProxyType({}),
) -> ServedPlan:
    """As `open_plan`; `where` is what errors call the file. Loads of tenants on other devices alone are left out.

    `tenants` gives whom loads are called like otherwise.
    """
    devices = file.plan.devices
    if number >= len(devices):
        raise PlanError(f"{where}: has a plan for {len(devices)} devices, and number {number} is asked for, from 0 on")
    plan = devices[number]
    kind = next((device for device in file.request.devices if device.name == plan.device), None)
    if kind is None:
        raise PlanError(f"{where}: device {number} is a {plan.device!r}, which is none of its [[device]] tables")
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
    """The partitions that take over the cores of running ones."""
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
