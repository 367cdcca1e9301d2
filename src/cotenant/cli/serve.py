"""`cotenant serve`: serve a repository until a signal says stop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cotenant.cli.options import (
    AsJson,
    Repository,
    SettingsOptions,
    Stale,
    policy_text,
    print_json,
    settings_of,
)
from cotenant.cli.records import with_records
from cotenant.cli.signals import StopSignals
from cotenant.policies import policy_names

if TYPE_CHECKING:
    from cotenant.config import ServerConfig
    from cotenant.serve.frontend.grpc_server import GrpcServer
    from cotenant.serve.frontend.http_server import HttpServer
    from cotenant.serve.server import Server
    from cotenant.serve.services import OpenedPlan

_TRACE_LIMIT_BYTES = 1 << 30
_LEAST_GRACE_S = 0.7
_REPLANNER_S = 1.0
"""How long a stop waits for a planner at work."""


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
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Record every event for 'explain'.")] = True,
    stale: Stale = False,
    as_json: AsJson = False,
) -> None:
    """Serve a repository over HTTP and gRPC. SIGTERM and Ctrl-C drain: what is inside is answered, then it stops.

    With a plan, SIGHUP reads its file again and changes over without losing a query. Else SIGHUP changes nothing.
    """
    ports = {"http_port": http_port, "grpc_port": grpc_port, "admin_port": admin_port}
    chosen = settings.chosen(policy=policy, isolation=isolation, host=host, **ports)
    with StopSignals() as signals:  # before the libraries are loaded, which takes seconds
        _serve(repository, chosen, signals, trace=trace, stale=stale, as_json=as_json)


def _serve(
    repository: Path, chosen: dict[str, object], signals: StopSignals, *, trace: bool, stale: bool, as_json: bool
) -> None:
    from cotenant.execute.gpu.hardware_queues import use_all_queues

    use_all_queues(os.environ)

    from cotenant.execute.layout import device_cores, lanes_of
    from cotenant.execute.sched_slice import SHORT_NS, set_slice
    from cotenant.log import log_to_stderr
    from cotenant.measure.group_models import resolved
    from cotenant.repository import model_names, trace_path
    from cotenant.serve.engine.awake import keep_awake
    from cotenant.serve.engine.loop import ServeLoop
    from cotenant.serve.frontend.admin_access import Access, access_at, is_local
    from cotenant.serve.frontend.grpc_server import GrpcServer
    from cotenant.serve.frontend.http_server import HttpServer
    from cotenant.serve.recorder import Recorder
    from cotenant.serve.server import Server
    from cotenant.serve.services import plan_files
    from cotenant.wire.codec import Limits

    log_to_stderr()
    os.umask(os.umask(0) | 0o077)  # traces tell of all tenants, and copies of models are theirs
    set_slice(SHORT_NS)  # what serves runs shortly, and models that compute on the same cores can wait
    model_names(repository)  # says what is wrong with the path before anything is written there
    settings = settings_of(repository, chosen)
    section = settings.server
    laid = _laid_out(settings, repository, stale=stale)
    policy_lanes = laid.lanes.lanes if laid else lanes_of(settings.device, device_cores(settings.device))
    settings = msgspec.structs.replace(settings, policy=resolved(repository, settings, policy_lanes))
    loop = ServeLoop()
    loop.start()
    server = Server(repository, settings, plan=laid.lanes if laid else None, readers=loop)
    replanner = plan_files().follow(server, laid, settings.plan, stale=stale) if laid else None
    limits = Limits(max_body_bytes=int(section.max_body_mib * (1 << 20)))
    access = access_at(section.host) if section.admin_port is None else Access.CLOSED
    front_ends: dict[str, HttpServer | GrpcServer] = {
        "http_port": HttpServer(server, section.host, section.http_port, limits, loop, access),
        "grpc_port": GrpcServer(server, section.host, section.grpc_port, limits, loop, access),
    }
    admin = section.admin_host or section.host
    if section.admin_port is not None:
        open_to = Access.LOCAL if is_local(admin) else Access.OPEN
        front_ends["admin_port"] = HttpServer(server, admin, section.admin_port, limits, loop, open_to)
    recorder: Recorder | None = None

    def close_trace() -> None:
        if recorder is not None:
            recorder.close()

    signals.guard(section.drain_s, server.cancel_loads, close_trace)
    signals.on_hangup = _tell_hangup if replanner is None else replanner.reload
    awake = keep_awake()
    try:
        ports = {name: each.start() for name, each in front_ends.items()}
        if trace:  # once the ports are ours: a second server must not take the trace away from the first
            recorder = Recorder(
                trace_path(repository), server.policy, server.machine, server.clock, limit_bytes=_TRACE_LIMIT_BYTES
            )
        server.start(*[each for each in (recorder, replanner, awake) if each is not None])
        if signals.stopped.is_set():
            return
        if replanner is not None:
            replanner.start()
        ready = {"host": section.host, **ports, "policy": policy_text(server.policy)}
        if laid is not None:
            ready["plan"] = {"file": settings.plan.file, "device": settings.plan.device}
        index = server.index(ready_only=False)
        states: dict[str, str] = {}
        for entry in index:  # a model is ready where one of its versions is
            states[entry.name] = entry.state if states.get(entry.name) != "READY" else "READY"
        ready["models"] = states
        if as_json:
            print_json(ready)
        else:
            served = sum(state == "READY" for state in states.values())
            print(
                f"Serving {served} of {len(states)} models under {ready['policy']}: "
                f"HTTP on {section.host}:{ports['http_port']}, gRPC on {section.host}:{ports['grpc_port']}"
                + (f", metrics and loads on {admin}:{ports['admin_port']}" if "admin_port" in ports else "")
            )
        _flush()
        signals.stopped.wait()
    finally:
        until_s = time.monotonic() + section.drain_s if signals.until_s is None else signals.until_s
        if replanner is not None:
            replanner.stop(min(_REPLANNER_S, max(0.0, until_s - time.monotonic())))
        have_ended = stop_serving(server, tuple(front_ends.values()), until_s)
        loop.stop()
        close_trace()
        if awake:
            awake.close()
        if signals.stopped.is_set() and not have_ended:  # a thread still computes, and libraries would abort below it
            _flush()
            os._exit(0)


def stop_serving(server: Server, front_ends: Sequence[HttpServer | GrpcServer], until_s: float) -> bool:
    """Drain the server until `until_s` of the monotonic clock. The front-ends' readers have their answers until then,
    and for _LEAST_GRACE_S at least. Says whether all launches have ended."""
    have_ended = server.stop(until_s)
    grace_s = max(_LEAST_GRACE_S, until_s - time.monotonic())
    stopping = [threading.Thread(target=each.stop, args=(grace_s,), daemon=True) for each in front_ends]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join()
    return have_ended


def _tell_hangup() -> None:
    import logging

    logging.getLogger("cotenant.server").info(
        "SIGHUP: there is nothing to read again, as no plan is served; models are loaded anew through the API"
    )


def _laid_out(settings: ServerConfig, repository: Path, *, stale: bool) -> OpenedPlan | None:
    """The plan's part for this machine, on its cores; None without a plan. Raises ConfigError or PlanError."""
    from cotenant.execute.layout import cores_alone
    from cotenant.serve.services import plan_files

    if settings.plan.file is None:
        return None
    cores = cores_alone(settings.device, "plans are served")
    return plan_files().open(settings.plan, cores, repository, stale=stale)


def _flush() -> None:
    """Whoever started the server may read the line that says it is ready from a pipe."""
    import sys

    sys.stdout.flush()
