"""`cotenant.plan`: whether tenants fit on devices, and how."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

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


@dataclass(frozen=True, slots=True)
class PlanCheck(Tabular):
    """The answer of `cotenant.check_plan`. Rows are the violations.

    `violations` are sentences, all that were found. `stale` says which measurements of the plan are of models that
    changed since. `same_profile`: the plan was made from the profiles that it was checked against.

    >>> check = PlanCheck(("tenant 'a': 3 ms of 2 ms",))
    >>> check.holds, check.rows()
    (False, [{'violation': "tenant 'a': 3 ms of 2 ms"}])
    """

    violations: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    same_profile: bool = True

    @property
    def holds(self) -> bool:
        """Whether the plan keeps all promises by the profiles."""
        return not self.violations

    @override
    def rows(self) -> list[dict[str, Any]]:
        """A row for each violation."""
        return [{"violation": each} for each in self.violations]


class PlanTenants(Protocol):
    """Functions that plan, and that check plans: the value of the socket `registry.PLAN_TENANTS`."""

    def check_plan(self, plan: Path, profiles: Mapping[str, Path], *, quantile: str, is_stale: bool) -> PlanCheck:
        """The function behind `cotenant.check_plan`; `profiles` are as for `plan_tenants`."""

    def plan_tenants(
        self,
        tenants: Path,
        profiles: Mapping[str, Path],
        devices: int | Mapping[str, int] | None,
        options: PlanOptions,
    ) -> PlanResult:
        """The function behind `cotenant.plan`. The key "" of `profiles` is for devices without one of their own."""


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
    if poisson and headroom is not None:
        raise PlanError("headroom and poisson are both given, expected one of them")
    start = None if running is None else Path(running)
    options = PlanOptions(planner, headroom, poisson, misses, quantile, start, quick, stale)
    return _planning().plan_tenants(Path(tenants), _named(profiles), devices, options)


def check_plan(
    plan: str | os.PathLike[str], profiles: Profiles, *, quantile: str = "p95", stale: bool = False
) -> PlanCheck:
    """Check a plan file against measured profiles, as `cotenant plan --check` does.

    `plan` is a file of `cotenant plan`, `cotenant place` or `cotenant co-schedule`. `profiles`, `quantile` and `stale`
    are as for `cotenant.plan`. The result has all violations.

    >>> check = cotenant.check_plan("plan.toml", "models/")  # doctest: +SKIP
    >>> if not check.holds:  # doctest: +SKIP
    ...     print(*check.violations, sep="\\n")

    Raises PlanError, with all problems of all models, for files that are wrong and profiles that lack models of the
    plan, and where the planning package is not installed.
    """
    return _planning().check_plan(Path(plan), _named(profiles), quantile=quantile, is_stale=stale)


def _planning() -> PlanTenants:
    found: dict[str, PlanTenants] = registry.load_all(registry.PLAN_TENANTS)
    if not found:
        raise PlanError("no planner of tenants is installed: add the package cotenant.techniques.partitions")
    return next(iter(found.values()))


def _named(profiles: Profiles) -> dict[str, Path]:
    if isinstance(profiles, Mapping):
        return {name: Path(path) for name, path in profiles.items()}
    return {"": Path(profiles)}
