"""Every world and class of an experiment once: in two processes, with progress, resumed where it was left off."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cotenant
from bench._server import cache_folder

PROCESSES = 2


def digest_of(sources: Iterable[ModuleType], files: Iterable[Path]) -> str:
    """Of everything that a result hangs on: these modules, of a package all that lie in it, and these data files."""
    made = hashlib.sha256()
    places = [Path(module.__file__) for module in sources if module.__file__]
    found = [
        file
        for place in places
        for file in (sorted(place.parent.glob("*.py")) if place.name == "__init__.py" else [place])
    ]
    for file in [*found, *files]:
        made.update(str(len(found)).encode() + file.read_bytes())
    return made.hexdigest()[:16]


def run_all(
    name: str,
    key: str,
    tasks: Sequence[Any],
    judge: Callable[[Any], list[dict[str, Any]]],
    said: Callable[[list[dict[str, Any]]], str],
    processes: int = 0,
) -> list[dict[str, Any]]:
    """The rows of all tasks, in their order.

    The result of a task is kept in a file named by `key` and the task's own text, and read from there the next time.
    `said` makes the progress line of a finished task. `processes` run at once, PROCESSES where it is 0.
    """
    folder = cache_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{hashlib.sha256(f'{key} {task!r}'.encode()).hexdigest()[:24]}.json" for task in tasks]
    missing = [(task, file) for task, file in zip(tasks, files, strict=True) if not file.exists()]
    done = len(tasks) - len(missing)
    if done:
        print(f"{name}: {done} of {len(tasks)} are known from before", file=sys.stderr, flush=True)
    count = min(processes or PROCESSES, len(os.sched_getaffinity(0)), len(missing))
    jobs = [(judge, task, file) for task, file in missing]
    if count > 1:
        with multiprocessing.get_context("fork").Pool(count) as pool:
            for rows in pool.imap_unordered(_judged, jobs):
                done += 1
                print(f"{name}: {done}/{len(tasks)} {said(rows)}", file=sys.stderr, flush=True)
    else:
        for job in jobs:
            done += 1
            print(f"{name}: {done}/{len(tasks)} {said(_judged(job))}", file=sys.stderr, flush=True)
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]


def timed_rows(
    name: str,
    sources: Iterable[ModuleType],
    tasks: Sequence[Any],
    measure: Callable[[Any], list[dict[str, Any]]],
    said: Callable[[list[dict[str, Any]]], str],
    *,
    quick: bool,
) -> list[dict[str, Any]]:
    """The rows of all tasks, measured one after the other on servers of ours.

    A full run that was cut short goes on where it was, while neither the modules nor the product have changed. Once all
    rows are there, nothing is kept: the next run measures anew.
    """
    kept = cache_folder() / (f"{name}-rows-quick" if quick else f"{name}-rows")
    if quick:
        shutil.rmtree(kept, ignore_errors=True)
    rows = run_all(kept.name, digest_of(sources, product_files()), tasks, measure, said, 1)
    shutil.rmtree(kept)
    return rows


def product_files() -> list[Path]:
    """The product's code."""
    return sorted(Path(cotenant.__file__).parent.rglob("*.py"))


def _judged(job: tuple[Callable[[Any], list[dict[str, Any]]], Any, Path]) -> list[dict[str, Any]]:
    judge, task, file = job
    rows = judge(task)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(rows), encoding="utf-8")
    draft.replace(file)
    return rows
