"""The page on problems of models names all of them, and none that the code does not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant.repository.foreign import FOREIGN

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "cotenant"
PAGE = (ROOT / "docs" / "model-problems.md").read_text("utf-8")
MODULES = (
    "repository/model_versions.py",
    "measure/opened_model.py",
    "measure/inputs.py",
    "measure/samples.py",
    "measure/merging_trial.py",
    "measure/loader_process.py",
    "measure/verdict.py",
    "wire/model_limits.py",
    "execute/open_model.py",
    "execute/contents.py",
    "execute/onnx/segment_store.py",
    "execute/onnx/segment_session.py",
    "execute/onnx/segments.py",
    "execute/torch/archive.py",
    "graph/onnx.py",
)
"""Modules that find the problems of a version while it is judged."""
ERRORS = {"ConfigError", "UnknownModelError", "ModelError", "GraphError", "VersionLoadError", "_LostError"}
ELSEWHERE = {
    "holds no models to profile": "of a repository",
    "is not a directory, expected a model repository": "of a repository",
    "no model has a valid profile": "of campaigns after the first",
    "it has been closed": "of a model that was opened",
    "shapes name an input": "checked before the file: names input",
    "cannot have shape": "checked before the file: the model takes",
}
"""Errors that judging a version does not raise, or that another one comes before."""


def texts(node: ast.AST) -> str:
    """The constant text of an expression, with a gap for each value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "\0"
    if isinstance(node, ast.JoinedStr):
        return "".join(texts(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "\0"
    return "\0".join(texts(part) for part in ast.iter_child_nodes(node))


def problems() -> Iterator[tuple[str, str]]:
    """The place and the text of each problem: arguments of errors, and what is added to lists of faults."""
    for module in MODULES:
        tree = ast.parse((SOURCES / module).read_text("utf-8"))
        named = {
            target.id: texts(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant | ast.JoinedStr)
        }
        for node in ast.walk(tree):
            found: list[ast.expr] = []
            if isinstance(node, ast.Call):
                function = node.func
                if (isinstance(function, ast.Name) and function.id in ERRORS) or (
                    isinstance(function, ast.Attribute)
                    and function.attr == "append"
                    and isinstance(function.value, ast.Name)
                    and function.value.id == "faults"
                ):
                    found = node.args
            elif (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == "faults"
                and isinstance(node.value, ast.ListComp)
            ):
                found = [node.value.elt]
            words = "\0".join(named.get(each.id, "") if isinstance(each, ast.Name) else texts(each) for each in found)
            if re.search(r"[a-z]{2} [a-z]", words):
                yield f"{module}:{getattr(node, 'lineno', 0)}", words


def rows(heading: str) -> list[str]:
    """The fragments of the first column of the table below a heading."""
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| ")]
    return [fragment for cell in cells for fragment in re.findall(r"`([^`]+)`", cell)]


PROBLEMS = dict(problems())


@pytest.mark.parametrize("place", PROBLEMS)
def test_a_problem_is_on_the_page(place: str) -> None:
    text = PROBLEMS[place]
    assert any(fragment in text for fragment in (*rows("Problems"), *ELSEWHERE)), text.replace("\0", "...")


@pytest.mark.parametrize("heading", ["Problems", "Warnings"])
def test_the_code_has_each_text_of_the_page(heading: str) -> None:
    every = "\0".join(
        texts(ast.parse((SOURCES / module).read_text("utf-8")))
        for module in (*MODULES, "config.py", "measure/loader.py")
    )
    missing = [each for each in rows(heading) if each not in every and each != "config.toml"]
    assert missing == []


def test_other_formats_are_those_of_the_code() -> None:
    assert sorted({*rows("Files of other systems")}) == sorted(FOREIGN)
