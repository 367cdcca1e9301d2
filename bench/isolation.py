"""Isolation: what victims notice of one clumsy or hostile client, on a real server under its default policy.

Three tenants of the quick start send 6 queries a second each, all in quota. Calm runs and runs with a disturbance take
turns. The disturbance is one of the clients of `bench/_attackers.py`, for another tenant, or a failure. A failure kills
the worker of that tenant, a front-end or the model loader again and again, or makes the disk refuse the trace. Clients
run on the same cores, with a low priority. Their processor time is in the rows, as is the number of front-end processes
of the server (`frontends`, 0: none).
`worst_victim_drop_points`: by how many points of attainment a victim is below its own in the calm runs, at most.
`recovery_s`: how long after the end of an attack the last query of a victim that missed its SLO came, at most.
A row during which others took more than 5 % of the processor is measured again, once. Rows are kept as they come: a run
that was cut short goes on where it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import termios
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench import _attackers
from bench._attackers import KINDS, TENANT, Attack
from bench._campaign import timed_rows
from bench._disturbed import core_time, disturbed, undisturbed
from bench._registry import FOLDER, BenchError
from bench._server import FRONT_END, LOADER, TINY_CONFIG, cache_folder, processes_of, serving, worker_pid
from bench._tenants import Inputs, prepare, sample_all
from cotenant.load import run_load_process
from cotenant.metrics import QueryRecord
from cotenant.repository import trace_path
from cotenant.serve.server_process import RunningServer
from cotenant.types import Outcome
from cotenant.workload import TenantLoad, Uniform, Workload
from cotenant.zoo import build

VICTIMS = ("magika", "minilm", "ocr_orientation")
RATE = 6.0
CALM = "none"
WORKER, FRONTEND, LOADS, DISK = FAULTS = ("killed worker", "killed front-end", "killed loader", "stalled disk")
"""What fails; any tenant's client can bring the first three about."""
ROWS = (CALM, "gzip", "flood", "images", "slow_heads", "loads", *FAULTS, CALM)
"""The default form; `--attack` runs the other kinds."""
QUICK_ROWS = (CALM, "flood")
"""Of both modes; front-ends can be killed, and the disk stalls, where they have processes of their own."""
QUICK_FAULTS = (FRONTEND, DISK)
SECONDS, QUICK_SECONDS = 35.0, 3.0
WARM_UP_S, AFTER_S, QUICK_AFTER_S = 2.0, 3.0, 1.5
KILL_EVERY_S, FRONTEND_KILL_EVERY_S = 2.0, 8.0
"""A front-end that was lost within 30 s is waited for longer. The other one is there meanwhile."""
MOST_STEAL = 0.05
_SERVER = '[device]\nlanes = "single"\n'
_PIPE_BYTES = 4096


def run(
    quick: bool, data_dir: Path | None, attacks: Sequence[str] | None = None, frontends: int | None = None
) -> dict[str, object]:
    """Measure. `data_dir` is not used; models are kept in the user's cache folder. Raises BenchError."""
    console = Console()
    seconds, after_s = (QUICK_SECONDS, QUICK_AFTER_S) if quick else (SECONDS, AFTER_S)
    tasks = tasks_of(quick, attacks, frontends)
    root, _ = prepare(cache_folder() / "isolation", VICTIMS, _SERVER, quick)
    _add_tenant(root)
    inputs = sample_all(root, VICTIMS)

    def row_of(task: tuple[int, str, int]) -> list[dict[str, Any]]:
        _, kind, count = task
        row = _row(root, kind, count, inputs, seconds, after_s)
        if row["steal"] > MOST_STEAL:
            row = {"again": True, **_row(root, kind, count, inputs, seconds, after_s)}
        return [row]

    rows = timed_rows("isolation", (sys.modules[__name__], _attackers), tasks, row_of, _told, quick=quick)
    summary = judge(rows)
    _show(console, rows)
    left_out = [kind for kind in (*KINDS, *FAULTS) if kind not in {row["kind"] for row in rows}]
    console.print(f"{len(rows)} rows of {seconds:g} s; left out: {', '.join(left_out) or 'nothing'}", highlight=False)
    return {"summary": summary, "rows": rows, "seeds": [1]}


