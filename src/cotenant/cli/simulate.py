"""`cotenant simulate`: results of policies for a workload, without running models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cotenant.cli.options import (
    MIN_FACTOR,
    MOST_FACTOR,
    AsJson,
    Repository,
    SettingsOptions,
    Stale,
    a_number,
    print_json,
)
from cotenant.cli.records import with_records
from cotenant.world.kinds import WorldKind


@with_records
def simulate(
    workload: Annotated[Path, typer.Argument(help="Workload file (TOML) as for 'cotenant load', or a recorded trace.")],
    repository: Repository,
    *,
    policy: Annotated[list[str] | None, typer.Option(help="Policy to simulate; can be repeated.")] = None,
    options: SettingsOptions,
    seeds: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Number of runs, with seeds from that of the workload on.")
    ] = 1,
    factor: Annotated[
        float, typer.Option(min=MIN_FACTOR, max=MOST_FACTOR, callback=a_number, help="Multiply all rates.")
    ] = 1.0,
    noise: Annotated[
        float, typer.Option(min=0, max=10, callback=a_number, help="Standard deviation of the logarithm of latencies.")
    ] = 0.05,
    decision_us: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e9,
            callback=a_number,
            help="Cost of each launch besides the model.",
            show_default="as measured by 'cotenant profile', else 50",
        ),
    ] = None,
    world: Annotated[
        WorldKind | None,
        typer.Option(
            help="'table': no contention; 'contention': calibrated memory contention; 'groups': measured latencies of "
            "groups of launches.",
            show_default="groups for a plan with groups, else table",
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the trace of the last run to this file.")] = None,
    bound: Annotated[
        bool, typer.Option("--bound", help="Also print upper bounds of any schedule for each run.")
    ] = False,
    stale: Stale = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a workload with the profile of a repository under one or more policies."""
    from cotenant.api.simulation import Simulation, SimulationOptions, workload_of
    from cotenant.cli.console import console as make_console
    from cotenant.cli.progress import progress, reading
    from cotenant.policies.registry import policy_text
    from cotenant.report.bound_text import sentences
    from cotenant.report.lost_text import lost_table
    from cotenant.report.tables import outcome_table

    chosen = options.chosen()
    with reading(workload, quiet=as_json) as on_read:
        spec = workload_of(workload, repository, on_read)
    assumed = SimulationOptions(factor, noise, decision_us, world, trace, bound, stale)
    warn = partial(typer.echo, err=True)
    simulation = Simulation(spec, repository, chosen, policy or (), assumed, warn)
    console = make_console()
    runs = []
    made = simulation.runs(range(spec.seed, spec.seed + seeds))
    while True:
        with progress("simulating", quiet=as_json) as simulation.on_step:
            run = next(made, None)
        if run is None:
            break
        if as_json:
            runs.append(run.to_json())
            continue
        title = f"simulated: {policy_text(run.made)}, seed {run.seed}, noise {noise:g}, world {simulation.world.value}"
        console.print(outcome_table(run.summary, title))
        if run.losses.lost:
            console.print(lost_table(run.losses.lost))
        if run.server is not None:
            console.print(run.server.text, highlight=False, soft_wrap=True)
            if run.server.problem:
                typer.echo(f"cotenant: {run.server.problem}", err=True)
        if run.policy_faults:
            faults = f"policy {run.policy!r} failed {run.policy_faults} times"
            console.print(f"{faults}: earliest deadline first, or the fallback, decided in its place")
        if run.groups:
            console.print(f"groups started: {', '.join(map(str, run.groups))}")
        if run.bound:
            console.print("\n".join(sentences(run.bound)), highlight=False, soft_wrap=True)
    if as_json:
        kind = simulation.world.value
        print_json({"simulated": True, "world": kind, "noise": noise, "decision_us": decision_us, "runs": runs})
