"""Wrong profiles: how soon a server corrects one that is wrong by a large factor, and what the other tenants lose.

A repository is profiled. Then all latencies of one model, the victim, are multiplied by 25 or by 0.04, and a fresh
server without learnt factors serves it. It is idle but for the victim's 10 queries a second, or loaded: two other
tenants send queries as well. Rows with the true profile are the reference.

- `seconds_to_first_answer`: until the first answer to the victim within its SLO, from the first query on.
- `seconds_to_within_10_pct`: until the believed latency stays within 10 % of its median over the last third of the row.
- `others_lose_points`: attainment of another tenant below that in the reference row with the same load, at most.
- `belief_ratio`: that median over the one of the reference row; 1 when the error of the profile is gone.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench._campaign import timed_rows
from bench._registry import BenchError
from bench._server import cache_folder, serving
from bench._tenants import Inputs, prepare, sample_all
from cotenant.load import run_load_process
from cotenant.profiles.profile_file import load_profile, save_profile
from cotenant.repository import profile_path
from cotenant.repository.paths import learnt_factors_path
from cotenant.types import Outcome
from cotenant.workload import TenantLoad, Uniform, Workload

VICTIM = "minilm"
OTHERS = ("magika", "ocr_orientation")
RATE, OTHERS_RATE = 10.0, 8.0
TRUE = 1.0
ERRORS = (TRUE, 25.0, 0.04)
SECONDS, QUICK_SECONDS = 40.0, 4.0
_LOOK_S = 0.05
_NEAR = 0.1
_SERVER = '[device]\nlanes = "single"\n'
Task = tuple[bool, float]


def run(quick: bool, data_dir: Path | None) -> dict[str, object]:
    """Measure. `data_dir` is not used; models are kept in the user's cache folder. Raises BenchError."""
    console = Console()
    seconds = QUICK_SECONDS if quick else SECONDS
    root, _ = prepare(cache_folder() / "heal", (VICTIM, *OTHERS), _SERVER, quick)
    true = root.with_name("heal-profile.json")
    shutil.copy(profile_path(root), true)
    inputs = sample_all(root, (VICTIM, *OTHERS))

    def row_of(task: Task) -> list[dict[str, Any]]:
        try:
            _multiply(true, profile_path(root), task[1])
            return [_row(root, task, inputs, seconds)]
        finally:
            shutil.copy(true, profile_path(root))

    tasks = [(is_loaded, error) for is_loaded in (False, True) for error in ERRORS]
    rows = timed_rows("heal", (sys.modules[__name__],), tasks, row_of, _told, quick=quick)
    summary = judge(rows)
    _show(console, rows)
    if quick:
        print(f"quick: rows of {QUICK_SECONDS:g} s instead of {SECONDS:g} s, and profiles with little effort")
    return {"summary": summary, "rows": rows, "seeds": [1]}


def judge(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The summary: the worst of all rows with a wrong profile, which get their comparison with the reference."""
    reference = {row["is_loaded"]: row for row in rows if row["error"] == TRUE}
    wrong = [row for row in rows if row["error"] != TRUE]
    for row in wrong:
        usual = reference[row["is_loaded"]]
        lost = [100 * (usual["attainment"][name] - row["attainment"][name]) for name in OTHERS if row["is_loaded"]]
        row["others_lose_points"] = max([0.0, *lost])
        row["belief_ratio"] = row["belief"] / usual["belief"]
    return {
        "seconds_to_first_answer": max(row["seconds_to_first_answer"] for row in wrong),
        "seconds_to_within_10_pct": max(row["seconds_to_within_10_pct"] for row in wrong),
        "others_lose_points": max(row["others_lose_points"] for row in wrong),
        "belief_ratio_worst": max((row["belief_ratio"] for row in wrong), key=lambda ratio: max(ratio, 1 / ratio)),
    }


def settled_s(readings: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """From which time on a belief stays near its final value, and this value: the median of the last third.

    `readings` are (seconds, belief). The time is that of the last reading if not even this one is near.
    """
    final = statistics.median([belief for _, belief in readings[-max(1, len(readings) // 3) :]])
    away = [at for at, (_, belief) in enumerate(readings) if abs(belief / final - 1) > _NEAR]
    first = min(away[-1] + 1, len(readings) - 1) if away else 0
    return readings[first][0], final


def _multiply(true: Path, path: Path, error: float) -> None:
    """Write a profile in which all latencies of the victim are multiplied by `error`."""
    profile = load_profile(true)
    victim = profile.models[VICTIM]
    times = [each.name for each in fields(victim.points[0]) if each.name.endswith("_ns")]
    points = tuple(
        replace(point, **{name: max(1, round(getattr(point, name) * error)) for name in times})
        for point in victim.points
    )
    models = {**profile.models, VICTIM: replace(victim, points=points)}
    save_profile(path, replace(profile, models=models))


def _row(root: Path, task: Task, inputs: Inputs, seconds: float) -> dict[str, Any]:
    is_loaded, error = task
    learnt_factors_path(root).unlink(missing_ok=True)
    others = OTHERS if is_loaded else ()
    tenants = (
        TenantLoad(VICTIM, VICTIM, Uniform(RATE)),
        *(TenantLoad(name, name, Uniform(OTHERS_RATE)) for name in others),
    )
    load = Workload(tenants, round(seconds * 1e9), seed=1)
    readings: list[tuple[float, float]] = []
    is_over = threading.Event()
    with serving(root) as server:

        def watch() -> None:
            begun_s = time.monotonic()
            while not is_over.wait(_LOOK_S):
                with suppress(OSError):
                    readings.append((time.monotonic() - begun_s, error * _factor(server.http_url)))

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            result = run_load_process(load, http_url=server.http_url, inputs=inputs)
        finally:
            is_over.set()
            watching.join()
    in_time = {
        name: [each for each in result.records if each.tenant == name and each.outcome is Outcome.ANSWERED]
        for name in (VICTIM, *others)
    }
    if not readings or not in_time[VICTIM]:
        raise BenchError(f"nothing of {VICTIM!r} was answered, or its metric was not there")
    after_s, belief = settled_s(readings)
    counts = {name: sum(each.tenant == name for each in result.records) for name in in_time}
    return {
        "is_loaded": is_loaded,
        "error": error,
        "seconds_to_first_answer": min(each.ended_ns for each in in_time[VICTIM]) / 1e9,
        "seconds_to_within_10_pct": after_s,
        "belief": belief,
        "attainment": {name: len(found) / max(1, counts[name]) for name, found in in_time.items()},
    }


def _factor(url: str) -> float:
    """The factor by which the server corrects the victim's profile now."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    wanted = f'cotenant_latency_factor_ratio{{tenant="{VICTIM}"}} '
    return float(next(line.removeprefix(wanted) for line in lines if line.startswith(wanted)))


def _told(rows: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"x{row['error']:g} {'loaded' if row['is_loaded'] else 'idle'}" for row in rows)


def _show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None)
    for head in ("load", "profile x", "first answer s", "within 10 % s", "belief / true", "others lose"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            "loaded" if row["is_loaded"] else "idle",
            f"{row['error']:g}",
            f"{row['seconds_to_first_answer']:.2f}",
            f"{row['seconds_to_within_10_pct']:.2f}",
            f"{row.get('belief_ratio', 1.0):.2f}",
            f"{row.get('others_lose_points', 0.0):.1f}",
        )
    console.print(table)
