"""`cotenant serve`: serve a repository until a stop signal."""

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
from cotenant.errors import CotenantError
from cotenant.linux import require
from cotenant.policies import policy_names

if TYPE_CHECKING:
    from cotenant.config import ServerConfig, ServerSection
    from cotenant.serve.client_sockets import ClientSockets
    from cotenant.serve.frontend.grpc_server import GrpcServer
    from cotenant.serve.frontend.http_server import HttpServer


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Record of the options of `cotenant serve` that are not settings of `cotenant.toml`."""

    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Record all events for 'explain'.")] = True
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
        typer.Option(help="'process' (one worker process per tenant) or 'thread'.", show_default=False),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address on which to listen.", show_default="127.0.0.1")] = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port; 0: a free one.", show_default="8000")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0: a free one.", show_default="8001")] = None,
    admin_port: Annotated[
        int | None,
        typer.Option(help="HTTP port of metrics and loads; required unless the host is a loopback address."),
    ] = None,
    frontends: Annotated[
        int | None,
        typer.Option(help="Number of front-end processes; 0: none, the engine serves clients.", show_default="1"),
    ] = None,
    run: RunOptions,
) -> None:
    """Serve a repository over HTTP and gRPC. SIGTERM and Ctrl-C drain: pending queries are answered, then it stops.

    With a plan, SIGHUP reloads the plan file and switches to it without losing queries. Else SIGHUP has no effect.
    """
    require("cotenant serve")
    ports = {"http_port": http_port, "grpc_port": grpc_port, "admin_port": admin_port}
    chosen = settings.chosen(policy=policy, isolation=isolation, host=host, frontends=frontends, **ports)
    with StopSignals() as signals:  # before loading libraries, which takes seconds
        from cotenant.repository import model_names
        from cotenant.serve.child import prepare_process

        prepare_process()
        model_names(repository)  # checks the path before anything is written there
        found = settings_of(repository, chosen)
        kind = _serve_in_processes if found.server.frontends else _serve
        kind(repository, found, signals, run)


def _serve(repository: Path, settings: ServerConfig, signals: StopSignals, run: RunOptions) -> None:
    """Serve from this process only."""
    from cotenant.serve.client_sockets import ClientSockets
    from cotenant.serve.frontend.front_ends import front_ends, retire_front_ends, stop_front_ends
    from cotenant.serve.serving import Serving

    section = settings.server
    sockets = ClientSockets(section)
    try:
        serving = Serving(repository, settings, stale=run.stale)
        servers = front_ends(serving.server, section, serving.loop)
    except BaseException:
        sockets.close()
        raise
    signals.guard(section.drain_s, serving.server.cancel_loads, serving.close_trace)
    signals.on_hangup = serving.hang_up
    try:
        if not sockets.replaces:
            _listen(servers, sockets)
        serving.start(records=run.trace)  # after binding its ports
        if signals.stopped.is_set():
            return
        serving.follow_plan()
        state = serving.report()
        if sockets.replaces:
            _check_ready(state)
            _listen(servers, sockets)
        sockets.take_over()
        _say_ready(section, sockets.ports, state, as_json=run.as_json)
        signals.stopped.wait()
    finally:
        until_s = time.monotonic() + section.drain_s if signals.until_s is None else signals.until_s
        if sockets.is_taken:
            retire_front_ends(servers.values(), until_s)
        have_ended = serving.stop(until_s)
        stop_front_ends(servers.values(), until_s)
        serving.close()
        sockets.close()
        if (
            signals.stopped.is_set() and not have_ended
        ):  # a thread still computes, and would crash on unloaded libraries
            _flush()
            os._exit(0)


def _serve_in_processes(repository: Path, settings: ServerConfig, signals: StopSignals, run: RunOptions) -> None:
    """Serve from an engine process and front-end processes."""
    from cotenant.serve.processes import ServerProcesses

    section = settings.server
    processes = ServerProcesses(repository, settings, frontends=section.frontends, records=run.trace, stale=run.stale)

    def on_up() -> None:
        if processes.sockets.replaces:
            _check_ready(processes.report)
        processes.sockets.take_over()
        _say_ready(section, processes.sockets.ports, processes.report, as_json=run.as_json)

    def stop() -> None:
        assert signals.until_s is not None
        processes.wake(signals.until_s)

    signals.guard(section.drain_s, stop, processes.kill)
    signals.on_hangup = processes.wake
    processes.run(on_up)


def _listen(servers: Mapping[str, HttpServer | GrpcServer], sockets: ClientSockets) -> None:
    for name, each in servers.items():
        each.start(sockets.all[name])


def _check_ready(state: Mapping[str, Any]) -> None:
    """Raise CotenantError for a model that is not served: the server that runs stays in its place."""
    if left := [name for name, each in state["models"].items() if each != "READY"]:
        text = "is not replaced, as this one does not serve all models of the repository"
        raise CotenantError(f"the running server {text}: {', '.join(map(repr, left))}; the log says why")


def _say_ready(section: ServerSection, ports: Mapping[str, int], state: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({"host": section.host, **ports, **state})
    else:
        states = state["models"]
        served = sum(state == "READY" for state in states.values())
        admin = section.admin_host or section.host
        print(
            f"Serving {served} of {len(states)} models under {state['policy']}: "
            f"HTTP on {section.host}:{ports['http_port']}, gRPC on {section.host}:{ports['grpc_port']}"
            + (f", metrics and loads on {admin}:{ports['admin_port']}" if "admin_port" in ports else "")
        )
    _flush()


def _flush() -> None:
    """Flush standard output, as the parent process may wait for the ready line on a pipe."""
    import sys

    sys.stdout.flush()
