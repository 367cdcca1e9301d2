"""Parts of pictures of plans: legends of letters and colours, shortened names, SVG export."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import StringIO

from rich.console import Console, RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from cotenant.report.tables import milliseconds

PALETTE = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#bbbbbb")
"""Colour-blind safe palette of Okabe and Ito."""
LIGHT_INK = ("#0072b2",)
"""Colours on which letters are white."""
MOST_WIDTH = 110
"""Maximum width of a picture, in characters."""
Keys = Mapping[str, tuple[str, str]]
"""A letter and a colour by name."""
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def keys_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A letter and a colour for each name; letters repeat from the 53rd name on."""
    return {
        name: (_LETTERS[number % len(_LETTERS)], PALETTE[number % len(PALETTE)]) for number, name in enumerate(names)
    }


def key_text(keys: Keys, name: str, *, bare: bool = False) -> Text:
    """The letter of a name on its colour; bare without a space on either side."""
    letter, colour = keys[name]
    ink = "white" if colour in LIGHT_INK else "black"
    return Text(letter if bare else f" {letter} ", style=f"{ink} on {colour}")


def short(name: str, width: int) -> str:
    """A name shortened to `width` by an ellipsis in the middle, where names of stages and versions differ least."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def in_ms(ns: int) -> str:
    """Nanoseconds as milliseconds, with three significant digits."""
    return milliseconds(ns / 1e6)


def svg_of(picture: RenderableType, title: str) -> str:
    """A picture of MOST_WIDTH columns as a self-contained SVG."""
    console = Console(record=True, width=MOST_WIDTH, file=StringIO(), color_system="truecolor", force_terminal=True)
    console.print(picture)
    svg = console.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME)
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # they would be loaded from elsewhere
