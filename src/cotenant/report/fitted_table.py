"""Table that fits the width of the terminal: as a table, as a narrower one, or as one block for each row."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

_WRAPPED = 24
"""Least width in characters of a wrapped text; shorter texts stay on one line."""
_INDENT, _GAP = 2, 3
"""Characters before a line of a block, and between two of its cells."""
_NOTHING = "0.–- %"
"""Characters of cells without information."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """A column with its width in characters on one line, and its least width: texts wrap at words, numbers never."""

    column: Column
    width: int
    least: int


class FittedTable(Table):
    """A Table that fits the width of its console. Numbers and names stay whole, texts are wrapped, nothing is cut.

    Without room for all columns, the table loses its frame. Without room then, each row becomes a block: its first
    `keys` cells, and below them the other cells with their headings. Columns of empty cells are left out, and
    columns of zeros if `optional` has their heading.
    """

    def __init__(self, *headers: Any, keys: int = 1, optional: Collection[str] = (), **options: Any) -> None:
        super().__init__(*headers, **options)
        self.title_justify = "left"
        self._keys, self._optional = keys, optional

    @override
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = [self._measured(each, console, options) for each in self._informative()]
        framed = Table(box=self.box, show_edge=self.show_edge, pad_edge=self.pad_edge, padding=self.padding)
        framed.expand = self.expand
        tight = [
            Table(box=self.box and box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
            for gap in (1, 0 if self.box else 1)
        ]
        if self.title:
            yield Text(str(self.title), "table.title")
        for table in (framed, *tight):
            table.columns = [replace(each.column, _index=at, overflow="fold") for at, each in enumerate(shown)]
            around = table._extra_width + sum(table._get_padding_width(at) for at in range(len(shown)))
            if sum(each.least for each in shown) + around <= options.max_width or not self.rows:
                table.show_header, table.rows = self.show_header, self.rows
                for column, each, width in zip(
                    table.columns, shown, _widths(shown, options.max_width - around), strict=True
                ):
                    column._cells, column.width, column.no_wrap = each.column._cells, width, False
                yield from table.__rich_console__(console, options)
                break
        else:
            yield from self._blocks(shown, options.max_width)
        if self.caption:
            yield Text(str(self.caption), style=self.caption_style or "")

    def _informative(self) -> Iterator[Column]:
        for at, column in enumerate(self.columns):
            nothing = _NOTHING if _text(column.header).plain in self._optional else " "
            if at < self._keys or not self.rows or any(_text(cell).plain.strip(nothing) for cell in column._cells):
                yield column

    def _measured(self, column: Column, console: Console, options: ConsoleOptions) -> _Shown:
        wide = options.update(width=10_000)
        head = Measurement.get(console, wide, column.header if self.show_header else "")
        cells = [Measurement.get(console, wide, cell) for cell in column._cells]
        width = max((cell.maximum for cell in cells), default=0)
        is_text = column.justify == "left" and not column.no_wrap
        words = max(min(width, _WRAPPED), *(cell.minimum for cell in cells)) if is_text and cells else width
        return _Shown(column, max(width, head.maximum), max(words, head.minimum))

    def _blocks(self, shown: Sequence[_Shown], width: int) -> RenderResult:
        """The rows as blocks. Cells stand in the same place of each block; a long text has lines of its own."""
        keys, others = shown[: self._keys], shown[self._keys :]
        heads = [" ".join(_text(each.column.header).plain.split()) if self.show_header else "" for each in others]
        widths = [max(len(_text(cell).plain) for cell in each.column._cells) for each in others]
        for at, row in enumerate(self.rows):
            name = [_text(each.column._cells[at]) for each in keys]
            yield Text("  ", style=row.style or "bold").join(each for each in name if each.plain.strip())
            line, long = Text(" " * _INDENT), []
            cells = (_text(each.column._cells[at]) for each in others)
            for head, value, longest in zip(heads, cells, widths, strict=True):
                pair = Text.assemble((f"{head} " if head and value.plain else "", "dim"), value)
                room = len(head) + 1 + longest
                if room > width // 2 or "\n" in value.plain:
                    long += [pair] if value.plain else []
                    continue
                if len(line) + room > width:
                    line.rstrip()
                    yield line
                    line = Text(" " * _INDENT)
                line.append_text(pair).append(" " * (room - len(pair) + _GAP))
            if line.plain.strip():
                line.rstrip()
                yield line
            for pair in long:
                pair.overflow = "fold"
                yield Padding(pair, (0, 0, 0, _INDENT), expand=False)


def _text(cell: Any) -> Text:
    """A copy of the text of a cell."""
    return cell.copy() if isinstance(cell, Text) else Text(str(cell))


def _widths(shown: Sequence[_Shown], room: int) -> list[int]:
    """Widths of columns: as on one line, or the least ones and a part of the remaining room."""
    missing = sum(each.width - each.least for each in shown)
    spare = max(0, min(missing, room - sum(each.least for each in shown)))
    return [each.least + (each.width - each.least) * spare // max(1, missing) for each in shown]
