"""Demand of the units of a model on a device, by number of rows: the input of joint plans."""

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
    """Time and resource demand of the units of a model, in order, each for 1 to `batch` rows.

    Arrays have the shape [units, batch]; column r - 1 is for r rows:

    - `duration_ns`: time of a unit alone on the whole device, from the start of its first kernel, without launch cost.
    - `need`: share of the device's slots, `blocks / (blocks per SM * SMs)`; above 1 for several waves.
    - `compute`, `bandwidth`: shares of the device's peak operations and bytes per second, from 0 to 1.

    `join_ns` [units] is the time to join the rows of chunks behind a unit; 0 if they are in one buffer. `splits` are
    disjoint runs of boundaries, in order, at which chunks may start, stop and end, as in `Tenant.splits`.

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
        """Whether units [start, end) may run in chunks."""
        return may_split(self.splits, start, end)

    def step(self, unit: int) -> tuple[int, int]:
        """The shortest segment [start, end) of units with this one that may run in chunks; empty if none may."""
        for run in self.splits:
            at = bisect_right(run, unit)
            if 0 < at < len(run):
                return run[at - 1], run[at]
        return unit, unit

    @property
    def has_long_steps(self) -> bool:
        """Whether some units may run in chunks only together with others."""
        return any(run[-1] - run[0] >= len(run) for run in self.splits)


def runs_of(splits: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """The runs of boundaries around units that are row-wise (`splits` has a flag for each unit)."""
    edges = np.flatnonzero(np.diff([0, *splits, 0])).tolist()
    return tuple(tuple(range(start, end + 1)) for start, end in zip(edges[::2], edges[1::2], strict=True))


def fingerprint_of(tables: Sequence[KernelTable]) -> str:
    """A digest of all figures of these tables, whatever their order."""
    digests = []
    for table in tables:
        digest = sha256(repr((table.model, table.batch, table.units, table.splits)).encode())
        for values in (table.duration_ns, table.need, table.compute, table.bandwidth, table.join_ns):
            digest.update(np.ascontiguousarray(values).tobytes())
        digests.append(digest.hexdigest())
    return sha256("".join(sorted(digests)).encode()).hexdigest()[:16]
