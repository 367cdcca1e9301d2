"""Measured co-runs, utilisation and constants as CSV files, with errors that name the file, the line and the column.

- co-runs: model, batch, partition_pct, other_model, other_batch, latency_ms. There may be other_pct, where it is not
  the rest that partition_pct leaves. Several co-runners stand in one cell with a "+" between them.
- solo: model, batch, partition_pct, latency_ms.
- utilisation: model, batch, l2_util_pct, dram_util_pct; and partition_pct, where it is not of the whole device.
- constants: one line with columns that begin with c1, c2, ..., c5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench._csv_rows import csv_rows
from bench.papers.gpulet._linear import WHOLE, LinearConstants, Utilisation
from cotenant.errors import CotenantError
from cotenant.techniques.partitions.coruns import CoRun, CoRunner

_SEVERAL = "+"


class InterferenceFileError(CotenantError):
    """A file of co-runs, utilisation or constants cannot be used: names the file, the place and the expected value."""


def read_solo(path: Path) -> dict[CoRunner, float]:
    """Latencies alone in ms, by (model, batch, size).

    Raises InterferenceFileError for a file that cannot be read or has other columns, and for a bad cell.
    """
    return {
        (row.text("model"), row.count("batch"), row.count("partition_pct")): row.positive("latency_ms")
        for row in _rows(path, ("model", "batch", "partition_pct", "latency_ms"))
    }


def read_coruns(path: Path, solo_ms: Mapping[CoRunner, float]) -> list[CoRun]:
    """Co-runs, their factors against the latencies alone of the same batch in the same partition.

    Raises InterferenceFileError as `read_solo` does, and for a target without a latency alone.
    """
    found = []
    for row in _rows(path, ("model", "batch", "partition_pct", "other_model", "other_batch", "latency_ms")):
        target = (row.text("model"), row.count("batch"), row.count("partition_pct"))
        if target not in solo_ms:
            raise row.error("model", f"a latency alone of {target[0]} at batch {target[1]} and {target[2]} per cent")
        models = row.text("other_model").split(_SEVERAL)
        batches = row.counts("other_batch", len(models))
        if row.has("other_pct"):
            sizes = row.counts("other_pct", len(models))
        elif len(models) > 1:
            raise row.error("other_model", "one model, or a column other_pct")
        elif target[2] >= 100:
            raise row.error("partition_pct", "less than 100, or a column other_pct")
        else:
            sizes = [100 - target[2]]
        others = tuple(sorted(zip(models, batches, sizes, strict=True)))
        found.append(CoRun(target, others, row.positive("latency_ms") / solo_ms[target]))
    return found


def read_utilisation(path: Path) -> Utilisation:
    """L2 and DRAM utilisation. Raises InterferenceFileError as `read_solo` does."""
    shares = {}
    for row in _rows(path, ("model", "batch", "l2_util_pct", "dram_util_pct")):
        size = row.count("partition_pct") if row.has("partition_pct") else WHOLE
        pair = (row.share("l2_util_pct"), row.share("dram_util_pct"))
        shares[row.text("model"), row.count("batch"), size] = pair
    return Utilisation.of(shares)


def read_constants(path: Path) -> LinearConstants:
    """The five constants of the first line. Raises InterferenceFileError as `read_solo` does."""
    row = next(_rows(path, ()))
    values = []
    for name in ("c1", "c2", "c3", "c4", "c5"):
        column = next((each for each in row.cells if each == name or each.startswith(name + "_")), None)
        if column is None:
            raise InterferenceFileError(f"{path}: there is no column {name}, expected c1 to c5")
        values.append(row.number(column))
    return LinearConstants(*values)


class _Row:
    """One line of a file."""

    def __init__(self, path: Path, line: int, cells: Mapping[str, str]) -> None:
        self.path, self.line, self.cells = path, line, cells

    def error(self, column: str, expected: str) -> InterferenceFileError:
        cell = self.cells.get(column)
        return InterferenceFileError(f"{self.path}, line {self.line}: {column} is {cell!r}, expected {expected}")

    def has(self, column: str) -> bool:
        return bool((self.cells.get(column) or "").strip())

    def text(self, column: str) -> str:
        if not self.has(column):
            raise self.error(column, "a name")
        return self.cells[column].strip()

    def number(self, column: str) -> float:
        try:
            value = float(self.cells[column] or "")
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.error(column, "a number")
        return value

    def positive(self, column: str) -> float:
        value = self.number(column)
        if value <= 0:
            raise self.error(column, "a positive number")
        return value

    def share(self, column: str) -> float:
        value = self.number(column)
        if value < 0:
            raise self.error(column, "a percentage from 0")
        return value / 100

    def count(self, column: str) -> int:
        return self.counts(column, 1)[0]

    def counts(self, column: str, expected: int) -> list[int]:
        """As many whole numbers from 1, with a "+" between them."""
        cells = (self.cells[column] or "").split(_SEVERAL)
        if len(cells) != expected or not all(cell.strip().isdecimal() and int(cell) > 0 for cell in cells):
            raise self.error(column, f"{expected} whole numbers from 1" if expected > 1 else "a whole number from 1")
        return [int(cell) for cell in cells]


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[_Row]:
    return (_Row(path, line, cells) for line, cells in csv_rows(path, columns, InterferenceFileError))
