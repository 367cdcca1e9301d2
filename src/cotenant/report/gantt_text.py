"""Gantt charts for the terminal, readable without colour: each label has a letter, dots are idle time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.text import Text

from cotenant.gantt import GanttChart, busy_ns, column_ns, label_at
from cotenant.report.pictures import Keys, in_ms, key_text, short

IDLE = "·"
_MARK = "┃"
_MOST_LANES = 16
_MOST_NAME = 24
_BUSY = 6
"""Width of the column with the busy share of a lane."""


def compared(charts: Mapping[str, GanttChart], keys: Keys, width: int, *, has_busy: bool = False) -> Iterator[Text]:
    """Lines of several charts on one time scale, `width` characters wide. `keys` are by label.

    With `has_busy`, each lane ends with its busy share of the scale.
    """
    until_ns = max(1, *(chart.end_ns for chart in charts.values()))
    for title, chart in charts.items():
        yield Text(f"{title}: {in_ms(chart.end_ns)} ms", style="bold")
        yield from _lines(chart, keys, until_ns, width, has_busy)
        yield Text()


def _lines(chart: GanttChart, keys: Keys, until_ns: int, width: int, has_busy: bool) -> Iterator[Text]:
    """One line for each lane, and the axis."""
    names = min(_MOST_NAME, max(map(len, chart.lanes))) + 1
    cells = width - names - 2 - (_BUSY if has_busy else 0)
    for lane in chart.lanes[:_MOST_LANES]:
        bars = chart.on(lane)
        line = Text(f"{short(lane, names - 1):<{names}}│")
        for start_ns, end_ns in column_ns(until_ns, cells):
            label = label_at(bars, start_ns, end_ns)
            if label is not None:
                line.append_text(key_text(keys, label, bare=True))
            elif any(start_ns <= at < end_ns for at in chart.marks_ns):
                line.append(_MARK)
            else:
                line.append(IDLE, style="dim")
        line.append("│")
        yield line.append(f"{100 * busy_ns(bars) / until_ns:>4.0f} %") if has_busy else line
    if len(chart.lanes) > _MOST_LANES:
        yield Text(f"... and {len(chart.lanes) - _MOST_LANES} more lanes", style="dim")
    end = f"{in_ms(until_ns)} ms"
    yield Text(f"{' ' * names}└0{' ' * max(1, cells - 1 - len(end))}{end}┘", style="dim")
