"""`cotenant load`: send the workload of a file to a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotenant.cli.options import MIN_FACTOR, MOST_FACTOR, AsJson, a_number, print_json


def load(
    workload: Annotated[Path, typer.Argument(help="Workload file (TOML).")],
    http: Annotated[str, typer.Option(help="URL of the server for HTTP.")] = "http://127.0.0.1:8000",
    grpc: Annotated[str, typer.Option(help="Address of the server for gRPC.")] = "127.0.0.1:8001",
    factor: Annotated[
        float, typer.Option(min=MIN_FACTOR, max=MOST_FACTOR, callback=a_number, help="Multiply all rates.")
    ] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Save the outcome of each query to this JSON file.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Send each sample alone first; a response that differs counts as failed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send an open-loop load of all tenants, and report outcomes and latencies. Ctrl-C stops early and reports."""
    from rich.live import Live

    from cotenant.cli.console import console as make_console
    from cotenant.cli.console import print_warnings
    from cotenant.cli.progress import progress
    from cotenant.load import LiveStats, run_load_process
    from cotenant.metrics import to_json
    from cotenant.report.live import live_table
    from cotenant.report.tables import outcome_table
    from cotenant.workload import load_workload, scale

    spec = load_workload(workload)
    if factor != 1.0:
        spec = scale(spec, factor)
    console = make_console(stderr=as_json)
    is_drawn = console.is_terminal
    with (
        Live(console=console, auto_refresh=False, transient=True) as live,
        progress("load", quiet=is_drawn or as_json) as on_step,
    ):

        def show(stats: LiveStats) -> None:
            if is_drawn:
                live.update(live_table(stats), refresh=True)
            on_step(stats.elapsed_ns, stats.duration_ns, "")

        result = run_load_process(spec, http_url=http, grpc_url=grpc, on_tick=show, check=check)
    if out is not None:
        result.save(out)
    if as_json:
        print_json({**to_json(result.summary), "warnings": list(result.warnings)})
        return
    console.print(outcome_table(result.summary, f"{workload.name} at {result.servers[0] if result.servers else http}"))
    print_warnings(console, result.warnings)
