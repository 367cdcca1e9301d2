"""What finds plans of models that start together: the protocol, what is found, and the two plans that need no search.

Source: GACER (2023), section 4, and section 5.1 for streams and the sequential execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cotenant.techniques.granularity.joint_plan import JointPlan, Wait
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.granularity.plan.joint_bound import bound_of
from cotenant.techniques.granularity.predict.evaluator import JointEvaluator
from cotenant.techniques.granularity.predict.rules import Occupancy


class JointProgress(Protocol):
    """Told by searches how many plans they evaluated and the makespan of the best; gives False to end them with it."""

    def __call__(self, evaluated: int, best_ns: float) -> bool:
        """Whether to go on."""
        ...


@dataclass(frozen=True, slots=True)
class FoundJointPlan:
    """A plan of a set, and what it is to be judged by: all times as believed, in ns.

    `bound_ns` is below every plan, also those with chunks. `alternatives` are the best distinct plans that were met,
    the plan itself first, so that a device can choose among them.
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
        """How far at most the makespan is above that of the best plan."""
        return 100 * (self.makespan_ns / self.bound_ns - 1)


class JointPlanner(Protocol):
    """Finds a plan of models that start together. Deterministic; `progress` may end it with the best so far, and so
    does KeyboardInterrupt."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def find(
        self, tables: Sequence[KernelTable], rules: Occupancy, progress: JointProgress | None = None
    ) -> FoundJointPlan:
        """A plan of the set. Raises InvalidValueError for a set without members."""
        ...


def found(
    evaluator: JointEvaluator, plan: JointPlan, evaluated: int, alternatives: Sequence[JointPlan] = ()
) -> FoundJointPlan:
    """A plan beside what it is to be judged by."""
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
    """One member after another, as a plan: each begins when the one before has ended."""
    ends = [member.units for member in streams.members]
    waits = tuple(Wait(m, 0, m - 1, ends[m - 1]) for m in range(1, len(ends)))
    return msgspec.structs.replace(streams, waits=waits)


@dataclass(frozen=True, slots=True)
class Streams:
    """All members at once, each as one stream: what a device makes of it."""

    name: str = "streams"

    def find(
        self, tables: Sequence[KernelTable], rules: Occupancy, progress: JointProgress | None = None
    ) -> FoundJointPlan:
        """See JointPlanner."""
        evaluator = JointEvaluator(tables, rules)
        return found(evaluator, evaluator.streams, 1)


@dataclass(frozen=True, slots=True)
class SequentialMembers:
    """One member after another."""

    name: str = "sequential"

    def find(
        self, tables: Sequence[KernelTable], rules: Occupancy, progress: JointProgress | None = None
    ) -> FoundJointPlan:
        """See JointPlanner."""
        evaluator = JointEvaluator(tables, rules)
        return found(evaluator, in_turn(evaluator.streams), 1)
