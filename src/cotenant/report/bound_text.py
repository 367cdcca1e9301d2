"""How far a run was from what any schedule could have done, in words, as a table and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cotenant.report.tables import milliseconds, percent
from cotenant.trace.bound import RunBound

COLUMNS = ("tenant", "asked", "in time", "attainment", "alone on its share", "slot ms a query", "over its profile")


def sentences(found: RunBound) -> list[str]:
    """What the bounds mean for a run, an objective a line."""
    asked = sum(each.asked for each in found.tenants)
    lines = [
        f"most: at most {int(found.most + 1e-6)} of {asked} queries could be answered in time, "
        f"{found.in_time} were: {of_bound(found.in_time, found.most)} of it."
    ]
    short = found.short
    kept = "and every tenant kept that"
    if short is not None:
        kept = f"but {short.tenant} got {short.in_time} of the {int(short.alone + 1e-6)} that it could have had so"
    lines.append(
        f"shares: where every tenant keeps what it could have alone on its share, at most {int(found.shares + 1e-6)} "
        f"could be; the run had {of_bound(found.in_time, found.shares)} of it, {kept}."
    )
    if len({each.weight for each in found.tenants}) > 1:
        lines.append(
            f"weighted: the answers in time could be worth {found.weighted:g} at most and were worth {found.worth:g}: "
            f"{of_bound(found.worth, found.weighted)} of it."
        )
    *others, last = found.limited_by or ("",)
    limits = "" if found.fair >= 1 else f", by what {' and '.join([*filter(None, [', '.join(others)]), last])} ask for"
    lines.append(
        f"fair: the smallest attainment of a tenant could be {100 * found.fair:.1f} % at most{limits}, "
        f"and was {100 * found.least:.1f} %: {of_bound(found.least, found.fair)} of it."
    )
    return lines


def rows(found: RunBound) -> list[Sequence[str]]:
    """The cells of COLUMNS, a row a tenant."""
    return [
        (
            each.tenant,
            str(each.asked),
            str(each.in_time),
            percent(each.attainment if each.asked else None),
            f"{each.alone:.0f}",
            milliseconds(each.slot_ns / 1e6 if each.asked else None),
            f"{each.pace:.2f}x",
        )
        for each in found.tenants
    ]


def of_bound(part: float, whole: float) -> str:
    """Which share of the most that is possible was reached."""
    return f"{100 * part / whole:.1f} %" if whole else "all"


def facts(found: RunBound) -> dict[str, Any]:
    """Plain data, ready for `json.dumps`."""
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
