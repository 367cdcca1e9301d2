"""Picture of a placement for the terminal or as an SVG: Gantt charts before and after, and a table of stages.

It is readable without colour: every stage has a letter, dots are idle time.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from cotenant.report.fitted_table import FittedTable
from cotenant.report.gantt_text import compared
from cotenant.report.pictures import MOST_WIDTH, Keys, in_ms, key_text, keys_of, short, svg_of
from cotenant.techniques.placement.plan.overview import LEAST_GAIN_PCT, PlacementOverview, StageView

_MOST_STAGES = 24
"""Most stages in the table: those of the longest service times."""
_SAID = 0.02
"""Least share of a stage's time for which a device is named."""
_NO_GAP_PCT = 0.05
"""Largest gap that is printed as none."""


def placement_picture(view: PlacementOverview, width: int = 80) -> RenderableType:
    """Both Gantt charts on one scale, and the table of stages, at most `width` columns wide."""
    width = max(60, min(width, MOST_WIDTH))
    keys = keys_of([str(number) for number in range(len(view.stages))])
    charts = compared({"Sequential": view.before, "Placed": view.after}, keys, width, has_busy=True)
    return Group(*charts, _table(view, keys, width))


def placement_svg(view: PlacementOverview, title: str) -> str:
    """The picture as the text of a self-contained SVG file."""
    return svg_of(placement_picture(view, MOST_WIDTH), title)


def placement_lines(view: PlacementOverview) -> Iterator[str]:
    """The results in sentences."""
    waiting = sum(ns > 0 for ns in view.queueing_ns)
    yield (
        f"Sequential: {100 * waiting / len(view.queueing_ns):.0f} % of {len(view.queueing_ns)} units queue for the "
        f"device, {in_ms(sum(view.queueing_ns))} ms in all; their service times are {in_ms(sum(view.service_ns))} ms."
    )
    bound = f"the lower bound is {in_ms(view.bound_ns)} ms"
    if view.gains:
        is_least = view.is_proved or view.gap_pct < _NO_GAP_PCT
        gap = "the placement is optimal" if is_least else f"{bound}, a gap of {view.gap_pct:.1f} %"
        yield (
            f"{view.model}: {in_ms(view.sequential_ns)} ms sequential, {in_ms(view.latency_ns)} ms placed, "
            f"{view.gain_pct:.1f} % less; {gap}."
        )
    elif view.most_gain_pct < LEAST_GAIN_PCT:
        sequential = f"Sequential {in_ms(view.sequential_ns)} ms"
        yield f"{view.model}: no placement can gain {LEAST_GAIN_PCT:g} %. {sequential}; {bound}."
    else:
        yield (
            f"{view.model}: no placement gains {LEAST_GAIN_PCT:g} %, the least measurable gain. Sequential "
            f"{in_ms(view.sequential_ns)} ms, best placement {in_ms(view.latency_ns)} ms; {bound}."
        )


def _table(view: PlacementOverview, keys: Keys, width: int) -> RenderableType:
    table = FittedTable(keys=2, box=None, padding=(0, 1), pad_edge=False, show_edge=False)
    shown_devices = view.devices[:2]
    table.add_column("", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    for head in ("branches", "units", *(f"{name}\nms" for name in shown_devices), "queue\nms"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("runs on", overflow="fold")
    order = sorted(range(len(view.stages)), key=lambda number: -max(view.stages[number].service_ns.values()))
    shown = sorted(order[:_MOST_STAGES])
    room = max(16, width - 64)
    for number in shown:
        stage = view.stages[number]
        table.add_row(
            key_text(keys, str(number)),
            short(_named(stage), room),
            str(stage.branches) if stage.branches > 1 else "",
            str(stage.tasks),
            *(in_ms(stage.service_ns[name]) if name in stage.service_ns else "–" for name in shown_devices),
            in_ms(stage.waits_ns),
            _where(stage),
        )
    left = len(view.stages) - len(shown)
    if not left:
        return table
    return Group(table, Text(f"... and {left} more stages that take less", style="dim"))


def _named(stage: StageView) -> str:
    first, last = (name.partition(":")[2] or name for name in (stage.first, stage.last))
    return first if stage.tasks == 1 else f"{first} to {last}"


def _where(stage: StageView) -> str:
    if stage.branches == 1:
        total = sum(stage.placed_ns.values())
        parts = [(100 * ns / total, name) for name, ns in stage.placed_ns.items() if ns >= _SAID * total]
        if len(parts) > 1:
            return ", ".join(f"{part:.0f} % on {name}" for part, name in sorted(parts, reverse=True))
        return next(iter(stage.runs_on))
    return ", ".join(f"{count} on {name}" for name, count in stage.runs_on.items())
