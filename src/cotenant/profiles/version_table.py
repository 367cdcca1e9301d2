"""Measured times of a model's units in several compiled versions, by cores; the source of `Spans`.

An implementation is measured alone at some core counts. Between them its speed `1 / time` and its memory traffic are
interpolated linearly. Below the smallest count speed falls linearly to 0; above the largest both are constant. Traffic
is at most `bandwidth x time`.

Pressure `p` is the share of the bandwidth that other launches would draw. The bandwidth is shared max-min fairly, with
equal weights of all cores. So a unit on `c` of `C` cores gets at least the share `max(1 - p, c / C)`, and its time is

    max(time alone, bytes / (bandwidth x share)).

More threads are not always faster. For each core count, a version for a level of pressure runs the number of threads
that is fastest at that level.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from cotenant.core.predictor import Spans
from cotenant.errors import InvalidValueError

_NS_PER_S = 1_000_000_000
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


class Implementation(Struct, frozen=True):
    """One compiled implementation of a unit: its time alone and its memory traffic at these core counts.

    Raises InvalidValueError when the lengths differ or the core counts do not rise from at least 1. Raises it for times
    that are not positive and for negative bytes.
    """

    cores: tuple[int, ...]
    solo_ns: tuple[int, ...]
    moved_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        where = "implementation"
        rising = all(a < b for a, b in zip((0, *self.cores), self.cores, strict=False))
        if not self.cores or not rising:
            raise InvalidValueError(where, "cores", self.cores, "numbers of cores that rise, from 1 on")
        for name, least in (("solo_ns", 1), ("moved_bytes", 0)):
            values = getattr(self, name)
            if len(values) != len(self.cores) or min(values) < least:
                raise InvalidValueError(where, name, values, f"{len(self.cores)} numbers from {least} on")

    def at(self, most: int) -> tuple[_Floats, _Floats]:
        """Time alone in ns, and bytes, on 1 to `most` cores."""
        counts = np.arange(1, most + 1, dtype=np.float64)
        known = np.array((0, *self.cores), dtype=np.float64)
        speed = np.array((0.0, *(1.0 / ns for ns in self.solo_ns)))
        moved = np.interp(counts, known[1:], np.array(self.moved_bytes, np.float64))
        return 1.0 / np.interp(counts, known, speed), moved


class UnitVersions(Struct, frozen=True):
    """The implementations of one unit, and the index of the implementation for each level of pressure."""

    implementations: tuple[Implementation, ...]
    by_level: tuple[int, ...]


class UnitCosts(NamedTuple):
    """Costs of single units alone.

    Unit u in version q on c cores has the index `((q * cores + c - 1) * units) + u`. `threads` is the number of threads
    used, at most c; `ns` the time, `moved` the bytes.
    """

    units: int
    versions: int
    cores: int
    ns: tuple[int, ...]
    moved: tuple[int, ...]
    threads: tuple[int, ...]


class VersionTable(Struct, frozen=True):
    """All units of one model at one shape and number of rows, on a machine of `cores` cores.

    The `levels` levels of pressure are evenly spaced from 0 to 1. `bandwidth_bytes_per_s` is that of the memory; at 0
    (unknown) pressure has no effect.

    Raises InvalidValueError when a number is out of range, or a unit lacks an implementation for a level.
    """

    cores: int
    levels: int
    bandwidth_bytes_per_s: int
    units: tuple[UnitVersions, ...]

    def __post_init__(self) -> None:
        where = "version table"
        for name, least in (("cores", 1), ("levels", 1), ("bandwidth_bytes_per_s", 0)):
            if getattr(self, name) < least:
                raise InvalidValueError(where, name, getattr(self, name), f"a number from {least} on")
        if not self.units:
            raise InvalidValueError(where, "units", self.units, "at least one")
        for number, unit in enumerate(self.units):
            known = len(unit.implementations)
            if len(unit.by_level) != self.levels or not all(0 <= each < known for each in unit.by_level):
                expected = f"for each of {self.levels} levels the number of one of its {known} implementations"
                raise InvalidValueError(where, f"by_level of unit {number}", unit.by_level, expected)

    @property
    def versions(self) -> int:
        """Number of versions: one for each level, or 1 if every unit has a single implementation."""
        return self.levels if any(len(set(unit.by_level)) > 1 for unit in self.units) else 1

    def spans(self) -> Spans:
        """Latencies of all ranges of units: see `Spans`."""
        ns, moved, threads = self._tables()
        made = np.zeros((self.versions, self.levels, self.cores, len(self.units) + 1), np.int64)
        for level in range(self.levels):
            taken = self._under(level, ns, moved, threads)
            made[:, level, :, 1:] = np.minimum.accumulate(np.rint(taken).astype(np.int64), axis=1)
        sums = np.zeros((self.versions, self.cores, len(self.units) + 1), np.int64)
        sums[:, :, 1:] = np.rint(moved)
        return Spans(
            len(self.units),
            self.versions,
            self.levels,
            self.cores,
            tuple(np.cumsum(made, axis=3).ravel().tolist()),
            tuple(np.cumsum(sums, axis=2).ravel().tolist()),
        )

    def costs(self) -> UnitCosts:
        """Costs of each unit alone: see `UnitCosts`."""
        ns, moved, threads = self._tables()
        flat = [tuple(np.rint(each).astype(np.int64).ravel().tolist()) for each in (ns, moved, threads)]
        return UnitCosts(len(self.units), self.versions, self.cores, *flat)

    def _tables(self) -> tuple[_Floats, _Floats, _Ints]:
        """Time, bytes and threads by (version, cores, unit), with the fastest number of threads at each level."""
        shape = (self.versions, self.cores, len(self.units))
        ns, moved, threads = np.empty(shape), np.empty(shape), np.empty(shape, np.int64)
        counts = np.arange(1, self.cores + 1)
        for u, unit in enumerate(self.units):
            raw = [each.at(self.cores) for each in unit.implementations]
            for q in range(self.versions):
                alone, bytes_ = raw[unit.by_level[q]]
                if self.bandwidth_bytes_per_s:
                    bytes_ = np.minimum(bytes_, alone * (self.bandwidth_bytes_per_s / _NS_PER_S))
                taken = self._under(q, alone, bytes_, counts)
                best = np.zeros(self.cores, np.int64)
                for c in range(1, self.cores):
                    best[c] = c if taken[c] < taken[best[c - 1]] else best[c - 1]
                ns[q, :, u], moved[q, :, u], threads[q, :, u] = alone[best], bytes_[best], best + 1
        return ns, moved, threads

    def _under(self, level: int, ns: _Floats, moved: _Floats, threads: _Ints) -> _Floats:
        """Times at a level of pressure."""
        if not self.bandwidth_bytes_per_s:
            return ns
        pressure = level / (self.levels - 1) if self.levels > 1 else 0.0
        part = np.maximum(1.0 - pressure, threads / self.cores)
        made: _Floats = np.maximum(ns, moved * _NS_PER_S / (self.bandwidth_bytes_per_s * part))
        return made
