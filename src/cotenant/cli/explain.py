"""`cotenant explain`: history of a query, and causes of the lost queries of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cotenant.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from cotenant.trace.bound import RunBound


def explain(
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY",
            help="Number of the query, from the header 'x-cotenant-query' of its response. With --lost: the trace.",
        ),
    ],
    trace: Annotated[
        Path | None, typer.Argument(help="Trace file, or repository with the trace of its server.", show_default=False)
    ] = None,
    lost: Annotated[
        bool, typer.Option("--lost", help="Count lost queries by tenant and cause: 'explain --lost TRACE'.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the history of one query: queueing delay, its launches, other launches, predictions and outcome.

    With --lost: causes of all queries of a run that were not answered in time, and upper bounds of any schedule.
    """
    from cotenant.repository import trace_path

    if lost:
        given = Path(query)
        if trace is not None:
            raise typer.BadParameter("expected only a trace, without the number of a query", param_hint="--lost")
        _print_lost(trace_path(given) if given.is_dir() else given, as_json)
        return
    if not re.fullmatch(r"[0-9]{1,18}", query):
        raise typer.BadParameter(f"{query!r} is not the number of a query", param_hint="QUERY")
    if trace is None:
        raise typer.BadParameter("expected a trace file, or a repository, after the number", param_hint="TRACE")
    _print_story(int(query), trace_path(trace) if trace.is_dir() else trace, as_json)


def _print_story(query: int, path: Path, as_json: bool) -> None:
    from cotenant.api.explaining import explain as explain_query
    from cotenant.cli.progress import reading
    from cotenant.report.lost_text import loss_sentence
    from cotenant.trace import read
    from cotenant.trace.losses import losses_of
    from cotenant.types import Outcome

    with reading(path) as on_read:
        story = explain_query(path, query, on_read)
    sentences = story.sentences()
    if story.outcome != Outcome.ANSWERED:
        sentences += [loss_sentence(loss) for loss in losses_of(*read(path))[1] if loss.query == query]
    if as_json:
        print_json({**msgspec.to_builtins(story), "sentences": sentences})
    else:
        print("\n".join(sentences))


def _bound(path: Path) -> RunBound:
    from cotenant.cli.progress import reading
    from cotenant.trace import read
    from cotenant.trace.bound import bound_of

    with reading(path) as on_read:
        return bound_of(*read(path, on_read))


def _print_lost(path: Path, as_json: bool) -> None:
    from cotenant.cli.console import console, print_warnings
    from cotenant.cli.progress import reading
    from cotenant.measure.busy import disturbed_sentence
    from cotenant.report.bound_text import facts, sentences
    from cotenant.report.lost_text import lost_facts, lost_table, missing_sentences, neighbours
    from cotenant.trace import missing_events, others_share, read
    from cotenant.trace.losses import losses_of

    with reading(path) as on_read:
        account, losses = losses_of(*read(path, on_read))
    missing, others = missing_events(path), others_share(path)
    if as_json:
        found = {"losses": msgspec.to_builtins(losses), "bound": facts(_bound(path))}
        print_json({**lost_facts(account), **found, "missing_events": missing, "others_share": others})
        return
    print_warnings(console(), disturbed_sentence(others))
    if not losses:
        lines = ["No query was lost: all were answered in time.", *missing_sentences(missing)]
        print("\n".join(lines))
    else:
        console().print(lost_table(account.lost))
        lines = [*neighbours(account), *sentences(_bound(path)), *missing_sentences(missing)]
        print("\n".join(lines))
