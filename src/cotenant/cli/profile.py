"""`cotenant profile`: measure the models of a repository."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from cotenant.cli.campaigns import ProfileCampaign, ProfileRun
from cotenant.cli.options import (
    LONGEST_S,
    AsJson,
    Fresh,
    Lanes,
    Repository,
    a_number,
    chosen_of,
    print_json,
    settings_of,
)

if TYPE_CHECKING:
    from cotenant.measure.contention_profile import ContentionProfile
    from cotenant.report.fitted_table import FittedTable
    from cotenant.work import Share


def profile(
    repository: Repository,
    budget: Annotated[
        float,
        typer.Option(
            min=0.0, max=LONGEST_S, callback=a_number, help="Seconds for each point, after the minimum number of runs."
        ),
    ] = 0.5,
    fresh: Fresh = False,
    lanes: Lanes = None,
    contention: Annotated[
        bool,
        typer.Option(
            "--contention", help="Also measure the slowdown by contention for memory, for 'cotenant simulate'."
        ),
    ] = False,
    campaigns: Sequence[ProfileCampaign] = (),
    as_json: AsJson = False,
) -> None:
    """Measure latency by batch and cores, per unit and per segment. An interrupted run resumes."""
    from cotenant.cli.console import console as make_console
    from cotenant.cli.console import print_left_out, print_warnings
    from cotenant.execute.gpu.hardware_queues import use_all_queues
    from cotenant.measure.solo import Effort
    from cotenant.measure.sweep import profile_repository
    from cotenant.measure.verdict import slow_words
    from cotenant.profiles.profile_file import disturbed_words
    from cotenant.repository import contention_path, profile_path, readable_versions

    use_all_queues(os.environ)
    chosen = chosen_of(None, lanes=lanes)
    for campaign in campaigns:
        chosen |= campaign.chosen()
    settings = settings_of(repository, chosen)
    parts: list[Share] = []
    for campaign in campaigns:
        settings, more = campaign.prepare(settings)
        parts += more
    if contention:
        from cotenant.measure.contention_profile import calibrate, contended_cores

        contended_cores(repository, settings)  # checks the cores before hours of measurements
    effort = Effort(budget_s=budget)
    with progress_bar(quiet=as_json) as on_step:
        result, errors = profile_repository(
            repository, settings, effort, fresh=fresh, on_step=on_step, partitions=tuple(parts)
        )
    run = ProfileRun(repository, settings, result, fresh, as_json, errors)
    for campaign in campaigns:
        campaign.measure(run)
    contended = calibrate(repository, settings, effort) if contention else None
    if as_json:
        found: dict[str, object] = {"profile": result}
        for campaign in campaigns:
            found |= campaign.found()
        found |= {"contention": contended, "errors": errors}
        print_json(msgspec.to_builtins(found))
    else:
        console = make_console()
        targets = {each.tenant: each.config.tenant.slo_ms for each in readable_versions(repository)}
        console.print(profile_table(result, targets))
        console.print(f"Saved to {profile_path(repository)}")
        for name, model in result.models.items():
            slow = slow_words(model, targets[name]) if name in targets else ""
            print_warnings(
                console, [f"{name}: {words}" for words in (slow, disturbed_words(model, repository)) if words]
            )
        for campaign in campaigns:
            campaign.show(console)
        if contended:
            console.print(contention_table(contended))
            console.print(f"Saved to {contention_path(repository)}")
        print_left_out(console, errors)
    if errors:
        raise typer.Exit(1)


def contention_table(found: ContentionProfile) -> FittedTable:
    """Table of the slowdown of each model beside memory copies on all other cores, and of the bandwidth."""
    from cotenant.report.fitted_table import FittedTable

    drawn = ", ".join(f"{each / 1e9:.1f}" for each in found.drawn_bytes_per_s)
    state = "saturated" if found.bandwidth_bytes_per_s else "not saturated: no contention for it in simulations"
    scales = found.pressure
    by = [
        name
        for name, scale in (
            ("a canary", scales and scales.slowdowns),
            ("counters of the cache", scales and scales.counters),
        )
        if scale
    ]
    pressure = f"pressure is measured by {' and '.join(by)}" if by else "pressure cannot be measured"
    table = FittedTable(title=f"Beside memory copies (GB/s by 1, 2, ... cores: {drawn}; {state}; {pressure})")
    table.add_column("model")
    table.add_column("slowdown", justify="right")
    table.add_column("memory traffic / counted", justify="right")
    for name, model in found.models.items():
        slowdown = f"{model.sensitivity.slowdown:.2f}" if model.sensitivity else ""
        table.add_row(name, slowdown, f"{model.traffic.memory_share:g}" if model.is_identified else "as counted")
    return table


class progress_bar:  # noqa: N801  (used like a function)
    """Context manager of a progress bar with the time left; its value is the callback for progress."""

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


def profile_table(result: Any, targets: Mapping[str, float]) -> Any:
    """Table of latencies: a line for each model and shape, a column for each batch and number of cores.

    `targets` are SLOs in milliseconds by tenant; an SLO that one query exceeds at its fastest is marked.
    """
    from cotenant.measure.verdict import fastest
    from cotenant.report.fitted_table import FittedTable

    columns = sorted({(point.items, point.cores) for model in result.models.values() for point in model.points})
    has_shapes = any(point.shape for model in result.models.values() for point in model.points)
    heads = [f"{items}x{cores}" for items, cores in columns]
    table = FittedTable("model", *["shape"] * has_shapes, "SLO", "p99 alone", *heads, "segments", "cut/whole")
    table.title = f"Median latency in ms at BATCHxCORES on {result.device.processor}"
    for name, model in result.models.items():
        best, slo_ms = fastest(model), targets.get(name)
        for shape in sorted({point.shape for point in model.points}):
            found = {(p.items, p.cores): p.p50_ns for p in model.points if p.shape == shape}
            cells = [f"{found[key] / 1e6:.2f}" if key in found else "" for key in columns]
            alone_ms = best[shape].p99_ns / 1e6 if shape in best else 0.0
            mark = " !" if slo_ms and alone_ms > slo_ms else ""
            alone = f"{alone_ms:.2f}{mark}" if alone_ms else ""
            slo, shapes = f"{slo_ms:g}" if slo_ms else "", [str(shape)] * has_shapes
            table.add_row(name, *shapes, slo, alone, *cells, str(len(model.cuts) - 1), f"{model.segment_ratio:.2f}")
    table.caption = (
        "4x2: a batch of 4 rows on 2 cores. p99 alone: one query at its fastest; '!': longer than the SLO (ms). "
        "cut/whole: time of a run in segments over that of a run without cuts."
    )
    return table
