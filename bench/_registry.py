"""Finds the benchmarks: every module below this package with a top-level function `run`, none of them imported."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.errors import CotenantError

FOLDER = Path(__file__).resolve().parent
Run = Callable[..., dict[str, Any]]


class BenchError(CotenantError):
    """A benchmark cannot be found, or a name fits several: names it and the existing ones."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module that measures something. `about` is the first line of its docstring, `file` is relative to the package.

    Its name is the constant NAME of the module, else the name of the file.
    """

    name: str
    about: str
    module: str
    file: Path

    def load(self) -> Run:
        """Import the module and give its `run(quick, data_dir)`."""
        run: Run = importlib.import_module(self.module).run
        return run


def benchmarks(folder: Path = FOLDER, package: str = __package__) -> dict[str, Benchmark]:
    """All benchmarks by name, sorted. Raises BenchError when two modules have one name."""
    found: dict[str, Benchmark] = {}
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder)
        if any(part.startswith(("_", ".")) for part in file.parts):
            continue
        benchmark = _read(path, file, package)
        if benchmark is None:
            continue
        other = found.get(benchmark.name)
        if other is not None:
            raise BenchError(f"benchmark {benchmark.name!r} is in {other.file} and in {file}: give one another NAME")
        found[benchmark.name] = benchmark
    return dict(sorted(found.items()))


def find(name: str) -> Benchmark:
    """One benchmark. Raises BenchError, with the names that there are, for an unknown one."""
    known = benchmarks()
    if name not in known:
        raise BenchError(f"there is no benchmark {name!r}; expected one of {', '.join(known)}")
    return known[name]


def _read(path: Path, file: Path, package: str) -> Benchmark | None:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(file))
    if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
        return None
    about = (ast.get_docstring(tree) or "(its module has no docstring)").strip().splitlines()[0]
    module = ".".join((package, *file.with_suffix("").parts))
    return Benchmark(_name(tree) or file.stem, about, module, file)


def _name(tree: ast.Module) -> str | None:
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        named = any(isinstance(target, ast.Name) and target.id == "NAME" for target in targets)
        value = getattr(node, "value", None)
        if named and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return None
