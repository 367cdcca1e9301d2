"""`cotenant demo`: the whole quick start."""

from __future__ import annotations

import shlex
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cotenant.cli.options import AsJson, a_number, print_json


def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Folder of models, traces and the report.")] = Path("demo"),
    seconds: Annotated[
        float, typer.Option(min=2.0, max=86_400.0, callback=a_number, help="Duration of the load under each policy.")
    ] = 30.0,
    factor: Annotated[
        float, typer.Option("--load", min=0.1, max=1000.0, callback=a_number, help="Load as a multiple of capacity.")
    ] = 1.3,
    as_json: AsJson = False,
) -> None:
    """Build models, profile them, serve them above capacity under two policies, and write a report."""
    from rich.live import Live
    from rich.text import Text

    from cotenant.cli.console import console as make_console
    from cotenant.cli.console import print_left_out, print_warnings
    from cotenant.cli.profile import profile_table
    from cotenant.cli.progress import progress
    from cotenant.cli.quick_start import CONTENDERS, SLO_TEXT, demo_workload, latency_targets_ms, running_server
    from cotenant.config import load_server_config
    from cotenant.errors import ConfigError
    from cotenant.execute.layout import device_cores
    from cotenant.files import write_whole
    from cotenant.load import LiveStats, run_load_process
    from cotenant.measure.solo import Effort
    from cotenant.measure.sweep import profile_repository
    from cotenant.metrics import to_json
    from cotenant.report.bound_text import facts, sentences
    from cotenant.report.charts import RunResult
    from cotenant.report.live import live_table
    from cotenant.report.lost_text import lost_facts, lost_table, missing_sentences
    from cotenant.report.tables import outcome_table
    from cotenant.report.timeline import write_timeline
    from cotenant.repository import SERVER_FILE, trace_path
    from cotenant.trace import missing_events, read
    from cotenant.trace.bound import RunBound, bound_of
    from cotenant.trace.losses import losses_of
    from cotenant.trace.lost import LossAccount
    from cotenant.workload import to_toml
    from cotenant.zoo import QUICK_START, build_repository

    console = make_console(quiet=as_json)
    began = time.monotonic()
    repository = folder / "models"
    console.rule("1. Models")
    build_repository(repository, progress=None if as_json else console.print)
    console.rule("2. Profile")
    settings = load_server_config(repository / SERVER_FILE)
    with progress("profiling", quiet=as_json) as on_step:
        profile, errors = profile_repository(repository, settings, Effort(0.25), fresh=False, on_step=on_step)
    print_left_out(console, errors)
    if not profile.models:
        raise ConfigError(
            f"{repository}: no model could be measured; correct the problems above, or remove the directory"
        )
    console.print(profile_table(profile, {}))
    targets_ms = latency_targets_ms(profile)
    build_repository(repository, models=list(targets_ms), slos_ms=targets_ms)
    slos = ", ".join(f"{model} {slo_ms} ms" for model, slo_ms in targets_ms.items())
    console.print(f"{SLO_TEXT} Here: {slos}.", highlight=False)
    models = tuple(model for model in QUICK_START if model in profile.models)
    workload = demo_workload(profile, models, len(device_cores(settings.device)), factor, seconds)
    write_whole(folder / "workload.toml", to_toml(workload).encode())
    runs: list[RunResult] = []
    traces: dict[str, str] = {}
    bounds: dict[str, RunBound] = {}
    losses: dict[str, LossAccount] = {}
    text: list[Any] = []
    for number, contender in enumerate(CONTENDERS, start=3):
        title = f"{contender.policy} (drop: {contender.drop}), {factor:g} x capacity, {seconds:g} s"
        console.rule(f"{number}. {title}")
        with running_server(repository, contender) as server:
            with Live(console=console, auto_refresh=False, transient=True) as live:

                def show(stats: LiveStats, live: Live = live) -> None:
                    live.update(live_table(stats), refresh=True)

                result = run_load_process(workload, http_url=server.http_url, grpc_url=server.grpc_url, on_tick=show)
            if contender is CONTENDERS[-1]:
                text = _read_picture(repository, server.http_url)
        console.print(outcome_table(result.summary, title))
        print_warnings(console, result.warnings)
        result.save(folder / f"{contender.name}.json")
        description = {"policy": contender.policy, "drop rule": contender.drop, "load": f"{factor:g} x capacity"}
        runs.append(RunResult.from_load(contender.name, result, description))
        timeline = folder / f"{contender.name}.perfetto.json"
        write_timeline(timeline, read(trace_path(repository))[1])
        traces[contender.name] = timeline.name
        bounds[contender.name] = bound_of(*read(trace_path(repository)))
        losses[contender.name] = losses_of(*read(trace_path(repository)))[0]
        console.print(lost_table(losses[contender.name].lost))
        missing = missing_sentences(missing_events(trace_path(repository)))
        console.print("\n".join([*sentences(bounds[contender.name]), *missing]), highlight=False)
    console.rule("5. A picture read through the served models")
    for line in text:
        console.print(Text.assemble(f"  {line.text}   ", (f"({line.score:.2f})", "dim")))
    report = folder / "report.html"
    _write_report(report, runs, profile, text, traces=traces, bounds=bounds, losses=losses)
    took = time.monotonic() - began
    console.rule("Done")
    console.print(f"Report: {report}   Timelines for ui.perfetto.dev: {', '.join(traces.values())}   ({took:.0f} s)")
    console.print("To look at first:")
    for command in (
        f"cotenant explain --lost {shlex.quote(str(repository))}",
        f"cotenant bound {shlex.quote(str(repository))}",
        f"cotenant sweep rate=0.5,1,2 {shlex.quote(str(folder / 'workload.toml'))} {shlex.quote(str(repository))}",
    ):
        console.print(f"  {command}", highlight=False, soft_wrap=True)
    if as_json:
        print_json(
            {
                "slos_ms": targets_ms,
                "runs": {run.name: to_json(run.summary) for run in runs},
                "bounds": {name: facts(bound) for name, bound in bounds.items()},
                "losses": {name: lost_facts(account) for name, account in losses.items()},
                "warnings": {run.name: list(run.warnings) for run in runs},
                "text": [line.text for line in text],
                "report": str(report),
                "seconds": round(took, 1),
            }
        )


