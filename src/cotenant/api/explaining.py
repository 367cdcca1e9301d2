"""`cotenant.explain`: the history of one query of a trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cotenant.measure.group_models import group_models
from cotenant.policies.registry import rebuild_policy
from cotenant.repository import trace_path
from cotenant.trace import read
from cotenant.trace.basis import GroupFits
from cotenant.trace.explain import ApplicationHistory, QueryHistory
from cotenant.trace.explain import explain as explain_query


def explain(
    trace: str | os.PathLike[str], query: int, on_read: Callable[[int, int], None] = lambda done, total: None
) -> QueryHistory | ApplicationHistory:
    """The history of a query: its delay, its launches and their predictions, as `cotenant explain` prints it.

    `trace` is a trace file, or a repository with the trace of its server. `query` is the number that a reply has.
    `on_read` is called now and then with the bytes read and the size of the file.

    >>> story = cotenant.explain("models/", 17)  # doctest: +SKIP
    >>> print("\\n".join(story.sentences()))  # doctest: +SKIP
    >>> story.to_pandas()  # doctest: +SKIP

    Raises TraceError for a file that is no trace, and for a query that is not in it.
    """
    path = Path(trace)
    path = trace_path(path) if path.is_dir() else path
    head, records = read(path, on_read)
    return explain_query(records, query, GroupFits(head, rebuild_policy, partial(group_models().find, path.parent)))
