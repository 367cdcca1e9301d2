"""Measured co-runs of a repository: the file that keeps them beside the profile, and the interference model of them.

A co-run is a target that ran again and again beside others that did, too, each in a partition of its own, and the
target alone in the same minute. `profile.corun_measure` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cotenant.errors import CotenantError, InvalidValueError
from cotenant.files import write_whole
from cotenant.predict.interference import CoRun, CoRunner, Interference, PressureInterference
from cotenant.predict.interference_fit import fit_pressure
from cotenant.profile.device import Device
from cotenant.profile.table import Profile, ProfileError, load_profile
from cotenant.repository import STATE_FOLDER, find_versions, model_names, profile_path

FORMAT = "cotenant-coruns/1"
ANTAGONIST = "(antagonist)"
"""Stands for a model that does nothing but copy memory; its batch is the number of cores that do."""
QUANTILES = ("p50", "p95")
_FEWEST = 2


@dataclass(frozen=True, slots=True)
class Timed:
    """Latencies of launches in one situation, over all `runs`."""

    p50_ns: int
    p95_ns: int
    runs: int


@dataclass(frozen=True, slots=True)
class CoRunRow:
    """One target: (tenant, batch, size of its partition), beside `others`, and alone in the same minute.

    `chosen` says why it was measured: "antagonist" (all are), "active" (it told most) or "random" (to judge by).
    Raises InvalidValueError without others, and for latencies that are not positive.
    """

    target: CoRunner
    others: tuple[CoRunner, ...]
    alone: Timed
    beside: Timed
    chosen: str

    def __post_init__(self) -> None:
        for timed in (self.alone, self.beside):
            if min(timed.p50_ns, timed.p95_ns, timed.runs) < 1:
                raise InvalidValueError(f"co-run of {self.target}", "latencies and runs", timed, "positive numbers")
        self.corun()

    def corun(self, quantile: str = "p50") -> CoRun:
        """Its factor at one of QUANTILES: that quantile beside the others over the same quantile alone."""
        beside, alone = (getattr(timed, f"{quantile}_ns") for timed in (self.beside, self.alone))
        return CoRun(self.target, self.others, beside / alone)


@dataclass(frozen=True, slots=True)
class CoRunProfile:
    """All co-runs of one repository on one device. `digests` identify the model of each tenant as the profile does.

    A measurement of k launches side by side stands as k rows, one after the other.
    """

    device: Device
    created: str
    command: str
    digests: dict[str, str]
    rows: tuple[CoRunRow, ...]
    format: str = FORMAT

    def still_valid(self, digests: Mapping[str, str]) -> tuple[CoRunRow, ...]:
        """The rows of models that are still there and still the same."""
        same = [name for name, digest in self.digests.items() if digests.get(name) == digest]
        same.append(ANTAGONIST)
        return tuple(row for row in self.rows if all(key[0] in same for key in (row.target, *row.others)))


def coruns_path(root: Path) -> Path:
    """Where the co-runs of a repository lie."""
    return root / STATE_FOLDER / "coruns.json"


def save_coruns(path: Path, found: CoRunProfile) -> None:
    """Write them; a reader sees the old file or the new one."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def load_coruns(path: Path) -> CoRunProfile:
    """Read what `save_coruns` wrote. Raises ProfileError when it is not that."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=CoRunProfile)
    except OSError as error:
        raise ProfileError(
            f"{path}: cannot be read ({error.strerror}); make it with 'cotenant profile --corun'"
        ) from None
    except (msgspec.MsgspecError, InvalidValueError) as error:
        raise ProfileError(
            f"{path}: holds no co-runs ({error}); remove it and run 'cotenant profile --corun'"
        ) from None
    if found.format != FORMAT:
        raise ProfileError(f"{path}: format is {found.format!r}, expected {FORMAT!r}; remove it and measure anew")
    return found


def runs_of(rows: Sequence[CoRunRow]) -> list[tuple[CoRunRow, ...]]:
    """The rows of each measurement together."""
    found: list[tuple[CoRunRow, ...]] = []
    at = 0
    while at < len(rows):
        together = sorted((rows[at].target, *rows[at].others))
        end = at + 1
        while (
            end < len(rows)
            and end - at < len(together)
            and sorted((rows[end].target, *rows[end].others)) == together
            and rows[end].chosen == rows[at].chosen
        ):
            end += 1
        found.append(tuple(rows[at:end]))
        at = end
    return found


@dataclass(frozen=True, slots=True)
class Features:
    """What a launch and antagonists do to each other: its factor beside them, and that of an antagonist beside it."""

    suffered: float
    caused: float


def antagonist_features(rows: Sequence[CoRunRow]) -> dict[CoRunner, Features]:
    """Sensitivity and pressure of each (tenant, batch, size) measured alone among antagonists, from no counter."""
    found: dict[CoRunner, Features] = {}
    for run in runs_of(rows):
        tenants = [row for row in run if row.target[0] != ANTAGONIST]
        streams = [row.corun().factor for row in run if row.target[0] == ANTAGONIST]
        if len(tenants) == 1 and streams:
            found[tenants[0].target] = Features(tenants[0].corun().factor, max(streams))
    return found


def valid_rows(root: Path, profile: Profile) -> tuple[CoRunRow, ...]:
    """Co-runs that hold for the models of a profile on its device; none where nothing was measured.

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
    """The interference model of a profiled repository, fitted to its measured co-runs; sizes are cores.

    None where there is no profile, or fewer than two co-runs of the same device and the same models. Models go by the
    name of their tenant, and by that of their directory. Factors compare `quantile`, one of QUANTILES, of the launches
    beside others with that of the launches alone.

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
class NamedInterference:
    """An interference model whose models have other names too: `tenants` gives the known name by the other one."""

    fitted: PressureInterference
    tenants: Mapping[str, str]

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = "") -> float:
        """See `Interference`."""
        return self.fitted.factor(self._known(model), batch, size, self._all(others))

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str = "") -> float:
        """See `Interference`."""
        return self.fitted.adds(self._known(model), batch, size, self._all([other])[0])

    def factor_at(
        self, quantile: float, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = ""
    ) -> float:
        """See `Interference`."""
        return self.fitted.factor_at(quantile, self._known(model), batch, size, self._all(others))

    def _known(self, model: str) -> str:
        return self.tenants.get(model, model)

    def _all(self, others: Sequence[CoRunner]) -> list[CoRunner]:
        return [(self._known(model), batch, size) for model, batch, size in others]


def _tenants(root: Path) -> dict[str, str]:
    """Tenants by the model's directory, where the names differ and the directory's is nobody's tenant."""
    found: dict[str, str] = {}
    owners: list[str] = []
    for name in model_names(root):
        try:
            for each in find_versions(root, name):
                owners.append(each.tenant)
                if each.is_default and each.tenant != name:
                    found[name] = each.tenant
        except CotenantError:
            continue  # such a model is in no profile either
    return {name: tenant for name, tenant in found.items() if name not in owners}
