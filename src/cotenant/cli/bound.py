"""`cotenant bound`: upper bounds of any schedule for a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotenant.cli.options import AsJson, print_json


def bound(
    trace: Annotated[Path, typer.Argument(help="Trace file, or repository with the trace of its server.")],
    as_json: AsJson = False,
) -> None:
    """Compare a run with upper bounds: queries answered in time, their weight, and the least attainment."""
    from rich.text import Text

    from cotenant.cli.console import console, print_warnings
    from cotenant.cli.progress import reading
    from cotenant.measure.busy import disturbed_sentence
    from cotenant.report.bound_text import COLUMNS, facts, rows, sentences
    from cotenant.report.fitted_table import FittedTable
    from cotenant.report.lost_text import missing_sentences
    from cotenant.report.tables import attainment_style
    from cotenant.repository import trace_path
    from cotenant.trace import missing_events, others_share, read
    from cotenant.trace.bound import bound_of

    path = trace_path(trace) if trace.is_dir() else trace
    with reading(path) as on_read:
        found = bound_of(*read(path, on_read))
    missing, others = missing_events(path), others_share(path)
    if as_json:
        print_json({**facts(found), "missing_events": missing, "others_share": others})
        return
    table = FittedTable(title=f"{found.slots} slots")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "tenant" else "right")
    for each, cells in zip(found.tenants, rows(found), strict=True):
        style = attainment_style(each.attainment if each.offered else None)
        styled = (
            Text(cell, style if column == "attainment" else "") for column, cell in zip(COLUMNS, cells, strict=True)
        )
        table.add_row(*styled)
    print_warnings(console(), disturbed_sentence(others))
    console().print(table)
    print("\n".join([*sentences(found), *missing_sentences(missing)]))
