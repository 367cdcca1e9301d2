"""`cotenant serve`: serve a repository until a signal says stop."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import AsJson, LogLevel, Repository, SettingsOptions, Stale, print_json, settings_of
from cotenant.cli.records import with_records
from cotenant.cli.signals import StopSignals
from cotenant.policies import policy_names

if TYPE_CHECKING:
    from cotenant.config import ServerConfig, ServerSection


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Record of the options of `cotenant serve` that say how this run goes, and are no settings."""

    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Record every event for 'explain'.")] = True
    stale: Stale = False
    log_level: LogLevel = None
    as_json: AsJson = False


@with_records
def serve(
    repository: Repository,
    *,
    policy: Annotated[
        str | None, typer.Option(help=f"Scheduling policy: {', '.join(policy_names())}.", show_default=False)
    ] = None,
    settings: SettingsOptions,
    isolation: Annotated[
        str | None,
        typer.Option(help="'process' (a worker process a tenant) or 'thread'.", show_default=False),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    http_port: Annotated[int | None, typer.Option(help="0 takes any free port.", show_default="8000")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="0 takes any free port.", show_default="8001")] = None,
    admin_port: Annotated[
        int | None,
        typer.Option(help="Port of metrics and loads, over HTTP; needed where the host is no loopback address."),
    ] = None,
    frontends: Annotated[
        int | None,
        typer.Option(help="Processes that speak with clients; 0: the one that decides does.", show_default="1"),
    ] = None,
    run: RunOptions,
) -> None:
    """Serve a repository over HTTP and gRPC. SIGTERM and Ctrl-C drain: what is inside is answered, then it stops.

    With a plan, SIGHUP reads its file again and changes over without losing a query. Else SIGHUP changes nothing.
    """
    ports = {"http_port": http_port, "grpc_port": grpc_port, "admin_port": admin_port}
    chosen = settings.chosen(policy=policy, isolation=isolation, host=host, frontends=frontends, **ports)
    with StopSignals() as signals:  # before the libraries are loaded, which takes seconds
        from cotenant.repository import model_names
        from cotenant.serve.child import prepare_process

        prepare_process()
        model_names(repository)  # says what is wrong with the path before anything is written there
        found = settings_of(repository, chosen)
        kind = _serve_in_processes if found.server.frontends else _serve
        kind(repository, found, signals, run)


def _serve(repository: Path, settings: ServerConfig, signals: StopSignals, run: RunOptions) -> None:
    """Serve from this process alone."""
    from cotenant.serve.frontend.front_ends import front_ends, stop_front_ends
    from cotenant.serve.serving import Serving

    section = settings.server
    serving = Serving(repository, settings, stale=run.stale)
    servers = front_ends(serving.server, section, serving.loop)
    signals.guard(section.drain_s, serving.server.cancel_loads, serving.close_trace)
    signals.on_hangup = serving.hang_up
    try:
        ports = {name: each.start() for name, each in servers.items()}
        serving.start(records=run.trace)  # with ports of its own: a second server must not take the first one's trace
        if signals.stopped.is_set():
            return
        serving.follow_plan()
        _say_ready(section, ports, serving.told(), as_json=run.as_json)
        signals.stopped.wait()
    finally:
        until_s = time.monotonic() + section.drain_s if signals.until_s is None else signals.until_s
        have_ended = serving.stop(until_s)
        stop_front_ends(servers.values(), until_s)
        serving.close()
        if signals.stopped.is_set() and not have_ended:  # a thread still computes, and libraries would abort below it
            _flush()
            os._exit(0)


def _serve_in_processes(repository: Path, settings: ServerConfig, signals: StopSignals, run: RunOptions) -> None:
    """Serve from an engine process, with front-ends in processes of their own."""
    from cotenant.serve.processes import ServerProcesses

    section = settings.server
    processes = ServerProcesses(repository, settings, frontends=section.frontends, records=run.trace, stale=run.stale)

    def stop() -> None:
        assert signals.until_s is not None
        processes.wake(signals.until_s)

    signals.guard(section.drain_s, stop, processes.kill)
    signals.on_hangup = processes.wake
    processes.run(lambda: _say_ready(section, processes.ports, processes.told, as_json=run.as_json))


def _say_ready(section: ServerSection, ports: Mapping[str, int], told: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({"host": section.host, **ports, **told})
    else:
        states = told["models"]
        served = sum(state == "READY" for state in states.values())
        admin = section.admin_host or section.host
        print(
            f"Serving {served} of {len(states)} models under {told['policy']}: "
            f"HTTP on {section.host}:{ports['http_port']}, gRPC on {section.host}:{ports['grpc_port']}"
            + (f", metrics and loads on {admin}:{ports['admin_port']}" if "admin_port" in ports else "")
        )
    _flush()


def _flush() -> None:
    """Whoever started the server may read the line that says it is ready from a pipe."""
    import sys

    sys.stdout.flush()
