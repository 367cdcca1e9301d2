"""READMEs of techniques: short, and right about code, benchmarks, commands and needs, as far as a machine can tell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import cotenant
from bench._house_map import between_techniques, technique_of
from bench._registry import benchmarks
from cotenant import registry
from cotenant.policies.registry import policy_names

PACKAGE = Path(cotenant.__file__).parent
README = "README.md"
FOLDERS = {path.name: path for path in sorted((PACKAGE / "techniques").iterdir()) if (path / "__init__.py").exists()}
FOLDERS["cluster"] = PACKAGE / "cluster"
NEEDS = {
    technique_of(f"{name}."): tuple(technique_of(f"{each}.") for each in needed)
    for name, needed in registry.NEEDS.items()
}
LINES = 80
SECTIONS = ("When it pays", "to the code", "Commands", "Limits")
COMMANDS_OF_BASE = ("explain", "load", "profile", "serve", "simulate")


def text_of(technique: str) -> str:
    return (FOLDERS[technique] / README).read_text(encoding="utf-8")


def told(text: str) -> tuple[str, ...]:
    """The techniques in the line "Needs:" of a README, "none" for none."""
    (line,) = re.findall(r"^Needs: (.*)$", text, re.MULTILINE)
    return () if line == "none" else tuple(line.split(", "))


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes and constants of a module, and functions of its classes as "Class.function"."""

    def names(body: list[ast.stmt], inside: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield inside + node.name
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (inside + target.id for target in targets if isinstance(target, ast.Name))
            if isinstance(node, ast.ClassDef):
                yield from names(node.body, f"{inside}{node.name}.")

    return frozenset(names(ast.parse(path.read_text(encoding="utf-8")).body))


def code_of(text: str) -> list[tuple[str, str]]:
    """What a README names as `path/file.py:name`: paths below its own folder, else below the package."""
    return re.findall(r"`([\w/]+\.py):([\w.]+)`", text)


def missing_code(folder: Path, text: str) -> list[str]:
    found = []
    for file, name in code_of(text):
        places = [place / file for place in (folder, PACKAGE) if (place / file).exists()]
        if not places or name not in names_in(places[0]):
            found.append(f"{file}:{name}")
    return found


def benches_of(text: str) -> list[str]:
    """The benchmarks that a README names: in last columns of tables whose head says so, and as commands."""
    found = re.findall(r"python -m bench ([\w-]+)", text)
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    is_benchmark = False
    for at, cells in enumerate(rows):
        if at + 1 < len(rows) and set("".join(rows[at + 1])) <= set("-: "):
            is_benchmark = cells[-1].strip() in ("benchmark", "`python -m bench`")
        elif is_benchmark:
            found += re.findall(r"`([^`]+)`", cells[-1])
    return found


def test_every_technique_has_one() -> None:
    assert set(FOLDERS) == set(NEEDS)
    assert [name for name, folder in FOLDERS.items() if not (folder / README).exists()] == []


@pytest.mark.parametrize("technique", FOLDERS)
def test_it_is_short_and_has_its_parts(technique: str) -> None:
    lines = text_of(technique).splitlines()
    assert len(lines) <= LINES
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []
    heads = [line for line in lines if line.startswith("## ")]
    assert [part for part in SECTIONS if not any(part in head for head in heads)] == []
    assert sum(line.startswith("Paper: ") for line in lines) == 1


@pytest.mark.parametrize("technique", FOLDERS)
def test_the_code_that_it_names_exists(technique: str) -> None:
    text = text_of(technique)
    assert len(code_of(text)) >= 10
    assert missing_code(FOLDERS[technique], text) == []


@pytest.mark.parametrize("technique", FOLDERS)
def test_the_benchmarks_that_it_names_exist(technique: str) -> None:
    named = benches_of(text_of(technique))
    assert len(named) >= 3
    assert sorted(set(named) - set(benchmarks())) == []


@pytest.mark.parametrize("technique", FOLDERS)
def test_the_commands_that_it_names_exist(technique: str) -> None:
    text = text_of(technique)
    commands = re.findall(r"`cotenant ([\w-]+)", text)
    assert commands
    assert sorted(set(commands) - {*COMMANDS_OF_BASE, *registry.built_in(registry.COMMANDS)}) == []
    assert sorted(set(re.findall(r"--policy (\w+)", text)) - set(policy_names())) == []


def test_it_says_which_techniques_it_needs() -> None:
    assert {name: told(text_of(name)) for name in FOLDERS} == NEEDS


def test_what_it_needs_it_imports() -> None:
    """The other way round, that it imports nothing else, is the law of `test_architecture.py`."""
    modules = {
        ".".join(("cotenant", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for folder in FOLDERS.values()
        for path in sorted(folder.rglob("*.py"))
    }
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    assert {technique_of(name) for name in trees} == set(FOLDERS)
    assert {(mine, theirs) for mine, needed in NEEDS.items() for theirs in needed} <= between_techniques(trees)


def test_what_is_wrong_is_found() -> None:
    folder = FOLDERS["overlap"]
    file = "policy/headroom_control.py"
    right = f"`{file}:Overlap.decide` `{file}:MOST_MEMBERS` `predict/conformal.py:Margins`"
    assert missing_code(folder, right) == []
    assert missing_code(folder, "`policy/headroom_control.py:Overlap.no`, `no.py:Overlap`") == [
        "policy/headroom_control.py:Overlap.no",
        "no.py:Overlap",
    ]
    table = "| a | benchmark |\n|---|---|\n| `x` | `y` (Fig. 1), `z` |\n\n| a | b |\n|---|---:|\n| c | `d` |\n"
    assert benches_of(f"{table}\n`python -m bench w`") == ["w", "y", "z"]
    assert told("a\nNeeds: b, c\n\nd") == ("b", "c")
