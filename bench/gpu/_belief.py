"""What the policies believe while pairs are served: the latencies and slowdowns measured on this device, as tables.

A server would fit `predict.groups.overlap` to measured groups; a run of minutes measures too few of them for that. All
contenders get the same predictor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.gpu._context import Context
from bench.gpu._journal import Row
from bench.gpu._latency import ensure_corun, ensure_latency, ensure_parts
from cotenant.core.predictor import Group
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable

QUANTILE = "p95"
_NS = 1e6


class MeasuredGroups(FittedGroups):
    """A group takes as long as its slowest member, each slowed down as it was beside the other in disjoint shares."""

    quantile = 0.95

    def __init__(self, table: TablePredictor, slowdowns: Mapping[tuple[str, str], float]) -> None:
        self._table = table
        self._slowdowns = dict(slowdowns)

    @property
    def key(self) -> str:
        """See FittedGroups."""
        return f"measured-{len(self._slowdowns)}"

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        """See GroupPredictor."""
        return [
            max(
                round(self._table.latency_ns(*member) * self._factor(at, [each.work.tenant for each in group]))
                for at, member in enumerate(group)
            )
            for group in groups
        ]

    def _factor(self, at: int, names: Sequence[str]) -> float:
        """The product of what each of the others costs the member."""
        factor = 1.0
        for other, name in enumerate(names):
            if other != at:
                factor *= max(1.0, self._slowdowns.get((names[at], name), 1.0))
        return factor


def believe(context: Context, pair: Sequence[str], items: int, sizes: Sequence[int]) -> GroupedPredictor:
    """The predictor for a pair in batches of `items`; missing latencies are measured now.

    Raises MeasureError when something cannot be measured.
    """
    tables = {}
    for name in dict.fromkeys(pair):
        rows = [ensure_latency(context, name, items, context.of_size(size)) for size in dict.fromkeys(sizes)]
        tables[name] = table_of(rows, ensure_parts(context, name))
    slowdowns: dict[tuple[str, str], float] = {}
    for row in ensure_corun(context, pair):
        slowdowns[row["model"], row["beside"]] = float(row["slowdown"])
    for name in pair:
        slowdowns.setdefault((name, name), max(slowdowns.values(), default=1.0))
    return GroupedPredictor(tables, None, MeasuredGroups(TablePredictor(tables), slowdowns))


def table_of(latencies: Sequence[Row], parts: Sequence[Row]) -> LatencyTable:
    """A latency table of a model from its rows of the steps latency and units."""
    rows = tuple(
        LatencyRow(0, int(row["items"]), int(row["asked_sms"]), max(1, round(row[f"{QUANTILE}_ms"] * _NS)))
        for row in latencies
    )
    return LatencyTable(rows, tuple(map(float, unit_ns(parts))), segment_ratio(parts))


def unit_ns(parts: Sequence[Row]) -> list[int]:
    """Latency of each unit: that of its measured segment, spread by estimated cost."""
    ordered = sorted(parts, key=lambda row: int(row["start"]))
    return [int(each) for row in ordered for each in str(row["units_ns"]).split()]


def segment_ratio(parts: Sequence[Row]) -> float:
    """What the model takes as its segments over what it takes whole; never below 1."""
    whole = float(parts[0]["whole_p50_ms"])
    return max(1.0, sum(float(row["p50_ms"]) for row in parts) / whole) if whole > 0 else 1.0
