"""What the units of a model ask of a device, by the number of rows: what plans of joint runs are made from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cotenant.errors import InvalidValueError
from cotenant.work import may_split

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class KernelTable:
    """The units of a model in the order in which they run, each for 1 to `batch` rows.

    `duration_ns`, `need`, `compute` and `bandwidth` are arrays [units, batch] whose column r - 1 is for r rows.
    `duration_ns` is what a unit takes alone on the whole device, from the start of its first kernel, without the cost
    of launching it. `need` is the share of the device's slots that it fills, blocks over blocks per SM times SMs; it is
    above 1 where it takes several waves. `compute` and `bandwidth` are shares, from 0 to 1, of the device's peak
    operations and bytes a second that it uses meanwhile. `join_ns` [units] is what it takes to put together the rows
    that chunks made, behind the unit, and 0 where they are written into one buffer. `splits` are the runs of boundaries
    at which chunks may begin, be stopped and end, as a tenant has them: of one run or several, apart and in order.

    Raises InvalidValueError when the arrays differ in shape or a value is out of its range.
    """

    model: str
    batch: int
    units: tuple[str, ...]
    duration_ns: Column
    need: Column
    compute: Column
    bandwidth: Column
    join_ns: Column
    splits: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        where, shape = f"kernels of {self.model!r}", (len(self.units), self.batch)
        if self.batch < 1 or not self.units:
            raise InvalidValueError(where, "batch and units", shape, "at least one row and one unit")
        for name in ("duration_ns", "need", "compute", "bandwidth"):
            values: Column = getattr(self, name)
            if values.shape != shape or not np.isfinite(values).all() or values.min() < 0:
                raise InvalidValueError(where, name, values.shape, f"finite numbers from 0, of shape {shape}")
        if self.need.min() <= 0:
            raise InvalidValueError(where, "need", float(self.need.min()), "shares above 0")
        if max(self.compute.max(), self.bandwidth.max()) > 1:
            raise InvalidValueError(where, "compute and bandwidth", "above 1", "shares of the peak, at most 1")
        if self.join_ns.shape != shape[:1]:
            raise InvalidValueError(where, "join_ns", self.join_ns.shape, f"one for each of {shape[0]} units")
        rising = all(low < high for run in self.splits for low, high in pairwise(run))
        ends = [0, *(edge for run in self.splits for edge in (run[0], run[-1])), self.size]
        if not rising or ends != sorted(ends) or any(len(run) < 2 for run in self.splits):
            raise InvalidValueError(where, "splits", self.splits, f"rising runs of boundaries from 0 to {self.size}")

    @property
    def size(self) -> int:
        """Number of units."""
        return len(self.units)

    def may_split(self, start: int, end: int) -> bool:
        """Whether units [start, end) may run for a part of the rows."""
        return may_split(self.splits, start, end)

    def step(self, unit: int) -> tuple[int, int]:
        """The shortest stretch [start, end) of units around one that may run for a part of the rows; empty where it
        may not."""
        for run in self.splits:
            at = bisect_right(run, unit)
            if 0 < at < len(run):
                return run[at - 1], run[at]
        return unit, unit

    @property
    def has_long_steps(self) -> bool:
        """Whether some units may run for a part of the rows together alone."""
        return any(run[-1] - run[0] >= len(run) for run in self.splits)


def runs_of(splits: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """The runs of boundaries of units that treat every row by themselves, or do not."""
    edges = np.flatnonzero(np.diff([0, *splits, 0])).tolist()
    return tuple(tuple(range(start, end + 1)) for start, end in zip(edges[::2], edges[1::2], strict=True))


def fingerprint_of(tables: Sequence[KernelTable]) -> str:
    """What changes with any figure of these tables, in whatever order they are."""
    digests = []
    for table in tables:
        digest = sha256(repr((table.model, table.batch, table.units, table.splits)).encode())
        for values in (table.duration_ns, table.need, table.compute, table.bandwidth, table.join_ns):
            digest.update(np.ascontiguousarray(values).tobytes())
        digests.append(digest.hexdigest())
    return sha256("".join(sorted(digests)).encode()).hexdigest()[:16]
