"""Reads the tidy CSV files that tables of costs are made from; errors name the file, the line and the column."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from bench._csv_rows import csv_rows
from bench.papers.gpulet._interference_csv import read_constants, read_utilisation
from bench.papers.gpulet._linear import LinearInterference
from cotenant.errors import PlanError
from cotenant.predict.latency import LatencyModel
from cotenant.techniques.partitions.plan.file import KnownTenant
from cotenant.techniques.partitions.plan.sources import ProfileCosts
from cotenant.techniques.partitions.plan.types import NS_PER_MS
from cotenant.techniques.partitions.predict.factors import Interference

BYTES_PER_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One line of a file of models. `input` names the form of a row, and with it the effort to assemble a batch."""

    slo_ns: int
    memory_bytes: int
    max_batch: int
    input: str


class _Row:
    """One line of a CSV file; errors in its cells say where they are."""

    def __init__(self, path: Path, line: int, cells: Mapping[str, str]) -> None:
        self.where = f"{path}, line {line}"
        self._cells = cells

    def text(self, column: str) -> str:
        cell = (self._cells[column] or "").strip()
        if not cell:
            raise PlanError(f"{self.where}: column {column!r} is empty")
        return cell

    def number(self, column: str) -> float:
        cell = self.text(column)
        try:
            number = float(cell)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise PlanError(f"{self.where}: {column} is {cell!r}, expected a number")
        return number

    def positive(self, column: str) -> float:
        number = self.number(column)
        if number <= 0:
            raise PlanError(f"{self.where}: {column} is {number!r}, expected a positive number")
        return number

    def count(self, column: str) -> int:
        number = self.positive(column)
        if number != int(number):
            raise PlanError(f"{self.where}: {column} is {number!r}, expected a whole number")
        return int(number)


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[_Row]:
    return (_Row(path, line, cells) for line, cells in csv_rows(path, columns, PlanError))


def read_latencies(path: Path) -> dict[str, dict[int, dict[int, int]]]:
    """Nanoseconds by model, size in percent and batch, from columns model, partition_pct, batch, latency_ms.

    Raises PlanError for a file that cannot be read, a cell that is not what it should be, and a point given twice.
    """
    found: dict[str, dict[int, dict[int, int]]] = {}
    for row in _rows(path, ("model", "partition_pct", "batch", "latency_ms")):
        batch = row.count("batch")
        points = found.setdefault(row.text("model"), {}).setdefault(row.count("partition_pct"), {})
        if batch in points:
            raise PlanError(f"{row.where}: batch {batch} of this model and partition_pct was given before")
        points[batch] = max(1, round(row.positive("latency_ms") * NS_PER_MS))
    return found


def read_models(path: Path) -> dict[str, ModelFacts]:
    """Facts by model, from columns model, input, slo_ms, memory_mb, max_batch.

    Raises PlanError as `read_latencies` does.
    """
    return {
        row.text("model"): ModelFacts(
            round(row.positive("slo_ms") * NS_PER_MS),
            round(row.positive("memory_mb") * BYTES_PER_MB),
            row.count("max_batch"),
            row.text("input"),
        )
        for row in _rows(path, ("model", "input", "slo_ms", "memory_mb", "max_batch"))
    }


def read_assembly(path: Path) -> dict[str, dict[int, float]]:
    """Mean time in ms to assemble a batch, by form of a row and batch; columns input_shape, batch, mean_overhead_ms.

    Raises PlanError as `read_latencies` does.
    """
    found: dict[str, dict[int, float]] = {}
    for row in _rows(path, ("input_shape", "batch", "mean_overhead_ms")):
        found.setdefault(row.text("input_shape"), {})[row.count("batch")] = row.positive("mean_overhead_ms")
    return found


def csv_tables(
    path: Path, util: Path | None = None, constants: Path | None = None, models: Path | None = None
) -> ProfileCosts:
    """What plans rest on, of latencies over partitions of a device that others measured.

    `util` and `constants` make the interference model, `models` gives memory, largest batch and SLO; models.csv beside
    the latencies is found. Raises PlanError, and InterferenceFileError.
    """
    if (util is None) != (constants is None):
        raise PlanError(f"{path}: --util and --constants make the interference model together, expected both or none")
    latencies = read_latencies(path)
    if models is None and (path.parent / "models.csv").is_file():
        models = path.parent / "models.csv"
    facts = read_models(models) if models else {}
    memory = {name: facts[name].memory_bytes if name in facts else 0 for name in latencies}
    for name, each in facts.items():
        for points in latencies.get(name, {}).values():
            for batch in [batch for batch in points if batch > each.max_batch]:
                del points[batch]
    known = {name: KnownTenant(name, each.slo_ns) for name, each in facts.items()}
    notes = [f"latencies: {path.name}, as they are; no tails"]
    notes.append(f"memory: {models.name}" if models else "memory: not considered, as there is no file of models")
    interference: Interference | None = None
    if util is not None and constants is not None:
        utilisation = read_utilisation(util)
        unseen = [name for name in latencies if name not in utilisation.table.models]
        if unseen:
            raise PlanError(f"{util}: has no utilisation of model {unseen[0]!r}")
        interference = LinearInterference(read_constants(constants), utilisation)
        notes.append(f"interference: linear model of {util.name} and {constants.name}")
    else:
        notes.append("interference: not known; partitions are believed not to touch each other")
    digest = sha256(b"".join(each.read_bytes() for each in (path, util, constants, models) if each)).hexdigest()
    models_of = {name: LatencyModel.of_points(sizes) for name, sizes in latencies.items()}
    return ProfileCosts(models_of, memory, digest, None, interference, known, tuple(notes))
