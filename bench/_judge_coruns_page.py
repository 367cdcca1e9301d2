"""The report of co-runs: errors against the number of measurements, and the factors that were found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bench._judge_coruns import CurvePoint
from cotenant.report.charts import FULL
from cotenant.report.page import Page, line_key, paragraph, table
from cotenant.report.svg import Chart, round_up


def orders_of(curve: Sequence[CurvePoint]) -> list[str]:
    """Names of the orders, the first first."""
    return list(dict.fromkeys(point.order for point in curve))


def curve_table(curve: Sequence[CurvePoint], title: str) -> Table:
    """Median and 90th percentile by count, a pair of columns an order."""
    heads, rows = curve_cells(curve)
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def curve_cells(curve: Sequence[CurvePoint]) -> tuple[list[str], list[list[str]]]:
    """The same as text: heads and lines."""
    orders = orders_of(curve)
    by_key = {(point.order, point.count): point for point in curve}
    heads = ["measured", *(f"{order}, {figure}" for order in orders for figure in ("median", "90 %"))]
    rows = []
    for count in sorted({point.count for point in curve}):
        cells = [str(count)]
        for order in orders:
            point = by_key.get((order, count))
            cells += [f"{point.median_error_pct:.1f} %", f"{point.p90_error_pct:.1f} %"] if point else ["", ""]
        rows.append(cells)
    return heads, rows


def curve_chart(curve: Sequence[CurvePoint], title: str) -> str:
    """Errors over the number of measurements as an `<svg>` element: nine of ten co-runs above, half of them below."""
    counts = [point.count for point in curve]
    errors = [value for point in curve for value in (point.median_error_pct, point.p90_error_pct)]
    low = max(0.1, min(errors) / 1.3)
    chart = Chart(
        FULL,
        420,
        title=title,
        x=(float(min(counts)), float(max(max(counts), min(counts) + 1))),
        y=(low, max(round_up(max(errors)), low * 3)),
        log_x=max(counts) > 8 * min(counts),
        log_y=True,
        x_label="measurements",
        y_label="error of the factor, per cent",
    )
    for number, order in enumerate(orders_of(curve)):
        points = sorted((point for point in curve if point.order == order), key=lambda point: point.count)
        for metric, shape in (("p90_error_pct", "triangle"), ("median_error_pct", "dot")):
            line = [(float(point.count), float(getattr(point, metric))) for point in points]
            chart.line(line, f"s{number}")
            chart.marks(line, shape, "answered")
    return chart.svg()


def write_corun_report(
    path: Path,
    title: str,
    lead: str,
    curve: Sequence[CurvePoint],
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = (),
) -> None:
    """Write the page: the curve, its figures, then tables of (title, heads, rows). It needs nothing beside it."""
    page = Page(title)
    page.add(paragraph(lead, "lead"))
    if curve:
        chart = curve_chart(curve, "error on co-runs that no fit saw: triangles 90 %, dots median")
        page.add(line_key(orders_of(curve)), f'<figure class="wide">{chart}</figure>')
        page.section("Errors by number of measurements", table(*curve_cells(curve)))
    for name, heads, rows in tables:
        page.section(name, table(heads, rows))
    page.write(path)