def tasks_of(quick: bool, attacks: Sequence[str] | None, frontends: int | None) -> list[tuple[int, str, int]]:
    """The rows of a run: number, kind, and front-end processes. Raises BenchError for an unknown kind."""
    for kind in attacks or ():
        if kind not in (*KINDS, *FAULTS):
            raise BenchError(f"there is no attack {kind!r}; expected one of {', '.join((*KINDS, *FAULTS))}")
    if attacks:
        rows = [(kind, 1) for kind in (CALM, *attacks)]
    elif quick:
        rows = [*((kind, 0) for kind in QUICK_ROWS), *((kind, 1) for kind in (*QUICK_ROWS, *QUICK_FAULTS))]
    else:
        rows = [(kind, 1) for kind in ROWS]
    counted = [(kind, count if frontends is None else frontends) for kind, count in rows]
    made = dict.fromkeys(counted) if quick else counted  # one mode, where it is given
    return [(at, kind, 2 if kind == FRONTEND else count) for at, (kind, count) in enumerate(made)]


def judge(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The summary. Each attacked row gets its largest drop (`drop_points`) from the calm rows of its mode."""
    calm = {
        mode: {name: statistics.median(row[name] for row in undisturbed(found)) for name in VICTIMS}
        for mode in (True, False)
        if (found := [row for row in rows if row["kind"] == CALM and (row["frontends"] > 0) is mode])
    }
    attacked = [row for row in rows if row["kind"] != CALM]
    for row in attacked:
        usual = calm.get(row["frontends"] > 0) or next(iter(calm.values()))
        row["drop_points"] = max(100 * (usual[name] - row[name]) for name in VICTIMS)
    return {
        "worst_victim_drop_points": max(row["drop_points"] for row in attacked),
        "recovery_s": max(row["recovery_s"] for row in attacked),
        **{f"calm_{name}": value for name, value in next(iter(calm.values())).items()},
    }


def _add_tenant(root: Path) -> None:
    """The model that attackers ask for."""
    folder = root / TENANT
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(TINY_CONFIG, encoding="utf-8")
    build("tiny", folder / "1" / "model.onnx")


def _row(root: Path, kind: str, frontends: int, inputs: Inputs, seconds: float, after_s: float) -> dict[str, Any]:
    """One run of a fresh server: victims throughout, the attack until some seconds before the end."""
    tenants = tuple(TenantLoad(name, name, Uniform(RATE)) for name in VICTIMS)
    until_s = WARM_UP_S + seconds
    load = Workload(tenants, round((until_s + after_s) * 1e9), seed=1, warmup_ns=round(WARM_UP_S * 1e9))
    with ExitStack() as stack:
        pipe = stack.enter_context(_trace_to_pipe(root)) if kind == DISK else -1
        server = stack.enter_context(serving(root, "--frontends", str(frontends)))
        before, others = _processor(), core_time()
        with _attacking(kind, server, pipe, until_s) as told:
            result = run_load_process(load, http_url=server.http_url, inputs=inputs)
        after = _processor()
        told |= disturbed(others)
    if kind == DISK and not told["pipe_bytes"]:
        raise BenchError("the server wrote nothing of its trace into the pipe that was to stall it")
    records = [each for each in result.records if each.scheduled_ns >= load.warmup_ns]
    end_ns = round(until_s * 1e9)
    missed = [each.scheduled_ns for each in records if each.outcome is not Outcome.ANSWERED]
    return {
        "kind": kind,
        "frontends": frontends,
        "queries": len(records) // len(VICTIMS),
        **{
            name: _attainment([each for each in records if each.tenant == name and each.scheduled_ns < end_ns])
            for name in VICTIMS
        },
        "recovery_s": max(0.0, (max(missed, default=0) - end_ns) / 1e9),
        "steal": (after[1] - before[1]) / max(1, after[0] - before[0]),
        **told,
    }


def _attainment(records: list[QueryRecord]) -> float:
    return sum(each.outcome is Outcome.ANSWERED for each in records) / max(1, len(records))


@contextmanager
def _attacking(kind: str, server: RunningServer, pipe: int, until_s: float) -> Iterator[dict[str, Any]]:
    """Attack a server for so many seconds. The counts of the attack are in the dictionary at the end."""
    told: dict[str, Any] = {}
    if kind == CALM:
        yield told
        return
    ended = threading.Event()
    acts: dict[str, Callable[[], None]] = {
        WORKER: lambda: _kill_again(lambda: worker_pid(server, TENANT), KILL_EVERY_S, ended, told),
        FRONTEND: lambda: _kill_again(lambda: processes_of(server, FRONT_END)[0], FRONTEND_KILL_EVERY_S, ended, told),
        LOADS: lambda: _kill_loader(server, ended, told),
        DISK: lambda: _stall(pipe, ended, told),
    }
    thread = threading.Thread(target=acts.get(kind, lambda: _send(kind, server, ended, told)), daemon=True)
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


def _kill_again(find: Callable[[], int], every_s: float, ended: threading.Event, told: dict[str, Any]) -> None:
    """Kill a process after a second, and then again and again."""
    told["sent"] = 0
    pause_s = 1.0
    while not ended.wait(pause_s):
        with suppress(BenchError, IndexError, ProcessLookupError):  # it is being replaced
            os.kill(find(), signal.SIGKILL)
            told["sent"] += 1
        pause_s = every_s


def _kill_loader(server: RunningServer, ended: threading.Event, told: dict[str, Any]) -> None:
    """Have the model of the attackers' tenant loaded again and again, and kill what loads it at several moments."""
    told["sent"], number = 0, 0
    while not ended.wait(0.5):
        load = threading.Thread(target=_load, args=(f"{server.http_url}/v2/repository/models/{TENANT}/load",))
        load.start()
        number += 1
        ended.wait(0.2 * (1 + number % 8))
        for pid in processes_of(server, LOADER):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                told["sent"] += 1
        load.join(30)


def _load(url: str) -> None:
    with suppress(OSError), urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=30):
        pass


