"""Reading CSV files with a head, with errors that name the file and what it lacks."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path


def csv_rows(
    path: Path, columns: tuple[str, ...], problem: Callable[[str], Exception]
) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Number and cells of each line below the head, which has to name at least these columns.

    Raises what `problem` makes of a sentence when the file cannot be read, lacks a column, or has no lines.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, restval="")
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise problem(f"{path}: there is no column {missing[0]!r}, expected {', '.join(columns)}")
            empty = True
            for cells in reader:
                empty = False
                yield reader.line_num, cells
            if empty:
                raise problem(f"{path}: has no lines below its head")
    except OSError as error:
        raise problem(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise problem(f"{path}: is not a CSV file ({error})") from None
