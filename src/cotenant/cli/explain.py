"""`cotenant explain`: why a query ended as it did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cotenant.cli.options import AsJson, print_json


def explain(
    query: Annotated[int, typer.Argument(help="Number of the query: the header 'x-cotenant-query' of its answer.")],
    trace: Annotated[Path, typer.Argument(help="Trace file, or the repository that is or was served.")],
    as_json: AsJson = False,
) -> None:
    """Tell the story of one query: what it waited for, what ran meanwhile, what was predicted and what came."""
    from cotenant.repository import trace_path
    from cotenant.trace import read
    from cotenant.trace.explain import explain as tell

    _, records = read(trace_path(trace) if trace.is_dir() else trace)
    story = tell(records, query)
    if as_json:
        print_json({**msgspec.to_builtins(story), "sentences": story.sentences()})
    else:
        print("\n".join(story.sentences()))
