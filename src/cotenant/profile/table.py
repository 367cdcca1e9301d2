"""The versioned profile file: what was measured, on what, when and by which command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from cotenant.errors import CotenantError
from cotenant.files import write_whole
from cotenant.predict.table import LatencyRow, LatencyTable, TablePredictor
from cotenant.profile.device import Device

FORMAT = "cotenant-profile/1"
QUANTILES = ("p50", "p90", "p95", "p99")


class ProfileError(CotenantError):
    """A profile cannot be used: names the file and what was expected."""


@dataclass(frozen=True, slots=True)
class Point:
    """Latency of the whole model for `items` rows of declared shape `shape` on `cores` cores, over `runs` runs."""

    shape: int
    items: int
    cores: int
    runs: int
    p50_ns: int
    p90_ns: int
    p95_ns: int
    p99_ns: int


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What is known of one model version.

    `digest` is that of the model file and its configuration; a profile of another digest is stale. `unit_ns` are
    median latencies of the units, one row on one core at the largest declared shape. `segment_ratio` is the latency of
    the model run as the segments `cuts`, over that of a whole run, medians of interleaved runs.
    """

    digest: str
    points: tuple[Point, ...]
    unit_ns: tuple[int, ...]
    cuts: tuple[int, ...]
    segment_ratio: float

    def table(self, quantile: str) -> LatencyTable:
        """The latencies at one of QUANTILES, for a predictor."""
        rows = tuple(
            LatencyRow(point.shape, point.items, point.cores, getattr(point, f"{quantile}_ns")) for point in self.points
        )
        return LatencyTable(rows, tuple(float(ns) for ns in self.unit_ns), self.segment_ratio)


@dataclass(frozen=True, slots=True)
class Profile:
    """All profiles of one repository on one device."""

    device: Device
    created: str
    command: str
    models: dict[str, ModelProfile]
    format: str = FORMAT

    def predictor(self, quantile: str = "p50") -> TablePredictor:
        """Believe this profile at one quantile."""
        return TablePredictor({name: model.table(quantile) for name, model in self.models.items()})


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile; a reader sees the old file or the new one, never half of one."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises ProfileError when it is not one."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read ({error.strerror}); make it with 'cotenant profile'") from None
    except msgspec.MsgspecError as error:
        raise ProfileError(f"{path}: is not a profile ({error}); remove it and run 'cotenant profile'") from None
    if profile.format != FORMAT:
        raise ProfileError(f"{path}: format is {profile.format!r}, expected {FORMAT!r}; run 'cotenant profile' anew")
    return profile
