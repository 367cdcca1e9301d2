"""Plotting: scales with round ticks, and charts as inline SVG, coloured by the style sheet of the page.

Colours are CSS classes (`c0`, `c1`, ...), so that one chart fits a light and a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from cotenant.report.style import style_sheet

Point = tuple[float, float]
Format = Callable[[float], str]


def number(value: float) -> str:
    """Short text of a number on an axis."""
    return f"{value:g}"


def duration(ms: float) -> str:
    """Text of a time given in milliseconds, in s, ms or µs."""
    if ms >= 1000:
        return f"{ms / 1000:g} s"
    return f"{ms:g} ms" if ms >= 1 else f"{ms * 1000:g} µs"


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values in [lo, hi] to pixels in [start, end]; clamps values outside."""

    lo: float
    hi: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        value = min(max(value, self.lo), self.hi)
        if self.log:
            share = math.log(value / self.lo) / math.log(self.hi / self.lo)
        else:
            share = (value - self.lo) / (self.hi - self.lo)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        """About `count` round values within the range: 1, 2 or 5 times a power of ten."""
        return _log_ticks(self.lo, self.hi, count) if self.log else _linear_ticks(self.lo, self.hi, count)


def _linear_ticks(lo: float, hi: float, count: int) -> list[float]:
    rough = (hi - lo) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(lo / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(hi / step + 1e-9) + 1)]


def _log_ticks(lo: float, hi: float, count: int) -> list[float]:
    first, last = math.floor(math.log10(lo)), math.ceil(math.log10(hi))
    for multiples in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**p for p in range(first, last + 1) for m in multiples]
        ticks = [tick for tick in ticks if lo * 0.999 <= tick <= hi * 1.001]
        if len(ticks) <= count + 2:
            break
    return [float(f"{tick:.6g}") for tick in ticks]


