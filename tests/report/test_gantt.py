"""Gantt charts in columns of text."""

from __future__ import annotations

import pytest

from cotenant.gantt import Bar, GanttChart, label_at
from cotenant.report.gantt_text import compared
from cotenant.report.pictures import keys_of

MS = 1_000_000


def lines(charts: dict[str, GanttChart], width: int, *, has_busy: bool = False) -> list[str]:
    return [line.plain for line in compared(charts, keys_of(["x", "y"]), width, has_busy=has_busy)]


def test_a_column_has_the_label_that_takes_most_of_it_or_is_idle() -> None:
    bars = [Bar("lane", "x", 0, 30), Bar("lane", "y", 30, 80), Bar("lane", "x", 95, 100)]
    assert label_at(bars, 0, 50) == "x"
    assert label_at(bars, 20, 50) == "y"
    assert label_at(bars, 80, 100) is None
    assert label_at(bars, 90, 100) == "x", "half of it is enough"
    assert label_at([], 0, 10) is None


def test_charts_are_on_one_scale_with_marks_where_lanes_are_idle() -> None:
    short = GanttChart(("a", "idle"), (Bar("a", "x", 0, 5 * MS),), 5 * MS)
    long = GanttChart(("a", "b"), (Bar("a", "x", 0, 2 * MS), Bar("b", "y", 5 * MS, 10 * MS)), 10 * MS, (5 * MS,))
    assert lines({"Before": short, "After": long}, 27) == [
        "Before: 5 ms",
        "a    │aaaaaaaaaa··········│",
        "idle │····················│",
        "     └0              10 ms┘",
        "",
        "After: 10 ms",
        "a │aaaaa······┃···········│",
        "b │···········┃bbbbbbbbbbb│",
        "  └0                 10 ms┘",
        "",
    ]


@pytest.mark.parametrize("width", [80, 110])
def test_many_lanes_and_long_names_fit(width: int) -> None:
    lanes = tuple(f"a model with a name that is quite long, part {number}" for number in range(18))
    found = lines({"All": GanttChart(lanes, (Bar(lanes[0], "x", 0, MS),), MS)}, width, has_busy=True)
    assert max(map(len, found)) == width
    assert found[1].startswith("a model with…ong, part 0 │aaa")
    assert found[1].endswith("a│ 100 %")
    assert found[-3] == "... and 2 more lanes"
    assert len(found) == 1 + 16 + 3
