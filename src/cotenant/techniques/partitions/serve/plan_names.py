"""Whom the loads of a plan are of, where they are the stages of applications.

A plan calls the load of a stage `APPLICATION.STAGE`. Where a tenant of the repository is called so, that tenant serves
it; else, where the application is served, the tenant of the stage's model does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from cotenant.errors import PlanError
from cotenant.repository import model_names, readable_versions
from cotenant.repository.application_spec import readable_applications
from cotenant.techniques.partitions.plan.file import Request
from cotenant.techniques.partitions.plan.types import NS_PER_MS, DevicePlan


def stage_tenants(root: Path, request: Request) -> dict[str, str]:
    """The tenants, by load, of the stages whose loads are called otherwise. What cannot be read is left out."""
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
    """How a plan divides the SLO of each application: nanoseconds by stage. One that is not whole is left out."""
    slos = {load.tenant: load.slo_ns for load in request.loads}
    shares: dict[str, dict[str, int]] = {}
    for application in request.applications:
        names = {stage.name: application.tenant(stage) for stage in application.stages}
        if all(load in slos for load in names.values()):
            shares[application.name] = {stage: slos[load] for stage, load in names.items()}
    return shares


def check_names(names: Mapping[str, str], where: str) -> None:
    """See to it that no tenant has two loads: each was planned with an SLO of its own. Raises PlanError."""
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
    """See to it that every tenant owns a model in the repository, readable or not. Raises PlanError."""
    readable = list(readable_versions(root))
    found = {each.model for each in readable}
    known = {each.tenant for each in readable} | {name for name in model_names(root) if name not in found}
    for tenant in tenants:
        if tenant not in known:
            raise PlanError(
                f"{where}: names tenant {tenant!r}, who owns no model in {root}, "
                f"expected one of {', '.join(sorted(known)) or 'none'} "
                "(the load APPLICATION.STAGE is served by a tenant called so, else by that of the stage's model)"
            )


def slos_of(root: Path) -> dict[str, int]:
    """The SLOs in nanoseconds that a server of a repository enforces, by tenant."""
    return {each.tenant: round(each.config.tenant.slo_ms * NS_PER_MS) for each in readable_versions(root)}


def check_slos(request: Request, tenants: Iterable[str], root: Path, where: str) -> None:
    """See to it that these tenants, and the applications, were planned with the SLOs of their `config.toml`, which the
    server enforces. Raises PlanError, which names both.

    The loads of stages have parts of the SLOs of their applications.
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
    for name, slo_ns, known_ns in planned:
        if known_ns is not None and slo_ns != known_ns:
            raise PlanError(
                f"{where}: plans {name} with an SLO of {slo_ns / NS_PER_MS:g} ms, and its config.toml says "
                f"{known_ns / NS_PER_MS:g} ms, which is what a server enforces: plan again, or make them equal"
            )


def renamed(plan: DevicePlan, names: Mapping[str, str]) -> DevicePlan:
    """The plan with its slots called like the tenants that serve them."""
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
