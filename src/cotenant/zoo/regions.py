"""Connected regions of a binary picture, in numpy: joins the runs of each row with touching runs of the row above."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cotenant.zoo.graph import Array


@dataclass(frozen=True, slots=True)
class Region:
    """Bounding box of a region, in pixels, right and bottom exclusive, and the mean of the values inside the region."""

    left: int
    top: int
    right: int
    bottom: int
    mean: float


def find_regions(values: Array, threshold: float) -> list[Region]:
    """Return the 8-connected regions of FP32 `values` [height, width] above `threshold`, by their first pixel's row."""
    height, width = values.shape
    padded = np.zeros((height, width + 2), np.int8)
    padded[:, 1:-1] = values > threshold
    edges = np.diff(padded, axis=1)
    rows, starts = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]
    parents = list(range(len(rows)))

    def root(run: int) -> int:
        while parents[run] != run:
            parents[run] = parents[parents[run]]
            run = parents[run]
        return run

    first_of_row = np.searchsorted(rows, np.arange(height + 1))
    for run, row in enumerate(rows):
        if row == 0:
            continue
        for above in range(first_of_row[row - 1], first_of_row[row]):
            if starts[above] <= ends[run] and ends[above] >= starts[run]:  # also where only corners touch
                one, other = root(above), root(run)
                parents[max(one, other)] = min(one, other)

    sums = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    run_sums = sums[rows * width + ends] - sums[rows * width + starts]
    members: dict[int, list[int]] = {}
    for run in range(len(rows)):
        members.setdefault(root(run), []).append(run)
    regions = []
    for runs in members.values():
        picked = np.array(runs)
        pixels = int((ends[picked] - starts[picked]).sum())
        regions.append(
            Region(
                left=int(starts[picked].min()),
                top=int(rows[picked].min()),
                right=int(ends[picked].max()),
                bottom=int(rows[picked].max()) + 1,
                mean=float(run_sums[picked].sum()) / pixels,
            )
        )
    return regions
