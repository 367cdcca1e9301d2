#!/usr/bin/env python3
"""Draw the pictures of README.md, light and dark: results as kept in bench/results, and the architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
RESULT = ROOT / "bench" / "results" / "goodput.json"
THEMES = {
    "light": {
        "paper": "#ffffff",
        "ink": "#1b1f24",
        "soft": "#5b6470",
        "rule": "#d9dde3",
        "ours": "#1f6fb2",
        "theirs": "#9aa3ad",
    },
    "dark": {
        "paper": "#0d1117",
        "ink": "#e8eaed",
        "soft": "#a2abb6",
        "rule": "#343a42",
        "ours": "#5aa9e6",
        "theirs": "#6b7480",
    },
}
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"'

FOUR = {
    "fcfs": "cotenant fcfs, drops nothing",
    "peer": "MLServer, tuned",
    "edf_cautious": "cotenant edf",
    "shares": "cotenant shares (default)",
}
PAIR = {
    "triton_default": "Triton, defaults",
    "triton_tuned": "Triton, tuned queues",
    "edf": "cotenant edf",
    "shares": "cotenant shares (default)",
}
"""Contenders of both parts of the benchmark, and what the picture calls them."""
TABLE = {
    "shares": "**cotenant, `shares` (default)**",
    "sjf": "cotenant, `sjf`",
    "edf_cautious": "cotenant, `edf`",
    "fcfs_drop": "cotenant, `fcfs` that drops hopeless queries",
    "fcfs": "cotenant, `fcfs` that drops nothing",
    "peer": "MLServer 1.7.1, tuned",
}
"""The same for the table."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of queries answered within their SLO, from 0 to 1: those of the worst tenant, and of all tenants."""

    label: str
    worst: float
    every: float
    is_default: bool


def bars(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], where: Mapping[str, object]) -> list[Bar]:
    """Medians over the seeds of the rows in which these keys have these values."""
    found = list[Bar]()
    for name, label in names.items():
        mine = [row for row in rows if row.get("contender") == name and where.items() <= row.items()]
        of_tenants = [[row[key] for key in row if key.startswith("attainment_")] for row in mine]
        worst, every = median(map(min, of_tenants)), median([row["attainment"] for row in mine])
        found.append(Bar(label, worst, every, name == "shares"))
    return found


def hero(result: Mapping[str, Any], theme: Mapping[str, str]) -> str:
    """Two panels, of each the worst tenant and all tenants."""
    rows = result["rows"]
    four = bars(rows, FOUR, {"load": 2.0})
    pair = bars(rows, PAIR, {"pair": "1x"})
    asked = next(row["asked_of_cores"] for row in rows if row.get("pair") == "1x")
    width, height = 860, 362
    parts = [
        text(
            24, 30, "Queries answered within their latency target, of all that were sent", 17, theme["ink"], bold=True
        ),
        text(
            24,
            52,
            "Two CPU cores, medians of three seeds; same models, runtime, clients and arrivals for every server",
            13,
            theme["soft"],
        ),
        *panel(24, four, "Four models, 2.0 times the capacity", theme),
        *panel(450, pair, f"ResNet-50 and MiniLM, {asked:.1f} times the capacity", theme),
        text(24, height - 14, "Measured: python -m bench goodput", 12, theme["soft"]),
    ]
    return picture(width, height, "Queries answered within their SLO, by server", parts, theme)


def panel(left: float, made: Sequence[Bar], title: str, theme: Mapping[str, str]) -> list[str]:
    """One group of bars for each contender: dark for the worst tenant, thin for all tenants."""
    long, top, row = 250.0, 112.0, 54.0
    parts = [
        text(left, 84, title, 14, theme["ink"], bold=True),
        text(left, 101, "thick: worst tenant, thin: all tenants", 12, theme["soft"]),
    ]
    for number, bar in enumerate(made):
        y = top + row * number
        colour = theme["ours"] if bar.is_default else theme["theirs"]
        parts += [
            text(left, y + 12, bar.label, 13, theme["ink"], bold=bar.is_default),
            *measure_bar(left, y + 18, 15, bar.worst, long, colour, theme, 15),
            *measure_bar(left, y + 37, 6, bar.every, long, colour, theme, 12),
        ]
    return parts


def measure_bar(
    left: float, y: float, high: float, part: float, long: float, colour: str, theme: Mapping[str, str], size: int
) -> list[str]:
    """A bar of a part of 1, with the part behind it."""
    ink = theme["ink"] if size > 12 else theme["soft"]
    return [
        f'<rect x="{left}" y="{y}" width="{long}" height="{high}" rx="2" fill="{theme["rule"]}" fill-opacity="0.45"/>',
        f'<rect x="{left}" y="{y}" width="{max(1.5, long * part):.1f}" height="{high}" rx="2" fill="{colour}"/>',
        text(left + long + 8, y + high / 2 + size * 0.36, f"{100 * part:.0f} %", size, ink, bold=size > 12),
    ]


