"""Predictors of groups of launches: latency tables for single launches, a fitted predictor for groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol, cast

from typing_extensions import override

from cotenant.core.predictor import Group
from cotenant.predict.latency import LatencyModel
from cotenant.predict.scales import Scales
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyTable


class FittedGroups(Protocol):
    """A fitted predictor of groups. Methods with a body have defaults for predictors that inherit them."""

    @property
    def key(self) -> str:
        """Identity of the fit: equal keys give equal predictions."""

    @property
    def quantile(self) -> float:
        """The quantile that it predicts."""

    @property
    def sizes(self) -> frozenset[int] | None:
        """Numbers of members of the groups that it was fitted to; None for all numbers."""
        return None

    def group_ns(self, groups: Sequence[Group]) -> Sequence[int]:
        """Time in ns from the start of each group to the end of its last member."""

    def bounds_ns(self, groups: Sequence[Group]) -> Sequence[tuple[int, int]]:
        """Lower and upper bounds in ns of each group's time, for unmeasured numbers of members."""
        return [(latency, latency) for latency in self.group_ns(groups)]

    def near(self, group: Group) -> int:
        """Number of measured groups close to this one in features; -1 if unknown."""
        return -1


class GroupedPredictor(TablePredictor):
    """Predicts single launches from tables with `scales`, and groups from `fitted`, multiplied by `factor`.

    Without `fitted`, before groups have been measured, launches on disjoint cores are assumed not to interfere, for any
    number of members.
    """

    def __init__(
        self,
        tables: Mapping[str, LatencyTable],
        scales: Scales | None = None,
        fitted: FittedGroups | None = None,
        factor: float = 1.0,
        models: Mapping[str, LatencyModel] | None = None,
    ) -> None:
        super().__init__(tables, scales, models)
        self.fitted = fitted
        self.factor = factor
        self._answers: dict[Group, int] = {}
        """Results of `fitted`, before `factor`."""
        self._longest: dict[Group, int] = {}
        """Upper bounds of groups with unmeasured numbers of members, before `factor`."""
        self._unmeasured: dict[int, frozenset[int]] = {}

    @override
    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        if self.fitted is None:
            answers = super().group_ns(groups)
        else:
            found = list(map(self._answers.get, groups))
            answers = self._ask(self.fitted, groups, found) if None in found else cast(list[int], found)
        factor = self.factor
        return answers if factor == 1.0 else [max(1, round(answer * factor)) for answer in answers]

    @override
    def unmeasured(self, most: int) -> frozenset[int]:
        found = self._unmeasured.get(most)
        if found is None:
            sizes = None if self.fitted is None else self.fitted.sizes
            found = frozenset(() if sizes is None else set(range(2, most + 1)) - sizes)
            self._unmeasured[most] = found
        return found

    @override
    def longest_ns(self, groups: Sequence[Group]) -> list[int]:
        believed = self.group_ns(groups)
        unmeasured = self.unmeasured(max(map(len, groups), default=1))
        if self.fitted is None or not unmeasured:
            return believed
        known, factor = self._longest, self.factor
        if len(known) > _MEMORY:
            known.clear()
        new = [group for group in groups if len(group) in unmeasured and group not in known]
        known.update(zip(new, [most for _, most in self.fitted.bounds_ns(new)], strict=True))
        return [max(ns, round(known.get(group, 0) * factor)) for ns, group in zip(believed, groups, strict=True)]

    def prefetch(self, groups: Iterable[Group]) -> Iterator[int]:
        """Predict these groups, the first MOST_PREFETCHED of them, so that to ask for them later takes no time.

        Each step predicts some groups and yields their number; other callers may use the predictor in between.
        """
        if self.fitted is not None:
            left = islice(groups, MOST_PREFETCHED)
            while chunk := tuple(islice(left, _PREFETCH_STEP)):
                self.group_ns(chunk)
                yield len(chunk)

    def scaled(self, scales: Scales) -> GroupedPredictor:
        """The same predictor with other factors of single launches."""
        return self.with_beliefs(self.tables, scales, self.factor)

    def with_beliefs(self, tables: Mapping[str, LatencyTable], scales: Scales, factor: float) -> GroupedPredictor:
        """The same fit of groups with another factor, and other tables and factors of single launches.

        Shares the memory of groups: a server corrects factors continuously.
        """
        made = GroupedPredictor(tables, scales, self.fitted, factor, self.models)
        made = made.with_margin(self.margin).with_beside(self.beside)
        made._answers, made._longest = self._answers, self._longest
        return made

    def _ask(self, fitted: FittedGroups, groups: Sequence[Group], found: Sequence[int | None]) -> list[int]:
        """The results, with missing ones predicted and memorised."""
        known = self._answers
        if len(known) > _MEMORY:
            known.clear()
        new: list[Group] = []
        places: list[int] = []
        answers = [answer or 0 for answer in found]
        for at, group in enumerate(groups):
            if not answers[at]:
                # The order of members has no meaning: the group may be known in another order.
                ordered = tuple(sorted(group))
                answer = known.get(ordered, 0)
                if answer:
                    answers[at] = known[group] = answer
                else:
                    new.append(ordered)
                    places.append(at)
        if new:
            for at, ordered, latency in zip(places, new, fitted.group_ns(new), strict=True):
                answers[at] = known[groups[at]] = known[ordered] = latency if latency > 1 else 1
                if len(ordered) == 2:
                    known[ordered[::-1]] = answers[at]
        return answers


_MEMORY = 1 << 18
"""Groups in memory at most, pairs in both orders; some 30 MB."""
MOST_PREFETCHED = 3 * _MEMORY // 8
"""Groups that are prefetched at most: the rest of the memory is for other groups."""
_PREFETCH_STEP = 256
"""Groups that one step of prefetching predicts: some 0.5 ms."""
