"""Files of planning, in TOML: what is asked for (`tenants.toml`), and a plan with all that it rests on (`plan.toml`).

A plan file holds its request again, so that it can be checked and planned anew without another file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from cotenant.errors import CotenantError
from cotenant.plan.application import Application, Stage
from cotenant.plan.toml import array, line, scalar
from cotenant.plan.types import NS_PER_MS, DevicePlan, DeviceType, Load, PartitionPlan, Plan, PlanError, Slot, checked

REQUEST_FORMAT = "cotenant-tenants/1"
PLAN_FORMAT = "cotenant-plan/1"
UNLIMITED_BYTES = 1 << 53
"""Memory of a device type whose file does not say: models always fit. It is 8 PiB."""
MOST_CORES = 64
"""Of a device whose splits are not named."""
_EVERY_SPLIT_CORES = 12
"""Up to so many cores every split is offered; beyond, those into powers of two."""
_GIB = 1 << 30
_MIB = 1 << 20

Name = Annotated[str, Meta(min_length=1)]
Rate = Annotated[float, Meta(gt=0, le=1e12)]
Milliseconds = Annotated[float, Meta(gt=0, le=3_600_000)]
Size = Annotated[int, Meta(ge=1, le=1_000_000)]
Sizes = Annotated[tuple[Size, ...], Meta(min_length=1)]
T = TypeVar("T", bound=Struct)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a tenant from elsewhere, a model repository say, where its file leaves it out."""

    model: str
    slo_ns: int


@dataclass(frozen=True, slots=True)
class KnownApplication:
    """The same of an application: its SLO and its stages."""

    slo_ns: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is asked for. `devices` is the inventory, one entry a device.

    Of a plan that was made, `loads` include those of the applications' stages.
    """

    loads: tuple[Load, ...]
    devices: tuple[DeviceType, ...]
    applications: tuple[Application, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan and all that is needed to check it and to plan again.

    `headroom` is the share that was added to every rate; `profile` the fingerprint of what its latencies rest on.
    """

    request: Request
    plan: Plan
    headroom: float
    profile: str = ""


