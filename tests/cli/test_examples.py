"""The examples print what the documentation shows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = sorted((EXAMPLES / "output").glob("*.txt"))


@pytest.mark.parametrize("expected", PRINTED, ids=lambda path: path.stem)
def test_example_prints_what_is_recorded(expected: Path) -> None:
    script = EXAMPLES / f"{expected.stem}.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == expected.read_text(encoding="utf-8")


def test_every_example_is_checked() -> None:
    own_test = {"read_picture", "application", "wordpiece"}  # trained models: see tests/zoo
    assert {path.stem for path in EXAMPLES.glob("*.py")} - own_test == {path.stem for path in PRINTED}


def test_examples_import_the_public_names_alone() -> None:
    found = {}
    for path in EXAMPLES.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imports = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        imports += [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
        found[path.stem] = [name for name in imports if name.startswith("cotenant.")]
    assert len(found) >= 5
    assert set(map(tuple, found.values())) == {()}


def test_the_page_on_the_design_shows_the_recorded_output() -> None:
    page = (EXAMPLES.parent / "docs" / "design.md").read_text(encoding="utf-8")
    assert (EXAMPLES / "output" / "one_query.txt").read_text(encoding="utf-8") in page