def table(result: Mapping[str, Any]) -> str:
    """The rows of the table in the README: worst tenant and all tenants, at 2.0 and 1.2 times the capacity."""
    at_2, at_1_2 = (bars(result["rows"], TABLE, {"load": load}) for load in (2.0, 1.2))
    rows = [
        f"| {more.label} | {more.worst:.0%} | {more.every:.0%} | {less.worst:.0%} | {less.every:.0%} |".replace(
            "%", " %"
        )
        for more, less in zip(at_2, at_1_2, strict=True)
    ]
    return "\n".join(rows)


def architecture(theme: Mapping[str, str]) -> str:
    """Clients, front-end, engine, worker processes; below them what is measured, predicted and planned."""
    width, height = 860, 316
    boxes = [
        box(20, 60, 130, 92, "Clients", ("tritonclient,", "KServe, curl"), theme),
        box(196, 60, 140, 92, "Front-ends", ("HTTP and gRPC", "Open Inference", "Protocol v2"), theme),
        box(
            382,
            40,
            216,
            132,
            "Engine",
            (
                "queues, quotas, admission",
                "policy: what runs next,",
                "in which batch and share,",
                "which one is refused",
            ),
            theme,
            strong=True,
        ),
        box(660, 40, 180, 60, "Worker of tenant A", ("segments on cores 0-1",), theme),
        box(660, 112, 180, 60, "Worker of tenant B", ("segments on core 1",), theme),
        box(196, 220, 140, 76, "Profiles", ("latency by batch,", "cores and shape"), theme),
        box(382, 220, 216, 76, "Predictor", ("latency of any segment,", "learns from what it sees"), theme),
        box(660, 220, 180, 76, "Simulator, planner", ("the same engine and", "policies, virtual time"), theme),
    ]
    arrows = [
        arrow(150, 106, 196, 106, theme),
        arrow(336, 106, 382, 106, theme),
        arrow(598, 72, 660, 72, theme),
        arrow(598, 142, 660, 142, theme),
        arrow(336, 258, 382, 258, theme),
        arrow(490, 220, 490, 172, theme),
        arrow(598, 258, 660, 258, theme),
    ]
    title = text(
        20, 24, "One query: from the client through the engine to a worker, and back", 15, theme["ink"], bold=True
    )
    return picture(width, height, "Architecture of cotenant", [title, *arrows, *boxes], theme)


def box(
    left: float,
    top: float,
    wide: float,
    high: float,
    name: str,
    lines: Sequence[str],
    theme: Mapping[str, str],
    *,
    strong: bool = False,
) -> str:
    """A box with a name and some lines."""
    edge, thick = (theme["ours"], 2.5) if strong else (theme["soft"], 1.2)
    middle = left + wide / 2
    first = top + high / 2 - 8.5 * len(lines) + 4
    place = f'x="{left}" y="{top}" width="{wide}" height="{high}" rx="7"'
    shape = f'<rect {place} fill="{theme["paper"]}" stroke="{edge}" stroke-width="{thick}"/>'
    words = [text(middle, first, name, 14, theme["ink"], bold=True, anchor="middle")]
    words += [
        text(middle, first + 18 + 17 * number, line, 12.5, theme["soft"], anchor="middle")
        for number, line in enumerate(lines)
    ]
    return shape + "".join(words)


def arrow(x: float, y: float, to_x: float, to_y: float, theme: Mapping[str, str]) -> str:
    """A line with a head, along one of the axes."""
    across, down = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    back_x, back_y = to_x - 8 * across, to_y - 8 * down
    head = (
        f"M{to_x} {to_y}L{back_x - 4.5 * down} {back_y - 4.5 * across}L{back_x + 4.5 * down} {back_y + 4.5 * across}Z"
    )
    colour = theme["soft"]
    return (
        f'<path d="M{x} {y}L{back_x} {back_y}" stroke="{colour}" stroke-width="1.6"/><path d="{head}" fill="{colour}"/>'
    )


def text(x: float, y: float, words: str, size: float, colour: str, *, bold: bool = False, anchor: str = "start") -> str:
    """A line of text that begins, or has its middle, at x."""
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}"{weight}>{escape(words)}</text>'


def picture(width: int, height: int, title: str, parts: Sequence[str], theme: Mapping[str, str]) -> str:
    """A file of its own."""
    size = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} role="img" {FONT}>',
        f"<title>{escape(title)}</title>",
        f'<rect {size} rx="8" fill="{theme["paper"]}"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def kept() -> dict[str, Any]:
    """The result of the benchmark that is kept in the tree."""
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def drawn() -> dict[str, str]:
    """All pictures by the names of their files."""
    result = kept()
    made = {f"goodput-{name}.svg": hero(result, theme) for name, theme in THEMES.items()}
    return made | {f"architecture-{name}.svg": architecture(theme) for name, theme in THEMES.items()}


def keep(pictures: Mapping[str, str]) -> None:
    """Write pictures by the names of their files."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in pictures.items():
        (FOLDER / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    keep(drawn())
