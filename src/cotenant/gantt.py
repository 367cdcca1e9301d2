"""Gantt charts: bars on lanes over time, the data of pictures and timelines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotenant.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a Gantt chart, on `lane` from `start_ns` to `end_ns`.

    Bars of one label share a letter and a colour. `args` are further facts, for viewers that show them.
    Raises InvalidValueError if a bar ends before it starts.
    """

    lane: str
    label: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.end_ns < self.start_ns:
            raise InvalidValueError(f"bar {self.label!r}", "end_ns", self.end_ns, f"at least start_ns, {self.start_ns}")


@dataclass(frozen=True, slots=True)
class GanttChart:
    """A Gantt chart: lanes in order, idle ones included, bars, and the end of the chart.

    The bars of a lane do not overlap. `marks_ns` are times common to all lanes, such as barriers.
    """

    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    end_ns: int
    marks_ns: tuple[int, ...] = ()

    def on(self, lane: str) -> list[Bar]:
        """The bars of a lane."""
        return [bar for bar in self.bars if bar.lane == lane]


def busy_ns(bars: Iterable[Bar]) -> int:
    """The total length of bars."""
    return sum(bar.end_ns - bar.start_ns for bar in bars)


def column_ns(until_ns: int, columns: int) -> list[tuple[int, int]]:
    """Start and end of each of `columns` equal columns from 0 to `until_ns`."""
    return [(until_ns * at // columns, until_ns * (at + 1) // columns) for at in range(columns)]


def label_at(bars: Sequence[Bar], start_ns: int, end_ns: int) -> str | None:
    """The label with the most time in a column of a lane; None if the lane is idle for longer."""
    taken: dict[str | None, int] = {}
    for bar in bars:
        inside = min(end_ns, bar.end_ns) - max(start_ns, bar.start_ns)
        if inside > 0:
            taken[bar.label] = taken.get(bar.label, 0) + inside
    taken[None] = end_ns - start_ns - sum(taken.values())
    return max(taken, key=taken.__getitem__)
