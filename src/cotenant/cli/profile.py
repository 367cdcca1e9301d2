"""`cotenant profile`: measure the models of a repository."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from cotenant.cli.options import AsJson, Lanes, Repository, print_json, settings_of


def profile(
    repository: Repository,
    budget: Annotated[float, typer.Option(help="Seconds to spend on each point, once enough runs are in.")] = 0.5,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what is known already.")] = False,
    lanes: Lanes = None,
    as_json: AsJson = False,
) -> None:
    """Measure latency over batch and cores, per unit and per segment. Interrupt it any time: it resumes."""
    from cotenant.cli.console import console as make_console
    from cotenant.profile.measure import Effort
    from cotenant.profile.sweep import profile_repository
    from cotenant.repository import profile_path

    settings = settings_of(repository, lanes=lanes)
    effort = Effort(budget_s=budget)
    with progress_bar(quiet=as_json) as on_step:
        result, errors = profile_repository(repository, settings, effort, fresh=fresh, on_step=on_step)
    if as_json:
        print_json({"profile": msgspec.to_builtins(result), "errors": errors})
    else:
        console = make_console()
        console.print(profile_table(result))
        console.print(f"Saved to {profile_path(repository)}")
        for model, error in errors.items():
            console.print(f"[red]{model} was left out:[/red] {error}")
    if errors:
        raise typer.Exit(1)


class progress_bar:  # noqa: N801  (used like a function)
    """A progress bar with the time left, fed by the callback that it gives."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("profiling"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            disable=quiet,
        )
        self._task: Any = None

    def __enter__(self) -> Any:
        self._bar.__enter__()
        self._task = self._bar.add_task("", total=None)
        return self._on_step

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def _on_step(self, done: int, total: int, text: str) -> None:
        self._bar.update(self._task, completed=done, total=total, description=text)


def profile_table(result: Any) -> Any:
    """Latencies as a table: a line per model and shape, a column per batch and cores."""
    from rich.table import Table

    columns = sorted({(point.items, point.cores) for model in result.models.values() for point in model.points})
    table = Table("model", "shape", *(f"L({items},{cores})" for items, cores in columns), "segments", "cut/whole")
    table.title = f"Median latency in ms at (batch, cores) on {result.device.processor}"
    for name, model in result.models.items():
        for shape in sorted({point.shape for point in model.points}):
            found = {(p.items, p.cores): p.p50_ns for p in model.points if p.shape == shape}
            cells = [f"{found[key] / 1e6:.2f}" if key in found else "" for key in columns]
            table.add_row(name, str(shape), *cells, str(len(model.cuts) - 1), f"{model.segment_ratio:.2f}")
    return table
