"""`cotenant cluster`: one plan over several nodes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from cotenant.cli.console import console
from cotenant.cli.options import AsJson, LogLevel, Stale, a_number, print_json
from cotenant.errors import CotenantError
from cotenant.techniques.partitions.plan.follow import LEAST_SHARE

cluster = typer.Typer(
    name="cluster",
    help="Serve one plan over several nodes, on Ray. Needs 'cotenant\\[cluster]'.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_STOP_S = 120.0


@cluster.command()
def up(
    tenants: Annotated[Path, typer.Argument(help="File of tenants, rates and device types (TOML).")],
    repository: Annotated[Path, typer.Argument(help="Model repository; it must be at this path on every node.")],
    profiles: Annotated[
        Path | None, typer.Option(help="Profile to plan with instead of the repository's.", show_default=False)
    ] = None,
    address: Annotated[str, typer.Option(help="Ray cluster to join, as HOST:PORT or 'auto'.", show_default=False)] = "",
    local_nodes: Annotated[
        int,
        typer.Option(min=1, max=1024, help="Without --address: nodes to start on this machine; they share its cores."),
    ] = 1,
    planner: Annotated[str, typer.Option(help="Planner, as for 'cotenant plan'.")] = "ours",
    headroom: Annotated[
        float,
        typer.Option(min=0.0, max=10.0, callback=a_number, help="Share of each rate that is added to it."),
    ] = 0.1,
    period: Annotated[
        float, typer.Option(min=0.5, max=86_400.0, callback=a_number, help="Seconds between two checks of the rates.")
    ] = 20.0,
    floor: Annotated[
        float,
        typer.Option(min=0.01, max=1.0, callback=a_number, help="Share of a declared rate that is always planned for."),
    ] = LEAST_SHARE,
    heartbeat: Annotated[
        float, typer.Option(min=0.05, max=3600.0, callback=a_number, help="Seconds between two heartbeats of a node.")
    ] = 0.5,
    host: Annotated[str, typer.Option(help="Listening address of the gateway.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="HTTP port of the gateway; 0 takes any free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port of the gateway; 0 takes any free port.")] = 8001,
    stale: Stale = False,
    log_level: LogLevel = None,
    as_json: AsJson = False,
) -> None:
    """Start agents on the nodes, a controller and a gateway. Runs until a signal or 'cotenant cluster down'."""
    from cotenant.cluster.detector import DetectorSettings
    from cotenant.cluster.head import ClusterHead, HeadSettings, read_spec
    from cotenant.cluster.interfaces import ControllerSettings
    from cotenant.cluster.note import Note
    from cotenant.cluster.ray_fleet import need_ray
    from cotenant.linux import require
    from cotenant.log import log_to_stderr
    from cotenant.techniques.partitions.plan.follow import FollowSettings
    from cotenant.techniques.partitions.plan.tracking import TrackingSettings

    require("cotenant cluster up")
    need_ray()  # fails early if a package is missing
    log_to_stderr()
    work = read_spec(tenants, repository, profiles, planner, headroom, stale=stale)
    settings = HeadSettings(host, http_port, grpc_port, address, () if address else _shared_cores(local_nodes))
    control = ControllerSettings(
        period_s=period,
        detector=DetectorSettings(interval_ns=round(heartbeat * 1e9)),
        follow=FollowSettings(TrackingSettings(headroom=headroom), floor=floor),
    )
    stop = threading.Event()
    failures: list[str] = []

    def failed(sentence: str) -> None:
        failures.append(sentence)
        stop.set()

    note = Note()
    try:
        head = ClusterHead(work, repository, settings, control, failed)
    except BaseException:
        note.remove()
        raise
    try:
        for number in (signal.SIGTERM, signal.SIGINT):  # once Ray has set its own handlers, which end the process
            signal.signal(number, lambda *_: stop.set())
        note.write(head.address)
        ready: dict[str, Any] = {
            "host": head.address.host,
            "http_port": head.address.http_port,
            "grpc_port": head.address.grpc_port,
            "nodes": [node["node"] for node in head.status()["nodes"]],
        }
        if as_json:
            print_json(ready)
        else:
            print(
                f"{len(ready['nodes'])} nodes: HTTP on {host}:{ready['http_port']}, gRPC on {host}:{ready['grpc_port']}"
            )
        _flush()
        stop.wait()
    finally:
        head.close()
        note.remove()
    if failures:
        raise CotenantError(failures[0])


@cluster.command()
def status(
    url: Annotated[
        str, typer.Option(help="URL of the gateway; by default that of this machine's cluster.", show_default=False)
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show nodes, tenants with rates and attainment, and changes of the plan."""
    from cotenant.cluster.note import read_note

    if not url:
        note = read_note()
        url = f"http://{note['host']}:{note['http_port']}"
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v2/cotenant/cluster", timeout=10) as answer:
            found = json.loads(answer.read())
    except (OSError, ValueError) as error:
        body = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
        why = ": ".join(filter(None, (str(error), body.strip()[:200])))
        raise CotenantError(f"no cluster gateway answers at {url} ({why}); check the URL") from None
    try:
        tables = _tables(found)
    except (LookupError, TypeError, AttributeError, ValueError):
        raise CotenantError(f"{url} is not a cluster gateway: its status has another form; check the URL") from None
    if as_json:
        print_json(found)
    else:
        for each in tables:
            console().print(each, end="\n\n" if each is not tables[-1] else "\n")


