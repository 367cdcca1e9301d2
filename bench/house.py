"""House: how large the code is, how often it says things twice, and whether its tests would notice a change.

Read off the source below src/cotenant:

- `src_lines`: all lines of all modules.
- `package_circles`: groups of two or more top packages that import each other, directly or around. Imports inside
  functions and for types count.
- Names of public classes and of modules that more than one place has, except those in `CONVENTIONAL`.
- `config_keys`: the keys of a model's config.toml and of the file of a server.

The base and the techniques, from `bench/_house_map.py`:

- `base_to_technique`: imports (or names in strings) of techniques by the base outside `registry.py`.
- `undeclared_technique_imports`: pairs of techniques of which one imports the other without saying so in its README.
- `circles_with_types`: groups of modules that import each other at module level.
- `packages_per_paper`: the most packages over which the code of one technique alone is spread.
- `src_lines_moved_or_deleted`: lines in techniques and lines fewer since the move began.
- `largest_command_options`: the most options that one command has of its own, beyond `COMMON_OPTIONS`.
- `banned_words`: words of tests/architecture/words.toml in docstrings, comments, strings and names.
- `docstring_words_per_sentence_p95`: words of a sentence that 95 % of all sentences in docstrings do not exceed.

Run: `modules_of_a_query`, the number of modules of the package with code that runs for one HTTP query. It covers the
server and the worker process of its model, with the default settings and after warm-up. Every thread of both processes
has a profile function from its start. It records the module of every Python function that is entered while one query
runs, and for some time after its answer. Counters and traces come then; generated functions without a module count for
none. Several queries follow one another, and only modules that run for each of them count. So occasional work (a look
at the workers' memory, a flush of the trace) does not count.

`mutants_killed_pct`: the share of a seeded sample of small changes that fail a test, see `bench/_mutants.py`. It needs
mutmut; without it the metric is left out.
"""

from __future__ import annotations

import ast
import mmap
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench._house_map import (
    base_to_technique,
    between_techniques,
    circles,
    members_of,
    options_of,
    packages_of,
    references,
    strong_groups,
    technique_of,
    wide_functions,
)
from bench._mutants import AREAS, Verdict, killed_pct, run_sample, sample
from bench._prose import banned, bans, sentence_words
from bench._registry import FOLDER, BenchError
from bench._server import serving, tiny_repository
from cotenant.cli.app import app
from cotenant.config import ModelConfig, ServerConfig
from cotenant.wire.client import infer_once

PACKAGE = FOLDER.parent / "src" / "cotenant"
TECHNIQUES = ("overlap", "partitions", "layer_blocks", "placement", "granularity")
CONVENTIONAL = ("__init__", "cli", "serve", "report", "data", "policy", "predict", "measure", "execute", "world")
"""Names of modules of techniques that say the part of a technique, so that several techniques have them."""
LINES_BEFORE = 78_817
"""Lines of `src` when techniques began to move into packages of their own."""
SEED = 1
MUTANTS, QUICK_MUTANTS = 120, 6
QUICK_AREAS = {
    "core": (
        *("tests/core", "tests/combined/test_sim_golden.py", "tests/combined/test_sim_golden_changes.py"),
        "tests/combined/test_core_properties.py::test_every_history_keeps_the_contract[edf-preempt]",
    )
}
"""What a quick run looks at, and tests of it that take seconds."""
QUICK_S = 20.0
"""After so long a quick run begins no other mutant."""
MODEL = "tiny"
WARM_UP, QUERIES = 50, 10
SETTLE_S = 0.3
"""How long after an answer the running modules are still counted as the query's, in seconds."""
_SITE = """
import mmap, os, sys, threading
folder = {folder!r}
with open(os.path.join(folder, "on"), "rb") as file:
    on = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
seen, out = set(), {{}}
def note(frame, event, _):
    if event == "call" and on[0]:
        key = on[0], frame.f_globals.get("__name__", "")
        if key not in seen:
            seen.add(key)
            if os.getpid() not in out:
                path = os.path.join(folder, "%d.seen" % os.getpid())
                out[os.getpid()] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(out[os.getpid()], b"%d %s\\n" % (key[0], key[1].encode()))
threading.setprofile(note)
sys.setprofile(note)
"""
"""Run by every interpreter that finds it on its path. The byte says which query is looked at, 0 for none."""


