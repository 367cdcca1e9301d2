"""The error report of interference models: how many co-runs are predicted how well, and what each case says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cotenant.report.charts import FULL
from cotenant.report.page import Page, line_key, paragraph, table
from cotenant.report.svg import Chart, round_up

_STEPS = 400


@dataclass(frozen=True, slots=True)
class ErrorCurve:
    """Relative errors of one model on co-runs that no fit had seen, in per cent and without sign."""

    name: str
    errors_pct: tuple[float, ...]


def error_distribution(curves: Sequence[ErrorCurve], title: str, marks: Sequence[tuple[float, str]] = ()) -> str:
    """Share of co-runs with an error of at most x, as an `<svg>` element; `marks` (share, text) cross the chart."""
    top = round_up(max([1.0, *(float(np.quantile(each.errors_pct, 0.95)) for each in curves)]))
    chart = Chart(
        FULL,
        400,
        title=title,
        x=(0.0, top),
        y=(0.0, 1.0),
        x_label="error of the predicted factor, per cent",
        y_label="share of co-runs",
        y_format=lambda share: f"{100 * share:.0f} %",
    )
    for share, text in marks:
        chart.horizontal(share, text)
    for number, curve in enumerate(curves):
        errors = np.sort(curve.errors_pct)
        ranks = np.unique(np.linspace(1, errors.size, min(errors.size, _STEPS)).astype(int))
        steps = [(float(errors[rank - 1]), rank / errors.size) for rank in ranks if errors[rank - 1] <= top]
        chart.stairs([(0.0, 0.0), *steps, (top, float(np.mean(errors <= top)))], f"s{number}")
    return chart.svg()


def write_interference_report(
    path: Path,
    title: str,
    lead: str,
    curves: Sequence[ErrorCurve],
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> None:
    """Write the page: the distribution of errors, then a table. It needs nothing beside it."""
    page = Page(title)
    chart = error_distribution(curves, "co-runs that no fit had seen", ((0.5, "median"), (0.9, "90 %")))
    page.add(paragraph(lead, "lead"), line_key(curve.name for curve in curves))
    page.add(f'<figure class="wide">{chart}</figure>', table(heads, rows))
    page.write(path)
