"""A placement for the terminal, or as an SVG: what each lane runs before and after, and where each branch runs.

It can be read without colour: every stage has a letter, dots are idle time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from cotenant.report.fitted_table import FittedTable
from cotenant.report.pictures import MOST_WIDTH, Keys, in_ms, key_text, keys_of, short, svg_of, time_axis
from cotenant.techniques.placement.plan.overview import LEAST_GAIN_PCT, PlacementOverview, StageView, Stretch

_MOST_STAGES = 24
"""Stages that a table lists: those that take longest."""
_MOST_LANES = 16
_BUSY = 6
"""Columns of what a lane is busy."""
_IDLE = "·"
_SAID = 0.02
"""Of a stage's time: devices that have less of it are not named."""
_NO_GAP_PCT = 0.05
"""What is printed as none."""


def placement_picture(view: PlacementOverview, width: int = 80) -> RenderableType:
    """Both Gantt charts on one scale, and the table of stages, at most `width` columns wide."""
    width = max(60, min(width, MOST_WIDTH))
    keys = keys_of([str(number) for number in range(len(view.stages))])
    until = max(view.sequential_ns, view.latency_ns, 1)
    parts: list[RenderableType] = []
    for words, lanes, ns in (
        ("One after the other", view.before, view.sequential_ns),
        ("Placed", view.after, view.latency_ns),
    ):
        parts += [Text(f"{words}: {in_ms(ns)} ms", style="bold"), *_chart(lanes, keys, until, width), Text()]
    return Group(*parts, _table(view, keys, width))


def placement_svg(view: PlacementOverview, title: str) -> str:
    """The picture as the text of an SVG file that needs nothing beside it."""
    return svg_of(placement_picture(view, MOST_WIDTH), title)


def placement_lines(view: PlacementOverview) -> Iterator[str]:
    """The answers in sentences."""
    waiting = sum(ns > 0 for ns in view.queueing_ns)
    yield (
        f"One after the other, {100 * waiting / len(view.queueing_ns):.0f} % of the {len(view.queueing_ns)} units wait "
        f"for the device when their inputs are there, {in_ms(sum(view.queueing_ns))} ms in all; units take "
        f"{in_ms(sum(view.service_ns))} ms."
    )
    bound = f"no placement goes below {in_ms(view.bound_ns)} ms"
    if view.gains:
        is_least = view.is_proved or view.gap_pct < _NO_GAP_PCT
        gap = "no placement takes less" if is_least else f"{bound}, a gap of {view.gap_pct:.1f} %"
        yield (
            f"{view.model}: {in_ms(view.sequential_ns)} ms before, {in_ms(view.latency_ns)} ms placed, "
            f"{view.gain_pct:.1f} % less; {gap}."
        )
    elif view.most_gain_pct < LEAST_GAIN_PCT:
        yield f"{view.model}: nothing is to be gained. It takes {in_ms(view.sequential_ns)} ms, and {bound}."
    else:
        yield (
            f"{view.model}: nothing is gained. It takes {in_ms(view.sequential_ns)} ms, the best placement that was "
            f"found {in_ms(view.latency_ns)}, and less than {LEAST_GAIN_PCT:g} % is not told from none; {bound}."
        )


def _chart(lanes: Mapping[str, Sequence[Stretch]], keys: Keys, until_ns: int, width: int) -> Iterator[Text]:
    """A line a lane, as many columns for equal times, and the axis."""
    names = max(map(len, lanes)) + 1
    cells = width - names - _BUSY - 2
    for number, (name, stretches) in enumerate(lanes.items()):
        if number == _MOST_LANES:
            yield Text(f"... and {len(lanes) - number} more lanes", style="dim")
            break
        line = Text(f"{name:<{names}}│")
        for cell in range(cells):
            stage = _most(stretches, until_ns * cell // cells, until_ns * (cell + 1) // cells)
            if stage is None:
                line.append(_IDLE, style="dim")
            else:
                line.append_text(key_text(keys, str(stage), bare=True))
        busy = sum(each.end_ns - each.start_ns for each in stretches) / until_ns
        yield line.append(f"│{100 * busy:>4.0f} %")
    yield time_axis(names, cells, until_ns)


def _most(stretches: Sequence[Stretch], start_ns: int, end_ns: int) -> int | None:
    """The stage that takes most of a piece of time; None where the lane is idle for longer than any takes."""
    shares: dict[int | None, int] = {}
    for each in stretches:
        inside = min(end_ns, each.end_ns) - max(start_ns, each.start_ns)
        if inside > 0:
            shares[each.stage] = shares.get(each.stage, 0) + inside
    shares[None] = end_ns - start_ns - sum(shares.values())
    return max(shares, key=shares.__getitem__)


def _table(view: PlacementOverview, keys: Keys, width: int) -> RenderableType:
    table = FittedTable(keys=2, box=None, padding=(0, 1), pad_edge=False, show_edge=False)
    shown_devices = view.devices[:2]
    table.add_column("", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    for head in ("branches", "units", *(f"{name}\nms" for name in shown_devices), "waits\nms"):
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
