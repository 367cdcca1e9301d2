"""A plan of models that are there together, for the terminal or as an SVG: who runs when without and with it.

It can be read without colour: every model has a letter, dots are idle time, bars are barriers.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from cotenant.report.gantt_text import compared
from cotenant.report.pictures import MOST_WIDTH, in_ms, keys_of, svg_of
from cotenant.techniques.granularity.plan.joint_overview import JointOverview
from cotenant.techniques.granularity.plan.kept import LEAST_GAIN_PCT

_MOST_STOPS = 12
"""That are named; the plan file has all."""
_NO_GAP_PCT = 0.05
"""What is printed as none."""


def together_picture(view: JointOverview, width: int = 80) -> RenderableType:
    """Both charts on one scale, and where the plan stops or cuts whom, at most `width` columns wide."""
    width = max(60, min(width, MOST_WIDTH))
    keys = keys_of([str(number) for number in range(len(view.members))])
    charts = compared({"All at once": view.before, "By the plan": view.after}, keys, width)
    stops = [Text(f"  {each}", style="dim") for each in view.stops[:_MOST_STOPS]]
    if len(view.stops) > _MOST_STOPS:
        stops.append(Text(f"  ... and {len(view.stops) - _MOST_STOPS} more", style="dim"))
    return Group(*charts, *stops)


def together_svg(view: JointOverview, title: str) -> str:
    """The picture as the text of an SVG file that needs nothing beside it."""
    return svg_of(together_picture(view, MOST_WIDTH), title)


def together_lines(view: JointOverview) -> Iterator[str]:
    """The answers in sentences, as believed."""
    names, streams, best = " and ".join(view.members), in_ms(view.before.end_ns), in_ms(view.after.end_ns)
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
