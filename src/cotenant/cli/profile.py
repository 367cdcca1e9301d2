"""`cotenant profile`: measure the models of a repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from cotenant.cli.options import LONGEST_S, AsJson, Lanes, Repository, a_number, chosen_of, print_json, settings_of

if TYPE_CHECKING:
    from cotenant.config import ServerConfig
    from cotenant.measure.contention_profile import ContentionProfile
    from cotenant.profile.profile_file import Profile
    from cotenant.report.fitted_table import FittedTable
    from cotenant.techniques.overlap.predict.overlap_errors import HeldOutErrors


def profile(
    repository: Repository,
    budget: Annotated[
        float,
        typer.Option(
            min=0.0, max=LONGEST_S, callback=a_number, help="Seconds to spend on each point, once enough runs are in."
        ),
    ] = 0.5,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what is known already.")] = False,
    lanes: Lanes = None,
    groups: Annotated[
        bool, typer.Option("--groups", help="Also measure launches that start together, and fit the predictor of them.")
    ] = False,
    groups_count: Annotated[int, typer.Option(min=20, max=1_000_000, help="Groups to measure.")] = 400,
    groups_minutes: Annotated[
        float, typer.Option(min=0.0, max=LONGEST_S / 60, callback=a_number, help="Measure groups no longer than this.")
    ] = 10.0,
    partitions: Annotated[
        list[str] | None,
        typer.Option(
            "--partitions",
            help="Profile at the partitions of a split, like '1,1' (cores) or '50,50' (per cent of a GPU); repeatable.",
            show_default=False,
        ),
    ] = None,
    corun: Annotated[
        bool, typer.Option("--corun", help="Also measure how much models slow each other down in partitions.")
    ] = False,
    budget_s: Annotated[
        float, typer.Option(min=1.0, max=LONGEST_S, callback=a_number, help="Seconds to spend on co-runs.")
    ] = 120.0,
    contention: Annotated[
        bool,
        typer.Option(
            "--contention", help="Also measure what models lose to others' use of the memory, for cotenant simulate."
        ),
    ] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Say how well groups are predicted that a fit has not seen."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure latency over batch and cores, per unit and per segment. Interrupt it any time: it resumes."""
    from cotenant.cli.console import console as make_console
    from cotenant.cli.console import print_left_out
    from cotenant.execute.gpu.queues import use_all_queues
    from cotenant.measure.solo import Effort
    from cotenant.measure.sweep import profile_repository
    from cotenant.profile.profile_file import disturbed_words
    from cotenant.repository import contention_path, profile_path
    from cotenant.techniques.partitions.cli.profile_corun import divided, measure, show

    use_all_queues(os.environ)
    settings = settings_of(repository, chosen_of(None, policy="overlap" if groups else None, lanes=lanes))
    settings, splits, parts = divided(settings, partitions or (), corun)
    if contention:
        from cotenant.measure.contention_profile import calibrate, contended_cores

        contended_cores(repository, settings)  # before hours of measuring
    effort = Effort(budget_s=budget)
    with progress_bar(quiet=as_json) as on_step:
        result, errors = profile_repository(
            repository, settings, effort, fresh=fresh, on_step=on_step, partitions=parts
        )
    overlap = None
    if groups:
        overlap = _measure_groups(repository, settings, result, (groups_count, groups_minutes), fresh, as_json, errors)
    judged = _judge(repository, result, as_json) if report and (groups or not corun) else None
    coruns = None
    if corun:
        with progress_bar(quiet=as_json) as on_step:
            coruns = measure(repository, settings, result, splits, budget_s, fresh, on_step, errors)
    contended = calibrate(repository, settings, effort) if contention else None
    if as_json:
        found = {
            "profile": result,
            "groups": overlap,
            "report": judged,
            "coruns": coruns,
            "contention": contended,
            "errors": errors,
        }
        print_json(msgspec.to_builtins(found))
    else:
        console = make_console()
        console.print(profile_table(result))
        console.print(f"Saved to {profile_path(repository)}")
        for name, model in result.models.items():
            if words := disturbed_words(model, repository):
                console.print(f"{name}: {words}")
        if overlap:
            console.print(f"{overlap['groups']} groups measured; predictor saved to {overlap['predictor']}")
            console.print(slowdown_table(overlap["slowdown"]))
        if judged:
            console.print(errors_table(judged))
        if coruns:
            show(console, coruns)
        if contended:
            console.print(contention_table(contended))
            console.print(f"Saved to {contention_path(repository)}")
        print_left_out(console, errors)
    if errors:
        raise typer.Exit(1)