@cluster.command()
def down() -> None:
    """Stop the cluster that 'cotenant cluster up' runs on this machine, and wait until it has ended."""
    from cotenant.cluster.note import read_note
    from cotenant.linux import start_time

    note = read_note()
    os.kill(int(note["pid"]), signal.SIGTERM)
    deadline = time.monotonic() + _STOP_S
    while start_time(int(note["pid"])) == note["started"]:
        if time.monotonic() > deadline:
            raise CotenantError(f"the cluster (process {note['pid']}) did not end within {_STOP_S:g} s: kill it")
        time.sleep(0.1)
    print("The cluster is down.")


def _shared_cores(nodes: int) -> tuple[tuple[int, ...], ...]:
    """Split the cores of this machine evenly among `nodes`. Raises CotenantError if there are too few cores."""
    from cotenant.linux import available_cores

    cores = available_cores()
    if len(cores) < nodes:
        raise CotenantError(f"--local-nodes is {nodes}, expected at most the number of cores, {len(cores)}")
    each = len(cores) // nodes
    return tuple(tuple(cores[at * each : (at + 1) * each]) for at in range(nodes))


def _tables(found: dict[str, Any]) -> list[Any]:
    """Tables and lines that show the status of a cluster."""
    from cotenant.report.fitted_table import FittedTable

    nodes = FittedTable("node", "device", "state", "address", "tenants", title="Nodes", show_edge=False)
    for node in found["nodes"]:
        slots = [slot for partition in node.get("partitions", ()) for slot in partition["slots"]]
        served = [f"{slot['tenant']} {slot['rate']:.3g}/s" for slot in slots]
        served += [f"{tenant} (backfilled)" for tenant in node.get("guests", ())]
        tenants = ", ".join(served) or node.get("reason", "")
        cells = (node["node"], node.get("device", ""), node["state"], node.get("http", ""), tenants)
        nodes.add_row(*map(str, cells))
    tenants_table = FittedTable("tenant", "SLO ms", "declared/s", "tracked/s", "planned/s", "in time", "nodes")
    tenants_table.title, tenants_table.title_justify, tenants_table.show_edge = "Tenants", "left", False
    for each in found["tenants"]:
        tracked, attained = each["tracked_rate"], each["attainment"]
        tenants_table.add_row(
            *(str(each["tenant"]), f"{each['slo_ms']:g}", f"{each['declared_rate']:.3g}"),
            *("-" if tracked is None else f"{tracked:.3g}", f"{each['planned_rate']:.3g}"),
            *("-" if attained is None else f"{100 * attained:.1f} %", ", ".join(each["nodes"]) or "none"),
        )
    tables = [nodes, tenants_table]
    if found["applications"]:
        tables.append(_applications(found["applications"]))
    lines = []
    if found["share"] < 1 or found["left_out"]:
        without = f", without {', '.join(found['left_out'])}" if found["left_out"] else ""
        lines.append(
            f"The rates exceed the nodes' capacity: {100 * found['share']:.0f} % is planned{without}. {found['breaks']}"
        )
    changes = found["changes"][-5:]
    lines += [
        f"{each['at']}  {each['reason']}: {each['nodes']} nodes, after {each['took_s']:.2f} s" for each in changes
    ]
    return [*tables, "\n".join(lines)] if lines else tables


def _applications(found: list[dict[str, Any]]) -> Any:
    from cotenant.report.fitted_table import FittedTable

    table = FittedTable("application", "SLO ms", "stages", "queries", "in time", title="Applications")
    table.show_edge = False
    for each in found:
        stages = [f"{stage['stage']} ({', '.join(stage['nodes']) or 'no node'})" for stage in each["stages"]]
        counts = each["queries"]
        ended = sum(counts[field] for field in ("in_time", "late", "refused", "failed", "cancelled"))
        in_time = f"{100 * counts['in_time'] / ended:.1f} %" if ended else "-"
        table.add_row(
            *(str(each["application"]), f"{each['slo_ms']:g}", ", ".join(stages), str(counts["offered"])),
            in_time,
        )
    return table


def _flush() -> None:
    import sys

    sys.stdout.flush()
