"""The versioned profile file: latencies of models, the device, the time and the command of the measurement."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType
from typing_extensions import override

from cotenant.errors import CotenantError
from cotenant.files import load, save
from cotenant.profiles.device import Device
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.profiles.merging import Merging
from cotenant.profiles.server_cost import ServerCost
from cotenant.profiles.version_table import VersionTable
from cotenant.tabular import Tabular

FORMAT = "cotenant-profile/1"
QUANTILES = ("p50", "p90", "p95", "p99")


def highest_quantile(runs: int) -> int:
    """The highest percentile that so many runs support: at least one of them lies above. 30 runs: 96; 100 runs: 99."""
    return 100 * (runs - 1) // runs if runs > 0 else 0


class ProfileError(CotenantError):
    """A profile cannot be used. The message names the file and the expected content."""


@dataclass(frozen=True, slots=True)
class Point:
    """Latency of the whole model for `items` rows of declared shape `shape` on `cores` cores, over `runs` runs.

    A quantile above `highest_quantile(runs)` is the longest run instead. `runs` is 0 for an assumed latency.
    `is_disturbed`: other processes kept the cores busy at every try. `cpu_ns`: median processor time of a run, all
    threads; 0 in older profiles.
    """

    shape: int
    items: int
    cores: int
    runs: int
    p50_ns: int
    p90_ns: int
    p95_ns: int
    p99_ns: int
    is_disturbed: bool = False
    cpu_ns: int = 0

    def supports(self, quantile: str) -> bool:
        """Whether the runs are enough for one of QUANTILES."""
        return int(quantile[1:]) <= highest_quantile(self.runs)

    def origin(self, quantile: str) -> str:
        """What the value at one of QUANTILES is, for example "p99 of 120 runs" or "longest of 30 runs"."""
        if not self.runs:
            return "assumed"
        return f"{quantile if self.supports(quantile) else 'longest'} of {self.runs} runs"


@dataclass(frozen=True, slots=True)
class ModelContent:
    """Digests of a model's files and of the configuration that its latency depends on, without opening the model."""

    files: str
    config: str


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Measurements of one model version.

    `digest` is that of the opened model and its configuration: a profile with another digest is stale. `content` is the
    same without opening the model. `unit_ns` are latencies of the units, for one row on one core at the largest
    declared shape. `segment_ratio` is the latency as segments `cuts` over that of a whole run, medians of interleaved
    runs. With `padded` a batch runs with the rows of the next larger measured batch, as captured models do. `versions`:
    see `LatencyTable`. `splits`: see `Tenant`. `merging`: whether queries may be merged. `row_bytes`: bytes of the
    input and output tensors of one row, by declared shape. `content`, `merging` and `row_bytes` are unset in older
    profiles. `memory_bytes` is the measured peak of the worker's resident memory; 0 if unknown.
    """

    digest: str
    points: tuple[Point, ...]
    unit_ns: tuple[int, ...]
    cuts: tuple[int, ...]
    segment_ratio: float
    padded: bool = False
    versions: VersionTable | UnsetType = UNSET
    splits: tuple[tuple[int, ...], ...] | UnsetType = UNSET
    merging: Merging | UnsetType = UNSET
    content: ModelContent | UnsetType = UNSET
    row_bytes: tuple[tuple[int, int], ...] | UnsetType = UNSET
    memory_bytes: int = 0

    def merged_rows(self, max_batch: int) -> int:
        """Most rows of a batch, of the `max_batch` of the configuration."""
        return max_batch if self.merging is UNSET or self.merging.is_allowed else 1

    def table(self, quantile: str) -> LatencyTable:
        """The latencies at one of QUANTILES, for a predictor; the longest run where a point has too few runs."""
        sizes = sorted({point.items for point in self.points})
        before = dict(zip(sizes, (0, *sizes), strict=False)) if self.padded else {}
        rows = tuple(
            LatencyRow(point.shape, items, point.cores, getattr(point, f"{quantile}_ns"))
            for point in self.points
            for items in range(before.get(point.items, point.items - 1) + 1, point.items + 1)
        )
        return LatencyTable(rows, tuple(float(ns) for ns in self.unit_ns), self.segment_ratio, self.versions)


def disturbed_words(model: ModelProfile, root: Path) -> str:
    """A warning about points that were measured beside busy processes; "" without any."""
    count = sum(point.is_disturbed for point in model.points)
    if not count:
        return ""
    return (
        f"{count} of {len(model.points)} points were measured while other processes kept the cores busy, at every try; "
        f"run 'cotenant profile {root} --fresh' on an idle machine"
    )


@dataclass(frozen=True, slots=True)
class Profile(Tabular):
    """All profiles of one repository on one device, and the cost of requests to a server there, if measured."""

    device: Device
    created: str
    command: str
    models: dict[str, ModelProfile]
    format: str = FORMAT
    server: ServerCost | UnsetType = UNSET

    def of_digest(self, tenant: str, digest: str) -> ModelProfile | None:
        """The profile with this digest: that of the tenant, or of another model with equal files and configuration."""
        known = self.models.get(tenant)
        found = (known, *self.models.values()) if known is not None else self.models.values()
        return next((each for each in found if each.digest == digest), None)

    @property
    def contents(self) -> dict[str, ModelContent | UnsetType]:
        """The content of each profiled model."""
        return {name: model.content for name, model in self.models.items()}

    @override
    def rows(self) -> list[dict[str, Any]]:
        """A row for each measured point: the model, the fields of Point, and times in milliseconds.

        A quantile is None where the runs are too few for it. `upper_ms` is the p99, or the longest run.
        """
        return [
            {
                "model": name,
                **{each: getattr(point, each) for each in ("shape", "items", "cores", "runs")},
                **{
                    f"{each}_ms": getattr(point, f"{each}_ns") / 1e6 if point.supports(each) else None
                    for each in QUANTILES
                },
                "upper_ms": point.p99_ns / 1e6,
                "cpu_ms": point.cpu_ns / 1e6 or None,
                "is_disturbed": point.is_disturbed,
            }
            for name, model in self.models.items()
            for point in model.points
        ]

    def tables(self, quantile: str = "p50") -> dict[str, LatencyTable]:
        """The latencies of all models at one quantile, for predictors and worlds."""
        return {name: model.table(quantile) for name, model in self.models.items()}


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile atomically."""
    save(path, profile)


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises ProfileError for any other file."""
    return load(path, Profile, FORMAT, ProfileError, "make it with 'cotenant profile'")


def launch_ns_of(path: Path) -> int:
    """What a launch costs a server besides the model, by a profile file; 0 where it was not measured."""
    with suppress(CotenantError):
        found = load_profile(path).server
        return 0 if found is UNSET else found.launch_ns
    return 0
