"""Beliefs about groups beside those about single launches: tables of the tenants, a fitted predictor of groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol, cast

from typing_extensions import override

from cotenant.core.predictor import Group
from cotenant.predict.latency import LatencyModel
from cotenant.predict.table import TablePredictor
from cotenant.profile.latency_table import LatencyTable


class FittedGroups(Protocol):
    """A fitted predictor of groups; see `predict.groups.overlap`. One that does not say what it was fitted to inherits
    what is said here."""

    @property
    def key(self) -> str:
        """Tells one fit from another: equal keys, equal predictions."""

    @property
    def quantile(self) -> float:
        """What it promises."""

    @property
    def sizes(self) -> frozenset[int] | None:
        """Numbers of members of the groups that it was fitted to; None for all that are asked for."""
        return None

    def group_ns(self, groups: Sequence[Group]) -> Sequence[int]:
        """See GroupPredictor."""

    def bounds_ns(self, groups: Sequence[Group]) -> Sequence[tuple[int, int]]:
        """The least and the most that groups of other numbers of members take; `group_ns` lies between."""
        return [(latency, latency) for latency in self.group_ns(groups)]

    def near(self, group: Group) -> int:
        """How many measured groups are near this one, as its prediction goes by; -1 where that is not known."""
        return -1


class GroupedPredictor(TablePredictor):
    """Predicts single launches from tables with their `scales`, groups from `fitted`, times `factor`.

    Without `fitted`, before groups have been measured, launches on disjoint cores are believed not to touch each other;
    that is an assumption, and no number of members is less sure than another one.
    """

    def __init__(
        self,
        tables: Mapping[str, LatencyTable],
        scales: Mapping[str, float] | None = None,
        fitted: FittedGroups | None = None,
        factor: float = 1.0,
        models: Mapping[str, LatencyModel] | None = None,
    ) -> None:
        super().__init__(tables, scales, models)
        self.fitted = fitted
        self.factor = factor
        self._answers: dict[Group, int] = {}
        """What `fitted` said, before `factor`."""
        self._longest: dict[Group, int] = {}
        """What groups of numbers of members that were not measured take at most, before `factor`."""
        self._unmeasured: dict[int, frozenset[int]] = {}

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        """See GroupPredictor; answers are memorised."""
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

    def longest_ns(self, groups: Sequence[Group]) -> list[int]:
        """See GroupPredictor; answers are memorised."""
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
        """Predict these groups, the first FORESEEN of them, so that to ask for them later takes no time.

        Each step predicts some of them and says how many; in between others may ask.
        """
        if self.fitted is not None:
            left = islice(groups, FORESEEN)
            while piece := tuple(islice(left, _PIECE)):
                self.group_ns(piece)
                yield len(piece)

    def scaled(self, scales: Mapping[str, float]) -> GroupedPredictor:
        """The same beliefs about groups, with other factors of single launches."""
        return self.with_beliefs(self.tables, scales, self.factor)

    def with_beliefs(
        self, tables: Mapping[str, LatencyTable], scales: Mapping[str, float], factor: float
    ) -> GroupedPredictor:
        """Other beliefs about single launches and another factor of groups, which are as they were fitted.

        What is memorised of groups goes on: a server corrects factors all the time, and would forget it each time.
        """
        made = GroupedPredictor(tables, scales, self.fitted, factor, self.models)
        made = made.with_margin(self.margin).with_beside(self.beside)
        made._answers, made._longest = self._answers, self._longest
        return made

    def _ask(self, fitted: FittedGroups, groups: Sequence[Group], found: Sequence[int | None]) -> list[int]:
        """The answers with those filled in that are None; they are remembered."""
        known = self._answers
        if len(known) > _MEMORY:
            known.clear()
        new: list[Group] = []
        places: list[int] = []
        answers = [answer or 0 for answer in found]
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
            for at, ordered, latency in zip(places, new, fitted.group_ns(new), strict=True):
                answers[at] = known[groups[at]] = known[ordered] = latency if latency > 1 else 1
                if len(ordered) == 2:
                    known[ordered[::-1]] = answers[at]
        return answers


_MEMORY = 1 << 18
"""Groups whose latencies are kept at most, pairs in both orders; some 30 MB."""
FORESEEN = 3 * _MEMORY // 8
"""Groups that are predicted ahead of time at most: the rest of the memory is for others."""
_PIECE = 256
"""Groups that are predicted in one step ahead of time: some 0.5 ms."""
