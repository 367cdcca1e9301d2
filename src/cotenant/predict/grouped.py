"""Beliefs about groups beside those about single launches: tables of the tenants, a fitted predictor of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cotenant.predict.protocol import Group
from cotenant.predict.table import LatencyTable, TablePredictor


class FittedGroups(Protocol):
    """A fitted predictor of groups; see `predict.overlap`."""

    @property
    def key(self) -> str:
        """Tells one fit from another: equal keys, equal predictions."""

    @property
    def quantile(self) -> float:
        """What it promises."""

    def group_ns(self, groups: Sequence[Group]) -> Sequence[int]:
        """See GroupPredictor."""


class GroupedPredictor(TablePredictor):
    """Predicts single launches from tables with their `scales`, groups from `fitted`, times `factor`.

    Without `fitted`, before groups have been measured, launches on disjoint cores are believed not to touch each other.
    """

    def __init__(
        self,
        tables: Mapping[str, LatencyTable],
        scales: Mapping[str, float] | None = None,
        fitted: FittedGroups | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__(tables, scales)
        self.fitted = fitted
        self.factor = factor
        self._answers: dict[Group, int] = {}

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        """See GroupPredictor; answers are memorised."""
        known = self._answers
        answers = [known.get(group, 0) for group in groups]
        if 0 not in answers:
            return answers
        if len(known) > _MEMORY:
            known.clear()
        new: list[Group] = []
        places: list[int] = []
        for at, group in enumerate(groups):
            if not answers[at]:
                # The order of members means nothing: these may have been asked for in another one.
                ordered = tuple(sorted(group))
                answer = known.get(ordered, 0)
                if answer:
                    answers[at] = known[group] = answer
                else:
                    new.append(ordered)
                    places.append(at)
        if new:
            found = super().group_ns(new) if self.fitted is None else self.fitted.group_ns(new)
            for at, ordered, latency in zip(places, new, found, strict=True):
                answers[at] = known[groups[at]] = known[ordered] = max(1, round(latency * self.factor))
        return answers

    def scaled(self, scales: Mapping[str, float]) -> GroupedPredictor:
        """The same beliefs about groups, with other factors of single launches."""
        return GroupedPredictor(self.tables, scales, self.fitted, self.factor)

    def with_factor(self, factor: float) -> GroupedPredictor:
        """The same beliefs with another factor of groups."""
        return GroupedPredictor(self.tables, self.scales, self.fitted, factor)


_MEMORY = 1 << 16
"""Groups whose latencies are kept at most; some 30 MB."""
