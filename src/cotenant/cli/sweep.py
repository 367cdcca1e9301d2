"""`cotenant sweep`: SLO attainment against a setting, by simulations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.cli.options import AsJson, Repository, SettingsOptions, Stale, a_number, print_json, values_of
from cotenant.cli.records import with_records

if TYPE_CHECKING:
    from cotenant.api.sweeping import SweepResult
    from cotenant.report.fitted_table import FittedTable


@with_records
def sweep(
    assignment: Annotated[
        str,
        typer.Argument(
            metavar="KEY=A,B,C",
            help="A key as for --set, or rate (factor on all rates), policy, noise, decision_us; and its values.",
        ),
    ],
    workload: Annotated[Path, typer.Argument(help="Workload file (TOML) as for 'cotenant load', or a recorded trace.")],
    repository: Repository,
    *,
    policy: Annotated[str | None, typer.Option(help="Policy to simulate.")] = None,
    options: SettingsOptions,
    noise: Annotated[
        float, typer.Option(min=0, max=10, callback=a_number, help="Standard deviation of the logarithm of latencies.")
    ] = 0.05,
    svg: Annotated[Path | None, typer.Option(help="Draw attainment against the value to this file (SVG).")] = None,
    stale: Stale = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a workload once for each value of a key. Ctrl-C shows the values that are done."""
    from cotenant.api.simulation import SimulatedRun, SimulationOptions, workload_of
    from cotenant.api.sweeping import SweepResult, swept
    from cotenant.cli.console import console
    from cotenant.cli.progress import progress, reading
    from cotenant.files import write_whole

    key, values = values_of(assignment)
    assumed = SimulationOptions(noise=noise, is_stale=stale)
    with reading(workload, quiet=as_json) as on_read:
        spec = workload_of(workload, repository, on_read)
    policies = () if policy is None else (policy,)
    done: list[tuple[object, SimulatedRun]] = []
    is_whole = True
    with progress("sweep", quiet=as_json) as on_step:
        try:
            done.extend(swept(spec, repository, key, values, policies, options.chosen(), assumed, on_step))
        except KeyboardInterrupt:
            is_whole = False
            if not done:
                raise
    found = SweepResult(key, tuple(value for value, _ in done), tuple(run for _, run in done))
    if svg is not None:
        write_whole(svg, found.svg().encode())
    if as_json:
        print_json({**found.to_json(), "is_whole": is_whole})
        return
    console().print(sweep_table(found))
    if not is_whole:
        typer.echo(f"cotenant: interrupted after {len(done)} of {len(values)} values", err=True)
    if svg is not None:
        print(f"Written: {svg}")


def sweep_table(found: SweepResult) -> FittedTable:
    """A row for each value: the attainment of each tenant, the least of them, and goodput."""
    from cotenant.report.fitted_table import FittedTable
    from cotenant.report.tables import percent

    table = FittedTable(title=f"SLO attainment by {found.key} (simulated)")
    table.add_column(found.key)
    for heading in (*found.tenants, "least", "goodput/s"):
        table.add_column(heading, justify="right")
    for row in found.rows():
        names = (*(f"attainment.{tenant}" for tenant in found.tenants), "least_attainment")
        value, *shares = row["value"], *(row[name] for name in names)
        table.add_row(str(value), *map(percent, shares), f"{row['goodput_per_s']:.1f}")
    return table
