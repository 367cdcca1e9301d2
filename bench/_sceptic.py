"""Every figure that the pages claim, beside the kept result that it is from."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path

from bench._claims import ROOT, Claim, judge, pages_of, record_of
from bench._registry import FOLDER, benchmarks
from bench._report import report

BENCHMARKS = "docs/benchmarks.md"
_SERVES = "bench._server.serving"
"""A benchmark that starts the server measures all of the product."""


def sceptic() -> int:
    """Print all claims; 1 where a figure differs from its row or has none."""
    pages = pages_of()
    claims = judge(pages)
    age = _Age()
    for each in claims:
        print(*_lines(each, age), sep="\n")
    without = [f"{name}:{line}  {text}" for name, page in pages.items() for line, text in page.free_figures()]
    without += [f"{each.page}  {each.fragment}: {each.fault}" for each in claims if not each.has_row]
    differ = [f"{each.page}  {each.fault}" for each in claims if each.fault and each.has_row]
    if report() not in (ROOT / BENCHMARKS).read_text(encoding="utf-8"):
        differ.append(f"{BENCHMARKS}  its table of results is not what `python -m bench report` prints")
    for title, lines in (("claims that differ", differ), ("claims without a row", without)):
        if lines:
            print(f"\n{title}:", *lines, sep="\n  ")
    old = sorted({each.result for each in claims if each.result and each.has_row and age.note(each.result)})
    print(
        f"\nfigures {sum(len(each.figures) for each in claims)}, results {len({each.result for each in claims})}, "
        f"claims_that_differ {len(differ)}, claims_without_row {len(without)}"
    )
    print(f"results {'older than the code that they measure' if age.is_known else 'of unknown age'}: {', '.join(old)}")
    return int(bool(differ or without))


def _lines(claim: Claim, age: _Age) -> list[str]:
    if not claim.figures or not claim.line:
        return []
    record = record_of(claim.result)
    head = f"{claim.page}:{claim.line}  bench/results/{claim.result}.json  {record['date'][:10]}  {record['command']}"
    rows = [f"    {each.text:>8}  {each.expression} = {each.value:.6g}" for each in claim.figures]
    return [f"{head}{age.note(claim.result)}", *rows]


class _Age:
    """Whether results are older than the code that they measure, by the history of the repository."""

    def __init__(self) -> None:
        self.is_known = _git("rev-parse", "--is-shallow-repository") == "false"
        self._benchmarks = benchmarks()
        self._history = [
            each.splitlines() for each in _git("log", "--format=%x00%cI", "--name-only").split("\0") if each
        ]
        """Of each commit its date, then its files, the newest first."""

        self._notes: dict[str, str] = {}

    def note(self, result: str) -> str:
        """What is to be said of the age of a result: nothing where it is newer than its code."""
        if result not in self._notes:
            self._notes[result] = self._note(result)
        return self._notes[result]

    def _note(self, result: str) -> str:
        if not self.is_known:
            return "  (no history here: whether the code has changed since is not known)"
        benchmark = self._benchmarks.get(result)
        if benchmark is None:
            return "  (its benchmark is gone)"
        changed = self._changed(tuple(measured_by(FOLDER / benchmark.file)))
        is_older = bool(changed) and datetime.fromisoformat(record_of(result)["date"]) < datetime.fromisoformat(changed)
        return f"  (older than the code that it measures, changed {changed[:10]})" if is_older else ""

    def _changed(self, places: Sequence[str]) -> str:
        """When one of these files or folders was last changed; empty if never."""
        folders = tuple(f"{each}/" for each in places)
        files = frozenset(places)
        for date, *paths in self._history:
            if any(path in files or path.startswith(folders) for path in paths):
                return date
        return ""


@cache
def measured_by(benchmark: Path) -> Sequence[str]:
    """The packages that a benchmark imports, also through its helpers, and its own file; paths from the root."""
    found: set[str] = {benchmark.relative_to(ROOT).as_posix()}
    todo, seen = [benchmark], {benchmark}
    while todo:
        for module in _imports(todo.pop()):
            if module == _SERVES:
                found.add("src/cotenant")
            path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            if module.startswith("bench.") and path.exists() and path not in seen:
                seen.add(path)
                todo.append(path)
            elif module.startswith("cotenant."):
                parts = module.split(".")[: 3 if ".techniques." in module else 2]
                place = ROOT.joinpath("src", *parts)
                found.add((place if place.is_dir() else place.with_suffix(".py")).relative_to(ROOT).as_posix())
    return sorted(found)


@cache
def _imports(path: Path) -> list[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    parts = [(node.module, alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    named = [name for module, each in parts if module for name in (module, f"{module}.{each}")]
    return [name for name in (*whole, *named) if name == _SERVES or not _is_attribute(name)]


def _is_attribute(name: str) -> bool:
    """Whether a dotted name is something inside a module of ours."""
    base = ROOT / "src" if name.startswith("cotenant.") else ROOT
    place = base.joinpath(*name.split("."))
    return name.startswith(("cotenant.", "bench.")) and not (place.is_dir() or place.with_suffix(".py").exists())


@cache
def _git(*arguments: str) -> str:
    """The output of git, empty where there is none."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
