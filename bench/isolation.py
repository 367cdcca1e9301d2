"""Isolation: what victims notice of one clumsy or hostile client, on a real server under its default policy.

Three tenants of the quick start ask 5 queries a second each, all within what they are owed. In turns with that alone, a
client of another tenant does one of the things in `bench/_attackers.py`, or its worker is killed every 2 s. Clients run
on the same cores, with a low priority; their processor time is in the rows.
`worst_victim_drop_points`: by how many points of attainment a victim is below its own in the calm runs, at most.
`recovery_s`: how long after the end of an attack the last query of a victim that missed its SLO came, at most.
A row during which others took more than 5 % of the processor is measured again, once. Rows are kept as they come: a run
that was cut short goes on where it was.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench import _attackers
from bench._attackers import KINDS, TENANT, Attack
from bench._campaign import digest_of
from bench._registry import FOLDER, BenchError
from bench._server import TINY_CONFIG, cache_folder, serving, worker_pid
from bench._tenants import Inputs, prepare, sample_all
from cotenant.load import run_load_process
from cotenant.metrics import QueryRecord
from cotenant.serve.server_process import RunningServer
from cotenant.types import Outcome
from cotenant.workload import TenantLoad, Uniform, Workload
from cotenant.zoo import build

VICTIMS = ("magika", "minilm", "ocr_orientation")
RATE = 5.0
CALM, KILLED = "none", "killed worker"
ROWS = (CALM, *KINDS[:5], CALM, *KINDS[5:], KILLED, CALM)
QUICK_ROWS = (CALM, "gzip", "flood", "malformed", KILLED)
SECONDS, QUICK_SECONDS = 40.0, 6.0
WARM_UP_S, AFTER_S = 2.0, 3.0
KILL_EVERY_S = 2.0
MOST_STOLEN = 0.05
_SERVER = '[device]\nlanes = "single"\n'


def run(quick: bool, data_dir: Path | None) -> dict[str, object]:
    """Measure. `data_dir` is not used; models are kept in the user's cache folder."""
    console = Console()
    seconds = QUICK_SECONDS if quick else SECONDS
    root, _ = prepare(cache_folder() / "isolation", VICTIMS, _SERVER, quick)
    _add_tenant(root)
    inputs = sample_all(root, VICTIMS)
    kept = cache_folder() / f"isolation-{digest_of((sys.modules[__name__], _attackers), ())}.jsonl"
    if quick:
        kept.unlink(missing_ok=True)
    known = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    rows: list[dict[str, Any]] = []
    for at, kind in enumerate(QUICK_ROWS if quick else ROWS):
        row = next((each for each in known if each["at"] == at), None)
        if row is None:
            row = {"at": at, **_row(root, kind, inputs, seconds)}
            if row["stolen"] > MOST_STOLEN:
                row = {"at": at, "again": True, **_row(root, kind, inputs, seconds)}
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        rows.append(row)
        console.print(_told(row), highlight=False)
    kept.unlink(missing_ok=True)
    calm = {name: statistics.median([row[name] for row in rows if row["kind"] == CALM]) for name in VICTIMS}
    attacked = [row for row in rows if row["kind"] != CALM]
    for row in attacked:
        row["drop_points"] = max(100 * (calm[name] - row[name]) for name in VICTIMS)
    summary = {
        "worst_victim_drop_points": max(row["drop_points"] for row in attacked),
        "recovery_s": max(row["recovery_s"] for row in attacked),
        **{f"calm_{name}": value for name, value in calm.items()},
    }
    _show(console, rows)
    if quick:
        console.print(f"quick: {len(QUICK_ROWS)} rows of {seconds:g} s, a coarser profile")
    return {"summary": summary, "rows": rows, "seeds": [1]}


def _add_tenant(root: Path) -> None:
    """The model that attackers ask for."""
    folder = root / TENANT
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(TINY_CONFIG, encoding="utf-8")
    build("tiny", folder / "1" / "model.onnx")


