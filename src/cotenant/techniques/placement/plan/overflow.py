"""Placement strategy `ours`: anytime search over placement and order, by multilevel annealing.

1. Start from the best plan of all fast strategies (`usual_plans`), in their order and in that of upward ranks.
2. From coarse to fine contractions (`contract`), anneal the plan (`annealing`), with restarts of falling heat, and
   expand it. At last anneal all tasks, from the start plan and from the best plan.
3. Improve small graphs by the exact solver (`exact`), if it is installed.
4. With noise, return the plan of the least mean cost, of the plans no worse than sequential and Comm+SD.

The cost of the result is never above that of the sequential execution and of Comm+SD.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib.util import find_spec
from random import Random

import numpy as np
from typing_extensions import override

from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.placement.plan import annealing, plan_loop
from cotenant.techniques.placement.plan.annealing import WINDOW
from cotenant.techniques.placement.plan.bounds import bound_of
from cotenant.techniques.placement.plan.contract import levels_of
from cotenant.techniques.placement.plan.exact import IntervalSearch
from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan, Timeline
from cotenant.techniques.placement.plan.heft import Heft, upward_ranks
from cotenant.techniques.placement.plan.plan_loop import IMPOSSIBLE, PENALTY, UNIT, FlatTaskPlan
from cotenant.techniques.placement.plan.strategies import (
    CommSlowdown,
    PlacementStrategy,
    Progress,
    QueueDelay,
    Sequential,
    Slowdown,
    based_on,
    queued,
)

FANS = (12, 4, 2)
"""Neighbours that make a hub, by level of contraction: whole branches, segments between forks, chains."""
_HEATS = (1.0, 0.3, 0.1, 0.03)
"""Heat at the start of each restart of a level, in tasks of mean size."""
_CHUNK = 300_000
"""Evaluated tasks between two checks of the clock (plain Python: a hundredth of it)."""
_EXACT_SIZE = 200
_SCENARIOS = 16


class Goal(Enum):
    """Objective of a placement."""

    LATENCY = "latency"
    PERIOD = "period"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class PlacementGoal:
    """Objective to minimise: the makespan, the busy time of the busiest resource (throughput), or memory of a space.

    `latency_bound_ns`: limit of the makespan. Secondary terms: PERIOD adds makespan / 64, MEMORY adds a byte for every
    1,024 ns of makespan. Raises InvalidValueError for MEMORY without a `space`.
    """

    goal: Goal = Goal.LATENCY
    space: str = ""
    latency_bound_ns: int | None = None

    def __post_init__(self) -> None:
        if self.goal is Goal.MEMORY and not self.space:
            raise InvalidValueError("goal of a placement", "space", self.space, "the space of the memory to minimise")

    def weights(self, problem: PlacementProblem) -> list[int]:
        """Weights for `plan_loop.cost_of`. Raises InvalidValueError for an unknown space."""
        shares = {Goal.LATENCY: [UNIT, 0, 0], Goal.PERIOD: [UNIT // 64, UNIT, 0], Goal.MEMORY: [1, 0, UNIT]}
        space = 0
        if self.space:
            if self.space not in problem.space_names:
                expected = f"one of {', '.join(problem.space_names)}"
                raise InvalidValueError("goal of a placement", "space", self.space, expected)
            space = problem.space_names.index(self.space)
        return [*shares[self.goal], space, -1 if self.latency_bound_ns is None else self.latency_bound_ns]


@dataclass(frozen=True, slots=True)
class FoundPlacement:
    """A plan with its timeline, a lower bound of the makespan, and the strategy of its start plan (`began_as`).

    `is_proved`: the makespan is proved minimal. `evaluated`: number of evaluated plans.
    """

    plan: TaskPlan
    timeline: Timeline
    bound_ns: int
    is_proved: bool
    evaluated: int
    began_as: str

    @property
    def gap_pct(self) -> float:
        """Largest possible excess over the optimum, in percent of the bound."""
        return 100.0 * (self.timeline.makespan_ns / self.bound_ns - 1) if self.bound_ns else 0.0


@dataclass(frozen=True, slots=True)
class OverflowSearch(PlacementStrategy):
    """Multilevel annealing, see the module.

    - `steps`: moves at each level; `seconds`: time limit, None for none. The result is deterministic for a `seed` if
      neither `seconds` nor the exact solver's limit ends the search.
    - `noise`: coefficient of variation of service times, under which the best plans of the levels are compared by
      their mean cost. With 0, the plan of the least cost is returned.
    - `exact_seconds`: time limit of the exact solver, for graphs of up to 200 tasks; 0 for no exact solver.
    """

    goal: PlacementGoal = PlacementGoal()
    steps: int = 100_000
    seconds: float | None = None
    seed: int = 1
    noise: float = 0.0
    exact_seconds: float = 0.0
    progress: Progress | None = None
    name: str = "ours"

    @override
    def place(self, problem: PlacementProblem) -> TaskPlan:
        return self.solve(problem).plan

    def solve(self, problem: PlacementProblem, more: Sequence[PlacementStrategy] = ()) -> FoundPlacement:
        """Search; `more`: further strategies for start plans.

        Raises PlanError with the broken limits if no feasible plan was found.
        """
        return _OverflowRun(self, problem).run(more)


class _OverflowRun:
    """State of one search."""

    def __init__(self, settings: OverflowSearch, problem: PlacementProblem) -> None:
        self.settings = settings
        self.problem = problem
        self.weights = settings.goal.weights(problem)
        self.is_latency = settings.goal.goal is Goal.LATENCY
        self.began = time.monotonic()
        self.evaluated = 0
        self.is_stopped = False
        bound = bound_of(problem)
        self.bound = bound.makespan_ns
        self.best: TaskPlan | None = None
        self.cost = IMPOSSIBLE
        self.candidates: list[TaskPlan] = []

    def run(self, more: Sequence[PlacementStrategy]) -> FoundPlacement:
        """Run all steps of the search."""
        if self.bound >= IMPOSSIBLE:
            raise PlanError("no placement can run: tasks exchange tensors between devices without a link")
        began_as, guard = self._start(more)
        levels = levels_of(self.problem, FANS) if self.problem.size > WINDOW else []
        began_with = self.best
        phases = len(levels) + 2 if levels else 1
        for number, level in enumerate(levels):
            smaller = PlacementProblem(level.graph, self.problem.loops)
            assert self.best is not None
            start = level.shrink(self.best, smaller)
            plans = [start, smaller.dispatch(start.place, upward_ranks(smaller))]
            found = self._anneal(smaller, plans, [[i] for i in range(smaller.size)], number, phases)
            self._offer(level.expand(found))
            self._offer(self.problem.dispatch(self.candidates[-1].place, upward_ranks(self.problem)))
        assert self.best is not None
        blocks = [list(block) for block in levels[0].blocks] if levels else [[i] for i in range(self.problem.size)]
        if levels and began_with is not None:  # plans of whole branches may lead away from good plans of single tasks
            self._offer(self._anneal(self.problem, [began_with], blocks, phases - 2, phases))
        self._offer(self._anneal(self.problem, [self.best], blocks, phases - 1, phases))
        proved = self._exact()
        plan = self._robust(guard)
        line = self.problem.evaluate(plan)
        assert line is not None
        cost = self._cost(plan)
        if cost >= PENALTY:
            raise PlanError(self._refusal(line))
        proved = (proved or line.makespan_ns <= self.bound) and self.is_latency
        return FoundPlacement(plan, line, min(self.bound, line.makespan_ns), proved, self.evaluated, began_as)

    def _start(self, more: Sequence[PlacementStrategy]) -> tuple[str, int]:
        """Offer all start plans; returns the name of the best, and the least cost of sequential and Comm+SD."""
        problem = self.problem
        plans = [*usual_plans(problem), *((other.name, other.place(problem)) for other in more)]
        costs: dict[str, int] = {}
        for name, plan in plans:
            costs[name] = self._offer(plan)
            self._offer(problem.dispatch(plan.place, upward_ranks(problem)))
        return min(costs, key=costs.__getitem__), min(costs["sequential"], costs["comm_sd"])

    def _offer(self, plan: TaskPlan) -> int:
        cost = self._cost(plan)
        self.evaluated += 1
        self.candidates.append(plan)
        if cost < self.cost or self.best is None:
            self.best, self.cost = plan, cost
        return cost

    def _cost(self, plan: TaskPlan) -> int:
        problem = self.problem
        line = problem.evaluate(plan)
        if line is None:
            return IMPOSSIBLE
        ints = problem.loops.ints
        return int(
            problem.loops[plan_loop].cost_of(problem.flat, problem.scratch, line.makespan_ns, ints(self.weights))
        )

    def _anneal(
        self,
        problem: PlacementProblem,
        starts: Iterable[TaskPlan],
        blocks: list[list[int]],
        level: int,
        levels: int,
    ) -> TaskPlan:
        """The best plan of a level, annealed from the best of some start plans."""
        loops, size = problem.loops, problem.size
        ints = loops.ints
        weights = ints(self.weights)
        best, least = None, IMPOSSIBLE + 1
        for plan in starts:
            line = problem.evaluate(plan)
            makespan = IMPOSSIBLE if line is None else line.makespan_ns
            cost = int(loops[plan_loop].cost_of(problem.flat, problem.scratch, makespan, weights))
            if cost < least:
                best, least = plan, cost
        assert best is not None
        starts_at, flat_blocks = [0], []
        for block in blocks:
            flat_blocks += block
            starts_at.append(len(flat_blocks))
        table = [len(blocks), *(len(starts_at) + 1 + at for at in starts_at), *flat_blocks]
        fixed = [ints(table), weights]
        seed = ints([1 + Random(f"{self.settings.seed} {level}").randrange(2**31 - 2)])
        flat_best = FlatTaskPlan(ints(best.order), ints(best.place), ints([0] * size))
        costs = ints([least, least])
        chunk = max(50, _CHUNK // min(size, WINDOW) // (1 if loops.is_compiled else 100))
        for restart, share in enumerate(_HEATS):
            order, place = flat_best.order.copy(), flat_best.place.copy()
            position = [0] * size
            for at, i in enumerate(order):
                position[i] = at
            walked = FlatTaskPlan(order, place, ints(position))
            costs[0] = costs[1]
            steps = self.settings.steps // len(_HEATS)
            heat = share * (int(costs[1]) % PENALTY) * len(problem.lane_names) / size
            done, gone = 0, 0.0
            began = time.monotonic()
            until = self._until(level, levels, restart)
            while done < steps and gone < 1.0 and not self._is_over():
                todo = min(chunk, steps - done)
                # The heat falls with the used share of steps or of time, whichever is larger.
                rate = gone / done if done else 1 / steps
                heats = ints([int(heat * (1 - gone)), int(heat * max(0.0, 1 - gone - rate * todo))])
                self.evaluated += int(
                    loops[annealing].anneal(
                        *(problem.flat, problem.scratch, problem.view, walked, flat_best),
                        *(*fixed, seed, heats, todo, costs),
                    )
                )
                done += todo
                gone = done / steps
                if until is not None:
                    now = time.monotonic()
                    gone = max(gone, (now - began) / (until - began) if until > now else 1.0)
        return TaskPlan(tuple(map(int, flat_best.place)), tuple(map(int, flat_best.order)))

    def _until(self, level: int, levels: int, restart: int) -> float | None:
        """End of a restart of a level: contracted levels share 30 % of the time, the two of all tasks the rest."""
        settings = self.settings
        if settings.seconds is None:
            return None
        ends = [0.0, *(0.3 * (number + 1) / (levels - 2) for number in range(levels - 2)), 0.65, 1.0]
        first, last = ends[level : level + 2] if levels > 1 else (0.0, 1.0)
        share = first + (last - first) * (restart + 1) / len(_HEATS)
        return self.began + max(0.0, settings.seconds - settings.exact_seconds) * share

    def _is_over(self) -> bool:
        settings = self.settings
        if self.is_latency and self.cost <= self.bound:
            return True
        if not self.is_stopped and settings.progress is not None:
            self.is_stopped = not settings.progress(self.evaluated, min(self.cost, IMPOSSIBLE), self.bound)
        return self.is_stopped

    def _exact(self) -> bool:
        settings, problem = self.settings, self.problem
        is_wanted = settings.exact_seconds > 0 and self.is_latency and problem.size <= _EXACT_SIZE
        if not is_wanted or self.is_stopped or self.cost <= self.bound or find_spec("ortools") is None:
            return False
        try:
            solved = IntervalSearch(settings.exact_seconds, seed=settings.seed).solve(problem, self.best)
        except PlanError:
            return False
        self.bound = max(self.bound, solved.bound_ns)
        self._offer(solved.plan)
        return self.cost <= self.bound

    def _robust(self, guard: int) -> TaskPlan:
        """The candidate of the least mean cost under noise, of those with a cost up to `guard` without noise."""
        assert self.best is not None
        if self.settings.noise <= 0:
            return self.best
        plans = [plan for plan in dict.fromkeys(self.candidates) if self._cost(plan) <= max(guard, self.cost)]
        return min(plans, key=lambda plan: (self.mean_cost(plan), self._cost(plan)))

    def mean_cost(self, plan: TaskPlan) -> float:
        """Mean cost under noise: each task's time has its own random factor, the same for all plans."""
        problem, settings = self.problem, self.settings
        ints = problem.loops.ints
        total = 0
        for scenario in range(_SCENARIOS):
            service = noisy(problem, settings.noise, settings.seed * 1000 + scenario)
            flat = problem.flat._replace(service=ints(service))
            makespan = problem.loops[plan_loop].evaluate(flat, problem.scratch, ints(plan.order), ints(plan.place))
            total += int(problem.loops[plan_loop].cost_of(flat, problem.scratch, makespan, ints(self.weights)))
        return total / _SCENARIOS

    def _refusal(self, line: Timeline) -> str:
        problem, bound = self.problem, self.settings.goal.latency_bound_ns
        broken = [
            f"{name} takes {held} bytes, the limit is {limit}"
            for name, held, limit in zip(problem.space_names, line.used_bytes, problem.limits, strict=True)
            if 0 <= limit < held
        ]
        if bound is not None and line.makespan_ns > bound:
            broken.append(f"the latency is {line.makespan_ns} ns, the bound {bound}")
        return f"no placement was found within the limits; in the best one, {' and '.join(broken)}"


@lru_cache(maxsize=4)
def usual_plans(problem: PlacementProblem) -> tuple[tuple[str, TaskPlan], ...]:
    """Start plans of every search, by name: of all fast strategies, and with all tasks on one device."""
    others: list[PlacementStrategy] = [Sequential(), QueueDelay(moves_all=True), QueueDelay(), Slowdown()]
    others += [CommSlowdown(as_published=True), CommSlowdown(), Heft()]
    plans = [(other.name, other.place(problem)) for other in others]
    for device, name in enumerate(problem.device_names):
        plans.append((f"all on {name}", queued(problem, based_on(problem, device))))
    return tuple(plans)


def noisy(problem: PlacementProblem, cv: float, seed: int) -> list[int]:
    """Service times by task and device, multiplied by a log-normal factor of mean 1 and this variation per task."""
    sigma = np.sqrt(np.log1p(cv * cv))
    factors = np.random.default_rng(seed).lognormal(-sigma * sigma / 2, sigma, problem.size)
    times = np.array(problem.service)
    noised: list[int] = np.where(times >= 0, np.rint(times * factors[:, None]), -1).astype(np.int64).ravel().tolist()
    return noised
