"""The error report of the overlap-aware predictor: a table for the terminal and a page with charts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.table import Table

from bench._judge_groups import Judgement
from cotenant.report.charts import HALF
from cotenant.report.page import Page, grid, table
from cotenant.report.svg import Chart, duration

_MOST_POINTS = 2500
_MS = 1e6


def errors_table(judgement: Judgement) -> Table:
    """Errors by tenants together, then of tenants left out, then the coverage of quantiles."""
    table = Table(title=f"Predictor of groups: MAPE {judgement.mape:.1f} % (cross-validated)", title_justify="left")
    table.add_column("groups of")
    table.add_column("groups", justify="right")
    table.add_column("MAPE", justify="right")
    for name, count, mape in judgement.by_name():
        table.add_row(name, str(count), f"{mape:.1f} %")
    table.add_section()
    for tenant, mape in judgement.unseen:
        table.add_row(f"with {tenant}, which no sample had", "", f"{mape:.1f} %")
    table.add_section()
    for level, share in judgement.coverage:
        table.add_row(f"single runs below the {100 * level:g} % quantile", "", f"{100 * share:.1f} %")
    return table


def write_predictor_report(path: Path, judgement: Judgement, title: str = "How groups are predicted") -> None:
    """Write the page; it needs nothing beside it."""
    page = Page(title)
    page.add(
        f'<p class="lead">On {len(judgement.judged)} groups that a fit had not seen, the predicted median is off by '
        f"<b>{judgement.mape:.1f} %</b> on average. Single runs scatter by {judgement.scatter:.1f} % around their own "
        "median.</p>"
    )
    page.section(
        "Predicted and measured",
        "<p>Each dot is a group: its median latency as measured, and as predicted by a fit that had not seen it "
        "(five folds). On the diagonal the prediction is right.</p>",
        grid((_scatter(judgement), _errors(judgement))),
    )
    page.section(
        "By tenants",
        table(
            ("groups of", "groups", "MAPE"),
            [(name, str(count), f"{mape:.1f} %") for name, count, mape in judgement.by_name()],
        ),
    )
    page.section(
        "Tenants that no sample had",
        "<p>All groups with a tenant were left out of the fit; it was then predicted from its profile alone.</p>",
        table(("tenant", "MAPE"), [(tenant, f"{mape:.1f} %") for tenant, mape in judgement.unseen]),
    )
    page.section(
        "Quantiles",
        "<p>Share of single runs, of groups that a fit had not seen, that ended within the quantile it promised.</p>",
        table(
            ("promised", "held"),
            [(f"{100 * level:g} %", f"{100 * share:.1f} %") for level, share in judgement.coverage],
        ),
    )
    page.write(path)


def _scatter(judgement: Judgement) -> str:
    measured = np.array([each.sample.median_ns for each in judgement.judged]) / _MS
    predicted = np.array([each.predicted_ns for each in judgement.judged]) / _MS
    low, high = float(min(measured.min(), predicted.min())) / 1.2, float(max(measured.max(), predicted.max())) * 1.2
    chart = Chart(
        HALF,
        HALF - 80,
        title="every group",
        x=(low, high),
        y=(low, high),
        log_x=True,
        log_y=True,
        x_label="measured",
        y_label="predicted",
        x_format=duration,
        y_format=duration,
    )
    chart.line([(low, low), (high, high)], "limit")
    stride = max(1, len(measured) // _MOST_POINTS)
    sizes = [len(each.sample.members) for each in judgement.judged]
    for size, css in ((1, "late"), (2, "answered")):
        points = [
            point
            for point, mine in zip(zip(measured.tolist(), predicted.tolist(), strict=True), sizes, strict=True)
            if min(mine, 2) == size
        ]
        chart.marks(points[::stride], "dot", css)
    return f"<figure>{chart.svg()}<figcaption>Orange: one member. Blue: two or more.</figcaption></figure>"


def _errors(judgement: Judgement) -> str:
    errors = np.sort([100 * each.error for each in judgement.judged])
    top = max(5.0, float(np.quantile(errors, 0.98)))
    chart = Chart(
        HALF,
        HALF - 80,
        title="how many groups are predicted how well",
        x=(0.0, top),
        y=(0.0, 1.0),
        x_label="error of the median, per cent",
        y_label="share of groups",
        y_format=lambda share: f"{100 * share:.0f} %",
        headroom=True,
    )
    ranks = np.unique(np.linspace(1, errors.size, min(errors.size, 400)).astype(int))
    steps = [(float(errors[rank - 1]), rank / errors.size) for rank in ranks if errors[rank - 1] <= top]
    chart.stairs([(0.0, 0.0), *steps], "s1")
    chart.vertical(min(judgement.mape, top), f"mean {judgement.mape:.1f} %")
    return f"<figure>{chart.svg()}</figure>"
