"""Self-contained HTML page, and the elements of its sections.

Functions return elements as HTML, and escape the texts that they take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from cotenant.files import write_whole
from cotenant.report.style import style_sheet

Cell = str | tuple[str, str]
"""The text of a cell, or (text, class)."""


class Page:
    """HTML elements below a heading, in the order of their addition; empty ones are left out."""

    def __init__(self, title: str) -> None:
        self._title = escape(title)
        self._parts = [f"<h1>{self._title}</h1>"]

    def add(self, *parts: str) -> None:
        """Append elements."""
        self._parts += filter(None, parts)

    def section(self, title: str, *parts: str) -> None:
        """Append a section with its own heading."""
        self.add(f"<section><h2>{escape(title)}</h2>\n{''.join(parts)}</section>")

    def html(self) -> str:
        """The whole page."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{self._title}</title><style>{style_sheet()}</style></head>\n<body><main>\n"
            + "\n".join(self._parts)
            + "\n</main></body></html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the page to a file; creates the folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.html().encode())


def paragraph(text: str, css: str = "") -> str:
    """Running text; `css` is "lead", "soft" or "warn"."""
    return f'<p class="{css}">{escape(text)}</p>' if css else f"<p>{escape(text)}</p>"


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], last: str = "") -> str:
    """A table; `last` is the class of its last row."""
    lines = ["".join(map(_cell, row)) for row in rows]
    marks = [""] * (len(lines) - 1) + [f' class="{last}"' if last else ""]
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr{mark}>{line}</tr>" for mark, line in zip(marks, lines, strict=False))
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Two-column table of names and values."""
    rows = "".join(f"<tr>{_cell(name)}{_cell(value)}</tr>" for name, value in pairs)
    return f'<table class="facts">{rows}</table>'


def grid(figures: Iterable[str]) -> str:
    """Figures side by side, as many as fit."""
    return f'<div class="grid2">{"".join(figures)}</div>'


def bar_key(names: Iterable[str], *more: tuple[str, str]) -> str:
    """Legend of bars, by number of the series; `more` are further entries of `key`."""
    bars = ((f'<rect class="c{at}" y="2" width="22" height="10" rx="2"/>', name) for at, name in enumerate(names))
    return key((*bars, *more))


def line_key(names: Iterable[str]) -> str:
    """Legend of lines, by number of the series."""
    return key((f'<path class="line s{at}" d="M0 7H22"/>', name) for at, name in enumerate(names))


def key(entries: Iterable[tuple[str, str]]) -> str:
    """Legend: marks, each an SVG element 22 wide and 14 high, with their names."""
    spans = (f'<span><svg viewBox="0 0 22 14">{mark}</svg>{escape(name)}</span>' for mark, name in entries)
    return f'<div class="key">{"".join(spans)}</div>'


def short_text(value: object) -> str:
    """Text of a value in a cell; numbers have four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(cell: Cell) -> str:
    text, css = (cell, "") if isinstance(cell, str) else cell
    return f'<td class="{css}">{escape(text)}</td>' if css else f"<td>{escape(text)}</td>"