def _row(root: Path, kind: str, inputs: Inputs, seconds: float) -> dict[str, Any]:
    """One run of a fresh server: victims throughout, the attack until some seconds before the end."""
    tenants = tuple(TenantLoad(name, name, Uniform(RATE)) for name in VICTIMS)
    total_s = WARM_UP_S + seconds + AFTER_S
    load = Workload(tenants, round(total_s * 1e9), seed=1, warmup_ns=round(WARM_UP_S * 1e9))
    with serving(root) as server:
        before = _processor()
        with _attacking(kind, server, WARM_UP_S + seconds) as told:
            result = run_load_process(load, http_url=server.http_url, inputs=inputs)
        after = _processor()
    records = [each for each in result.records if each.scheduled_ns >= load.warmup_ns]
    end_ns = round((WARM_UP_S + seconds) * 1e9)
    missed = [each.scheduled_ns for each in records if each.outcome is not Outcome.ANSWERED]
    return {
        "kind": kind,
        "queries": len(records) // len(VICTIMS),
        **{
            name: _attainment([each for each in records if each.tenant == name and each.scheduled_ns < end_ns])
            for name in VICTIMS
        },
        "recovery_s": max(0.0, (max(missed, default=0) - end_ns) / 1e9),
        "stolen": (after[1] - before[1]) / max(1, after[0] - before[0]),
        **told,
    }


def _attainment(records: list[QueryRecord]) -> float:
    return sum(each.outcome is Outcome.ANSWERED for each in records) / max(1, len(records))


@contextmanager
def _attacking(kind: str, server: RunningServer, until_s: float) -> Iterator[dict[str, Any]]:
    """Attack a server for so many seconds. What was done is in the dictionary at the end."""
    told: dict[str, Any] = {}
    if kind == CALM:
        yield told
        return
    ended = threading.Event()
    work: Callable[[], None] = (
        (lambda: _kill(server, ended, told)) if kind == KILLED else (lambda: _send(kind, server, ended, told))
    )
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    timer = threading.Timer(until_s, ended.set)
    timer.start()
    try:
        yield told
    finally:
        ended.set()
        timer.cancel()
        thread.join(30)


def _send(kind: str, server: RunningServer, ended: threading.Event, told: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "bench._attackers", kind, server.http_url]
    with subprocess.Popen(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True) as process:
        ended.wait()
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    if len(lines) < 2:
        raise BenchError(f"the attack {kind!r} ended by itself")
    told.update(json.loads(lines[-1]))


def _kill(server: RunningServer, ended: threading.Event, told: dict[str, Any]) -> None:
    told["sent"] = 0
    while not ended.wait(KILL_EVERY_S):
        with suppress(BenchError, ProcessLookupError):  # it is being replaced
            os.kill(worker_pid(server, TENANT), signal.SIGKILL)
            told["sent"] += 1


def _processor() -> tuple[int, int]:
    """Ticks of all cores so far, and those of them that went to other machines on the same host."""
    fields = [int(each) for each in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
    return sum(fields[:8]), fields[7]


def _told(row: dict[str, Any]) -> str:
    figures = ", ".join(f"{name} {100 * row[name]:.1f} %" for name in VICTIMS)
    return f"{row['kind']}: {figures}"


def _show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table("one client", *VICTIMS, "drop, points", "recovery, s", "requests", box=SIMPLE)
    for row in rows:
        drop = f"{row['drop_points']:.1f}" if "drop_points" in row else ""
        figures = [*[f"{100 * row[name]:.0f}" for name in VICTIMS], drop, f"{row['recovery_s']:.1f}"]
        table.add_row(row["kind"], *figures, str(row.get("sent", "")))
    console.print(table)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        if kind in KINDS:
            console.print(f"{kind}: {getattr(Attack, kind).__doc__}", highlight=False)
