"""Command-line fuzz: thousands of command lines with something wrong, none of which ends in a traceback or never.

Each case takes a valid command line and changes one thing. That is an option, an argument, an input file, the
repository, the place of the output or its kind. Nearly all cases run in one interpreter, which is replaced when a case
ends it. The rest are real processes that write to a full disk, a closed descriptor, or a pipe without a reader.
Metrics, in cases: `tracebacks` (or status 70), `hangs` (longer than 20 s), `status_0_on_failure` (status 0, though the
command cannot have done its work).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench._cli_cases import LIMIT_S, Case, case_of, copy_of, judged, make_folder

NAME = "cli-fuzz"
SEED = 1
CASES, QUICK_CASES = 2_050, 160
PROCESSES, QUICK_PROCESSES = 100, 6
_FIRST_S = 60.0
"""For the first case of an interpreter, which loads the libraries."""
_SHOWN = 30
_REAL = (
    ("models models", ">/dev/full", True),
    ("simulate workload.toml models", ">/dev/full", True),
    ("explain --lost trace.jsonl", ">&-", True),
    ("bound trace.jsonl", "| true", False),
    ("bound trace.jsonl", "2>&- >/dev/full", True),
    ("plan tenants.toml --profiles models --quick", "| head -c 10", False),
    ("replay trace.jsonl", "<&- >&- 2>&-", True),
    ("--help", ">/dev/full", True),
    ("--version", ">&-", True),
    ("simulate workload.toml models --trace /dev/full", "", True),
    ("plan tenants.toml --profiles models --quick --out /dev/full", "", True),
    ("explain 3 /dev/zero", "", True),
    ("bound fifo", "", True),
    ("simulate workload.toml models", "| LC_ALL=C true", False),
    ("devices --json", "2>&- | cat", False),
)
"""Command lines of a shell: the part after `cotenant`, and whether the whole cannot end well."""


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Run the cases. `data_dir` is not used."""
    began = time.monotonic()
    count, real = (QUICK_CASES, QUICK_PROCESSES) if quick else (CASES, PROCESSES)
    with tempfile.TemporaryDirectory(prefix="cotenant-cli-") as scratch:
        folder = Path(scratch) / "given"
        folder.mkdir()
        os.environ["TMPDIR"] = scratch
        make_folder(folder)
        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(_in_process, folder, range(start, count, 4)) for start in range(4)]
            found += [pool.submit(_real, folder, range(start, real, 2)) for start in range(2)]
            rows = [row for each in found for row in each.result()]
    rows.sort(key=lambda row: row["case"])
    bad = [row for row in rows if row["traceback"] or row["hang"] or row["well_in_vain"]]
    summary = {
        "cases": len(rows),
        "ended_well": sum(row["status"] == 0 for row in rows),
        "tracebacks": sum(row["traceback"] for row in rows),
        "hangs": sum(row["hang"] for row in rows),
        "status_0_on_failure": sum(row["well_in_vain"] for row in rows),
    }
    console = Console(markup=False)
    if bad:
        table = Table("case", "line", "what", "output", "status", "said")
        for row in bad[:_SHOWN]:
            cells = (str(row["case"]), row["line"], row["what"], row["stream"], str(row["status"]), row["said"])
            table.add_row(*(each.encode("ascii", "backslashreplace").decode() for each in cells))
        console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in summary.items()))
    console.print(f"{time.monotonic() - began:.0f} s")
    if quick:
        console.print(f"quick: {QUICK_CASES} of {CASES} lines, {QUICK_PROCESSES} of {PROCESSES} processes")
    return {"summary": summary, "rows": bad, "seeds": [SEED]}


def _in_process(folder: Path, numbers: Iterable[int]) -> list[dict[str, Any]]:
    """The rows of cases that run one after the other in one interpreter; another one when it ended or hangs."""
    child: subprocess.Popen[bytes] | None = None
    rows = []
    for number in numbers:
        is_first = child is None
        child = child or _interpreter(folder)
        row = _ask(child, number, _FIRST_S if is_first else LIMIT_S)
        if isinstance(row, str):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            case, _ = case_of(number, SEED)
            row = judged(case, child.returncode, "", row) | {"hang": row == "hang", "traceback": row != "hang"}
            child = None
        rows.append(row)
    if child is not None:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    return rows


def _interpreter(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench._cli_cases", str(folder)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _ask(child: subprocess.Popen[bytes], number: int, limit_s: float) -> dict[str, Any] | str:
    """The row of a case; else what became of the interpreter."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{SEED} {number}\n".encode())
    child.stdin.flush()
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        if not selector.select(limit_s):
            return "hang"
    line = child.stdout.readline()
    return json.loads(line) if line else "the interpreter ended"


def _real(folder: Path, numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Rows of cases in processes of their own: those of _REAL, then such as run in one interpreter, too."""
    rows = []
    for number in numbers:
        at = -1 - number
        if number < len(_REAL):
            line, after, fails = _REAL[number]
            case = Case(at, (line, after), "shell", "shell", fails)
            text = f"set -o pipefail; {sys.executable} -m cotenant {line} {after}"
            command = ["bash", "-c", text]
            prepare = _fifo
        else:
            case, prepare = case_of(10_000_000 + number, SEED)
            case = Case(at, case.arguments, "plain", case.what, case.fails and case.stream != "full")
            command = [
                sys.executable,
                "-m",
                "cotenant",
                *(each.encode("utf-8", "surrogateescape") for each in case.arguments),
            ]
        with copy_of(folder) as made:
            prepare(made)
            rows.append(_ended(case, command, made))
    return rows


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "fifo")


def _ended(case: Case, command: list[Any], folder: Path) -> dict[str, Any]:
    source = os.pathsep.join(filter(None, [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        *(command,), cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": source}, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return judged(case, child.returncode, "", "hang") | {"hang": True}
    return judged(case, child.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
