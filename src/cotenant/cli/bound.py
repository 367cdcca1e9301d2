"""`cotenant bound`: how far a run was from what any schedule could have done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from cotenant.trace.bound import RunBound


def bound(
    trace: Annotated[Path, typer.Argument(help="Trace file, or the repository that is or was served.")],
    as_json: AsJson = False,
) -> None:
    """Say how many of the queries of a run could have been answered in time at most, and how evenly."""
    from cotenant.repository import trace_path
    from cotenant.trace import read
    from cotenant.trace.bound import bound_of

    found = bound_of(*read(trace_path(trace) if trace.is_dir() else trace))
    if as_json:
        print_json(_facts(found))
        return
    from cotenant.cli.console import console

    console().print(_table(found))
    print("\n".join(sentences(found)))


def sentences(found: RunBound) -> list[str]:
    """What the bounds mean for a run, an objective a line."""
    asked = sum(each.asked for each in found.tenants)
    lines = [
        f"most: at most {int(found.most + 1e-6)} of {asked} queries could be answered in time, "
        f"{found.in_time} were: {_percent(found.in_time, found.most)} of it."
    ]
    short = found.short
    kept = "and every tenant kept that"
    if short is not None:
        kept = f"but {short.tenant} got {short.in_time} of the {int(short.alone + 1e-6)} that it could have had so"
    lines.append(
        f"shares: where every tenant keeps what it could have alone on its share, at most {int(found.shares + 1e-6)} "
        f"could be; the run had {_percent(found.in_time, found.shares)} of it, {kept}."
    )
    if len({each.weight for each in found.tenants}) > 1:
        lines.append(
            f"weighted: the answers in time could be worth {found.weighted:g} at most and were worth {found.worth:g}: "
            f"{_percent(found.worth, found.weighted)} of it."
        )
    *others, last = found.limited_by or ("",)
    limits = "" if found.fair >= 1 else f", by what {' and '.join([*filter(None, [', '.join(others)]), last])} ask for"
    lines.append(
        f"fair: the smallest attainment of a tenant could be {100 * found.fair:.1f} % at most{limits}, "
        f"and was {100 * found.least:.1f} %: {_percent(found.least, found.fair)} of it."
    )
    return lines


def _table(found: RunBound) -> Table:
    from rich.table import Table

    from cotenant.report.tables import attainment_style, milliseconds, percent

    table = Table(title=f"{found.slots} slots", title_justify="left")
    for column in (
        "tenant",
        "asked",
        "in time",
        "attainment",
        "alone on its share",
        "slot ms a query",
        "over its profile",
    ):
        table.add_column(column, justify="left" if column == "tenant" else "right")
    for each in found.tenants:
        attainment = each.attainment if each.asked else None
        table.add_row(
            each.tenant,
            str(each.asked),
            str(each.in_time),
            f"[{attainment_style(attainment)}]{percent(attainment)}",
            f"{each.alone:.0f}",
            milliseconds(each.slot_ns / 1e6 if each.asked else None),
            f"{each.pace:.2f}x",
        )
    return table


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "all"


def _facts(found: RunBound) -> dict[str, Any]:
    return {
        "slots": found.slots,
        "asked": sum(each.asked for each in found.tenants),
        "in_time": found.in_time,
        "most": found.most,
        "shares": found.shares,
        "worth": found.worth,
        "weighted": found.weighted,
        "least_attainment": found.least,
        "fair": found.fair,
        "limited_by": list(found.limited_by),
        "tenants": [
            {
                "tenant": each.tenant,
                "weight": each.weight,
                "asked": each.asked,
                "in_time": each.in_time,
                "attainment": each.attainment,
                "slot_ms_a_query": each.slot_ns / 1e6,
                "over_profile": each.pace,
                "share": each.share,
                "alone_on_share": each.alone,
            }
            for each in found.tenants
        ],
    }
