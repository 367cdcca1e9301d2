"""A joint plan for the terminal or as an SVG: Gantt charts without it and with it.

The charts are readable without colour: every model has a letter, dots are idle time, bars are barriers.
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
"""Most barriers, waits and chunks that are printed; the plan file has all."""
_NO_GAP_PCT = 0.05
"""A smaller gap to the bound is printed as none, in percent."""


def joint_picture(view: JointOverview, width: int = 80) -> RenderableType:
    """Both charts on one scale, and the stops and chunks of the plan, at most `width` columns wide."""
    width = max(60, min(width, MOST_WIDTH))
    keys = keys_of([str(number) for number in range(len(view.members))])
    charts = compared({"All at once": view.before, "By the plan": view.after}, keys, width)
    stops = [Text(f"  {each}", style="dim") for each in view.stops[:_MOST_STOPS]]
    if len(view.stops) > _MOST_STOPS:
        stops.append(Text(f"  ... and {len(view.stops) - _MOST_STOPS} more", style="dim"))
    return Group(*charts, *stops)


def joint_svg(view: JointOverview, title: str) -> str:
    """The picture as an SVG file without external references."""
    return svg_of(joint_picture(view, MOST_WIDTH), title)


def joint_lines(view: JointOverview) -> Iterator[str]:
    """The predicted times in sentences."""
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
        yield f"The plan gains less than {LEAST_GAIN_PCT:g} %, the precision of the times: no plan is kept."
