"""Inputs of `cotenant plan`: profiles of device types, and the number of devices of each type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from cotenant.techniques.partitions.plan.file import Request
    from cotenant.techniques.partitions.plan.sources import CostBasis, ProfileCosts

MOST_DEVICES = 10_000


def tables_of(profiles: Sequence[str], quantile: str) -> dict[str, ProfileCosts]:
    """Tables by name of device type; "" for all types without a profile of their own.

    Raises PlanError for a repository that guarantees higher rates than its lanes serve.
    """
    from cotenant.cli.rates import rates_fault
    from cotenant.errors import PlanError
    from cotenant.techniques.partitions.plan.sources import read_profile_costs

    found: dict[str, ProfileCosts] = {}
    for text in profiles:
        name, equals, rest = text.partition("=")
        if not equals or Path(text).exists():
            name, rest = "", text
        if name in found:
            raise typer.BadParameter(f"device {name!r} has two profiles, expected one", param_hint="--profiles")
        found[name] = read_profile_costs(Path(rest), quantile)
        if (fault := rates_fault(Path(rest))) is not None:
            raise PlanError(f"{rest}: {fault}")
    return found


def basis_for(tables: dict[str, ProfileCosts], request: Request, *, stale: bool = False) -> CostBasis:
    """Costs of a request. Raises as `plan.sources.basis_of`."""
    from cotenant.techniques.partitions.plan.sources import basis_of

    models = [load.model for load in request.loads]
    models += [stage.model for application in request.applications for stage in application.stages]
    return basis_of(tables, request.devices, models, stale=stale)


def with_devices(request: Request, devices: str | None) -> Request:
    """The request with other numbers of its device types, in their order."""
    if devices is None:
        return request
    kinds = {device.name: device for device in request.devices}
    counts: dict[str, int] = {}
    for part in devices.split(","):
        name, equals, number = part.partition("=")
        if not equals:
            if len(kinds) != 1:
                text = f"{part!r} is not NAME=N, and the file has {len(kinds)} device types: {', '.join(kinds)}"
                raise typer.BadParameter(text, param_hint="--devices")
            name, number = next(iter(kinds)), part
        if name.strip() not in kinds:
            text = f"device {name.strip()!r} is not in the file, which has {', '.join(kinds)}"
            raise typer.BadParameter(text, param_hint="--devices")
        if not re.fullmatch(r"[0-9]{1,5}", number.strip()) or int(number) > MOST_DEVICES:
            text = f"{number!r} is not a number of devices up to {MOST_DEVICES}"
            raise typer.BadParameter(text, param_hint="--devices")
        if name.strip() in counts:
            raise typer.BadParameter(f"device {name.strip()!r} has two counts, expected one", param_hint="--devices")
        counts[name.strip()] = int(number)
    made = [kind for name, kind in kinds.items() for _ in range(counts.get(name, _count(request, name)))]
    return replace(request, devices=tuple(made))


def _count(request: Request, name: str) -> int:
    return sum(device.name == name for device in request.devices)
