"""Made-up costs with groups for the tests of planners: what members gain beside each other, by their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from cotenant.techniques.partitions.plan.table_costs import TableCosts
from cotenant.techniques.partitions.plan.types import CoRunner
from cotenant.techniques.partitions.predict.factors import Interference
from plan_samples import table_costs

MS = 1_000_000


class GroupGains:
    """Groups take what their members do in turn, in whole partitions, over a gain; no less than the longest of them.

    `alone` is ms by model and batch. Members have equal parts of partitions of `size`. A gain of None is not known.
    """

    def __init__(
        self, size: int, alone: Mapping[str, Mapping[int, float]], gains: Mapping[frozenset[str], float | None]
    ) -> None:
        self._size = size
        self._alone = alone
        self._gains = gains
        self._most = max(map(len, gains), default=1)

    def divisions(self, size: int, members: int) -> Sequence[tuple[int, ...]]:
        """See GroupTimes."""
        return ((size // members,) * members,) if size == self._size and members <= self._most else ()

    def group_ns(self, members: Sequence[CoRunner], size: int) -> int | None:
        """See GroupTimes."""
        gain = self._gains.get(frozenset(model for model, _, _ in members))
        if gain is None or size != self._size:
            return None
        times = [self._alone[model][batch] for model, batch, _ in members]
        return ceil(max(sum(times) / gain, *times) * MS)


def grouped_costs(
    device: str,
    size: int,
    alone: Mapping[str, Mapping[int, float]],
    gains: Mapping[frozenset[str], float | None],
    interference: Interference | None = None,
    slower: Mapping[int, float] | None = None,
) -> TableCosts:
    """Costs of one type of device with groups in partitions of `size`; other sizes take `slower` times as long."""
    factors = {size: 1.0, **(slower or {})}
    tables = {
        model: {
            part: {batch: ceil(ms * factor * MS) for batch, ms in points.items()} for part, factor in factors.items()
        }
        for model, points in alone.items()
    }
    between = {device: interference} if interference else None
    return table_costs({device: tables}, dict.fromkeys(alone, 1), between, {device: GroupGains(size, alone, gains)})
