"""`cotenant replay`: check that this version decides as the recorded one, or draw a timeline of the trace."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cotenant.cli.options import AsJson, print_json


def replay(
    trace: Annotated[Path, typer.Argument(help="Trace file, or repository with the trace of its server.")],
    perfetto: Annotated[Path | None, typer.Option(help="Write a timeline for ui.perfetto.dev to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Feed the events of a trace to the core again, and compare its actions with the recorded ones.

    The replay ends where events are missing, since later ones depend on them.
    """
    from cotenant.cli.progress import reading
    from cotenant.measure.group_models import group_models
    from cotenant.policies.registry import rebuild_policy
    from cotenant.report.timeline import write_timeline
    from cotenant.repository import trace_path
    from cotenant.trace import missing_events, read, same_decisions
    from cotenant.trace import replay as replay_records

    path = trace_path(trace) if trace.is_dir() else trace
    if perfetto is not None:
        write_timeline(perfetto, read(path)[1])
    events = 0
    different: int | None = None
    with reading(path) as on_read:
        head, records = read(path, on_read)
        for record, line in replay_records(head, records, rebuild_policy, partial(group_models().find, path.parent)):
            events += 1
            if different is None and not same_decisions(record, line):
                different = record.time_ns
    missing = missing_events(path)
    if as_json:
        same = different is None
        print_json({"events": events, "same": same, "first_difference_ns": different, "missing_events": missing})
    elif different is None:
        print(f"{events} events replayed: every action is the same.")
    else:
        print(f"{events} events replayed: the actions differ from {different} ns on.")
    if missing and not as_json:
        print(f"{missing} events are missing in the trace: it is replayed up to the first of them.")
    if different is not None:
        raise typer.Exit(1)
