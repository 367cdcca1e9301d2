"""Share of the cores that processes outside of a benchmark took during a row, and rows without much of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from cotenant.linux import available_cores
from cotenant.measure.busy import MOST_OTHERS_OF_RUN, CoreTime, OthersClock, others_share

KEY = "disturbed_pct"
"""Key of a row: the share in per cent; None where it is not known, as of less than 1 s."""
_MOST_PCT = 100 * MOST_OTHERS_OF_RUN
_CLOCK = OthersClock(os.getpid, available_cores())
_Row = TypeVar("_Row", bound=Mapping[str, Any])


def core_time() -> CoreTime:
    """A reading before a row, for `disturbed`. Servers, load generators and peers are processes of the benchmark."""
    return _CLOCK.read()


def disturbed(before: CoreTime) -> dict[str, float | None]:
    """The share since a reading, as a part of a row."""
    share = others_share(before, _CLOCK.read())
    return {KEY: None if share is None else round(100 * share, 1)}


def is_disturbed(row: Mapping[str, Any]) -> bool:
    """Whether other processes took more than 5 % of the cores during a row; False where it is not known."""
    return (row.get(KEY) or 0.0) > _MOST_PCT


def undisturbed(rows: Iterable[_Row]) -> list[_Row]:
    """The rows that were not disturbed; all rows if all were."""
    known = list(rows)
    return [row for row in known if not is_disturbed(row)] or known


def disturbed_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many rows were disturbed and are left out; empty without any."""
    count = sum(map(is_disturbed, rows))
    judged = sum(row.get(KEY) is not None for row in rows)
    if not count:
        return ""
    what = f"other processes took more than {_MOST_PCT:g} % of the cores"
    if count == judged:
        return f"All {count} rows with a load are disturbed ({what}): no figure is of a quiet machine."
    return f"{count} of {judged} rows with a load are disturbed ({what}); medians leave them out where others remain."
