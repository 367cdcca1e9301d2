"""Sections of plan files: a package adds one; a file that nobody reads is refused; a technique may be absent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant import registry
from cotenant.errors import PlanError
from cotenant.plan_file import parse_sections, read_sections, sections, sections_text
from section_of_notes import noted

BUILT_IN = tuple(registry.BUILT_IN[registry.PLAN_SECTIONS])


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of notes; nothing of it is known before and after a test."""

    with noted(monkeypatch):
        yield
    registry.built_in.cache_clear()


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


def test_a_technique_that_is_not_there_has_no_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name.startswith("cotenant.techniques") else name)
    registry.built_in.cache_clear()
    plan = tmp_path / "plan.toml"
    plan.write_text('format = "cotenant-plan/1"\n[[placement]]\nmodel = "net"\n')
    with pytest.raises(PlanError, match="unknown field `placement`, expected one of format, author, notes; "):
        read_sections(plan)
