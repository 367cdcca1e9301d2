"""The section of plan files with placements: where the units of models run in shares of several cores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct

from cotenant.errors import PlanError
from cotenant.files import convert, to_table
from cotenant.plan_file import FileSection, SectionCheck
from cotenant.techniques.placement.unit_placement import UnitPlacement

PLACEMENT = "placement"
"""Name and key of the section."""


class _Tables(Struct, frozen=True):
    placement: tuple[UnitPlacement, ...]


class PlacementSection(FileSection):
    """Placements. A plan of tenants takes those that the repository keeps of the tenants' models."""

    keys: ClassVar = (PLACEMENT,)
    comment: ClassVar = "# Made by 'cotenant place'; 'cotenant plan --check' tells whether it holds.\n"

    def read(self, table: dict[str, Any], where: str) -> tuple[UnitPlacement, ...]:
        """The placements. Whether they hold is for `check` to say."""
        return convert(table, _Tables, where, PlanError).placement

    def tables(self, content: Sequence[UnitPlacement]) -> dict[str, Any]:
        """An array of tables."""
        return {PLACEMENT: to_table(content)}

    def kept(self, root: Path, models: Collection[str]) -> tuple[UnitPlacement, ...]:
        """The placements of models that did not change since. Raises ProfileError for files that are broken."""
        from cotenant.techniques.placement.measured_tasks import read_placements

        return tuple(each for each in read_placements(root) if each.model in models)

    def check(self, content: Sequence[UnitPlacement], roots: Sequence[Path], *, stale: bool | None) -> SectionCheck:
        """Judge each by the tasks that were measured of its model."""
        from cotenant.techniques.placement.measured_tasks import read_tasks
        from cotenant.techniques.placement.plan.judge import placement_faults

        measured = read_tasks(roots, {each.model for each in content}, stale=stale)
        return SectionCheck(
            [fault for each in content for fault in placement_faults(each, measured.get(each.model, {}))]
        )

    def words(self, content: Sequence[UnitPlacement]) -> list[str]:
        """Model, share, and time before and after."""
        return [
            f"{each.model} placed on {each.where}, {each.latency_ns / 1e6:.3g} ms instead of "
            f"{each.sequential_ns / 1e6:.3g}"
            for each in content
        ]
