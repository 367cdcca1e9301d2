"""Figures of a run as a table for the terminal and as JSON."""

from __future__ import annotations

from rich.text import Text

from cotenant.metrics import Summary, TenantSummary, to_json
from cotenant.report.fitted_table import FittedTable

__all__ = ["attainment_style", "milliseconds", "outcome_table", "percent", "to_json"]

LOSSES = ("late", "dropped", "rejected", "failed", "cancelled", "excluded")
"""Columns that tables leave out while no query ended so."""
_COLUMNS = (
    "tenant",
    "SLO ms",
    "offered",
    "answered",
    *LOSSES,
    "p50 ms",
    "p99 ms",
    "goodput/s",
    "attainment",
)


def milliseconds(value: float | None) -> str:
    """Text of a number with three significant digits; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float | None) -> str:
    """Text of a share as a percentage with one decimal, never rounded up to 100 %; a dash for None."""
    if share is None:
        return "–"
    return "99.9 %" if 0.999 < share < 1 else f"{100 * share:.1f} %"


def attainment_style(share: float | None) -> str:
    """Colour for the terminal: green from 99 %, yellow from 90 %."""
    if share is None:
        return "dim"
    return "green" if share >= 0.99 else "yellow" if share >= 0.9 else "red"


def outcome_table(summary: Summary, title: str) -> FittedTable:
    """One line for each tenant and, with several, a total. The columns LOSSES appear only with such queries."""
    table = FittedTable(title=title, optional=LOSSES)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "tenant" else "right")
    for line in summary.tenants:
        table.add_row(*_cells(line))
    if len(summary.tenants) > 1:
        table.add_section()
        table.add_row(*_cells(summary.total), style="bold")
    return table


def _cells(line: TenantSummary) -> list[Text | str]:
    return [
        Text(line.tenant),
        milliseconds(line.slo_ms),
        str(line.offered),
        str(line.answered),
        *(_count(getattr(line, name)) for name in LOSSES),
        milliseconds(line.p50_ms),
        milliseconds(line.p99_ms),
        f"{line.goodput_per_s:.1f}",
        Text(percent(line.attainment), style=attainment_style(line.attainment)),
    ]


def _count(number: int) -> Text:
    return Text(str(number), style="dim" if number == 0 else "")
