"""The picture of the load wave: rates, GPUs held and violations over the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from cotenant.report.charts import FULL
from cotenant.report.style import style_sheet
from cotenant.report.svg import Chart, round_up

_HEIGHT = 260
_KEY = 26


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of (seconds, value)."""

    name: str
    points: Sequence[tuple[float, float]]


def write_wave(
    path: Path, duration_s: int, rates: Sequence[Line], devices: Sequence[Line], violations: Sequence[Line]
) -> None:
    """Write one SVG file that needs nothing beside it; values hold until the next point, violations are per window."""
    parts = []
    for number, (title, label, lines) in enumerate(
        (
            ("Rates offered", "queries / s", rates),
            ("GPUs held", "GPUs", devices),
            ("Late or dropped, by when they came", "per cent", violations),
        )
    ):
        shown = [Line(line.name, [(x, y) for x, y in line.points if x <= duration_s]) for line in lines]
        top = round_up(1.05 * max((y for line in shown for _, y in line.points), default=1.0))
        chart = Chart(
            FULL,
            _HEIGHT,
            title=title,
            x=(0.0, float(duration_s)),
            y=(0.0, top),
            x_label="seconds",
            y_label=label,
        )
        if lines is violations:
            chart.horizontal(1.0, "1 %")
        for series, line in enumerate(shown):
            end = [(float(duration_s), line.points[-1][1])] if line.points else []
            chart.stairs([*line.points, *end], f"s{series}")
        at = number * (_HEIGHT + _KEY)
        parts.append(f'<g transform="translate(0 {at})">{_sized(chart.svg())}{_key(lines)}</g>')
    height = 3 * (_HEIGHT + _KEY)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {FULL} {height}" width="{FULL}" height="{height}">'
        f"<style>{style_sheet()} svg {{ background: var(--paper); }}</style>{''.join(parts)}</svg>\n",
        encoding="utf-8",
    )


def _sized(svg: str) -> str:
    return svg.replace("<svg ", f'<svg width="{FULL}" height="{_HEIGHT}" ', 1)


def _key(lines: Sequence[Line]) -> str:
    parts, x = [], 78
    for series, line in enumerate(lines):
        parts.append(
            f'<path class="line s{series}" d="M{x} {_HEIGHT + 6}h22"/>'
            f'<text class="name" x="{x + 28}" y="{_HEIGHT + 11}">{escape(line.name)}</text>'
        )
        x += 60 + 8 * len(line.name)
    return "".join(parts)
