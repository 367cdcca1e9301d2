"""What a chunked graph of either format asks for."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.errors import InvalidValueError
from cotenant.graph.rewrite.rows import RowGraph


def check_chunks(graph: RowGraph, unit: int | tuple[int, int], rows: Sequence[int]) -> tuple[int, int]:
    """The units that are to run in chunks of so many rows.

    Raises InvalidValueError for units or rows that are none, MixedRowsError when the units mix rows.
    """
    start, end = (unit, unit + 1) if isinstance(unit, int) else unit
    where, count = f"chunks of {graph.dfg.model!r}", len(graph.dfg.units)
    if not 0 <= start < end <= count:
        raise InvalidValueError(where, "units", (start, end), f"0 <= start < end <= {count}")
    if len(rows) < 2 or min(rows) < 1:
        raise InvalidValueError(where, "rows", tuple(rows), "those of two chunks or more, at least one each")
    graph.check(start, end)
    return start, end