def run(quick: bool, data_dir: Path | None) -> dict[str, object]:
    """Measure. `data_dir` is not used."""
    sources = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    trees = {name: ast.parse(text) for name, text in sources.items()}
    around = circles_of({name: set(imports_of(name, tree)) for name, tree in trees.items()})
    classes = twice(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    files = twice(stem for name in sources if (stem := name.rpartition(".")[2]) not in CONVENTIONAL)
    modules = modules_of_a_query()
    known = {name.removesuffix(".__init__"): tree for name, tree in trees.items()}
    lines = {name.removesuffix(".__init__"): len(text.splitlines()) for name, text in sources.items()}
    smeared = {name: packages_of(name, known) for name in TECHNIQUES}
    undeclared = sorted(
        f"{mine} -> {theirs}" for mine, theirs in between_techniques(known) if theirs not in needs(mine)
    )
    left = base_to_technique(known)
    wide = dict(wide_functions(known))
    options = dict(options_of(typer.main.get_command(app)))
    known_bans = bans()
    words = [found for path in sorted(PACKAGE.rglob("*.py")) for found in banned(path, known_bans)]
    lengths = [count for tree in trees.values() for _, count, _ in sentence_words(tree)]
    in_techniques = sum(count for name, count in lines.items() if technique_of(name))
    summary: dict[str, float] = {
        "src_lines": sum(lines.values()),
        "base_lines": sum(lines.values()) - in_techniques,
        "base_to_technique": len(left),
        "undeclared_technique_imports": len(undeclared),
        "circles_with_types": len(circles(known)),
        "packages_per_paper": max(map(len, smeared.values())),
        "src_lines_moved_or_deleted": in_techniques + LINES_BEFORE - sum(lines.values()),
        "policy_members": members_of(known["cotenant.core.snapshot"], "Policy"),
        "launch_fields": members_of(known["cotenant.core.actions"], "Launch"),
        "wide_functions": len(wide),
        "largest_command_options": max(map(len, options.values())),
        "see_docstrings": references(known),
        "banned_words": len(words),
        "docstring_words_per_sentence_p95": float(np.percentile(lengths, 95)),
        "package_circles": len(around),
        "class_names_with_two_homes": len(classes),
        "file_names_with_two_homes": len(files),
        "config_keys": keys_of(ServerConfig) + keys_of(ModelConfig),
        "modules_of_a_query": len(modules),
    }
    rows: list[dict[str, object]] = [
        *({"metric": "base_to_technique", "name": f"{name} -> {other}"} for name, other in left),
        *({"metric": "undeclared_technique_imports", "name": pair} for pair in undeclared),
        *({"metric": "circles_with_types", "name": " ".join(circle)} for circle in circles(known)),
        *({"metric": "packages_per_paper", "name": " ".join(found)} for found in smeared.values()),
        *({"metric": "wide_functions", "name": name, "parameters": count} for name, count in wide.items()),
        *({"metric": "largest_command_options", "name": name, "options": found} for name, found in options.items()),
        *(
            {"metric": "banned_words", "name": f"{found.path.relative_to(PACKAGE)}:{found.line}", "word": found.word}
            for found in words
        ),
        *({"metric": "package_circles", "name": " ".join(circle)} for circle in around),
        *({"metric": "class_names_with_two_homes", "name": name, "homes": homes} for name, homes in classes.items()),
        *({"metric": "file_names_with_two_homes", "name": name, "homes": homes} for name, homes in files.items()),
        *({"metric": "modules_of_a_query", "name": name} for name in modules),
    ]
    console = Console()
    try:
        verdicts = judged(quick, console)
    except BenchError as error:
        console.print(f"mutants_killed_pct is left out: {error}", markup=False)
    else:
        summary["mutants_killed_pct"] = killed_pct(verdicts)
        summary["mutants"] = len(verdicts)
        rows += [
            {"metric": "mutants", "file": each.mutant.file, "outcome": each.outcome, "change": each.mutant.difference}
            for each in verdicts
        ]
    table = Table("metric", "value")
    for metric, value in summary.items():
        table.add_row(metric, f"{value:.1f}" if metric.endswith("pct") else str(value))
    console.print(table)
    if quick:
        console.print(
            f"quick: {summary.get('mutants', 0)} mutants of {', '.join(QUICK_AREAS)} against a few of their tests, "
            f"not {MUTANTS} of {', '.join(AREAS)} against all that answer for them"
        )
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


def judged(quick: bool, console: Console) -> list[Verdict]:
    """Verdicts on the sample. Raises BenchError where mutants cannot be made, or the tests fail without them."""
    tests: Mapping[str, tuple[str, ...]] = QUICK_AREAS if quick else AREAS
    mutants = sample(QUICK_MUTANTS if quick else MUTANTS, SEED, tests)

    def tell(verdict: Verdict) -> None:
        if not quick:
            console.print(f"{verdict.outcome:8} {verdict.seconds:5.0f} s  {verdict.mutant.file}", markup=False)

    limit_s = QUICK_S if quick else float("inf")
    return run_sample(mutants, tests, tell, workers=len(os.sched_getaffinity(0)), limit_s=limit_s)


def needs(technique: str) -> list[str]:
    """The techniques that one may import, by the line "Needs:" of its README."""
    folder = PACKAGE / ("cluster" if technique == "cluster" else f"techniques/{technique}")
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    found = re.search(r"^Needs: (.*?)\.?$", text, re.MULTILINE)
    return re.findall(r"\w+", found.group(1)) if found else []


def imports_of(name: str, tree: ast.Module) -> Iterator[str]:
    """Top packages (or modules) of cotenant that a module imports, at any depth of its code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise BenchError(f"{name} has a relative import, line {node.lineno}: expected none")
        if isinstance(node, ast.ImportFrom) and node.module == "cotenant":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cotenant."):
            yield (node.module or "").split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("cotenant."))


def circles_of(imported: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of top packages each of which reaches the others, of what every module imports."""
    packages = {name.split(".")[1] for name in imported if "." in name and not name.endswith(".__init__")}
    return strong_groups(
        (package, other)
        for name, others in imported.items()
        for other in others
        if (package := name.partition(".")[2].partition(".")[0]) in packages and other in packages
    )


def twice(names: Iterator[str]) -> dict[str, int]:
    """Names that come more than once, and how often."""
    return {name: count for name, count in sorted(Counter(names).items()) if count > 1}


def keys_of(config: type[msgspec.Struct]) -> int:
    """Keys of all sections of a configuration; a section that there may be one of for each name counts once."""
    sections = [get_args(section.type)[-1:] or (section.type,) for section in msgspec.structs.fields(config)]
    return sum(len(msgspec.structs.fields(section)) for (section,) in sections)


def modules_of_a_query() -> list[str]:
    """Modules of cotenant with code that runs for an HTTP query, in the server and in the model's worker."""
    inputs = {"x": np.zeros((1, 16), np.float32)}
    with tempfile.TemporaryDirectory(prefix="cotenant-house-") as name, tiny_repository(MODEL) as repository:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_SITE.format(folder=name), encoding="utf-8")
        (folder / "on").write_bytes(b"\0")
        with (
            _on_path(name),
            (folder / "on").open("r+b") as file,
            mmap.mmap(file.fileno(), 1) as on,
            serving(repository) as server,
        ):
            for _ in range(WARM_UP):
                infer_once(server.http_url, MODEL, inputs)
            for query in range(1, QUERIES + 1):
                time.sleep(SETTLE_S)
                on[0] = query
                infer_once(server.http_url, MODEL, inputs)
                time.sleep(SETTLE_S)
                on[0] = 0
        seen: dict[int, set[str]] = {query: set() for query in range(1, QUERIES + 1)}
        for path in folder.glob("*.seen"):
            for line in path.read_text(encoding="utf-8").splitlines():
                number, module = line.split(" ", 1)
                seen[int(number)].add(module)
    return sorted(module for module in set.intersection(*seen.values()) if module.split(".")[0] == "cotenant")


@contextmanager
def _on_path(folder: str) -> Iterator[None]:
    """Interpreters that are started in the block look for modules in the folder first."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join((folder, *([before] if before else [])))
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
