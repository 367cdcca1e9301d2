"""Tenants that serve the loads of applications' stages.

The load of a stage is named `APPLICATION.STAGE`. A tenant of this name in the repository serves it, else the tenant of
the stage's model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from cotenant.errors import PlanError
from cotenant.repository import model_names, readable_versions
from cotenant.repository.application_spec import readable_applications
from cotenant.techniques.partitions.plan.file import Request
from cotenant.techniques.partitions.plan.types import NS_PER_MS, DevicePlan, DeviceType, Load
from cotenant.work import CPU

_ROUNDING = 1e-9
"""Relative tolerance of rates."""


def stage_tenants(root: Path, request: Request) -> dict[str, str]:
    """Tenants of the stages, by load, if their names differ. Unreadable applications are left out."""
    if not request.applications:
        return {}
    owners = {found.model: found.tenant for found in readable_versions(root) if found.is_default}
    known = list(owners.values())
    declared = readable_applications(root)
    found: dict[str, str] = {}
    for application in request.applications:
        spec = declared.get(application.name)
        if spec is None:
            continue
        models = {stage.name: stage.model for stage in spec.stages}
        for stage in application.stages:
            load = application.tenant(stage)
            owner = owners.get(models.get(stage.name, ""))
            if load not in known and owner is not None:
                found[load] = owner
    return found


def shares_of(request: Request) -> dict[str, dict[str, int]]:
    """Stage budgets of each application in ns. Applications with a stage that has no load are left out."""
    slos = {load.tenant: load.slo_ns for load in request.loads}
    shares: dict[str, dict[str, int]] = {}
    for application in request.applications:
        names = {stage.name: application.tenant(stage) for stage in application.stages}
        if all(load in slos for load in names.values()):
            shares[application.name] = {stage: slos[load] for stage, load in names.items()}
    return shares


def check_names(names: Mapping[str, str], where: str) -> None:
    """Check that no tenant serves two loads, as each was planned with its own SLO. Raises PlanError."""
    taken: dict[str, str] = {}
    for load, tenant in names.items():
        other = taken.setdefault(tenant, load)
        if other != load:
            stage = load if load != tenant else other
            raise PlanError(
                f"{where}: the loads {other!r} and {load!r} would both be served by tenant {tenant!r}, expected one: "
                f"give the stage a tenant of its own, a directory of the repository with the same model and "
                f"tenant.name = {stage!r}, and name that directory as the stage's model"
            )


def check_owners(tenants: Iterable[str], root: Path, where: str) -> None:
    """Check that every tenant has a model in the repository, readable or not. Raises PlanError."""
    readable = list(readable_versions(root))
    found = {each.model for each in readable}
    known = {each.tenant for each in readable} | {name for name in model_names(root) if name not in found}
    for tenant in tenants:
        if tenant not in known:
            raise PlanError(
                f"{where}: tenant {tenant!r} has no model in {root}, "
                f"expected one of {', '.join(sorted(known)) or 'none'} "
                "(a tenant of the name APPLICATION.STAGE serves that load, else the tenant of the stage's model)"
            )


def slos_of(root: Path) -> dict[str, int]:
    """SLOs in ns that a server of this repository enforces, by tenant."""
    return {each.tenant: round(each.config.tenant.slo_ms * NS_PER_MS) for each in readable_versions(root)}


def check_slos(request: Request, tenants: Iterable[str], root: Path, where: str) -> None:
    """Check that tenants and applications were planned with the SLOs of their `config.toml`, which servers enforce.

    Loads of stages are not compared: they have stage budgets. Raises PlanError with a sentence for each difference.
    """
    stages = {application.tenant(stage) for application in request.applications for stage in application.stages}
    enforced, declared = slos_of(root), readable_applications(root)
    planned = [
        (f"tenant {load.tenant!r}", load.slo_ns, enforced.get(load.tenant))
        for load in request.loads
        if load.tenant in tenants and load.tenant not in stages
    ]
    planned += [
        (f"application {each.name!r}", each.slo_ns, declared[each.name].slo_ns)
        for each in request.applications
        if each.name in declared
    ]
    _refuse(
        f"{where}: {name}: slo_ms is {known_ns / NS_PER_MS:.9g} in its config.toml and {slo_ns / NS_PER_MS:.9g} in the "
        "plan: plan again, or make both equal"
        for name, slo_ns, known_ns in planned
        if known_ns is not None and slo_ns != known_ns
    )


def check_rates(loads: Iterable[Load], served: Mapping[str, float], root: Path, where: str) -> None:
    """Check that the plan serves the rates that `config.toml` guarantees, and that no rate limit is below its demand.

    `loads`: demand of the plan on all its devices; `served`: rows a second of this device, by tenant, with headroom.
    Raises PlanError with a sentence for each contradiction.
    """
    demand = {load.tenant: load.rate_per_s for load in loads}
    sections = {each.tenant: each.config.tenant for each in readable_versions(root) if each.is_default}
    faults = []
    for tenant, rate in served.items():
        section = sections.get(tenant)
        if section is None:
            continue
        if section.rate is not None and section.rate > rate * (1 + _ROUNDING):
            faults.append(
                f"{where}: tenant {tenant!r}: rate is {section.rate:g} in its config.toml and {rate:g} in the plan "
                "with headroom: plan for the guaranteed rate, or lower it"
            )
        wanted = min(rate, demand.get(tenant, rate))
        if section.max_rate is not None and section.max_rate < wanted * (1 - _ROUNDING):
            faults.append(
                f"{where}: tenant {tenant!r}: max_rate is {section.max_rate:g} in its config.toml and the plan has "
                f"{wanted:g} rows/s for it: plan for at most max_rate, or raise it"
            )
    _refuse(faults)


def check_kind(device: DeviceType, models: Iterable[str], measured: str, root: Path, where: str) -> None:
    """Check that the planned device, its profile and the cores of this machine are of one kind. Raises PlanError."""
    if device.kind != CPU:
        raise PlanError(
            f"{where}: device {device.name!r} is of kind {device.kind!r}, and plans are laid out on cores, kind "
            f"{CPU!r}: plan a device of kind = {CPU!r} from a profile that 'cotenant profile {root}' measured on cores"
        )
    if measured != device.kind:
        raise PlanError(
            f"{where}: device {device.name!r} is of kind {device.kind!r}, and the profile of "
            f"{', '.join(map(repr, models))} is of kind {measured!r}: run 'cotenant profile {root}' on a device of "
            f"kind {device.kind!r}, and plan again"
        )


def _refuse(faults: Iterable[str]) -> None:
    """Raise PlanError with all sentences, if there is one."""
    if found := [*faults]:
        raise PlanError(*found)


def renamed(plan: DevicePlan, names: Mapping[str, str]) -> DevicePlan:
    """The plan with the names of the serving tenants in its slots."""
    return replace(
        plan,
        partitions=tuple(
            replace(
                partition,
                slots=tuple(replace(slot, tenant=names.get(slot.tenant, slot.tenant)) for slot in partition.slots),
            )
            for partition in plan.partitions
        ),
    )
