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
from cotenant.cli.progress import progress

if TYPE_CHECKING:
    from cotenant.measure.contention_profile import ContentionProfile
    from cotenant.profiles.server_cost import ServerCost
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
    server: Annotated[
        bool, typer.Option(help="Also measure what a server needs for a request besides the model (10 s).")
    ] = True,
    campaigns: Sequence[ProfileCampaign] = (),
    as_json: AsJson = False,
) -> None:
    """Measure latency by batch and cores, per unit and per segment. An interrupted run resumes."""
    from cotenant.cli.console import console as make_console
    from cotenant.cli.console import print_left_out, print_warnings
    from cotenant.execute.gpu.hardware_queues import use_all_queues
    from cotenant.load.server_cost import with_server_cost
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
    with progress("profiling", quiet=as_json) as on_step:
        result, errors = profile_repository(
            repository, settings, effort, fresh=fresh, on_step=on_step, partitions=tuple(parts)
        )
        if server:
            result = with_server_cost(repository, settings, result, on_step)
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
        if result.server is not msgspec.UNSET:
            console.print(server_table(result.server))
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


def server_table(found: ServerCost) -> FittedTable:
    """Table of the cost of requests by protocol: processor time by process, and latency, at 64 bytes and 600 kB."""
    from cotenant.load.server_cost import LARGE
    from cotenant.report.fitted_table import FittedTable

    table = FittedTable(
        "protocol", "front-end us", "engine us", "worker us", "refused us", "alone us", "600 kB in ms", "600 kB out ms"
    )
    table.title = "Processor time of a server for a request, besides the model"
    busy_rate = found.busiest_per_s
    small, read, write = (0, 0), (4 * LARGE, 0), (0, 4 * LARGE)
    for name, cost in found.requests.items():
        parts = (each.of(small) for each in (cost.front_end, cost.engine, cost.worker))
        refused = cost.refused_front_end_ns + cost.refused_engine_ns
        short = [f"{ns / 1e3:.0f}" for ns in (*parts, refused, cost.alone_ns)]
        table.add_row(
            name, *short, *(f"{found.request_ns(name, sizes, busy_rate) / 1e6:.2f}" for sizes in (read, write))
        )
    launch = (
        f"{found.launch_engine_ns / 1e3:.0f} us of the engine and {found.launch_worker_ns / 1e3:.0f} us of a worker"
    )
    rates = ", ".join(
        f"{each.rate_per_s:.0f}/s: {each.front_end:.2f}, {each.engine:.2f}, {each.worker:.2f}" for each in found.by_rate
    )
    table.caption = (
        f"{found.front_ends} front-end process(es); each launch costs {launch} more. refused: of a request that is "
        "not run. alone: latency of a lone request without its model. "
        f"Factors by rate (front-end, engine, worker): {rates}."
    )
    return table


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


def profile_table(result: Any, targets: Mapping[str, float]) -> Any:
    """Table of latencies: a line for each model and shape, a column for each batch and number of cores.

    `targets` are SLOs in milliseconds by tenant; an SLO that one query exceeds at its fastest is marked.
    Disturbed points are marked, and a slowest run in place of a p99 has its number of runs.
    """
    from cotenant.measure.verdict import fastest
    from cotenant.report.fitted_table import FittedTable

    columns = sorted({(point.items, point.cores) for model in result.models.values() for point in model.points})
    has_shapes = any(point.shape for model in result.models.values() for point in model.points)
    heads = [f"{items}x{cores}" for items, cores in columns]
    table = FittedTable(
        "model", *["shape"] * has_shapes, "SLO", "p99 alone", "CPU", *heads, "segments", "cut/whole", "MiB"
    )
    table.title = f"Median latency in ms at BATCHxCORES on {result.device.processor}"
    for name, model in result.models.items():
        best, slo_ms = fastest(model), targets.get(name)
        for shape in sorted({point.shape for point in model.points}):
            found = {(p.items, p.cores): p for p in model.points if p.shape == shape}
            cells = [f"{found[key].p50_ns / 1e6:.2f}{_mark(found[key])}" if key in found else "" for key in columns]
            slo, shapes = f"{slo_ms:g}" if slo_ms else "", [str(shape)] * has_shapes
            memory = f"{model.memory_bytes / 2**20:.0f}" if model.memory_bytes else ""
            alone, cpu, ends = "", "", (str(len(model.cuts) - 1), f"{model.segment_ratio:.2f}", memory)
            if point := best.get(shape):
                alone_ms, runs = point.p99_ns / 1e6, "" if point.supports("p99") else f" ({point.runs} runs)"
                alone = f"{alone_ms:.2f}{runs}{_mark(point)}{' !' if slo_ms and alone_ms > slo_ms else ''}"
                cpu = f"{point.cpu_ns / 1e6:.2f}" if point.cpu_ns else ""
            table.add_row(name, *shapes, slo, alone, cpu, *cells, *ends)
    table.caption = (
        "4x2: a batch of 4 rows on 2 cores. p99 alone: one query at its fastest; '(30 runs)': the longest of 30 runs, "
        "too few for a p99; '!': longer than the SLO (ms). CPU: processor time of that query. '~': measured while "
        "other processes kept the cores busy. cut/whole: time of a run in segments over that of a run without cuts. "
        "MiB: peak memory of its worker."
    )
    return table


def _mark(point: Any) -> str:
    """The mark of a disturbed point."""
    return " ~" if point.is_disturbed else ""
