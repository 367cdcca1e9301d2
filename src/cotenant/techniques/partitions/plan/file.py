"""TOML files of planning: requests (`tenants.toml`), and the tenants' section of plan files.

The section repeats the request, so that a plan is checked without another file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct
from typing_extensions import override

from cotenant.errors import CotenantError, PlanError
from cotenant.files import convert, parse_toml, read_toml, to_table, toml_text
from cotenant.plan_file import TENANTS, FileSection, parse_sections, read_sections, sections_text
from cotenant.techniques.partitions.plan.application import Application, Stage
from cotenant.techniques.partitions.plan.types import NS_PER_MS, DevicePlan, DeviceType, Load, Name, Plan, Size, checked

REQUEST_FORMAT = "cotenant-tenants/1"
UNLIMITED_BYTES = 1 << 53
"""Memory of a device type without `memory_gib`, in bytes: every model fits."""
MOST_CORES = 64
"""Most cores of a device without `splits`."""
_EVERY_SPLIT_CORES = 12
"""Most cores for which every split is allowed; devices of more cores are split into powers of two."""
_GIB = 1 << 30
_MIB = 1 << 20


Unmeasured = Callable[[Mapping[str, str]], Sequence[str]]
"""Takes the models of tenants by name; returns a sentence for each problem of a tenant that cannot be planned."""


@dataclass(frozen=True, slots=True)
class KnownTenant:
    """Model and SLO of a tenant from its repository, for tables of tenants that leave them out."""

    model: str
    slo_ns: int


@dataclass(frozen=True, slots=True)
class KnownApplication:
    """SLO and stages of an application from its repository."""

    slo_ns: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """Input of a planner. `devices`: the inventory, one entry a device.

    In plan files, `loads` include the loads of the applications' stages.
    """

    loads: tuple[Load, ...]
    devices: tuple[DeviceType, ...]
    applications: tuple[Application, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The section TENANTS of a plan file: a plan and the request that it serves.

    `headroom`: share that was added to every rate; `profile`: fingerprint of the profiles of its latencies. `misses`:
    promised largest share of SLOs that a tenant misses with Poisson arrivals, or None.
    """

    request: Request
    plan: Plan
    headroom: float
    profile: str = ""
    misses: float | None = None


