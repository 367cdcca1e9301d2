"""Measured latencies of one model, for predictors, simulated worlds and campaigns."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from cotenant.errors import InvalidValueError
from cotenant.profiles.version_table import VersionTable


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One measured point: `items` rows of declared shape `shape` on `cores` cores took `latency_ns`."""

    shape: int
    items: int
    cores: int
    latency_ns: int


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """All points of one model, and the distribution of its latency over its units.

    - `unit_weights`: relative latencies of the units.
    - `segment_ratio`: latency of a run in segments over that of a whole run.
    - `versions`: the units' compiled versions, measured for one row of the first declared shape; unset without any.

    Raises InvalidValueError when there is no point, no unit, or a value out of range.
    """

    rows: tuple[LatencyRow, ...]
    unit_weights: tuple[float, ...] = (1.0,)
    segment_ratio: float = 1.0
    versions: VersionTable | UnsetType = UNSET

    def __post_init__(self) -> None:
        if not self.rows:
            raise InvalidValueError("latency table", "rows", self.rows, "at least one measured point")
        if not self.unit_weights or min(self.unit_weights) < 0:
            raise InvalidValueError("latency table", "unit_weights", self.unit_weights, "weights from 0, at least one")
        for row in self.rows:
            if row.latency_ns <= 0 or row.items < 1 or row.cores < 1:
                raise InvalidValueError("latency table", "row", row, "positive latency, items and cores")
        if isinstance(self.versions, VersionTable) and len(self.versions.units) != len(self.unit_weights):
            expected = f"as many units as there are weights, {len(self.unit_weights)}"
            raise InvalidValueError("latency table", "versions", f"{len(self.versions.units)} units", expected)
