#!/usr/bin/env python3
"""Draw the picture of docs/design.md: the floors of the base, and which sockets of it each technique fills."""

from __future__ import annotations

from collections.abc import Mapping

from draw_readme import THEMES, keep, picture, text

from cotenant.registry import BUILT_IN

FLOORS = (
    (("cli", "commands"), ("report", "tables, pictures"), ("load", "load generator")),
    (("serve.frontend", "HTTP, gRPC"), ("serve.engine", "driver, observers"), ("serve.models", "names, versions")),
    (("sim", "the engine in virtual time"), ("measure", "campaigns that make profiles")),
    (("execute", "workers, threads, streams"), ("world", "simulated devices")),
    (("wire", "the protocol"), ("repository", "models, settings"), ("trace", "log, explain, causes")),
    (("policies", "snapshot to decision, pure"),),
    (("profile", "measured data"), ("predict", "latency, margin, calibration")),
    (("core", "events to actions, pure"),),
    (("graph", "operators, units, cuts"), ("types, work", "queries, outcomes, shares")),
)
"""Rooms of each floor, and what they are. Upper floors import lower ones."""
PACKAGES = {
    "overlap": "Abacus",
    "partitions": "GPU-let",
    "layer_blocks": "VELTAIR",
    "placement": "SIR+",
    "granularity": "GACER",
    "cluster": "cluster",
}
"""Techniques by package, and what the picture calls them."""


def design(theme: Mapping[str, str]) -> str:
    """Floors on the left, a table of sockets and techniques on the right."""
    width, top, row = 860, 76, 38
    sockets = sorted(BUILT_IN)
    height = top + row * max(len(FLOORS), len(sockets)) + 24
    parts = [
        text(20, 30, "The base: a server without any of the papers", 15, theme["ink"], bold=True),
        text(20, 50, "Each floor imports the floors below it", 12, theme["soft"]),
        text(470, 30, "Sockets, and the techniques that fill them", 15, theme["ink"], bold=True),
    ]
    for number, rooms in enumerate(FLOORS):
        y = top + row * number
        wide = 420 / len(rooms)
        for at, (room, words) in enumerate(rooms):
            middle = 20 + wide * (at + 0.5) - 3
            place = f'x="{20 + wide * at:.1f}" y="{y}" width="{wide - 6:.1f}" height="{row - 7}"'
            parts.append(f'<rect {place} rx="5" fill="{theme["paper"]}" stroke="{theme["soft"]}"/>')
            parts.append(text(middle, y + 14, room, 12.5, theme["ink"], bold=True, anchor="middle"))
            parts.append(text(middle, y + 26.5, words, 10.5, theme["soft"], anchor="middle"))
    columns = [602 + 46 * at for at in range(len(PACKAGES))]
    parts += [
        text(x, 58, name, 10.5, theme["ink"], anchor="middle")
        for x, name in zip(columns, PACKAGES.values(), strict=True)
    ]
    for number, socket in enumerate(sockets):
        y = top + row * number + 14
        parts.append(text(470, y + 4, socket.removeprefix("cotenant.").replace("_", " "), 12.5, theme["ink"]))
        parts.append(f'<path d="M470 {y + 18}H850" stroke="{theme["rule"]}"/>')
        for x, package in zip(columns, PACKAGES, strict=True):
            if any(f".{package}." in f"{found}." for found in BUILT_IN[socket].values()):
                parts.append(f'<circle cx="{x}" cy="{y}" r="6" fill="{theme["ours"]}"/>')
    return picture(width, height, "The base of cotenant and its sockets", parts, theme)


def drawn() -> dict[str, str]:
    """All pictures by the names of their files."""
    return {f"design-{name}.svg": design(theme) for name, theme in THEMES.items()}


if __name__ == "__main__":
    keep(drawn())