class _Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all tables: an unknown key is an error."""


class _Device(_Table, frozen=True):
    name: Name
    count: Annotated[int, Meta(ge=0, le=10_000)] = 1
    kind: Literal["cpu", "gpu"] = "cpu"
    cores: Annotated[int, Meta(ge=1)] | None = None
    splits: Annotated[tuple[Sizes, ...], Meta(min_length=1)] | None = None
    memory_gib: Annotated[float, Meta(gt=0, le=1 << 23)] | None = None
    partition_mib: Annotated[float, Meta(ge=0, le=1 << 30)] = 0.0
    price: Annotated[float, Meta(ge=0, le=1e12)] = 1.0


class _Tenant(_Table, frozen=True):
    name: Name
    rate: Rate
    model: Name | None = None
    slo_ms: Milliseconds | None = None


class _Stage(_Table, frozen=True):
    name: Name
    model: Name
    after: tuple[Name, ...] = ()


class _Application(_Table, frozen=True):
    name: Name
    rate: Rate
    slo_ms: Milliseconds | None = None
    stage: tuple[_Stage, ...] = ()


class _Request(_Table, frozen=True):
    device: tuple[_Device, ...] = ()
    tenant: tuple[_Tenant, ...] = ()
    application: tuple[_Application, ...] = ()
    format: str = REQUEST_FORMAT


class _Slot(_Table, frozen=True):
    tenant: Name
    batch: Annotated[int, Meta(ge=1)]
    rate: Rate


class _Partition(_Table, frozen=True):
    size: Size
    duty_ms: Milliseconds
    slots: Annotated[tuple[_Slot, ...], Meta(min_length=1)]


class _Placed(_Table, frozen=True):
    device: Name
    partition: Annotated[tuple[_Partition, ...], Meta(min_length=1)]


class _PlanFile(_Request, frozen=True):
    planner: str = ""
    headroom: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    profile: str = ""
    plan: tuple[_Placed, ...] = ()


def read_request(
    path: Path,
    known: Mapping[str, Known] | None = None,
    applications: Mapping[str, KnownApplication] | None = None,
) -> Request:
    """Read a file of tenants, applications and devices. `known` gives what the tenants' tables leave out, by tenant,
    and `applications` what those of applications do.

    Without either, a tenant's model is called like the tenant, and a missing SLO is an error. Raises PlanError, which
    names the file, the key and what was expected.
    """
    return parse_request(_text(path), str(path), known, applications)


def parse_request(
    text: str,
    where: str,
    known: Mapping[str, Known] | None = None,
    applications: Mapping[str, KnownApplication] | None = None,
) -> Request:
    """As `read_request`; `where` is what errors call the text. Raises PlanError."""
    table = _table(text, where)
    if "plan" in table:
        raise PlanError(f"{where}: holds a plan, expected a file of tenants and devices without [[plan]]")
    found = _converted(table, _Request, where, REQUEST_FORMAT)
    return _request(found, where, known or {}, applications or {})


def read_plan(path: Path) -> PlanFile:
    """Read a plan file. Whether the plan holds is for `check_plan` to say.

    Raises PlanError, which names the file, the key and what was expected.
    """
    return parse_plan(_text(path), str(path))


def parse_plan(text: str, where: str) -> PlanFile:
    """As `read_plan`; `where` is what errors call the text. Raises PlanError."""
    table = _table(text, where)
    if table.get("format") != PLAN_FORMAT:
        given = table.get("format")
        raise PlanError(f"{where}: format is {given!r}, expected {PLAN_FORMAT!r}: is it the output of 'cotenant plan'?")
    found = _converted(table, _PlanFile, where, PLAN_FORMAT)
    request = _request(found, where, {}, {})
    placed = []
    for number, device in enumerate(found.plan):
        partitions = []
        for partition in device.partition:
            slots = tuple(Slot(slot.tenant, slot.batch, slot.rate) for slot in partition.slots)
            duty_ns = _ns(partition.duty_ms, f"{where}: plan[{number}].partition.duty_ms")
            partitions.append(PartitionPlan(partition.size, duty_ns, slots))
        placed.append(DevicePlan(device.device, tuple(partitions)))
    return PlanFile(request, Plan(tuple(placed), found.planner), found.headroom, found.profile)


def plan_text(file: PlanFile) -> str:
    """The TOML of a plan file: `parse_plan` of it is the plan file again."""
    lines = [
        "# Made by 'cotenant plan'; 'cotenant plan --check' tells whether it holds, 'cotenant serve --plan' runs it.",
        line("format", PLAN_FORMAT),
        line("planner", file.plan.planner),
        line("headroom", file.headroom),
        line("profile", file.profile),
    ]
    lines += request_lines(file.request)
    for device in file.plan.devices:
        lines += ["", "[[plan]]", line("device", device.device)]
        for partition in device.partitions:
            lines += ["", "[[plan.partition]]", line("size", partition.size)]
            lines += [line("duty_ms", partition.duty_ns / NS_PER_MS), "slots = ["]
            for slot in partition.slots:
                cells = f"tenant = {scalar(slot.tenant)}, batch = {slot.batch}, rate = {scalar(slot.rate_per_s)}"
                lines.append(f"    {{ {cells} }},")
            lines.append("]")
    return "\n".join(lines) + "\n"


def request_text(request: Request) -> str:
    """The TOML of a file of tenants: `parse_request` of it is the request again."""
    return "\n".join([line("format", REQUEST_FORMAT), *request_lines(request)]) + "\n"


def request_lines(request: Request) -> list[str]:
    """The tables of devices, tenants and applications."""
    lines: list[str] = []
    for device, group in groupby(request.devices):
        lines += ["", "[[device]]", line("name", device.name), line("count", len(list(group)))]
        lines.append(f"splits = {array([array(split) for split in device.splits])}")
        if device.memory_bytes < UNLIMITED_BYTES:
            lines.append(line("memory_gib", device.memory_bytes / _GIB))
        if device.partition_bytes:
            lines.append(line("partition_mib", device.partition_bytes / _MIB))
        lines.append(line("price", device.price))
    for load in request.loads:
        lines += ["", "[[tenant]]", line("name", load.tenant), line("model", load.model)]
        lines += [line("rate", load.rate_per_s), line("slo_ms", load.slo_ns / NS_PER_MS)]
    for application in request.applications:
        lines += ["", "[[application]]", line("name", application.name), line("rate", application.rate_per_s)]
        lines.append(line("slo_ms", application.slo_ns / NS_PER_MS))
        for stage in application.stages:
            lines += ["", "[[application.stage]]", line("name", stage.name), line("model", stage.model)]
            if stage.after:
                lines.append(f"after = {array([scalar(name) for name in stage.after])}")
    return lines


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
    """All multisets of `sizes`, which descend, of that total; each descends."""
    if total == 0:
        return [()]
    found = []
    for index, size in enumerate(sizes):
        if size <= total:
            found += [(size, *rest) for rest in _splits(total - size, sizes[index:])]
    return found


def _request(
    found: _Request, where: str, known: Mapping[str, Known], elsewhere: Mapping[str, KnownApplication]
) -> Request:
    if not found.device:
        raise PlanError(f"{where}: has no [[device]], expected at least one kind of device")
    if not found.tenant and not found.application:
        raise PlanError(f"{where}: has neither [[tenant]] nor [[application]], expected at least one")
    try:
        devices = tuple(made for device in found.device for made in (_device(device),) * device.count)
        loads = tuple(_load(tenant, known) for tenant in found.tenant)
        applications = tuple(_application(each, elsewhere.get(each.name)) for each in found.application)
        checked(loads, devices)
    except CotenantError as error:
        raise PlanError(f"{where}: {error}") from None
    names = [application.name for application in applications]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise PlanError(f"{where}: application {twice[0]!r} is there twice, expected once")
    return Request(loads, devices, applications)


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
    return DeviceType(section.name, splits, memory_bytes, section.price, round(section.partition_mib * _MIB))


def _load(section: _Tenant, known: Mapping[str, Known]) -> Load:
    name = f"tenant {section.name!r}"
    elsewhere = known.get(section.name) or known.get(section.model or "")
    model = section.model or (elsewhere.model if elsewhere else section.name)
    if section.slo_ms is not None:
        return Load(section.name, model, section.rate, _ns(section.slo_ms, f"{name}: slo_ms"))
    if elsewhere is None:
        raise PlanError(f"{name}: slo_ms is missing, expected a latency target in milliseconds")
    return Load(section.name, model, section.rate, elsewhere.slo_ns)


def _application(section: _Application, known: KnownApplication | None) -> Application:
    name = f"application {section.name!r}"
    stages = tuple(Stage(stage.name, stage.model, stage.after) for stage in section.stage)
    if known is not None:
        stages = stages or known.stages
    if not stages:
        raise PlanError(f"{name}: has no [[application.stage]], expected at least one stage")
    if section.slo_ms is not None:
        slo_ns = _ns(section.slo_ms, f"{name}: slo_ms")
    elif known is not None:
        slo_ns = known.slo_ns
    else:
        raise PlanError(f"{name}: slo_ms is missing, expected a latency target in milliseconds for the whole")
    return Application(section.name, slo_ns, section.rate, stages)


def _ns(milliseconds: float, where: str) -> int:
    ns = round(milliseconds * NS_PER_MS)
    if ns < 1:
        raise PlanError(f"{where} is {milliseconds!r}, expected at least a nanosecond")
    return ns


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is not valid TOML: {error}") from None


def _table(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(f"{where}: is not valid TOML: {error}") from None


def _converted(table: dict[str, Any], into: type[T], where: str, form: str) -> T:
    if table.get("format", form) != form:
        raise PlanError(f"{where}: format is {table['format']!r}, expected {form!r}")
    try:
        return msgspec.convert(table, into, strict=True)
    except msgspec.ValidationError as error:
        sentence, _, place = str(error).partition(" - at `$")
        key = place.rstrip("`").lstrip(".")
        raise PlanError(f"{where}: {key + ': ' if key else ''}{sentence}") from None
