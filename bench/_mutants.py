"""Mutation testing: a seeded sample of small changes to the code, each run against its tests.

`python -m bench._mutants --sample 40 --seed 1` (`make mutants SAMPLE=40 SEED=1`) copies the tree. It checks that the
tests pass there, and then makes one change at a time in the copy. A change is killed if it fails a test, or makes the
tests run much longer. A change that passes all tests has survived, and its difference is printed. Then either the
change is equivalent or a test is missing. Verdicts are kept in `.mutants/` until source or tests change, so that an
interrupted run goes on.

The changes are those of mutmut, less two kinds. Texts (messages) say little, and so do arguments and values that become
None or go away, since nearly all of those raise at once. Two kinds are added that mutmut lacks: a negated condition,
and a removed call with an unused result. `strict=` is left alone: it checks what holds.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from bench._registry import FOLDER, BenchError

ROOT = FOLDER.parent
STATE = ROOT / ".mutants"
COPIED = ("src", "tests", "bench", "deploy", "examples", "scripts", "pyproject.toml")
"""What the tests need of the tree."""
_ENGINE = "tests/combined/test_core_properties.py"
_REPLAYED = ("tests/combined", "tests/sim", "tests/oracle")
AREAS = {
    "core": ("tests/core", "tests/properties/test_tasks_properties.py", "tests/policies", *_REPLAYED, _ENGINE),
    "policies": ("tests/policies", "tests/core", *_REPLAYED, _ENGINE),
    "techniques/partitions/plan": ("tests/techniques/partitions",),
    "execute/worker": (
        *("tests/execute/test_batches.py", "tests/execute/test_supervisor.py", "tests/execute/test_buffers.py"),
        *(
            "tests/execute/test_launch_runner.py",
            "tests/execute/test_executor_tasks.py",
            "tests/execute/test_processes.py",
        ),
        "tests/conformance",
    ),
}
"""Parts of the package, and the tests that answer for them, in the order in which they run."""
_PYTEST = (
    *("-m", "pytest", "-q", "-x", "-m", "not alone", "-p", "no:cacheprovider", "--no-header"),
    *("--hypothesis-profile", "mutants", "--hypothesis-seed", "0"),
)
_MEMORY_BYTES = 8 << 30
"""Address space of a run, so that a change without end leaves the other memory of the machine alone."""
_LONGER, _MORE_S = 3.0, 20.0
"""A run that takes this many times as long as without a change, and so many seconds more, is stopped."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the area and file (relative to the tree), the text of the file with it, and the lines that differ."""

    area: str
    file: str
    text: str
    difference: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: 'killed', 'timeout' (counts as killed) or 'survived', and after how long."""

    mutant: Mutant
    outcome: str
    seconds: float


def changes_of(text: str, name: str = "") -> list[Callable[[], str]]:
    """What gives the text with one change inside a function, for every one. Raises BenchError without mutmut."""
    try:
        import libcst as cst
        from libcst import matchers
        from mutmut.mutation import file_mutation, mutators
        from mutmut.mutation.pragma_handling import get_ignored_lines
    except ImportError as error:
        raise BenchError(f"mutants need mutmut, of the group 'dev' of pyproject.toml: {error}") from None

    def turned_round(node: cst.If) -> Iterator[cst.If]:
        yield node.with_changes(test=_negated(cst, node.test))

    def left_out(node: cst.SimpleStatementLine) -> Iterator[cst.SimpleStatementLine]:
        match node.body:
            case [cst.Expr(value=cst.Call())]:
                yield node.with_changes(body=[cst.Pass()])

    said_too_little = (
        mutators.operator_string,
        mutators.operator_assignment,
        mutators.operator_arg_removal,
        mutators.operator_dict_arguments,
    )
    operators: Any = [each for each in mutators.mutation_operators if each[1] not in said_too_little]
    operators += [(cst.If, turned_round), (cst.SimpleStatementLine, left_out)]
    tree = cst.MetadataWrapper(cst.parse_module(text))
    visitor = file_mutation.MutationVisitor(operators, get_ignored_lines(name, text, tree))
    module = tree.visit(visitor)
    checks = {
        id(each.value)
        for each in matchers.findall(module, matchers.Arg(keyword=matchers.Name("strict")))
        if isinstance(each, cst.Arg)
    }
    found = [
        each
        for each in visitor.mutations
        if isinstance(each.contained_by_top_level_function, cst.FunctionDef) and id(each.original_node) not in checks
    ]
    return [partial(_changed, module, each.original_node, each.mutated_node) for each in found]


def _negated(cst: Any, test: Any) -> Any:
    inner = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.UnaryOperation(cst.Not(), inner)


def _changed(module: Any, before: Any, after: Any) -> str:
    changed: str = module.deep_replace(before, after).code
    return changed


def sample(count: int, seed: int, areas: Iterable[str] = AREAS, root: Path = ROOT) -> list[Mutant]:
    """Different mutants, the same for the same tree and seed: a file by its length, then one of its changes."""
    rng = random.Random(seed)
    files = {path: area for area in areas for path in sorted((root / "src" / "cotenant" / area).rglob("*.py"))}
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    lengths = [len(text.splitlines()) for text in texts.values()]
    made: dict[Path, list[Callable[[], str]]] = {}
    found: dict[tuple[str, str], Mutant] = {}
    for path in rng.choices(list(files), lengths, k=4 * count):
        if len(found) == count:
            break
        if path not in made:
            made[path] = changes_of(texts[path], str(path))
        if not made[path]:
            continue
        text, file = rng.choice(made[path])(), str(path.relative_to(root))
        lines = difflib.unified_diff(texts[path].splitlines(), text.splitlines(), file, file, n=2, lineterm="")
        found[file, text] = Mutant(files[path], file, text, "\n".join(lines))
    return list(found.values())


class Arena:
    """Copies of the tree in which tests run, one for each that runs at a time; the time that they take unchanged."""

    def __init__(self, folder: Path, workers: int, root: Path = ROOT) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._limits_s: dict[str, float] = {}
        for number in range(workers):
            copy = folder / str(number)
            for name in COPIED:
                if (root / name).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__", "results")
                    shutil.copytree(root / name, copy / name, ignore=ignored)
                else:
                    shutil.copy2(root / name, copy / name)
            self._free.put(copy)

    def try_out(self, area: str, tests: Sequence[str]) -> float:
        """Run the tests of an area unchanged; gives their time in s. Raises BenchError when they fail."""
        copy = self._free.get()
        try:
            status, seconds = _run_tests(copy, tests, 1800.0, writes_bytecode=True)
        finally:
            self._free.put(copy)
        if status != 0:
            raise BenchError(f"the tests of {area} fail without any change ({status}): {' '.join(tests)}")
        self._limits_s[area] = _LONGER * seconds + _MORE_S
        return seconds

    def judge(self, mutant: Mutant, tests: Sequence[str]) -> Verdict:
        """Make the change in a copy, run the tests, and take it back."""
        copy = self._free.get()
        path = copy / mutant.file
        before, times = path.read_bytes(), path.stat()
        try:
            path.write_text(mutant.text, encoding="utf-8")
            status, seconds = _run_tests(copy, tests, self._limits_s[mutant.area])
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its byte code is that of these times
            self._free.put(copy)
        return Verdict(mutant, {None: "timeout", 0: "survived"}.get(status, "killed"), seconds)


def _run_tests(
    copy: Path, tests: Sequence[str], limit_s: float, writes_bytecode: bool = False
) -> tuple[int | None, float]:
    """Exit status of pytest, None when it was stopped, and the time in s."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(copy / "src"), str(copy), *_outer_paths()))}
    if not writes_bytecode:  # two changes of one size in one second would share it
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *_PYTEST, *tests],
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES)),
    )
    try:
        status: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(process)
    return status, time.monotonic() - began


