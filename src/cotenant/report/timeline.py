"""Timeline of a trace for Perfetto: launches by core, and the outcome of each query."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cotenant.gantt import Bar
from cotenant.report.perfetto import Counter, Instant, write_perfetto
from cotenant.trace import Record, basis_of, headroom_ns, in_lines, work_of
from cotenant.work import lane_name

_MOST_NAMED = 8
"""Most cores in the name of a track. A larger share, which varies between launches, is named by its first core: no two
running launches have the same one."""


def write_timeline(path: Path, records: Iterable[Record]) -> int:
    """Write a trace as a file for ui.perfetto.dev; return the number of launches.

    - Tracks of lanes have a bar for each launch, with its version, requested cores and predicted memory pressure.
    - Tracks of tenants and applications have a bar for each query, from its arrival to its end.
    - Tracks of cores have the tasks of placed launches, as if the units began with the launch.
    - Counters have the waiting queries and the cores in use, by tenant.

    At a gap of the trace a mark has the number of missing events; pending queries and launches are not drawn.
    """
    with in_lines(records) as lines:
        return _write_timeline(path, lines)


def _write_timeline(path: Path, records: Iterable[Record]) -> int:
    bars: list[Bar] = []
    instants: list[Instant] = []
    counters: list[Counter] = []
    arrived: dict[int, dict[str, Any]] = {}
    deadlines: dict[int, int] = {}
    begun: dict[int, int] = {}
    running: dict[int, tuple[int, dict[str, Any]]] = {}
    waiting: dict[str, int] = {}
    held: dict[str, int] = {}
    whole: dict[int, tuple[str, int]] = {}
    expanded: dict[int, dict[str, Any]] = {}
    enqueued: dict[int, int] = {}
    zero: int | None = None
    launches = 0
    for record in records:
        zero = record.time_ns if zero is None else zero
        now = record.time_ns - zero
        if record.kind == "EventsMissing":
            gap = f"{record.event['events']} events are missing"
            instants.append(Instant("trace/gaps", gap, now))
            for known in (arrived, deadlines, begun, running, waiting, held, whole, expanded, enqueued):
                known.clear()
        elif record.kind == "QueryArrived":
            query = record.event["query"]
            arrived[query["id"]] = {**query, "arrival_ns": now}
            deadlines[query["id"]] = query["deadline_ns"] - zero
            waiting[query["tenant"]] = waiting.get(query["tenant"], 0) + 1
        elif record.kind == "ApplicationArrived":
            whole[record.event["query"]] = record.event["application"], now
        elif record.kind == "ApplicationEnded" and record.event["query"] in whole:
            name, start = whole.pop(record.event["query"])
            label = f"{record.event['outcome']} #{record.event['query']}"
            args = {key: record.event[key] for key in ("query", "outcome", "reason")}
            bars.append(Bar(f"applications/{name}", label, start, now, args))
        elif record.kind == "LaunchExpanded" and record.event["launch"] in running:
            start, launch = running[record.event["launch"]]
            bars.append(_launch_bar(launch, start, now, None))
            share = expanded.pop(launch["id"])
            held[work_of(launch).tenant] += len(share["cores"]) - len(launch["share"]["cores"])
            running[launch["id"]] = now, {**launch, "share": share}
        elif record.kind == "LaunchEnded" and record.event["launch"] in running:
            start, launch = running.pop(record.event["launch"])
            launches += 1
            held[work_of(launch).tenant] -= len(launch["share"]["cores"])
            bars.append(_launch_bar(launch, start, now, record.event["error"]))
            share, tenant = launch["share"], work_of(launch).tenant
            for numbers, units, begun_ns, ended_ns in record.event.get("task_times", ()):
                for number in numbers:
                    track = f"tasks/{lane_name(number, share['cores'], share['device'])}"
                    bars.append(Bar(track, tenant, start + begun_ns, start + ended_ns, {"units": units}))
        for kind, action in record.actions:
            if kind == "Launch":
                waited_ns = enqueued.pop(action["id"], None)
                headroom = headroom_ns(action, deadlines, now if waited_ns is None else waited_ns)
                running[action["id"]] = (now, action | {"enqueued": waited_ns, "headroom_ns": headroom})
                work = work_of(action)
                held[work.tenant] = held.get(work.tenant, 0) + len(action["share"]["cores"])
                if work.is_first:
                    waiting[work.tenant] = waiting.get(work.tenant, 0) - len(action["queries"])
                    begun.update(dict.fromkeys(action["queries"], now))
            elif kind == "Enqueue":
                enqueued[action["launch"]["id"]] = now
            elif kind == "Expand":
                expanded[action["launch"]] = action["share"]
            elif kind == "Respond":
                query = arrived.pop(action["query"])
                first = begun.pop(action["query"], None)
                del deadlines[action["query"]]
                if first is None:
                    waiting[query["tenant"]] -= 1
                track = f"tenants/{query['tenant']}"
                args = {"query": action["query"], "outcome": action["outcome"], "reason": action["reason"]}
                bars.append(Bar(track, f"{action['outcome']} #{action['query']}", query["arrival_ns"], now, args))
                if first is None:
                    instants.append(Instant(track, action["outcome"], now, args))
        if record.kind in ("QueryArrived", "LaunchEnded", "TimerFired"):
            counters.append(Counter("queues/waiting", now, dict(waiting)))
            counters.append(Counter("cores/held", now, dict(held)))
    write_perfetto(path, sorted(bars, key=_track_order), instants, counters)
    return launches


def _launch_bar(launch: dict[str, Any], start: int, end: int, error: str | None) -> Bar:
    work, share = work_of(launch), launch["share"]
    numbers = share["cores"]
    cores = ",".join(map(str, numbers))
    track = f"lanes/cores {cores}" if len(numbers) <= _MOST_NAMED else f"lanes/cores from {min(numbers)} on"
    args = {
        "batch": launch["batch"],
        "queries": ", ".join(map(str, launch["queries"])),
        "units": f"{work.start} to {work.end}",
        "predicted_ms": launch["predicted_ns"] / 1e6,
        "headroom_ms": launch["headroom_ns"] / 1e6,
    }
    for key in ("wanted", "pressure_pct"):
        if value := basis_of(launch).get(key):
            args[key] = value
    if work.version:
        args["version"] = work.version
    if launch.get("after"):
        args["after"] = ", ".join(map(str, launch["after"]))
    if launch["enqueued"] is not None:
        args["enqueued_at_ms"] = launch["enqueued"] / 1e6
    if error:
        args["error"] = error
    rows = f" x{work.items}" if work.items > 1 else ""
    if work.rows:
        rows = " rows {} to {}".format(*work.rows)
    if len(numbers) > _MOST_NAMED:
        args["cores"] = cores
    return Bar(track, f"{work.tenant}{rows}", start, end, args)


def _track_order(bar: Bar) -> tuple[bool, str, int]:
    return (not bar.lane.startswith("lanes/"), bar.lane, bar.start_ns)
