"""The planner protocol for joint plans, its result, and the two baselines that need no search.

Source: GACER (2023), section 4; section 5.1 for streams and the sequential execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from typing_extensions import override

from cotenant.techniques.granularity.joint_plan import JointPlan, Wait
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.granularity.plan.joint_bound import bound_of
from cotenant.techniques.granularity.predict.evaluator import JointEvaluator
from cotenant.techniques.granularity.predict.rules import Occupancy


class JointProgress(Protocol):
    """Callback of searches: the number of evaluated plans, and the best makespan in ns."""

    def __call__(self, evaluated: int, best_ns: float) -> bool:
        """Whether to go on; False ends the search with the best plan so far."""
        ...


@dataclass(frozen=True, slots=True)
class FoundJointPlan:
    """A plan of a set with its reference times, all predicted, in ns.

    `bound_ns` is a lower bound for all plans, with chunks too. `alternatives` are the best distinct plans, the plan
    itself first; a trial run on the device can choose among them.
    """

    plan: JointPlan
    makespan_ns: float
    streams_ns: float
    sequential_ns: float
    bound_ns: float
    evaluated: int
    alternatives: tuple[JointPlan, ...]

    @property
    def gap_pct(self) -> float:
        """Upper bound on the distance of the makespan to the optimum, in percent."""
        return 100 * (self.makespan_ns / self.bound_ns - 1)


class JointPlanner(Protocol):
    """Searches a plan of models that start together. Deterministic; `progress` or KeyboardInterrupt ends it early with
    the best plan so far."""

    @property
    def name(self) -> str:
        """Name in tables."""
        ...

    def find(
        self, tables: Sequence[KernelTable], rules: Occupancy, progress: JointProgress | None = None
    ) -> FoundJointPlan:
        """A plan of the set. Raises InvalidValueError for a set without members."""
        ...


def found(
    evaluator: JointEvaluator, plan: JointPlan, evaluated: int, alternatives: Sequence[JointPlan] = ()
) -> FoundJointPlan:
    """A plan with its reference times."""
    return FoundJointPlan(
        plan,
        evaluator.cost(plan).makespan_ns,
        evaluator.cost(evaluator.streams).makespan_ns,
        evaluator.sequential_ns(),
        bound_of(evaluator.tables, evaluator.rules),
        evaluated,
        tuple(dict.fromkeys((plan, *alternatives))),
    )


def in_turn(streams: JointPlan) -> JointPlan:
    """One member after another, as a plan with waits."""
    ends = [member.units for member in streams.members]
    waits = tuple(Wait(m, 0, m - 1, ends[m - 1]) for m in range(1, len(ends)))
    return msgspec.structs.replace(streams, waits=waits)


@dataclass(frozen=True, slots=True)
class Streams(JointPlanner):
    """All members at once, each as one stream: the native concurrency of the device."""

    name: str = "streams"

    @override
    def find(
        self, tables: Sequence[KernelTable], rules: Occupancy, progress: JointProgress | None = None
    ) -> FoundJointPlan:
        evaluator = JointEvaluator(tables, rules)
        return found(evaluator, evaluator.streams, 1)


@dataclass(frozen=True, slots=True)
class SequentialMembers(JointPlanner):
    """One member after another."""

    name: str = "sequential"

    @override
    def find(
        self, tables: Sequence[KernelTable], rules: Occupancy, progress: JointProgress | None = None
    ) -> FoundJointPlan:
        evaluator = JointEvaluator(tables, rules)
        return found(evaluator, in_turn(evaluator.streams), 1)