@contextmanager
def _trace_to_pipe(root: Path) -> Iterator[int]:
    """A pipe in place of the trace that the next server of a repository begins; its end for reading."""
    path = trace_path(root)
    begun = path.with_name(path.name + ".new")
    path.parent.mkdir(exist_ok=True)
    for each in (path, begun):
        each.unlink(missing_ok=True)
    os.mkfifo(begun)
    pipe = os.open(begun, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield pipe
    finally:
        with suppress(OSError):  # `_stall` has closed it
            os.close(pipe)
        for each in (path, begun):
            each.unlink(missing_ok=True)


def _stall(pipe: int, ended: threading.Event, told: dict[str, Any]) -> None:
    """Take nothing of the trace any more, until the end; from then on writing it is an error."""
    while True:
        with suppress(BlockingIOError):
            os.read(pipe, 1 << 20)
        with suppress(OSError):  # more was written meanwhile
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            break
    ended.wait()
    told["pipe_bytes"] = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
    os.close(pipe)


def _processor() -> tuple[int, int]:
    """Ticks of all cores so far, and those of them that went to other machines on the same host."""
    fields = [int(each) for each in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
    return sum(fields[:8]), fields[7]


def _told(rows: Sequence[dict[str, Any]]) -> str:
    [row] = rows
    figures = ", ".join(f"{name} {100 * row[name]:.1f} %" for name in VICTIMS)
    return f"{row['kind']}, {row['frontends']} front-ends: {figures}"


def _show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table("one client", "front-ends", *VICTIMS, "drop, points", "recovery, s", "requests", box=SIMPLE)
    for row in rows:
        drop = f"{row['drop_points']:.1f}" if "drop_points" in row else ""
        figures = [*[f"{100 * row[name]:.0f}" for name in VICTIMS], drop, f"{row['recovery_s']:.1f}"]
        table.add_row(row["kind"], str(row["frontends"]), *figures, str(row.get("sent", "")))
    console.print(table)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        if kind in KINDS:
            console.print(f"{kind}: {getattr(Attack, kind).__doc__}", highlight=False)
