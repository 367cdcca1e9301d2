"""The section `[[together]]` of plan files: joint plans of models that start together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct
from typing_extensions import override

from cotenant.errors import PlanError
from cotenant.files import convert, to_table
from cotenant.plan_file import FileSection, SectionCheck
from cotenant.techniques.granularity.joint_plan import StoredJointPlan

JOINT_PLANS_KEY = "together"
"""Name of the section, and its key in the file."""


class _Tables(Struct, frozen=True):
    together: tuple[StoredJointPlan, ...]


class JointPlanSection(FileSection):
    """Joint plans, at most one for each set of models, batches and lanes."""

    keys: ClassVar = (JOINT_PLANS_KEY,)
    comment: ClassVar = "# Made by 'cotenant co-schedule'; 'cotenant plan --check' tells whether it holds.\n"

    @override
    def read(self, table: dict[str, Any], where: str) -> tuple[StoredJointPlan, ...]:
        found = convert(table, _Tables, where, PlanError).together
        keys = [each.key for each in found]
        if len(set(keys)) < len(keys):
            twice = next(each for each in keys if keys.count(each) > 1)
            names = ", ".join(f"{model}={batch}" for model, batch in twice[0])
            raise PlanError(
                f"{where}: [[together]] of {names} is there twice, expected one for each set, batches and lanes"
            )
        return found

    @override
    def tables(self, content: Sequence[StoredJointPlan]) -> dict[str, Any]:
        return {JOINT_PLANS_KEY: to_table(content)}

    @override
    def check(self, content: Sequence[StoredJointPlan], roots: Sequence[Path], *, stale: bool | None) -> SectionCheck:
        from cotenant.techniques.granularity.plan.kept import verdict, words_of
        from cotenant.techniques.placement.measured_tasks import read_tasks

        measured = read_tasks(roots, {member.model for each in content for member in each.members}, stale=stale)
        found = [(each, *verdict(each, measured)) for each in content]
        return SectionCheck(
            [fault for _, faults, _ in found for fault in faults],
            [f"{words_of(each)}: it was made from another profile" for each, _, is_stale in found if is_stale],
        )

    @override
    def words(self, content: Sequence[StoredJointPlan]) -> list[str]:
        from cotenant.techniques.granularity.plan.kept import words_of

        return [words_of(each) for each in content]
