"""The papers' tables: where they lie, how one is read, and single figures of the papers by name."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench._registry import FOLDER, BenchError

DATA = FOLDER / "data"
"""What the repository holds. A run may be given another folder of the same form."""


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A row of papers.csv, as printed: `value` is a number as a rule. `where` is a figure or table, and the section."""

    paper: str
    value: str
    unit: str
    where: str

    @property
    def text(self) -> str:
        """With its unit."""
        return f"{self.value} {self.unit}".strip()


@dataclass(frozen=True, slots=True)
class Headline:
    """One of our figures, to be read beside the figure of a paper, or alone where the paper has none.

    An experiment's constant HEADLINES holds its own. `ours` and `bound` are metrics of its summary; with `of`, both are
    taken as a share of that metric. `note` gives the conditions and the differences from the paper.
    """

    what: str
    ours: str
    unit: str
    note: str
    paper: PaperFigure | None = None
    bound: str = ""
    of: str = ""


def paper_figure(paper: str, experiment: str, setting: str, metric: str, unit: str = "") -> PaperFigure:
    """A figure of a paper. `unit` may be left out where the rest names one row.

    It is read from the repository's own tables whatever data a run is given: a paper says what it says. Raises
    BenchError for a name that is no row, or several.
    """
    name = (paper, experiment, setting, metric)
    found = [row for row in _papers() if _name(row) == name and unit in ("", row["unit"])]
    if len(found) != 1:
        raise BenchError(f"{DATA / 'papers.csv'}: has {len(found)} rows of {', '.join(name)}, expected one")
    (row,) = found
    where = row["where"] if experiment in ("headline", row["where"]) else f"{experiment}; {row['where']}"
    return PaperFigure(paper, row["value"], row["unit"], where)


def read_rows(path: Path, *columns: str) -> list[dict[str, str]]:
    """The rows of a table. Raises BenchError where it cannot be read, or lacks one of `columns`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BenchError(f"{path}: cannot be read ({reason}); expected a data folder of the form of {DATA}") from None
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise BenchError(f"{path}: has no column {missing[0]!r}, expected {', '.join(columns)}")
    return rows


@cache
def _papers() -> list[dict[str, str]]:
    return read_rows(DATA / "papers.csv", "paper", "experiment", "setting", "metric", "value", "unit", "where")


def _name(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[key] for key in ("paper", "experiment", "setting", "metric"))
