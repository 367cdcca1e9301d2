"""Text of the bounds of a run: sentences, a table and plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cotenant.report.tables import milliseconds, percent
from cotenant.trace.bound import RunBound

COLUMNS = ("tenant", "offered", "in time", "attainment", "alone on share", "slot ms/query", "over profile")


def sentences(found: RunBound) -> list[str]:
    """The bounds of a run in words, one line for each objective."""
    offered = sum(each.offered for each in found.tenants)
    lines = [
        f"most: at most {int(found.most + 1e-6)} of {offered} queries could be answered in time, "
        f"{found.in_time} were: {of_bound(found.in_time, found.most)} of the bound."
    ]
    short = found.short
    kept = "and every tenant had that many"
    if short is not None:
        kept = f"but {short.tenant} had {short.in_time} of its {int(short.alone + 1e-6)}"
    lines.append(
        f"shares: at most {int(found.shares + 1e-6)} if every tenant has as many as it could alone on its share: "
        f"{of_bound(found.in_time, found.shares)} of the bound, {kept}."
    )
    if len({each.weight for each in found.tenants}) > 1:
        lines.append(
            f"weighted: the total weight of queries answered in time could be {found.weighted:g} at most and was "
            f"{found.value:g}: {of_bound(found.value, found.weighted)} of the bound."
        )
    *others, last = found.limited_by or ("",)
    limits = (
        "" if found.fair >= 1 else f" (by the demand of {' and '.join([*filter(None, [', '.join(others)]), last])})"
    )
    lines.append(
        f"fair: the least attainment of a tenant could be {100 * found.fair:.1f} % at most{limits} "
        f"and was {100 * found.least:.1f} %: {of_bound(found.least, found.fair)} of the bound."
    )
    return lines


def rows(found: RunBound) -> list[Sequence[str]]:
    """Cells of the table with the headings COLUMNS, one row for each tenant."""
    return [
        (
            each.tenant,
            str(each.offered),
            str(each.in_time),
            percent(each.attainment if each.offered else None),
            f"{each.alone:.0f}",
            milliseconds(each.slot_ns / 1e6 if each.offered else None),
            f"{each.pace:.2f}x",
        )
        for each in found.tenants
    ]


def of_bound(part: float, whole: float) -> str:
    """The reached part of a bound, as a percentage."""
    return f"{100 * part / whole:.1f} %" if whole else "all"


def facts(found: RunBound) -> dict[str, Any]:
    """Plain data, ready for `json.dumps`."""
    return {
        "slots": found.slots,
        "asked": sum(each.offered for each in found.tenants),
        "in_time": found.in_time,
        "most": found.most,
        "shares": found.shares,
        "worth": found.value,
        "weighted": found.weighted,
        "least_attainment": found.least,
        "fair": found.fair,
        "limited_by": list(found.limited_by),
        "tenants": [
            {
                "tenant": each.tenant,
                "weight": each.weight,
                "asked": each.offered,
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
