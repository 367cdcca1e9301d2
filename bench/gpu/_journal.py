"""What survives an interruption: finished points as JSON lines, and the time that is left.

`cotenant.measure.campaign` has a journal too, but its measurements never fail and have no steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cotenant.errors import CotenantError
from cotenant.files import append_entry, read_entries

Row = dict[str, Any]
"""One line of a table: plain numbers and texts by column. Names of columns end in their unit."""


class MeasureError(CotenantError):
    """A point could not be measured: says which, and why."""


class Journal:
    """Rows of finished points by step and key, on disk as soon as they are measured.

    A point that failed is noted with its reason and tried again by the next run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done: dict[tuple[str, str], list[Row]] = {}
        self._failed: dict[tuple[str, str], str] = {}
        for entry in read_entries(path):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # of something else
                self._take(entry)
        self._tried: set[tuple[str, str]] = set()

    def _take(self, entry: Mapping[str, Any]) -> None:
        at = (str(entry["step"]), str(entry["key"]))
        if "error" in entry:
            self._failed[at] = str(entry["error"])
        else:
            self._done[at] = [dict(row) for row in entry["rows"]]
            self._failed.pop(at, None)

    def has(self, step: str, key: str) -> bool:
        """Whether the point needs no measuring in this run: it is there, or it has failed in this run."""
        return (step, key) in self._done or (step, key) in self._tried

    def get(self, step: str, key: str) -> list[Row] | None:
        """The rows of a point, None when it is not there."""
        return self._done.get((step, key))

    def rows(self, step: str) -> list[Row]:
        """All rows of a step, in the order in which they were measured."""
        return [row for (name, _), rows in self._done.items() if name == step for row in rows]

    @property
    def failures(self) -> list[Row]:
        """Points without figures, and why."""
        return [{"step": step, "point": key, "reason": why} for (step, key), why in self._failed.items()]

    def put(self, step: str, key: str, rows: Sequence[Row], seconds: float) -> None:
        """Keep the rows of a point, which took `seconds` to measure; they are on disk when this returns."""
        self._write({"step": step, "key": key, "seconds": round(seconds, 3), "rows": list(rows)})

    def fail(self, step: str, key: str, reason: str) -> None:
        """Note why a point has no rows."""
        self._write({"step": step, "key": key, "error": reason})
        self._tried.add((step, key))

    def _write(self, entry: Row) -> None:
        self._take(entry)
        append_entry(self._path, entry)


class Budget:
    """Seconds that may be spent, from now on. `clock` gives seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._end = self._start + seconds

    @property
    def left_s(self) -> float:
        """What is left; never below 0."""
        return max(0.0, self._end - self._clock())

    @property
    def spent_s(self) -> float:
        """Time since the start."""
        return self._clock() - self._start

    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.left_s <= 0