def _measure_groups(
    root: Path,
    settings: ServerConfig,
    profile: Profile,
    bounds: tuple[int, float],
    fresh: bool,
    quiet: bool,
    errors: dict[str, str],
) -> dict[str, Any]:
    """Measure groups and fit their predictor; adds to `errors` what was left out."""
    from cotenant.execute.layout import device_cores, lanes_of
    from cotenant.repository import overlap_path
    from cotenant.techniques.overlap.measure.groups import GroupEffort, fit_groups, measure_groups
    from cotenant.techniques.overlap.measure.layout_facts import pair_latencies

    effort = GroupEffort(count=bounds[0], budget_s=60 * bounds[1])
    with progress_bar(quiet=quiet) as on_step:
        samples, found = measure_groups(root, settings, profile, effort, fresh=fresh, on_step=on_step)
    for name, text in found.items():
        errors.setdefault(name, text)
    with progress_bar(quiet=quiet) as on_step:
        fitted = fit_groups(root, profile, on_step=lambda done, total: on_step(done, total, "fitting the predictor"))
    narrow = min(lane.size for lane in lanes_of(settings.device, device_cores(settings.device)))
    beside = {" + ".join(pair): found.slowdown for pair, found in pair_latencies(fitted, profile, narrow).items()}
    return {"groups": len(samples), "predictor": str(overlap_path(root)), "slowdown": beside}


def slowdown_table(slowdown: dict[str, float]) -> FittedTable:
    """What models cost each other, the worst pairs first."""
    from cotenant.report.fitted_table import FittedTable

    table = FittedTable(title="Side by side on cores of their own: predicted latency over that of the slower one alone")
    table.add_column("pair")
    table.add_column("times", justify="right")
    for pair, factor in sorted(slowdown.items(), key=lambda entry: -entry[1]):
        table.add_row(pair, f"{factor:.2f}")
    return table


def _judge(root: Path, profile: Profile, quiet: bool) -> HeldOutErrors:
    from cotenant.repository import groups_path
    from cotenant.techniques.overlap.group_samples import load_samples
    from cotenant.techniques.overlap.measure.groups import facts_of
    from cotenant.techniques.overlap.predict.overlap_errors import held_out_errors

    _, samples = load_samples(groups_path(root))
    known = [each for each in samples if all(member.work.tenant in profile.models for member in each.members)]
    with progress_bar(quiet=quiet) as on_step:
        return held_out_errors(known, facts_of(profile), on_step=on_step)


def errors_table(errors: HeldOutErrors) -> FittedTable:
    """Errors by tenants together, then how many runs stay below the quantile that is promised."""
    from cotenant.report.fitted_table import FittedTable

    table = FittedTable(title=f"Predictor of groups: MAPE {errors.mape_pct:.1f} % (cross-validated)")
    table.add_column("groups of")
    table.add_column("groups", justify="right")
    table.add_column("MAPE", justify="right")
    for name, (count, mape_pct) in errors.by_tenants.items():
        table.add_row(name, str(count), f"{mape_pct:.1f} %")
    table.add_section()
    table.add_row(f"single runs below the {100 * errors.level:g} % quantile", "", f"{errors.coverage_pct:.1f} %")
    return table


def contention_table(found: ContentionProfile) -> FittedTable:
    """What each model loses beside copies of memory on all other cores, and what the memory gives."""
    from cotenant.report.fitted_table import FittedTable

    drawn = ", ".join(f"{each / 1e9:.1f}" for each in found.drawn_bytes_per_s)
    told = "saturated" if found.bandwidth_bytes_per_s else "not saturated: nobody waits for it in simulations"
    scales = found.pressure
    by = [
        name
        for name, scale in (
            ("a canary", scales and scales.slowdowns),
            ("counters of the cache", scales and scales.counters),
        )
        if scale
    ]
    pressure = f"pressure is told by {' and '.join(by)}" if by else "nothing tells the pressure"
    table = FittedTable(title=f"Beside copies of memory (GB/s drawn by 1, 2, ... cores: {drawn}; {told}; {pressure})")
    table.add_column("model")
    table.add_column("times as long", justify="right")
    table.add_column("bytes from memory, times counted", justify="right")
    for name, model in found.models.items():
        slowdown = f"{model.sensitivity.slowdown:.2f}" if model.sensitivity else ""
        table.add_row(name, slowdown, f"{model.traffic.memory_share:g}" if model.is_identified else "as counted")
    return table


class progress_bar:  # noqa: N801  (used like a function)
    """A progress bar with the time left, fed by the callback that it gives."""

    def __init__(self, *, quiet: bool, what: str = "profiling") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
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
    from cotenant.report.fitted_table import FittedTable

    columns = sorted({(point.items, point.cores) for model in result.models.values() for point in model.points})
    table = FittedTable("model", "shape", *(f"L({items},{cores})" for items, cores in columns), "segments", "cut/whole")
    table.title = f"Median latency in ms at (batch, cores) on {result.device.processor}"
    for name, model in result.models.items():
        for shape in sorted({point.shape for point in model.points}):
            found = {(p.items, p.cores): p.p50_ns for p in model.points if p.shape == shape}
            cells = [f"{found[key] / 1e6:.2f}" if key in found else "" for key in columns]
            table.add_row(name, str(shape), *cells, str(len(model.cuts) - 1), f"{model.segment_ratio:.2f}")
    return table