def _outer_paths() -> list[str]:
    """What the path names besides the tree itself."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [path for path in given if path and Path(path).resolve() not in (ROOT, ROOT / "src")]


def _end(process: subprocess.Popen[bytes]) -> None:
    """The tests and all that they started in their session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_sample(
    mutants: Sequence[Mutant],
    tests: dict[str, tuple[str, ...]],
    tell: Callable[[Verdict], None],
    *,
    workers: int,
    note: Callable[[str], None] = lambda _: None,
    limit_s: float = float("inf"),
    known: dict[str, dict[str, Any]] | None = None,
    root: Path = ROOT,
) -> list[Verdict]:
    """Judge mutants; the first `workers` of them, and others until `limit_s` has passed. `known`: verdicts by `key_of`.

    `tell` gets every verdict, `note` the steps before the first.
    """
    known = known or {}
    done = [
        Verdict(each, known[key_of(each)]["outcome"], known[key_of(each)]["seconds"])
        for each in mutants
        if key_of(each) in known
    ]
    for each in done:
        tell(each)
    open_ = [each for each in mutants if key_of(each) not in known]
    if not open_:
        return done
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cotenant-mutants-") as name, ThreadPoolExecutor(workers) as pool:
        arena = Arena(Path(name), workers, root)
        areas = [area for area in tests if any(each.area == area for each in open_)]
        tried = pool.map(lambda area: arena.try_out(area, tests[area]), areas)
        for area, seconds in zip(areas, tried, strict=True):
            note(f"the tests of {area} pass without a change in {seconds:.0f} s")

        def judge(number: int, mutant: Mutant) -> Verdict | None:
            if number >= workers and time.monotonic() - began > limit_s:
                return None
            return arena.judge(mutant, tests[mutant.area])

        for verdict in pool.map(judge, range(len(open_)), open_):
            if verdict is not None:
                tell(verdict)
                done.append(verdict)
    return done


