"""Sections of plan files: a package adds one; a file that nobody reads is refused; a technique may be absent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from commands import Run
from cotenant import registry
from cotenant.errors import PlanError
from cotenant.plan_file import FileSection, SectionCheck, parse_sections, read_sections, sections, sections_text

BUILT_IN = tuple(registry.BUILT_IN[registry.PLAN_SECTIONS])


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


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of notes; nothing of it is known before and after a test."""

    def points(socket: str) -> list[SimpleNamespace]:
        is_mine = socket == registry.PLAN_SECTIONS
        return [SimpleNamespace(name="notes", value="notes:Notes", load=lambda: Notes)] if is_mine else []

    monkeypatch.setattr(registry, "_entry_points", points)
    sections.cache_clear()
    yield
    registry.built_in.cache_clear()
    sections.cache_clear()


def test_a_section_of_another_package_stands_behind_those_of_this_one() -> None:
    assert tuple(sections()) == (*BUILT_IN, "notes")
    contents = {"notes": {"author": "me", "notes": ["a", "b"]}}
    text = sections_text(contents)
    assert text == '# Noted.\nformat = "cotenant-plan/1"\nauthor = "me"\nnotes = ["a", "b"]\n'
    assert parse_sections(text, "plan.toml") == contents


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "format is None, expected 'cotenant-plan/1'"),
        ('format = "cotenant-plan/9"\n', "format is 'cotenant-plan/9'"),
        ('format = "cotenant-plan/1"\n', "has no section, expected at least one of .*, notes"),
        ('format = "cotenant-plan/1"\nauthor = "me"\n', "notes is missing"),
        (
            'format = "cotenant-plan/1"\nnotes = []\nchapters = []\n',
            "unknown field `chapters`, expected one of format, .*, author, notes; other sections need the package",
        ),
    ],
)
def test_a_file_of_no_section_is_refused_with_a_sentence(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=rf"^plan\.toml: .*{words}"):
        parse_sections(text, "plan.toml")


def test_the_check_of_a_file_asks_its_sections(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(sections_text({"notes": {"notes": ["new", "old"]}}))
    status, out, _ = run("plan", "--check", plan, "--profiles", tmp_path / "models")
    assert (status, out) == (0, f"{plan} holds: note 'new', note 'old'.\nold\n")
    plan.write_text(sections_text({"notes": {"notes": ["old", ""]}}))
    status, out, _ = run("plan", "--check", plan, "--profiles", tmp_path / "models")
    assert (status, out) == (1, f"{plan} does not hold, 1 violation:\n  note 1 is empty in models\nold\n")
    status, out, _ = run("plan", "--check", plan, "--profiles", tmp_path / "models", "--json")
    fault = "note 1 is empty in models"
    assert json.loads(out) == {"holds": False, "violations": [fault], "stale": ["old"], "plan_file": str(plan)}


def test_options_of_a_technique_that_is_not_there_are_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name.startswith("cotenant.techniques") else name)
    registry.built_in.cache_clear()
    for option in ("placement", "together"):
        status, _, err = run("plan", tmp_path, f"--{option}", "net")
        assert (status, f"plans of the section '{option}' need a package that is not installed" in err) == (2, True)
    status, _, err = run("plan", tmp_path / "tenants.toml", "--profiles", tmp_path)
    assert (status, "plans of the section 'tenants' need a package" in err) == (2, True)
    plan = tmp_path / "plan.toml"
    plan.write_text('format = "cotenant-plan/1"\n[[placement]]\nmodel = "net"\n')
    with pytest.raises(PlanError, match="unknown field `placement`, expected one of format, author, notes; "):
        read_sections(plan)
