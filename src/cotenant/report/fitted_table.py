"""Table that fits the width of the terminal: columns without room follow in a table below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

_MOST = 24
"""Width in characters to which texts of cells may be wrapped; shorter ones stay on one line."""


class FittedTable(Table):
    """A Table that splits its columns into several tables, one below the other, if they do not fit.

    Each table begins with the first `keys` columns. Texts are wrapped, never cut.
    """

    def __init__(self, *headers: Any, keys: int = 1, **options: Any) -> None:
        super().__init__(*headers, **options)
        self.title_justify = "left"
        self._keys = keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, or its parts."""
        groups = self._groups(console, options)
        for group in groups:
            part = Table(box=self.box, show_edge=self.show_edge, pad_edge=self.pad_edge, show_header=self.show_header)
            part.padding, part.expand = self.padding, self.expand
            part.title = Text(str(self.title), "table.title") if self.title and group is groups[0] else None
            part.title_justify = "left"
            part.columns, part.rows = list(self._chosen(group)), self.rows
            yield from part.__rich_console__(console, options)
        if self.caption:
            yield Text(str(self.caption), style=self.caption_style or "")

    def _chosen(self, group: list[int]) -> Iterator[Column]:
        for place, at in enumerate((*range(self._keys), *group)):
            column = replace(self.columns[at], _index=place, overflow="fold", no_wrap=False)
            column._cells = self.columns[at]._cells
            yield column

    def _groups(self, console: Console, options: ConsoleOptions) -> list[list[int]]:
        """Numbers of the columns after the keys, by table."""
        wide = options.update(width=10_000)
        widths = [
            min(_MOST, max(Measurement.get(console, wide, cell).maximum for cell in (column.header, *column._cells)))
            for column in self.columns
        ]
        around = 2 if self.box is None else 3  # characters between two texts
        ends = 1 if self.box is not None else 0 if self.pad_edge else -around
        room = options.max_width - ends - sum(width + around for width in widths[: self._keys])
        needs = [width + around for width in widths[self._keys :]]
        count = len(_dealt(needs, room))
        while room > 1 and len(_dealt(needs, room - 1)) == count > 1:  # so that the parts are about as wide
            room -= 1
        return [[self._keys + at for at in group] for group in _dealt(needs, room)]


def _dealt(needs: list[int], room: int) -> list[list[int]]:
    """Columns in their order, grouped greedily into tables of width `room`, at least one in each."""
    groups: list[list[int]] = [[]]
    left = room
    for at, need in enumerate(needs):
        if need > left and groups[-1]:
            groups.append([])
            left = room
        groups[-1].append(at)
        left -= need
    return groups
