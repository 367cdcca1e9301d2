"""Large neighbourhood search for joint plans, with simulated annealing over windows of time.

1. Start from streams, the published plan, its barriers as waits, all orders of ranks, and each run of units in halves.
2. Take a random window of the plan's time. With a given probability, strip half of the plan there.
3. Apply random moves inside the window; keep each that does not raise the score.
4. Accept the result if it is better, else with probability `exp(-rise / warmth)`; the warmth falls geometrically.
   Return to the best plan when the present one is 4 warmths above it.
5. Repeat from step 2.

Beyond the published moves there are waits between two members, ranks, and chunks of runs of units. The score is the
mean makespan relative to streams over several *beliefs*: the given tables, and perturbed times, needs and admission
rules. The plan is never slower, as predicted, than streams or the published plan. The device's admission rule is not
documented, so that the best plans by either rule are alternatives.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf

import msgspec
import numpy as np
from typing_extensions import override

from cotenant.techniques.granularity.joint_plan import Chunk, JointPlan
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.granularity.plan.plan_moves import Moves, Window, barrier_as_waits, even_rows, with_ranks
from cotenant.techniques.granularity.plan.planner import FoundJointPlan, JointPlanner, JointProgress, found
from cotenant.techniques.granularity.plan.published import Descent, Published
from cotenant.techniques.granularity.predict.evaluator import JointEvaluator
from cotenant.techniques.granularity.predict.rules import Admission, Occupancy

_TRIES = 24
"""Moves that are tried in a window."""
_STRIPPED = 0.3
"""Probability that a window starts with half of the plan removed there."""
_WARM, _COLD = 0.004, 0.0002
"""First and last warmth of the annealing, as a share of the makespan of streams."""
_LOOK = 0.001
"""A plan is dropped early when its score exceeds the present one by this share of the makespan of streams."""
_COST = 3e-5
"""Penalty for each chunk, wait and barrier, as a share of the makespan of streams."""
_MOST_ORDERS = 24
"""Orders of ranks at most from which the search starts."""
_LAUNCH = 1.5
"""Largest factor on launch cost in perturbed beliefs: threads that launch at once delay each other."""


@dataclass(frozen=True, slots=True)
class JointSearch(JointPlanner):
    """The search of this package. `evaluations` limits the evaluated plans; the published search gets `rounds` of them,
    and a quarter at most. `beliefs` is the number of perturbed beliefs; `times` and `needs` are the standard deviations
    of their logarithms. The same `seed` gives the same plan."""

    evaluations: int = 6000
    seed: int = 0
    rounds: int = 1000
    beliefs: int = 4
    times: float = 0.15
    needs: float = 0.20
    name: str = "ours"

    @override
    def find(
        self, tables: Sequence[KernelTable], rules: Occupancy, progress: JointProgress | None = None
    ) -> FoundJointPlan:
        search = _Windows(self, tables, rules, progress)
        try:
            search.run()
        except KeyboardInterrupt:
            pass
        best, *others = search.found()
        return found(search.evaluators[0], best, search.evaluated, others)


@dataclass(frozen=True, slots=True)
class _Scored:
    """A plan with its makespans relative to streams, one for each belief of a walk. `extra` is the penalty for its
    pointers and chunks."""

    plan: JointPlan
    extra: float
    times: tuple[float, ...]

    @property
    def score(self) -> float:
        """Mean relative makespan, plus the penalty."""
        return sum(self.times) / len(self.times) + self.extra


class _Windows:
    """One search of three walks: over all beliefs, over those with the given admission rule, and over the others."""

    def __init__(
        self,
        settings: JointSearch,
        tables: Sequence[KernelTable],
        rules: Occupancy,
        progress: JointProgress | None,
    ) -> None:
        self.settings = settings
        self.tables = tables
        self.rules = rules
        self.evaluators = [JointEvaluator(tables, rules)]
        for wrong in _beliefs(settings, tables, rules):
            self.evaluators.append(JointEvaluator(*wrong, beside=self.evaluators[0]))
        self.evaluated = 0
        self._progress = progress
        self._streams = [each.cost(each.streams).makespan_ns for each in self.evaluators]
        self._all = tuple(range(len(self.evaluators)))
        self._target = self._streams[0]
        self._best = _Scored(self.evaluators[0].streams, 0.0, (1.0,) * len(self.evaluators))
        self._walked: list[_Scored] = []
        self._end = settings.evaluations
        self._is_over = False
        self._rng = random.Random(settings.seed)
        self._moves = Moves(tables, self._rng)

    def found(self) -> list[JointPlan]:
        """The best plan that is predicted not to be slower than streams and the published plan, then the alternatives.
        These are the best plan of each walk, and the best of the starting plans, which is simpler."""
        for each in self._walked:
            self._keep(self._scored(each.plan, self._all))
        return [self._best.plan, *(each.plan for each in self._walked)]

    def run(self) -> None:
        """Run one walk for each group of beliefs, from the starting plans."""
        starts = list(self._starts())
        rules = self.rules
        own = [n for n in self._all if self.evaluators[n].rules.admission == rules.admission]
        groups = [self._all, tuple(own), tuple(n for n in self._all if n not in own)]
        groups = groups if len(own) < len(self._all) else groups[:1]
        for number, group in enumerate(groups):
            begin = self.evaluated
            self._end = begin + (self.settings.evaluations - begin) // (len(groups) - number)
            self._walk(starts, group)
        ranked = [self._scored(plan, self._all) for plan in starts]
        self._walked.append(min(ranked, key=lambda each: each.score))

    def _walk(self, starts: Sequence[JointPlan], group: tuple[int, ...]) -> None:
        begin = self.evaluated
        at = best = min((self._scored(plan, group) for plan in starts), key=lambda each: each.score)
        self._walked.append(best)
        while not self._is_over and self.evaluated < self._end:
            window = Window.of(*self.evaluators[0].spans(at.plan), self._rng)
            other = self._searched(at, group, window)
            warmth = _WARM * (_COLD / _WARM) ** ((self.evaluated - begin) / max(1, self._end - begin))
            if other.score < at.score or self._rng.random() < exp((at.score - other.score) / warmth):
                at = other
            if at.score < best.score:
                best = self._walked[-1] = at
            elif best.score < at.score - 4 * warmth:
                at = best

    def _searched(self, at: _Scored, group: tuple[int, ...], window: Window) -> _Scored:
        """The best plan of a descent inside one window."""
        if self._rng.random() < _STRIPPED:
            at = self._score(self._moves.stripped(at.plan, window), group) or at
        for _ in range(_TRIES):
            if self._is_over:
                break
            plan = self._moves.any(at.plan, window)
            if plan is not None and plan != at.plan:
                at = self._score(plan, group, at) or at
        return at

    def _starts(self) -> Iterator[JointPlan]:
        streams = self.evaluators[0].streams
        yield streams
        published = self._published()
        yield published
        for _ in range(len(published.barriers)):
            published = barrier_as_waits(published, 0)
        if self.evaluators[0].cost_if(published) is not None:
            yield published
        members = range(len(self.tables))
        for ranks in itertools.islice(itertools.permutations(members), _MOST_ORDERS if len(members) > 1 else 0):
            yield with_ranks(streams, ranks)
        for m, table in enumerate(self.tables):
            for run in table.splits if table.batch > 1 else ():
                yield msgspec.structs.replace(streams, chunks=(Chunk(m, run[0], run[-1], even_rows(table.batch, 2)),))

    def _published(self) -> JointPlan:
        def progress(evaluated: int, best_ns: float) -> bool:
            self.evaluated = evaluated
            return self._goes_on(best_ns)

        rounds = min(self.settings.rounds, self.settings.evaluations // 4)
        search = Descent(Published(rounds=rounds), self.evaluators[0], progress)
        try:
            search.run()
        finally:  # also when it is interrupted
            self.evaluated = search.evaluated
            self._target = self.evaluators[0].cost(search.best).makespan_ns
            self._best = _Scored(search.best, 0.0, (inf,) * len(self.evaluators))
            self._keep(self._scored(search.best, self._all))
        return search.best

    def _scored(self, plan: JointPlan, group: tuple[int, ...]) -> _Scored:
        """A plan with its score under some beliefs. Raises InvalidValueError when its waits are circular."""
        extra = _COST * (len(plan.chunks) + len(plan.waits) + len(plan.barriers))
        return _Scored(
            plan, extra, tuple([self.evaluators[n].cost(plan).makespan_ns / self._streams[n] for n in group])
        )

    def _score(self, plan: JointPlan, group: tuple[int, ...], than: _Scored | None = None) -> _Scored | None:
        """A plan with its score, or None as soon as it is worse than another one or cannot run."""
        self.evaluated += 1
        if self.evaluated % 16 == 0:
            self._goes_on(self.evaluators[0].cost(self._best.plan).makespan_ns)
        extra = _COST * (len(plan.chunks) + len(plan.waits) + len(plan.barriers))
        times: list[float] = []
        behind = extra - than.extra if than is not None else 0.0
        for n in group:
            cost = self.evaluators[n].cost_if(plan)
            if cost is None:
                return None
            times.append(cost.makespan_ns / self._streams[n])
            if than is not None:
                behind += (times[-1] - than.times[len(times) - 1]) / len(group)
                if behind > _LOOK:
                    return None
        score = _Scored(plan, extra, tuple(times))
        if group is self._all:
            self._keep(score)
        return None if behind > 0 else score

    def _keep(self, found: _Scored) -> None:
        """Update the best plan; `found` is scored under all beliefs."""
        if found.score < self._best.score and found.times[0] * self._streams[0] <= self._target * (1 + 1e-12):
            self._best = found

    def _goes_on(self, best_ns: float) -> bool:
        self._is_over = self._is_over or (self._progress is not None and not self._progress(self.evaluated, best_ns))
        return not self._is_over


def _beliefs(
    settings: JointSearch, tables: Sequence[KernelTable], rules: Occupancy
) -> Iterator[tuple[Sequence[KernelTable], Occupancy]]:
    """Perturbed tables and rules."""
    rng = np.random.default_rng(settings.seed)
    others = {Admission.WHOLE: Admission.FILL, Admission.FILL: Admission.WHOLE}
    for number in range(settings.beliefs):
        wrong = []
        for table in tables:
            times, needs = (rng.lognormal(0.0, by, (table.size, 1)) for by in (settings.times, settings.needs))
            wrong.append(dataclasses.replace(table, duration_ns=table.duration_ns * times, need=table.need * needs))
        is_other = number % 2 == 0 and not rules.keeps_slots
        admission = others[rules.admission] if is_other else rules.admission
        launch_ns = round(rules.launch_ns * rng.uniform(1.0, _LAUNCH))
        yield wrong, dataclasses.replace(rules, admission=admission, launch_ns=launch_ns)
