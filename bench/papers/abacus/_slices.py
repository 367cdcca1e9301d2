"""Slices of the A100 (MIG) as worlds: known latencies from networks, and assumed ones between bounds.

Networks were released for pairs on a 2g.10gb slice and for groups of four on a 4g.20gb slice, of four models. Nothing
was for a 1g.5gb slice, nor for fewer than four on a 4g.20gb one. Their latencies lie between two bounds, and a drawn
number from 0 (the lower one) to 1 says where. No figure of theirs is a measured one, nor fitted to one.

* Alone on 2g.10gb: the network of pairs, asked for one as that of the whole device is. The latency is at most that
  beside one operator of another model. (For BERT it is less, by half; the network was never shown groups of one.)
* Alone on 1g.5gb, half of that in SMs and memory: from as quick as on 2g.10gb to twice its time.
* One to three on 4g.20gb: from as quick as on the whole device to the lesser of two times. One is that of its two
  halves side by side. The other is the network of four beside one operator of each missing model.

A group is never quicker than its parts, nor slower on a slice than on its halves. Networks were fitted separately;
where they contradict that, the larger slice gives way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench._registry import BenchError
from bench.papers.abacus._a100 import A100, FOUR, NS_PER_MS, PaperModel
from cotenant.core.predictor import Group, Member
from cotenant.work import Work

Real = npt.NDArray[np.float64]
SIZES = (1, 2, 4)
"""Of the slices, in sevenths of the SMs: 1g.5gb, 2g.10gb, 4g.20gb (Table 3). Four, two or one of them are as much."""
TARGETS = {1: "mig_1in4", 2: "mig_2in4", 4: "mig_4in4"}
"""Experiments with the QoS targets of these slices."""


class Slice:
    """A slice of `size` as a world like A100, for groups of up to `size` of FOUR. `at` says where between the bounds.

    Raises BenchError for another size, for `at` outside 0 to 1, and for a group of more than `size` members.
    """

    def __init__(self, data: Path, size: int, at: float = 0.5) -> None:
        if size not in SIZES:
            raise BenchError(f"a slice of {size} sevenths: expected one of {', '.join(map(str, SIZES))}")
        if not 0 <= at <= 1:
            raise BenchError(f"{at}: expected a number from 0, the lower bound, to 1, the upper one")
        self.size, self.at = size, at
        self._half = A100(data, device="mig2g")
        self._four, self._whole = A100(data, device="mig4g"), A100(data)
        by_name = {model.name: model for model in self._whole.models}
        self.models: tuple[PaperModel, ...] = tuple(by_name[name] for name in FOUR)
        self._known: dict[Group, float] = {}
        self._on_half_known: dict[Group, float] = {}

    def operators(self, model: str) -> int:
        """Number of operators of a model."""
        return self._whole.operators(model)

    def most(self, models: Sequence[str]) -> int:
        """The largest group of these models."""
        return min(self.size, len(models))

    def latency_ns(self, group: Group) -> float:
        """Latency of a group in ns."""
        key = tuple(sorted(group))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = float(self.latencies_ms([key])[0]) * NS_PER_MS
        return found

    def latencies_ms(self, groups: Sequence[Group]) -> Real:
        """Latencies of many groups in ms, shape (groups,)."""
        low, high = self.bounds_ms(groups)
        return low + self.at * (high - low)

    def bounds_ms(self, groups: Sequence[Group]) -> tuple[Real, Real]:
        """What they take at least and at most, shape (groups,) each; equal where a network says it."""
        least, most = np.zeros(len(groups)), np.zeros(len(groups))
        for size in {len(group) for group in groups}:
            if not 1 <= size <= self.size:
                raise BenchError(f"a group of {size} on a slice of {self.size} sevenths: expected 1 to {self.size}")
            at = [number for number, group in enumerate(groups) if len(group) == size]
            least[at], most[at] = self._bounds([groups[number] for number in at])
        return least, most

    def _bounds(self, groups: list[Group]) -> tuple[Real, Real]:
        """As `bounds_ms`, of groups of one size."""
        if self.size < 4:
            found = self._on_half(groups)
            return found, 2 * found if self.size == 1 else found
        halves = self._on_halves(groups)
        least = np.minimum(self._on_whole(groups), halves)
        missing = [[name for name in FOUR if all(name != each.work.tenant for each in group)] for group in groups]
        filled = [(*group, *map(_first, names)) for group, names in zip(groups, missing, strict=True)]
        with_all = np.maximum(self._four.latencies_ms(filled), least)
        return (with_all, with_all) if len(groups[0]) == 4 else (least, np.minimum(with_all, halves))

    def _on_half(self, groups: Sequence[Group]) -> Real:
        """One or two on a 2g.10gb slice."""
        known = self._on_half_known
        new = list(dict.fromkeys(group for group in groups if group not in known))
        if new:
            known |= zip(new, (self._alone(new) if len(new[0]) == 1 else self._pairs(new)).tolist(), strict=True)
        return np.array([known[group] for group in groups])

    def _alone(self, groups: list[Group]) -> Real:
        beside = [
            group if name == group[0].work.tenant else (*group, _first(name)) for name in FOUR for group in groups
        ]
        return self._half.latencies_ms(beside).reshape(len(FOUR), len(groups)).min(axis=0)

    def _pairs(self, groups: list[Group]) -> Real:
        parts = self._on_half([(member,) for group in groups for member in group]).reshape(len(groups), 2)
        return np.maximum(self._half.latencies_ms(groups), parts.max(axis=1))

    def _on_whole(self, groups: list[Group]) -> Real:
        """The longest of all parts of one to three, on the whole device."""
        members = range(len(groups[0]))
        parts = [part for size in (1, 2, 3) for part in combinations(members, size)]
        asked = [tuple(group[at] for at in part) for part in parts for group in groups]
        return self._whole.latencies_ms(asked).reshape(len(parts), len(groups)).max(axis=0)

    def _on_halves(self, groups: list[Group]) -> Real:
        """Side by side on two 2g.10gb slices, shared out among them in the best way."""
        members = range(len(groups[0]))
        ways = [
            [part, [at for at in members if at not in part]]
            for size in (1, 2)
            for part in combinations(members, size)
            if len(members) - size <= 2
        ]
        found = [
            [self._on_half([tuple(group[at] for at in side) for group in groups]) for side in sides if side]
            for sides in ways
        ]
        return np.minimum.reduce([np.maximum.reduce(sides) for sides in found])


def _first(name: str) -> Member:
    """The shortest segment of a model that a network knows."""
    return Member(Work(name, 0, 4, 0, 1), 1)
