"""The interference model of a repository, fitted to its measured co-runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from cotenant.errors import CotenantError, InvalidValueError
from cotenant.profiles.profile_file import Profile, load_profile
from cotenant.repository import coruns_path, find_versions, model_names, profile_path
from cotenant.techniques.partitions.coruns import ANTAGONIST, QUANTILES, CoRunner, CoRunRow, load_coruns, runs_of
from cotenant.techniques.partitions.predict.factors import Interference, PressureInterference
from cotenant.techniques.partitions.predict.interference_fit import fit_pressure

_FEWEST = 2


@dataclass(frozen=True, slots=True)
class AntagonistFactors:
    """Slowdown of a launch beside antagonists (`suffered`), and of an antagonist beside the launch (`caused`)."""

    suffered: float
    caused: float


def antagonist_features(rows: Sequence[CoRunRow]) -> dict[CoRunner, AntagonistFactors]:
    """Slowdowns of each (tenant, batch, size) that was measured alone among antagonists."""
    found: dict[CoRunner, AntagonistFactors] = {}
    for run in runs_of(rows):
        tenants = [row for row in run if row.target[0] != ANTAGONIST]
        streams = [row.corun().factor for row in run if row.target[0] == ANTAGONIST]
        if len(tenants) == 1 and streams:
            found[tenants[0].target] = AntagonistFactors(tenants[0].corun().factor, max(streams))
    return found


def valid_rows(root: Path, profile: Profile) -> tuple[CoRunRow, ...]:
    """Co-runs of a repository that are valid for the models and the device of a profile.

    Raises ProfileError for a file that cannot be used.
    """
    path = coruns_path(root)
    if not path.exists():
        return ()
    found = load_coruns(path)
    if found.device.fingerprint != profile.device.fingerprint:
        return ()
    return found.still_valid({name: model.digest for name, model in profile.models.items()})


def corun_interference(root: Path, *, quantile: str = "p50", seed: int = 0) -> Interference | None:
    """The interference model of a repository, fitted to its measured co-runs; sizes are cores.

    None without a profile or with fewer than two valid co-runs. Models have the names of their tenants and of their
    directories. Slowdowns are ratios of `quantile` (one of QUANTILES) beside co-runners to the same quantile alone.

    Raises ProfileError for files that cannot be used, InvalidValueError for another quantile.
    """
    if quantile not in QUANTILES:
        raise InvalidValueError("interference", "quantile", quantile, f"one of {', '.join(QUANTILES)}")
    if not coruns_path(root).exists() or not profile_path(root).exists():
        return None
    rows = valid_rows(root, load_profile(profile_path(root)))
    if len(rows) < _FEWEST:
        return None
    fitted = fit_pressure([row.corun(quantile) for row in rows], seed=seed)
    return NamedInterference(fitted, _tenants(root))


@dataclass(frozen=True, slots=True)
class NamedInterference(Interference):
    """An interference model with further names of models. `tenants`: the fitted name by other name."""

    fitted: PressureInterference
    tenants: Mapping[str, str]

    @override
    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = "") -> float:
        return self.fitted.factor(self._known(model), batch, size, self._all(others))

    @override
    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str = "") -> float:
        return self.fitted.adds(self._known(model), batch, size, self._all([other])[0])

    @override
    def factor_at(
        self, quantile: float, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = ""
    ) -> float:
        return self.fitted.factor_at(quantile, self._known(model), batch, size, self._all(others))

    def _known(self, model: str) -> str:
        return self.tenants.get(model, model)

    def _all(self, others: Sequence[CoRunner]) -> list[CoRunner]:
        return [(self._known(model), batch, size) for model, batch, size in others]


def _tenants(root: Path) -> dict[str, str]:
    """Tenants by model directory, for directories with another name than their tenant and no tenant of that name."""
    found: dict[str, str] = {}
    owners: list[str] = []
    for name in model_names(root):
        try:
            for each in find_versions(root, name, {}):
                owners.append(each.tenant)
                if each.is_default and each.tenant != name:
                    found[name] = each.tenant
        except CotenantError:
            continue  # an unreadable model is in no profile
    return {name: tenant for name, tenant in found.items() if name not in owners}
