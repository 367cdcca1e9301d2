"""A plan of models that are there together, for the terminal or as an SVG: who runs when without and with it.

It can be read without colour: every model has a letter, dots are idle time, bars are barriers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from cotenant.report.pictures import MOST_WIDTH, in_ms, key_text, keys_of, short, svg_of, time_axis
from cotenant.techniques.granularity.plan.kept import LEAST_GAIN_PCT
from cotenant.techniques.granularity.plan.overview import JointOverview, JointView

_MOST_NAME = 24
_MOST_STOPS = 12
"""That are named; the plan file has all."""
_NO_GAP_PCT = 0.05
"""What is printed as none."""


def together_picture(view: JointOverview, width: int = 80) -> RenderableType:
    """Both charts on one scale, and where the plan stops or cuts whom, at most `width` columns wide."""
    width = max(60, min(width, MOST_WIDTH))
    until = max(view.before.makespan_ns, view.after.makespan_ns, 1)
    parts: list[RenderableType] = []
    for words, each in (("All at once", view.before), ("By the plan", view.after)):
        parts += [
            Text(f"{words}: {in_ms(each.makespan_ns)} ms", style="bold"),
            *_chart(each, view, until, width),
            Text(),
        ]
    stops = [Text(f"  {each}", style="dim") for each in view.stops[:_MOST_STOPS]]
    if len(view.stops) > _MOST_STOPS:
        stops.append(Text(f"  ... and {len(view.stops) - _MOST_STOPS} more", style="dim"))
    return Group(*parts, *stops)


def together_svg(view: JointOverview, title: str) -> str:
    """The picture as the text of an SVG file that needs nothing beside it."""
    return svg_of(together_picture(view, MOST_WIDTH), title)


def together_lines(view: JointOverview) -> Iterator[str]:
    """The answers in sentences, as believed."""
    names, streams, best = " and ".join(view.members), in_ms(view.before.makespan_ns), in_ms(view.after.makespan_ns)
    is_least = view.gap_pct < _NO_GAP_PCT
    gap = (
        "no plan takes less"
        if is_least
        else f"no plan takes less than {in_ms(view.bound_ns)} ms, a gap of {view.gap_pct:.1f} %"
    )
    yield (
        f"{names}: one after the other on all cores {in_ms(view.sequential_ns)} ms, all at once on a lane each "
        f"{streams} ms, by the plan {best} ms; {gap}."
    )
    if not view.gains:
        yield f"Streams are as good: less than {LEAST_GAIN_PCT:g} % is not told from nothing, and no plan is kept."


def _chart(view: JointView, whole: JointOverview, until_ns: int, width: int) -> Iterator[Text]:
    """A line a stream, as many columns for equal times, and the axis."""
    keys = keys_of([str(number) for number in range(len(whole.members))])
    names = min(_MOST_NAME, max(len(each.name) for each in view.streams)) + 1
    cells = width - names - 2
    for stream in view.streams:
        line = Text(f"{short(stream.name, names - 1):<{names}}│")
        for cell in range(cells):
            start, end = until_ns * cell // cells, until_ns * (cell + 1) // cells
            if 2 * _within(stream.busy_ns, start, end) >= end - start:
                line.append_text(key_text(keys, str(stream.member), bare=True))
            else:
                is_barrier = any(start <= at < end for at in view.barriers_ns)
                line.append("┃" if is_barrier else "·", style="" if is_barrier else "dim")
        yield line.append("│")
    yield time_axis(names, cells, until_ns)


def _within(busy_ns: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    return sum(max(0, min(end_ns, end) - max(start_ns, start)) for start, end in busy_ns)