def _read_picture(repository: Path, url: str) -> list[Any]:
    """Draw a picture with lines of text, and read it with the served models of detection and recognition."""
    from cotenant.cli.quick_start import PICTURE_LINES, with_retries
    from cotenant.wire.client import infer_once
    from cotenant.zoo.ocr import RECOGNITION, draw_picture, load_labels, read_text

    characters = load_labels(repository / RECOGNITION / "labels.txt")
    return read_text(draw_picture(PICTURE_LINES), with_retries(partial(infer_once, url)), characters)


def _write_report(path: Path, runs: list[Any], profile: Any, text: list[Any], **found: Any) -> None:
    """Write the report. `found` are results by name of the run, as for `write_report`."""
    from cotenant.cli.quick_start import SLO_TEXT
    from cotenant.report.html import Section, write_report
    from cotenant.report.machine import machine_facts

    rows = [
        {
            "model": name,
            "shape": point.shape,
            "batch": point.items,
            "cores": point.cores,
            "p50 ms": round(point.p50_ns / 1e6, 2),
            "p99 ms, or longest": round(point.p99_ns / 1e6, 2),
            "runs": point.runs,
        }
        for name, model in profile.models.items()
        for point in model.points
    ]
    picture = Section("A picture read through the served models", verbatim="\n".join(line.text for line in text))
    slos = Section("Origin of the SLOs", f"{SLO_TEXT} A config.toml that you edited keeps its SLO.")
    write_report(path, runs, machine=machine_facts(), profiles=rows, sections=[slos, picture], **found)
