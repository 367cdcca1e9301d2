"""The words of the package: none that its style bans, and sentences that can be read once."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import cotenant
from bench._prose import LONG_SENTENCE, banned, bans, sentence_words, sentences

PACKAGE = Path(cotenant.__file__).parent
BANS = bans()


def test_no_word_of_the_list_is_used() -> None:
    found = [each for path in sorted(PACKAGE.rglob("*.py")) for each in banned(path, BANS)]
    lines = "\n".join(f"{each.path.relative_to(PACKAGE)}:{each.line}: {each.word!r} ({each.instead})" for each in found)
    assert not found, lines


def test_docstrings_have_short_sentences() -> None:
    counts = [
        count
        for path in sorted(PACKAGE.rglob("*.py"))
        for _, count, _ in sentence_words(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(counts) > 5_000
    assert np.percentile(counts, 95) <= LONG_SENTENCE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"""The tenant whose query waits."""\n', ["whose"]),
        ("# engineers who run models make sure of it\n", []),
        ("held_back = 1\nsure_ns = 2\nmeasured = 3\n", ["held back", "sure"]),
        ('"""What is wrong with it."""\nx = "what has run"\n', ["what has"]),
        ('f"{cause}: nobody waits"\n', ["nobody"]),
    ],
)
def test_which_words_are_found(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert [each.word.lower() for each in banned(path, BANS)] == words


def test_code_in_pages_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("`--sure` is an option, and `held_back` a name.\nIt is told.\n")
    assert [(each.line, each.word) for each in banned(path, BANS)] == [(2, "told")]


def test_what_a_sentence_is() -> None:
    text = "One. Two words: Three\nlines; it goes on.\n\n- a list\n- of two\n\nSee `core.x`. 5 us."
    assert sentences(text) == [
        *("One.", "Two words:", "Three lines; it goes on.", "- a list", "- of two", "See `core.x`.", "5 us.")
    ]