class _Device(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A `[[device]]` table: `count` devices of a type. Without `splits`, they follow from `cores`."""

    name: Name
    count: Annotated[int, Meta(ge=0, le=10_000)] = 1
    kind: Literal["cpu", "gpu"] = "cpu"
    cores: Annotated[int, Meta(ge=1)] | None = None
    splits: Annotated[tuple[tuple[Size, ...], ...], Meta(min_length=1)] | None = None
    memory_gib: Annotated[float, Meta(gt=0, le=1 << 23)] | None = None
    partition_mib: Annotated[float, Meta(ge=0, le=1 << 30)] = 0.0
    price: Annotated[float, Meta(ge=0, le=1e12)] = 1.0


class _Request(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The tables of a file of tenants."""

    device: tuple[_Device, ...] = ()
    tenant: tuple[Load, ...] = ()
    application: tuple[Application, ...] = ()
    format: str = ""


class _PlanFile(_Request, frozen=True):
    """The keys of the section of a plan file."""

    planner: str = ""
    headroom: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    profile: str = ""
    misses: Annotated[float, Meta(gt=0, lt=1)] | None = None
    plan: tuple[DevicePlan, ...] = ()


def read_request(
    path: Path,
    known: Mapping[str, KnownTenant] | None = None,
    applications: Mapping[str, KnownApplication] | None = None,
    unmeasured: Unmeasured = lambda models: (),
) -> Request:
    """Read a file of tenants, applications and devices.

    `known` and `applications` give the values that tables leave out, by name. Without them, a tenant's model has the
    tenant's name, and a missing SLO is an error. `unmeasured` gets the model of each tenant, and says what keeps
    tenants from being planned. Raises PlanError with the file, the key and the expected value, or all such tenants.
    """
    return _request_of(read_toml(path, PlanError), str(path), known or {}, applications or {}, unmeasured)


def parse_request(
    text: str,
    where: str,
    known: Mapping[str, KnownTenant] | None = None,
    applications: Mapping[str, KnownApplication] | None = None,
) -> Request:
    """As `read_request`, for a text; `where`: its name in errors. Raises PlanError."""
    return _request_of(parse_toml(text, where, PlanError), where, known or {}, applications or {}, lambda models: ())


class TenantsSection(FileSection):
    """Tenants, devices, and the plan of the tenants on the devices. `cotenant plan` checks it against profiles."""

    keys: ClassVar = ("planner", "headroom", "profile", "misses", "device", "tenant", "application", "plan")
    comment: ClassVar = (
        "# Made by 'cotenant plan'; 'cotenant plan --check' tells whether it holds, 'cotenant serve --plan' runs it.\n"
    )

    @override
    def read(self, table: dict[str, Any], where: str) -> PlanFile:
        for slot in _slots(_tables(table, "plan")):
            if "rate" in slot:  # traces hold slots too, with other field names
                slot["rate_per_s"] = slot.pop("rate")
        found = convert(_named(table), _PlanFile, where, PlanError)
        plan = Plan(found.plan, found.planner)
        return PlanFile(_request(found, where), plan, found.headroom, found.profile, found.misses)

    @override
    def tables(self, content: PlanFile) -> dict[str, Any]:
        head = {"planner": content.plan.planner, "headroom": content.headroom, "profile": content.profile}
        head |= {} if content.misses is None else {"misses": content.misses}
        return head | _tables_of(content.request, content.plan)


def read_plan(path: Path) -> PlanFile:
    """Read the plan of a plan file. Raises PlanError with the file, the key and the expected value."""
    return _plan_of(read_sections(path), str(path))


def parse_plan(text: str, where: str) -> PlanFile:
    """As `read_plan`, for a text; `where`: its name in errors. Raises PlanError."""
    return _plan_of(parse_sections(text, where), where)


def plan_text(file: PlanFile) -> str:
    """TOML of a plan file with this section alone; `parse_plan` reads it back."""
    return sections_text({TENANTS: file})


def plan_tables(devices: Sequence[DevicePlan]) -> list[dict[str, Any]]:
    """Tables of devices, for plan files and for the status of servers and clusters."""
    tables: list[dict[str, Any]] = to_table(devices)
    for slot in _slots(tables):
        slot["rate"] = slot.pop("rate_per_s")
    return tables


def request_text(request: Request) -> str:
    """TOML of a file of tenants; `parse_request` reads it back."""
    return toml_text({"format": REQUEST_FORMAT, **_tables_of(request)})


def _tables_of(request: Request, plan: Plan | None = None) -> dict[str, Any]:
    """The arrays of tables, without empty ones, which TOML cannot hold."""
    devices = []
    for device, group in groupby(request.devices):
        table = {"name": device.name, "count": len(list(group)), "splits": device.splits}
        if device.kind != "cpu":
            table["kind"] = device.kind
        if device.memory_bytes < UNLIMITED_BYTES:
            table["memory_gib"] = device.memory_bytes / _GIB
        if device.partition_bytes:
            table["partition_mib"] = device.partition_bytes / _MIB
        devices.append(table | {"price": device.price})
    applications = [{"name": table["name"], "rate": table["rate"], **table} for table in to_table(request.applications)]
    tables = {
        "device": devices,
        "tenant": to_table(request.loads),
        "application": applications,
        "plan": plan_tables(plan.devices) if plan else [],
    }
    return {key: each for key, each in tables.items() if each}


@lru_cache(maxsize=64)
def splits_of_cores(cores: int) -> tuple[tuple[int, ...], ...]:
    """The ways to divide so many cores into partitions, the undivided device first.

    Every way up to 12 cores; beyond, the whole and every way into powers of two, of which 64 cores have 1,828. Raises
    PlanError above 64 cores.
    """
    if not 1 <= cores <= MOST_CORES:
        raise PlanError(f"{cores} cores have too many splits: name those to be considered, as splits = [[{cores}], …]")
    if cores <= _EVERY_SPLIT_CORES:
        sizes = tuple(range(cores, 0, -1))
    else:
        sizes = tuple(sorted({cores, *(1 << power for power in range(cores.bit_length()))}, reverse=True))
    return tuple(_splits(cores, sizes))


def _splits(total: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All multisets of `sizes` with this sum, each in descending order; `sizes` descend."""
    if total == 0:
        return [()]
    found = []
    for index, size in enumerate(sizes):
        if size <= total:
            found += [(size, *rest) for rest in _splits(total - size, sizes[index:])]
    return found


def _request_of(
    table: dict[str, Any],
    where: str,
    known: Mapping[str, KnownTenant],
    applications: Mapping[str, KnownApplication],
    unmeasured: Unmeasured,
) -> Request:
    if "plan" in table:
        raise PlanError(f"{where}: holds a plan, expected a file of tenants and devices without [[plan]]")
    if table.get("format", REQUEST_FORMAT) != REQUEST_FORMAT:
        raise PlanError(f"{where}: format is {table['format']!r}, expected {REQUEST_FORMAT!r}")
    for tenant in _tables(table, "tenant"):
        its = known.get(str(tenant.get("name"))) or known.get(str(tenant.get("model")))
        if its:
            tenant.update({"model": its.model, "slo_ms": its.slo_ns / NS_PER_MS} | tenant)
    named = {str(each["name"]): each for each in _tables(table, "tenant") if "name" in each}
    faults = [*unmeasured({name: str(each.get("model", name)) for name, each in named.items()})]
    if not faults:
        lacking = [name for name, each in named.items() if "slo_ms" not in each]
        faults = [f"tenant {name!r}: slo_ms is missing; add a line like 'slo_ms = 100'" for name in lacking]
    if faults:
        raise PlanError(*(f"{where}: {each}" for each in faults))
    for application in _tables(table, "application"):
        whole = applications.get(str(application.get("name")))
        if whole:
            application.update({"slo_ms": whole.slo_ns / NS_PER_MS, "stage": to_table(whole.stages)} | application)
    return _request(convert(_named(table), _Request, where, PlanError), where)


def _plan_of(sections: Mapping[str, Any], where: str) -> PlanFile:
    found = sections.get(TENANTS)
    if not isinstance(found, PlanFile):
        raise PlanError(f"{where}: has no [[device]], expected a plan of tenants on devices")
    return found


def _named(table: dict[str, Any]) -> dict[str, Any]:
    """The table, where a tenant without a model gets the model of its own name."""
    for tenant in _tables(table, "tenant"):
        if "name" in tenant:
            tenant.setdefault("model", tenant["name"])
    return table


def _slots(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    partitions = [partition for device in devices for partition in _tables(device, "partition")]
    return [slot for partition in partitions for slot in _tables(partition, "slots")]


def _tables(table: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = table.get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _request(found: _Request, where: str) -> Request:
    if not found.device:
        raise PlanError(f"{where}: has no [[device]], expected at least one kind of device")
    if not found.tenant and not found.application:
        raise PlanError(f"{where}: has neither [[tenant]] nor [[application]], expected at least one")
    try:
        devices = tuple(made for device in found.device for made in (_device(device),) * device.count)
        checked(found.tenant, devices)
    except CotenantError as error:
        raise PlanError(f"{where}: {error}") from None
    names = [application.name for application in found.application]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise PlanError(f"{where}: application {twice[0]!r} is there twice, expected once")
    return Request(found.tenant, devices, found.application)


def _device(section: _Device) -> DeviceType:
    name = f"device {section.name!r}"
    splits = section.splits
    if splits is None:
        if section.kind == "gpu":
            raise PlanError(f"{name}: splits is missing, expected lists of percents, as splits = [[100], [50, 50]]")
        if section.cores is None:
            raise PlanError(f"{name}: cores is missing, expected the number of cores, or splits = [[2], [1, 1]]")
        try:
            splits = splits_of_cores(section.cores)
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from None
    elif section.cores is not None and max(map(sum, splits)) != section.cores:
        raise PlanError(f"{name}: cores is {section.cores}, but the largest of splits has {max(map(sum, splits))}")
    memory_bytes = UNLIMITED_BYTES if section.memory_gib is None else max(1, round(section.memory_gib * _GIB))
    partition_bytes = round(section.partition_mib * _MIB)
    return DeviceType(section.name, splits, memory_bytes, section.price, partition_bytes, section.kind)
