"""Section of plan files with placements of models."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct
from typing_extensions import override

from cotenant.errors import PlanError
from cotenant.files import convert, to_table
from cotenant.plan_file import FileSection, SectionCheck
from cotenant.techniques.placement.unit_placement import UnitPlacement

PLACEMENT = "placement"
"""Name and key of the section."""


class _Tables(Struct, frozen=True):
    placement: tuple[UnitPlacement, ...]


class PlacementSection(FileSection):
    """Placements. A plan of tenants includes the kept placements of the tenants' models."""

    keys: ClassVar = (PLACEMENT,)
    comment: ClassVar = "# Made by 'cotenant place'; 'cotenant plan --check' tells whether it holds.\n"

    @override
    def read(self, table: dict[str, Any], where: str) -> tuple[UnitPlacement, ...]:
        return convert(table, _Tables, where, PlanError).placement

    @override
    def tables(self, content: Sequence[UnitPlacement]) -> dict[str, Any]:
        return {PLACEMENT: to_table(content)}

    @override
    def kept(self, root: Path, models: Collection[str]) -> tuple[UnitPlacement, ...]:
        """Kept placements of unchanged models. Raises ProfileError for damaged files."""
        from cotenant.techniques.placement.measured_tasks import read_placements

        return tuple(each for each in read_placements(root) if each.model in models)

    @override
    def check(self, content: Sequence[UnitPlacement], roots: Sequence[Path], *, stale: bool | None) -> SectionCheck:
        from cotenant.techniques.placement.measured_tasks import read_tasks
        from cotenant.techniques.placement.plan.judge import placement_faults

        measured = read_tasks(roots, {each.model for each in content}, stale=stale)
        return SectionCheck(
            [fault for each in content for fault in placement_faults(each, measured.get(each.model, {}))]
        )

    @override
    def words(self, content: Sequence[UnitPlacement]) -> list[str]:
        return [
            f"{each.model} placed on {each.where}, {each.latency_ns / 1e6:.3g} ms instead of "
            f"{each.sequential_ns / 1e6:.3g}"
            for each in content
        ]
