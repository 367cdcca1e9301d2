"""The prose of the package: words that the style bans, and the lengths of sentences in docstrings. Pure.

`python -m bench._prose PATH...` lists what is left in these files.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

WORDS = Path(__file__).resolve().parents[1] / "tests" / "architecture" / "words.toml"
LONG_SENTENCE = 25
"""Words; see docs/glossary.md for the terms that replace long descriptions."""
_NAME_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
_CODE = re.compile(r"`[^`]*`")
_EXAMPLE = re.compile(r"^ *>>> .*$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`\"(*\d])|(?<=[.!?])\s*$|\n\s*\n|\n\s*(?=[-*] |\d+\. |\|)")


class Found(NamedTuple):
    """A banned word: where it stands, what it is, and the term to use instead."""

    path: Path
    line: int
    word: str
    instead: str
    text: str


class Ban(NamedTuple):
    """A banned word. `where`: "prose", "names" or "both". `allowed`: contexts in which it has its ordinary meaning."""

    word: re.Pattern[str]
    instead: str
    where: str
    allowed: re.Pattern[str] | None


def bans(path: Path = WORDS) -> list[Ban]:
    """The word list."""
    given = tomllib.loads(path.read_text(encoding="utf-8"))["word"]
    return [
        Ban(
            re.compile(rf"\b(?:{each['is']})\b", re.IGNORECASE),
            each["instead"],
            each["where"],
            re.compile("|".join(each["allowed"]), re.IGNORECASE) if each.get("allowed") else None,
        )
        for each in given
    ]


def texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line, text and whether it is a name: the identifiers, comments and strings of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for at, line in enumerate(token.string.splitlines()):
                yield token.start[0] + at, line, False
        elif token.type == tokenize.NAME:
            yield token.start[0], " ".join(part.lower() for part in _NAME_PARTS.findall(token.string)), True


def banned(path: Path, known: list[Ban]) -> list[Found]:
    """Banned words of a Python module, or of a page of text: there outside of code."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        lines = texts(source)
    else:
        lines = ((at, _CODE.sub("", line), False) for at, line in enumerate(source.splitlines(), 1))
    found = []
    for number, text, is_name in lines:
        for ban in known:
            if ban.where == ("prose" if is_name else "names") or (match := ban.word.search(text)) is None:
                continue
            if ban.allowed is not None:
                match = ban.word.search(ban.allowed.sub(" ", text))
            if match is not None:
                found.append(Found(path, number, match.group(), ban.instead, text.strip()))
    return found


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions, and of the names that a bare string follows; with their lines."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            for each in body:
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                    value = each.value.value
                    if isinstance(value, str):
                        yield each.lineno, value


def sentences(text: str) -> list[str]:
    """The sentences of a text. Entries of lists, and what begins anew after a colon, count by themselves."""
    return [" ".join(part.split()) for part in _SENTENCE_END.split(_EXAMPLE.sub("\n", text)) if part and part.strip()]


def sentence_words(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    """Line of the docstring, number of words, and text of every sentence."""
    for line, text in docstrings(tree):
        for sentence in sentences(text):
            yield line, len(sentence.split()), sentence


def main() -> None:
    """List banned words and long sentences of the files and folders that are named."""
    known = bans()
    for name in sys.argv[1:]:
        root = Path(name)
        for path in [root] if root.is_file() else sorted([*root.rglob("*.py"), *root.rglob("*.md")]):
            for found in banned(path, known):
                print(f"{found.path}:{found.line}: {found.word!r}: {found.instead}: {found.text}")
            if path.suffix == ".py":
                for line, count, text in sentence_words(ast.parse(path.read_text(encoding="utf-8"))):
                    if count > LONG_SENTENCE:
                        print(f"{path}:{line}: {count} words: {text}")


if __name__ == "__main__":
    main()