def killed_pct(verdicts: Sequence[Verdict]) -> float:
    """Share of those that some test noticed."""
    return 100.0 * sum(each.outcome != "survived" for each in verdicts) / len(verdicts)


def key_of(mutant: Mutant) -> str:
    """A name that is of this change of this file alone."""
    return hashlib.sha256(f"{mutant.file}\n{mutant.text}".encode()).hexdigest()[:16]


def _digest(root: Path = ROOT) -> str:
    """Of the source and the tests: another one makes verdicts of before worthless."""
    digest = hashlib.sha256()
    for path in chain(sorted((root / "src").rglob("*.py")), sorted((root / "tests").rglob("*.*"))):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def main(arguments: list[str]) -> int:
    """Judge a sample and print the survivors. 0 means that it ran, whatever the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m bench._mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=40, metavar="N", help="how many changes")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another seed, other changes")
    parser.add_argument("--areas", default=",".join(AREAS), metavar="A,A", help="parts of the package")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="how many run at a time")
    chosen = parser.parse_args(arguments)
    areas = chosen.areas.split(",")
    if unknown := [area for area in areas if area not in AREAS]:
        parser.error(f"unknown area {unknown[0]!r}, expected one of {', '.join(AREAS)}")
    STATE.mkdir(exist_ok=True)
    file = STATE / f"{_digest()}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    known = {(entry := json.loads(line))["key"]: entry for line in lines}
    count = 0
    with file.open("a", encoding="utf-8") as state:

        def tell(verdict: Verdict) -> None:
            nonlocal count
            count += 1
            key, mutant = key_of(verdict.mutant), verdict.mutant
            if key not in known:
                entry = {"key": key, "outcome": verdict.outcome, "seconds": verdict.seconds, "file": mutant.file}
                print(json.dumps(entry), file=state, flush=True)
            print(f"[{count}/{chosen.sample}] {verdict.outcome:8} {verdict.seconds:5.0f} s  {mutant.file}", flush=True)
            if verdict.outcome == "survived":
                print(mutant.difference + "\n", flush=True)

        note = partial(print, flush=True)
        verdicts = run_sample(
            sample(chosen.sample, chosen.seed, areas), AREAS, tell, workers=chosen.workers, note=note, known=known
        )
    for area in [*areas, "all"]:
        some = [each for each in verdicts if area in ("all", each.mutant.area)]
        if some:
            print(f"{area:15} {killed_pct(some):5.1f} % of {len(some)} killed")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BenchError as error:
        print(f"mutants: {error}", file=sys.stderr)
        sys.exit(2)
