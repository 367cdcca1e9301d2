"""`cotenant.plan`: whether tenants fit on devices, and how."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cotenant import registry
from cotenant.errors import PlanError
from cotenant.files import write_whole
from cotenant.tabular import Tabular

Profiles = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
"""A profiled repository or a profile file, or one for each device type by name."""


class PlanResult(Tabular):
    """The answer of `cotenant.plan`. Rows are the tenants of a plan, or where nothing fits the changes that help."""

    __slots__ = ()

    @property
    @abstractmethod
    def fits(self) -> bool:
        """Whether there is a plan."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Plain data, as `cotenant plan --json` prints it."""

    @abstractmethod
    def text(self) -> str:
        """The plan file (TOML). Raises PlanError where there is no plan."""

    @abstractmethod
    def svg(self) -> str:
        """A picture of the plan (SVG). Raises PlanError where there is no plan."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file, for `cotenant serve --plan`. Raises PlanError where there is no plan."""
        write_whole(Path(path), self.text().encode())


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How tenants are planned: the arguments of `plan` of these names."""

    planner: str | None
    headroom: float | None
    is_poisson: bool
    misses: float | None
    quantile: str
    running: Path | None
    is_quick: bool
    is_stale: bool


class PlanTenants(Protocol):
    """A function that plans: the value of the socket `registry.PLAN_TENANTS`."""

    def __call__(
        self,
        tenants: Path,
        profiles: Mapping[str, Path],
        devices: int | Mapping[str, int] | None,
        options: PlanOptions,
    ) -> PlanResult:
        """See `plan`. The key "" of `profiles` is for all device types without a profile of their own."""


def plan(
    tenants: str | os.PathLike[str],
    profiles: Profiles,
    *,
    devices: int | Mapping[str, int] | None = None,
    planner: str | None = None,
    headroom: float | None = None,
    poisson: bool = False,
    misses: float | None = None,
    quantile: str = "p95",
    running: str | os.PathLike[str] | None = None,
    quick: bool = False,
    stale: bool = False,
) -> PlanResult:
    """Plan tenants onto devices from measured profiles, and check the plan, as `cotenant plan` does.

    `tenants` is a file of tenants, rates, SLOs and devices (TOML). `profiles` is a profiled repository or a profile
    file, or one for each device type by its name. `devices` replaces the number of devices, or the number of each type.
    `planner` is by default "ours". `headroom` is the share added to every rate, by default 0.1; instead, `poisson` adds
    what Poisson arrivals need. `misses` is a share of SLOs, as 0.01: each tenant misses at most so many in a simulation
    of Poisson arrivals, or there is no plan. `quantile` is that of the measured latencies: "p50", "p95" or "p99".
    `running` is a plan file to start from, if the planner can. `quick` does not search how far rates may grow. `stale`
    accepts profiles of models that changed since.

    >>> found = cotenant.plan("tenants.toml", "models/")  # doctest: +SKIP
    >>> if found.fits:  # doctest: +SKIP
    ...     found.save("plan.toml")

    Raises PlanError for files that are wrong, for both `headroom` and `poisson`, and where the planning package is not
    installed.
    """
    found: dict[str, PlanTenants] = registry.load_all(registry.PLAN_TENANTS)
    if not found:
        raise PlanError("no planner of tenants is installed: add the package cotenant.techniques.partitions")
    if isinstance(profiles, Mapping):
        named = {name: Path(path) for name, path in profiles.items()}
    else:
        named = {"": Path(profiles)}
    [made, *_] = found.values()
    if poisson and headroom is not None:
        raise PlanError("headroom and poisson are both given, expected one of them")
    start = None if running is None else Path(running)
    options = PlanOptions(planner, headroom, poisson, misses, quantile, start, quick, stale)
    return made(Path(tenants), named, devices, options)
