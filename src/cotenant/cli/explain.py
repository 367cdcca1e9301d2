"""`cotenant explain`: why a query ended as it did, and why queries of a run were lost."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cotenant.cli.options import AsJson, print_json


def explain(
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY",
            help="Number of the query: the header 'x-cotenant-query' of its answer. With --lost, the trace.",
        ),
    ],
    trace: Annotated[
        Path | None, typer.Argument(help="Trace file, or the repository that is or was served.", show_default=False)
    ] = None,
    lost: Annotated[
        bool, typer.Option("--lost", help="Why queries were lost, by tenant and cause: 'explain --lost TRACE'.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tell the story of one query: what it waited for, what ran meanwhile, what was predicted and what came.

    With --lost instead why queries of a whole run were not answered in time, and how many could have been.
    """
    from cotenant.repository import trace_path

    if lost:
        asked = Path(query)
        if trace is not None:
            raise typer.BadParameter("expected a trace alone, without the number of a query", param_hint="--lost")
        _tell_lost(trace_path(asked) if asked.is_dir() else asked, as_json)
        return
    if not re.fullmatch(r"[0-9]{1,18}", query):
        raise typer.BadParameter(f"{query!r} is not the number of a query", param_hint="QUERY")
    if trace is None:
        raise typer.BadParameter("expected a trace file, or a repository, behind the number", param_hint="TRACE")
    _tell(int(query), trace_path(trace) if trace.is_dir() else trace, as_json)


def _tell(query: int, path: Path, as_json: bool) -> None:
    from cotenant.measure.group_models import group_models
    from cotenant.policies.registry import rebuild_policy
    from cotenant.report.lost_text import loss_sentence
    from cotenant.trace import read
    from cotenant.trace.basis import GroupBeliefs
    from cotenant.trace.explain import explain as tell
    from cotenant.trace.losses import losses_of
    from cotenant.types import Outcome

    head, records = read(path)
    story = tell(records, query, GroupBeliefs(head, rebuild_policy, partial(group_models().find, path.parent)))
    sentences = story.sentences()
    if story.outcome != Outcome.ANSWERED:
        sentences += [loss_sentence(loss) for loss in losses_of(*read(path))[1] if loss.query == query]
    if as_json:
        print_json({**msgspec.to_builtins(story), "sentences": sentences})
    else:
        print("\n".join(sentences))


def _tell_lost(path: Path, as_json: bool) -> None:
    from cotenant.cli.console import console
    from cotenant.report.bound_text import facts, sentences
    from cotenant.report.lost_text import lost_facts, lost_table, missing_sentences, neighbours
    from cotenant.trace import missing_events, read
    from cotenant.trace.bound import bound_of
    from cotenant.trace.losses import losses_of

    account, losses = losses_of(*read(path))
    missing = missing_events(path)
    if as_json:
        found = {"losses": msgspec.to_builtins(losses), "bound": facts(bound_of(*read(path)))}
        print_json({**lost_facts(account), **found, "missing_events": missing})
    elif not losses:
        lines = ["No query was lost: all that ended were answered in time.", *missing_sentences(missing)]
        print("\n".join(lines))
    else:
        console().print(lost_table(account.lost))
        lines = [*neighbours(account), *sentences(bound_of(*read(path))), *missing_sentences(missing)]
        print("\n".join(lines))
