"""Latency of a model alone, interpolated from measured points; used by policies, simulator and planners.

Reasons for the rules and their errors on measured profiles: decision 0064.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from cotenant.profiles.latency_table import LatencyRow, LatencyTable

PARTS = 1 << 24
"""Fixed-point unit of `LatencyModel.prefix`: the latency of the whole model."""


class LatencyModel:
    """Latency in ns of one model by declared shape, rows and cores, at the quantile of its table. Immutable.

    Exact at measured points. Otherwise:

    - Rows, on a measured number of cores: linear between measured batches. Below the smallest batch: its latency, since
      rows can be padded to it. Above the largest: linear, with the larger slope of (last two batches) and (first and
      last batch). If neither is positive, each further row costs the latency of a row in the largest batch.
    - Cores: with measured numbers of cores a < c < b, the speed `v = 1 / latency` is linear:
      `v(c) = v(a) + (v(b) - v(a)) * (c - a) / (b - a)`.
      If b is slower than a, c is as slow as b. Below the fewest cores the speed is in proportion to the cores. Above
      the most it is constant.
    - Shape: that of the measured shape with the nearest number.
    """

    __slots__ = ("_shapes", "prefix", "sizes", "table")

    def __init__(self, table: LatencyTable) -> None:
        self.table = table
        self.prefix = _prefix_sums(table.unit_weights)
        """Share of the latency before each unit, in PARTS; the last is that of all units."""
        points: dict[int, dict[int, list[tuple[int, int]]]] = {}
        for row in table.rows:
            points.setdefault(row.shape, {}).setdefault(row.cores, []).append((row.items, row.latency_ns))
        self._shapes = {
            shape: (tuple(sorted(by_cores)), tuple(tuple(sorted(by_cores[cores])) for cores in sorted(by_cores)))
            for shape, by_cores in points.items()
        }
        self.sizes = tuple(sorted({row.cores for row in table.rows}))
        """Measured numbers of cores, ascending."""

    @classmethod
    def of_points(cls, points: Mapping[int, Mapping[int, int]]) -> LatencyModel:
        """A model of one shape and one unit, from latencies in ns by cores and rows. Raises as LatencyTable."""
        rows = (LatencyRow(0, items, cores, ns) for cores, of in points.items() for items, ns in of.items())
        return cls(LatencyTable(tuple(rows)))

    @property
    def shape_count(self) -> int:
        """Number of measured shapes."""
        return len(self._shapes)

    def latency_ns(self, shape: int, rows: int, cores: int) -> int:
        """Latency of the whole model, rounded up."""
        return ceil(self._at(shape, rows, cores))

    def slowest_ns(self, rows: int, cores: int) -> int:
        """Latency at the measured shape that takes longest."""
        return max([self.latency_ns(shape, rows, cores) for shape in self._shapes])

    def most_rows(self, cores: int) -> int:
        """The largest batch that needs no extrapolation on so many cores, at any shape."""
        return min([curve[-1][0] for shape in self._shapes for curve in self._around(shape, cores)])

    def _at(self, shape: int, rows: int, cores: int) -> float:
        found = self._shapes.get(shape)
        counts, curves = found or self._shapes[min(self._shapes, key=lambda known: (abs(known - shape), known))]
        at = bisect_left(counts, cores)
        if at == len(counts):
            return over_rows(curves[-1], rows)
        more = over_rows(curves[at], rows)
        if counts[at] == cores:
            return more
        if at == 0:
            return more * counts[0] / cores
        fewer = over_rows(curves[at - 1], rows)
        if fewer <= more:
            return more
        part = (cores - counts[at - 1]) / (counts[at] - counts[at - 1])
        return fewer * more / (more + (fewer - more) * part)

    def _around(self, shape: int, cores: int) -> Sequence[Sequence[tuple[int, int]]]:
        """The measured batches that determine the latency on a number of cores."""
        counts, curves = self._shapes[shape]
        at = bisect_left(counts, cores)
        if at == len(counts):
            return curves[-1:]
        return curves[at : at + 1] if counts[at] == cores or at == 0 else curves[at - 1 : at + 1]


def over_rows(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Value at a number of rows, from ascending points (rows, value), by the rule for rows of LatencyModel."""
    at = bisect_left(points, (rows, 0))
    if at < len(points) and (points[at][0] == rows or at == 0):
        return points[at][1]
    if at < len(points):
        (low, latency), (high, top) = points[at - 1], points[at]
        return latency + (top - latency) * (rows - low) / (high - low)
    most, latency = points[-1]
    rising = max(_slope(points[-2:]), _slope((points[0], points[-1]))) if len(points) > 1 else 0.0
    return latency + (rising or latency / most) * (rows - most)


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Slope of latency by rows between the first and the last point; at least 0."""
    (size_a, latency_a), *_, (size_b, latency_b) = points
    return max(0.0, (latency_b - latency_a) / (size_b - size_a))


def _prefix_sums(weights: Iterable[float]) -> tuple[int, ...]:
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    total = sums[-1] or 1.0
    return tuple(round(part / total * PARTS) for part in sums)