def round_up(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten: a round end of an axis."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if m * power >= value * 0.999)


class Chart:
    """One chart of `width` x `height` pixels: add marks, then call `svg()`. `headroom` reserves a line above it."""

    def __init__(
        self,
        width: int,
        height: int,
        *,
        title: str,
        x: tuple[float, float],
        y: tuple[float, float],
        log_x: bool = False,
        log_y: bool = False,
        x_label: str = "",
        y_label: str = "",
        x_format: Format = number,
        y_format: Format = number,
        headroom: bool = False,
    ) -> None:
        self._width, self._height, self._title = width, height, title
        left, right, top, bottom = (78 if y_label else 60), 16, (48 if headroom else 34), (46 if x_label else 28)
        self.x = Scale(*x, left, width - right, log_x)
        self.y = Scale(*y, height - bottom, top, log_y)
        self._parts: list[str] = []
        self._text(left, 18, title, "title")
        for tick in self.y.ticks(5):
            at = self.y(tick)
            self._parts.append(f'<path class="grid" d="M{left} {at:.1f}H{width - right}"/>')
            self._text(left - 8, at + 4, y_format(tick), "tick end")
        for tick in self.x.ticks(7 if width > 700 else 5):
            at = self.x(tick)
            self._parts.append(f'<path class="grid" d="M{at:.1f} {top}V{height - bottom}"/>')
            self._text(at, height - bottom + 18, x_format(tick), "tick mid")
        self._parts.append(f'<path class="axis" d="M{left} {height - bottom}H{width - right}"/>')
        if x_label:
            self._text((left + width - right) / 2, height - 8, x_label, "label mid")
        if y_label:
            middle = (top + height - bottom) / 2
            self._parts.append(
                f'<text class="label mid" transform="translate(14 {middle:.0f}) rotate(-90)">{escape(y_label)}</text>'
            )

    def line(self, points: Iterable[Point], css: str) -> None:
        """Straight lines from point to point."""
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        if path:
            self._parts.append(f'<path class="line {css}" d="M{path}"/>')

    def stairs(self, points: Sequence[Point], css: str) -> None:
        """A step function: level until the next point, for counts and distributions."""
        if not points:
            return
        path = [f"M{self.x(points[0][0]):.1f} {self.y(points[0][1]):.1f}"]
        path += [f"H{self.x(x):.1f}V{self.y(y):.1f}" for x, y in points[1:]]
        self._parts.append(f'<path class="line {css}" d="{"".join(path)}"/>')

    def marks(self, points: Iterable[Point], shape: str, css: str) -> None:
        """Small marks in one path; `shape` is a key of `SHAPES`."""
        drawing = SHAPES[shape]
        path = "".join(f"M{self.x(x):.1f} {self.y(y):.1f}{drawing}" for x, y in points)
        if path:
            self._parts.append(f'<path class="mark {shape} {css}" d="{path}"/>')

    def vertical(self, x: float, text: str, css: str = "limit") -> None:
        """A vertical line at x, with its text above the frame. The chart needs `headroom`."""
        at, (bottom, top) = self.x(x), (self.y.start, self.y.end)
        self._parts.append(f'<path class="{css}" d="M{at:.1f} {top}V{bottom}"/>')
        side = "end" if at > self.x.end - 50 else "mid" if at > self.x.start + 50 else ""
        self._text(at, top - 5, text, f"note {side}")

    def horizontal(self, y: float, text: str, css: str = "limit") -> None:
        """A horizontal line at y, with its text above the right end, or below it at the top edge."""
        at = self.y(y)
        self._parts.append(f'<path class="{css}" d="M{self.x.start} {at:.1f}H{self.x.end}"/>')
        near_top = at < self.y.end + 16
        self._text(self.x.end - 4, at + (14 if near_top else -5), text, "note halo end")

    def label(self, x: float, y: float, text: str, css: str) -> None:
        """A text at a place in pixels."""
        self._text(x, y, text, css)

    def _text(self, x: float, y: float, text: str, css: str) -> None:
        self._parts.append(f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def svg(self) -> str:
        """The chart as an `<svg>` element."""
        return svg_element(self._width, self._height, self._title, self._parts)

    def file(self) -> str:
        """The chart as the text of a self-contained SVG file."""
        paper = f'<rect width="{self._width}" height="{self._height}" style="fill: var(--paper)"/>'
        style = f"<style>{escape(style_sheet(), quote=False)}</style>"
        made = svg_element(self._width, self._height, self._title, [style, paper, *self._parts])
        return made.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


SHAPES = {
    "dot": "h0",
    "triangle": "m-3 2.5h6l-3 -5.5z",
    "cross": "m-2.5 -2.5l5 5m-5 0l5 -5",
    "plus": "m-3 0h6m-3 -3v6",
    "square": "m-2.5 -2.5h5v5h-5z",
}
"""Marks as path commands that start at their point."""


def svg_element(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """An `<svg>` element around drawing commands, with a title for screen readers."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def grouped_bars(width: int, groups: Sequence[tuple[str, Sequence[float | None]]], title: str, form: Format) -> str:
    """Horizontal bars of shares from 0 to 1: a group for each name, a bar with its value for each series."""
    bar, gap, group_gap, top = 17, 3, 14, 6
    left = 30 + max([len(name) for name, _ in groups], default=0) * 7.6
    scale = Scale(0.0, 1.0, left, width - 74)
    parts: list[str] = []
    y: float = top
    rows: list[str] = []
    for name, values in groups:
        height = len(values) * (bar + gap) - gap
        rows.append(f'<text class="name end" x="{left - 10:.1f}" y="{y + height / 2 + 5:.1f}">{escape(name)}</text>')
        for series, value in enumerate(values):
            length = max(1.5, scale(value or 0.0) - left)
            rows.append(
                f'<rect class="c{series}" x="{left:.1f}" y="{y:.1f}" width="{length:.1f}" height="{bar}" rx="2"/>'
                f'<text class="value" x="{left + length + 7:.1f}" y="{y + bar - 4:.1f}">'
                f"{escape('–' if value is None else form(value))}</text>"
            )
            y += bar + gap
        y += group_gap - gap
    bottom = y - group_gap + 8
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = scale(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {top - 4}V{bottom:.1f}"/>')
        parts.append(f'<text class="tick mid" x="{at:.1f}" y="{bottom + 16:.1f}">{100 * tick:g} %</text>')
    return svg_element(width, math.ceil(bottom + 24), title, [*parts, *rows])
