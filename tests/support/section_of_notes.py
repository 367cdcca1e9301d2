"""A section of plan files that a package adds: notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from cotenant import registry
from cotenant.errors import PlanError
from cotenant.plan_file import FileSection, SectionCheck, sections


class Notes(FileSection):
    """Notes, of which empty ones do not hold, and old ones are stale."""

    keys: ClassVar = ("author", "notes")
    comment: ClassVar = "# Noted.\n"

    def read(self, table: dict[str, Any], where: str) -> dict[str, Any]:
        if "notes" not in table:
            raise PlanError(f"{where}: notes is missing")
        return table

    def tables(self, content: dict[str, Any]) -> dict[str, Any]:
        return content

    def check(self, content: dict[str, Any], roots: Sequence[Path], *, stale: bool | None) -> SectionCheck:
        assert stale is not None
        faults = [
            f"note {number} is empty in {roots[0].name}" for number, note in enumerate(content["notes"]) if not note
        ]
        return SectionCheck(faults, [note for note in content["notes"] if note == "old"])

    def words(self, content: dict[str, Any]) -> list[str]:
        return [f"note {note!r}" for note in content["notes"]]


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of notes is the only one that is installed; nothing of it is known before and after the block."""

    def points(socket: str) -> list[SimpleNamespace]:
        is_mine = socket == registry.PLAN_SECTIONS
        return [SimpleNamespace(name="notes", value="notes:Notes", load=lambda: Notes)] if is_mine else []

    monkeypatch.setattr(registry, "_entry_points", points)
    sections.cache_clear()
    yield
    sections.cache_clear()
