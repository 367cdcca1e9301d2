"""`cotenant serve`: serve a repository until a signal says stop."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import msgspec
import typer

from cotenant.cli.options import (
    AsJson,
    Drop,
    Isolation,
    Lanes,
    PolicyName,
    Preempt,
    Repository,
    policy_text,
    print_json,
    settings_of,
)

_TRACE_LIMIT_BYTES = 1 << 30


def serve(
    repository: Repository,
    policy: PolicyName = None,
    drop: Drop = None,
    preempt: Preempt = None,
    lanes: Lanes = None,
    isolation: Isolation = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    http_port: Annotated[int | None, typer.Option(help="0 takes any free port.", show_default="8000")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="0 takes any free port.", show_default="8001")] = None,
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Record every event for 'explain'.")] = True,
    as_json: AsJson = False,
) -> None:
    """Serve a repository over HTTP and gRPC. SIGTERM and Ctrl-C drain: what is inside is answered, then it stops."""
    from cotenant.log import log_to_stderr
    from cotenant.repository import model_names, trace_path
    from cotenant.serve.codec import Limits
    from cotenant.serve.groups import settle_barrier
    from cotenant.serve.grpc_server import GrpcServer
    from cotenant.serve.http_server import HttpServer
    from cotenant.serve.recorder import Recorder
    from cotenant.serve.server import Server
    from cotenant.slices import SHORT_NS, set_slice

    log_to_stderr()
    set_slice(SHORT_NS)  # what serves runs shortly, and models that compute on the same cores can wait
    model_names(repository)  # says what is wrong with the path before anything is written there
    settings = settings_of(repository, policy, drop, preempt, lanes, isolation)
    chosen = {"host": host, "http_port": http_port, "grpc_port": grpc_port}
    section = msgspec.structs.replace(
        settings.server, **{key: value for key, value in chosen.items() if value is not None}
    )
    settings = settle_barrier(repository, msgspec.structs.replace(settings, server=section))
    server = Server(repository, settings)
    limits = Limits(max_body_bytes=int(section.max_body_mib * (1 << 20)))
    http = HttpServer(server, section.host, section.http_port, limits)
    grpc = GrpcServer(server, section.host, section.grpc_port, limits)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    recorder: Recorder | None = None
    try:
        ports = {"http_port": http.start(), "grpc_port": grpc.start()}
        if trace:  # once the ports are ours: a second server must not take the trace away from the first
            recorder = Recorder(
                trace_path(repository), server.policy, server.cores, server.clock, limit_bytes=_TRACE_LIMIT_BYTES
            )
        server.start(*([recorder] if recorder else []))
        ready = {"host": section.host, **ports, "policy": policy_text(settings.policy)}
        index = server.index(ready_only=False)
        ready["models"] = {entry.name: entry.state for entry in index}
        if as_json:
            print_json(ready)
        else:
            served = sum(entry.state == "READY" for entry in index)
            print(
                f"Serving {served} of {len(index)} models under {ready['policy']}: "
                f"HTTP on {section.host}:{ports['http_port']}, gRPC on {section.host}:{ports['grpc_port']}"
            )
        _flush()
        stop.wait()
    finally:
        server.stop()
        http.stop(1.0)
        grpc.stop(1.0)
        if recorder:
            recorder.close()


def _flush() -> None:
    """Whoever started the server may read the line that says it is ready from a pipe."""
    import sys

    sys.stdout.flush()
