"""`cotenant explain`: why a query ended as it did."""

from __future__ import annotations

from functools import partial
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
    from cotenant.policies.registry import rebuild_policy
    from cotenant.predict.groups.overlap_file import find_overlap
    from cotenant.repository import trace_path
    from cotenant.trace import read
    from cotenant.trace.basis import GroupBeliefs
    from cotenant.trace.explain import explain as tell

    path = trace_path(trace) if trace.is_dir() else trace
    head, records = read(path)
    story = tell(records, query, GroupBeliefs(head, rebuild_policy, partial(find_overlap, path.parent)))
    if as_json:
        print_json({**msgspec.to_builtins(story), "sentences": story.sentences()})
    else:
        print("\n".join(story.sentences()))
