"""Imports between modules, and how wide interfaces are: what `house` counts in syntax trees and commands. Pure.

The base is all of `cotenant` but `cotenant.techniques` and `cotenant.cluster`, which counts as a technique.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

Trees = Mapping[str, ast.Module]
"""Modules by full name; packages without `.__init__`."""
REGISTRY = "cotenant.registry"
MANY_PARAMETERS, MANY_OPTIONS = 12, 12
COMMON_OPTIONS = {
    "--json": "every command that prints a result",
    "--set": "commands that read cotenant.toml: one of its keys",
    "--lanes": "the same: how the device is divided",
    "--cores": "commands that run a server, or simulate one: its device",
    "--device-number": "the same: which device of a plan",
    "--stale": "commands that read a profile",
    "--fresh": "commands that measure",
    "--log-level": "commands that serve",
}
"""Options that mean the same in every command that has them, and in which. The size of a command leaves them out."""


def technique_of(name: str) -> str:
    """The technique that a module belongs to, "" for the base."""
    room, *inner = (*name.split(".")[1:], "")
    return room if room == "cluster" else inner[0] if room == "techniques" and inner else ""


def imported(name: str, tree: ast.AST, known: Trees, *, in_functions: bool = True) -> set[str]:
    """The modules of the package that a module imports: for types and inside functions too, unless switched off."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cotenant":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "cotenant"}
        elif in_functions or not is_function:
            found |= imported(name, node, known, in_functions=in_functions)
    return (found & known.keys()) - {name, "cotenant"}


def named(tree: ast.Module) -> set[str]:
    """The modules of techniques that strings name, docstrings left out."""
    told = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in told]
    return {
        each.value.partition(":")[0]
        for each in strings
        if isinstance(each.value, str) and each.value.startswith(("cotenant.techniques.", "cotenant.cluster."))
    }


def base_to_technique(trees: Trees) -> list[tuple[str, str]]:
    """Imports of techniques by the base, those by name included, outside the registry."""
    return [
        (name, other)
        for name, tree in trees.items()
        if not technique_of(name) and name != REGISTRY
        for other in sorted(imported(name, tree, trees) | named(tree))
        if technique_of(other)
    ]


def between_techniques(trees: Trees) -> set[tuple[str, str]]:
    """Pairs of techniques of which the first imports the second."""
    return {
        (mine, theirs)
        for name, tree in trees.items()
        if (mine := technique_of(name))
        for other in imported(name, tree, trees) | named(tree)
        if (theirs := technique_of(other)) not in ("", mine)
    }


def circles(trees: Trees) -> list[list[str]]:
    """Groups of modules each of which reaches the others by imports of its module level, those for types included."""
    return strong_groups(
        (name, other) for name, tree in trees.items() for other in imported(name, tree, trees, in_functions=False)
    )


def strong_groups(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Strongly connected groups of two or more names."""
    known = sorted(set(arrows))
    names = sorted({name for arrow in known for name in arrow})
    at = {name: number for number, name in enumerate(names)}
    rows, columns = [at[name] for name, _ in known], [at[other] for _, other in known]
    graph = coo_array((np.ones(len(known)), (rows, columns)), (len(at), len(at)))
    count, labels = connected_components(graph, directed=True, connection="strong")
    groups = [[name for name in names if labels[at[name]] == label] for label in range(count)]
    return [group for group in groups if len(group) > 1]


def packages_of(technique: str, trees: Trees) -> list[str]:
    """The packages that hold what only one technique uses: its own, and those of base modules that it alone imports."""
    users: dict[str, set[str]] = {}
    for name, tree in trees.items():
        for other in imported(name, tree, trees):
            users.setdefault(other, set()).add(technique_of(name))
    alone = {name.split(".")[1] for name, mine in users.items() if not technique_of(name) and mine == {technique}}
    return [technique, *sorted(alone)]


def wide_functions(trees: Trees) -> Iterator[tuple[str, int]]:
    """Functions with MANY_PARAMETERS or more, and how many they have; commands and constructors of records included."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                args = node.args
                count = len([*args.posonlyargs, *args.args, *args.kwonlyargs])
                if count >= MANY_PARAMETERS:
                    yield f"{name}:{node.name}", count


def options_of(command: Any, name: str = "cotenant") -> Iterator[tuple[str, list[str]]]:
    """Every command of a command of click, by its words, with its own options: common and hidden ones left out."""
    for word, each in getattr(command, "commands", {}).items():
        yield from options_of(each, f"{name} {word}")
    found = [max(each.opts, key=len) for each in command.params if each.param_type_name == "option" and not each.hidden]
    yield name, [each for each in found if each not in COMMON_OPTIONS]


def members_of(tree: ast.Module, kind: str) -> int:
    """Public fields, properties and methods of a class."""
    [node] = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == kind]
    names = [
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    names += [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
    return len([name for name in names if not name.startswith("_")])


def references(trees: Trees) -> int:
    """Docstrings that only point to another one: "See X."."""
    texts = [
        ast.get_docstring(node) or ""
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    return sum(text.startswith("See ") and len(text.split()) <= 3 for text in texts)
