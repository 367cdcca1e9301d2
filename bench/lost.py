"""Lost: ten faults are injected into a served machine; does the account of lost queries name each fault and its tenant?

ResNet-50, MiniLM and magika get one query a request, over HTTP. Arrivals are open loop, Poisson; each tenant demands
the same share of a part of the machine (profiled latencies). The policy is `edf`: under `shares` a neighbour's burst
costs next to nothing. There is one fault a phase; between two the server has time to forget.
The trace tells which queries that came in a phase were lost, and the cause of each. A fault counts as named when most
of them have the expected cause. Where the fault is one tenant's, the queries of that tenant count. Where another tenant
loses by it, the account must name the culprit. `unexplained_pct` is the part of the clients' lost queries that the
account does not have.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench._server import cache_folder, rss_mb, serving, worker_pid
from bench._tenants import core_times, sample_all, warm_up
from cotenant.config import NS_PER_MS, load_model_config
from cotenant.load import run_load_process
from cotenant.repository import profile_path, trace_path
from cotenant.serve.server_process import RunningServer
from cotenant.trace import read
from cotenant.trace.losses import losses_of
from cotenant.trace.lost import Loss
from cotenant.types import LossCause, Outcome
from cotenant.wire.encode import http_request
from cotenant.workload import Poisson, TenantLoad, Workload, for_capacity
from cotenant.zoo import build_repository

MODELS = ("magika", "minilm", "resnet50")
LOAD, CROWDED = 0.35, 4.0
PHASE_S, QUICK_PHASE_S = 12.0, 3.0
CALM_S, QUICK_CALM_S = 4.0, 2.5
SEED = 1
HUNGRY = 6
"""Loops that take one core: of what they leave a lane gets a seventh."""

Inputs = Mapping[str, Sequence[Mapping[str, Any]]]
Act = Callable[[RunningServer, Path, Inputs, float], Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its injection, and the cause to be named. `tenant` None: over all tenants.

    `setup` changes the files of the repository for a server of its own; it gets the resident memory of a worker."""

    name: str
    tenant: str | None
    causes: tuple[LossCause, ...]
    culprit: str = ""
    factors: Mapping[str, float] = field(default_factory=dict)
    timeout_ms: float | None = None
    act: Act | None = None
    setup: Callable[[Path, float], None] | None = None
    items: int = 1


def _kill(server: RunningServer, root: Path, inputs: Inputs, seconds: float) -> None:
    for _ in range(3):
        with suppress(Exception):  # the one before it may not be replaced yet
            os.kill(worker_pid(server, "minilm"), signal.SIGKILL)
        time.sleep(seconds / 4)


def _reload(server: RunningServer, root: Path, inputs: Inputs, seconds: float) -> None:
    until = time.monotonic() + 0.7 * seconds
    while time.monotonic() < until:
        url = f"{server.http_url}/v2/repository/models/resnet50/load"
        with suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(url, b"{}", method="POST"), timeout=30).close()


def _take_core(server: RunningServer, root: Path, inputs: Inputs, seconds: float) -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}: pass"
    loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(HUNGRY)]
    time.sleep(0.9 * seconds)
    for loop in loops:
        loop.kill()
        loop.wait()


def _stall(server: RunningServer, root: Path, inputs: Inputs, seconds: float) -> None:
    """Clients that send half of a request, and the rest too late."""
    body, headers = http_request(inputs["minilm"][0], {})
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if name.lower() != "content-length")
    text = f"POST /v2/models/minilm/infer HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()
    slo_s = load_model_config(root / "minilm" / "config.toml").tenant.slo_ms / 1e3
    until = time.monotonic() + 0.8 * seconds
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection((server.host, server.http_port), 10) as link:
            link.sendall(text + body[: len(body) // 2])
            time.sleep(1.2 * slo_s)
            link.sendall(body[len(body) // 2 :])
            link.settimeout(5)
            link.recv(4096)


def _short_profile(root: Path, _: float) -> None:
    """A third of the measured latency of one model, whatever its name."""
    path = profile_path(root)
    known = json.loads(path.read_text(encoding="utf-8"))
    model = known["models"]["resnet50"]
    for point in model["points"]:
        point.update({key: max(1, value // 3) for key, value in point.items() if key.endswith("_ns")})
    path.write_text(json.dumps(known), encoding="utf-8")


def _configured(model: str, line: str) -> Callable[[Path, float], None]:
    def change(root: Path, resident_mb: float) -> None:
        path = root / model / "config.toml"
        text = re.sub(rf"(?m)^{line.split(' ')[0]} = .*\n", "", path.read_text(encoding="utf-8"))
        value = line.format(resident=round(resident_mb / 1.048576) + 12)
        path.write_text(text.replace("[tenant]\n", f"[tenant]\n{value}\n", 1), encoding="utf-8")

    return change


def _small_memory(root: Path, resident_mb: float) -> None:
    """A limit that requests of four rows go beyond, and an SLO that they are in time by."""
    for line in ("memory_limit_mib = {resident}", "slo_ms = 5000"):
        _configured("resnet50", line)(root, resident_mb)


OWN, SLOW = (LossCause.OWN_RATE,), (LossCause.SLOW,)
FAULTS = (
    Fault("own rate x4", "resnet50", OWN, factors={"resnet50": CROWDED * 2.5}),
    Fault("a neighbour's burst", "resnet50", (LossCause.NEIGHBOUR,), "minilm", factors={"minilm": CROWDED * 4}),
    Fault("short time-outs", "minilm", (LossCause.CLIENT,), timeout_ms=2.0),
    Fault("a worker killed", "minilm", (LossCause.FAILED,), act=_kill),
    Fault("a model reloaded", "resnet50", (LossCause.GONE,), act=_reload),
    Fault("a stalled client", "minilm", (LossCause.FRONT_END, LossCause.CLIENT), act=_stall),
    Fault("a core taken", None, (LossCause.STEAL_TIME,), act=_take_core, factors=dict.fromkeys(MODELS, 1.8)),
    Fault("a profile 3x too short", "resnet50", SLOW, factors={"resnet50": 3.5}, setup=_short_profile),
    Fault("an SLO below the latency", "resnet50", (LossCause.SLO,), setup=_configured("resnet50", "slo_ms = 20")),
    Fault(
        *("a memory limit", "resnet50", (LossCause.FAILED,)),
        setup=_small_memory,
        items=4,
    ),
)


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure; models are kept in the user's cache folder."""
    root = cache_folder() / "lost"
    build_repository(root, models=MODELS)
    service = core_times(root, MODELS, quick)
    rates = dict(for_capacity(service, len(os.sched_getaffinity(0)), LOAD))
    inputs = sample_all(root, MODELS)
    kept = {path: path.read_bytes() for path in (profile_path(root), *(root / m / "config.toml" for m in MODELS))}
    seconds = QUICK_PHASE_S if quick else PHASE_S
    faults = [each for each in FAULTS if not quick or each.setup is None]
    rows: list[dict[str, Any]] = []
    resident_mb = 0.0
    try:
        for group in [[each for each in faults if each.setup is None], *([each] for each in faults if each.setup)]:
            if group[0].setup is not None:
                group[0].setup(root, resident_mb)
            phases: list[tuple[Fault, int, int, Counter[str]]] = []
            with serving(root, "--policy", "edf") as server:
                with suppress(Exception):  # a server with a fault need not answer
                    asyncio.run(warm_up(server.http_url, "", inputs, strict=False))
                    resident_mb = resident_mb or rss_mb(worker_pid(server, "resnet50"))
                for fault in group:
                    phases.append(_phase(server, root, fault, rates, inputs, seconds))
                    time.sleep(QUICK_CALM_S if quick else CALM_S)
            _, losses = losses_of(*read(trace_path(root)))
            rows += [_row(*phase, losses) for phase in phases]
            for path, content in kept.items():
                path.write_bytes(content)
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
    lost, unexplained = (sum(row[key] for row in rows) for key in ("lost_by_clients", "unexplained"))
    summary = {
        "unexplained_pct": round(100 * unexplained / max(1, lost), 2),
        "causes_right": sum(row["right"] for row in rows),
        "faults": len(rows),
        "lost": lost,
    }
    _show(rows, summary)
    if quick:
        print(f"quick: {len(rows)} faults instead of {len(FAULTS)}, {seconds:g} s each, a coarser profile")
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


def _phase(
    server: RunningServer, root: Path, fault: Fault, rates: Mapping[str, float], inputs: Inputs, seconds: float
) -> tuple[Fault, int, int, Counter[str]]:
    """Send a phase; when it was on the machine's clock, and what clients lost by tenant."""
    import threading

    tenants = []
    for model in MODELS:
        config = load_model_config(root / model / "config.toml").tenant
        is_short = fault.timeout_ms is not None and model == fault.tenant
        tenants.append(
            TenantLoad(
                *(model, model, Poisson(rates[model] * fault.factors.get(model, 1.0))),
                slo_ns=round(config.slo_ms * NS_PER_MS),
                timeout_ns=round(fault.timeout_ms * NS_PER_MS) if is_short and fault.timeout_ms else None,
            )
        )
    sent = dict(inputs)
    if fault.items > 1 and fault.tenant is not None:
        import numpy as np

        rows = [{k: np.concatenate([v] * fault.items) for k, v in each.items()} for each in inputs[fault.tenant]]
        sent[fault.tenant] = rows
    begin_ns = time.monotonic_ns()
    thread = None
    if fault.act is not None:
        thread = threading.Thread(target=fault.act, args=(server, root, inputs, seconds + 1.0))
        thread.start()
    load = Workload(tuple(tenants), round(seconds * 1e9), seed=SEED)
    result = run_load_process(load, http_url=server.http_url, inputs=sent)  # type: ignore[arg-type]
    if thread is not None:
        thread.join()
    lost = Counter(record.tenant for record in result.records if record.outcome is not Outcome.ANSWERED)
    return fault, begin_ns, time.monotonic_ns(), lost


def _row(fault: Fault, begin_ns: int, end_ns: int, by_clients: Counter[str], losses: Sequence[Loss]) -> dict[str, Any]:
    inside = [each for each in losses if begin_ns <= each.arrival_ns <= end_ns]
    of_fault = [each for each in inside if fault.tenant in (None, each.tenant)]
    named = Counter((each.cause, each.culprit) for each in of_fault)
    cause, culprit = named.most_common(1)[0][0] if named else (None, "")
    counted = Counter(each.tenant for each in inside)
    return {
        "fault": fault.name,
        "tenant": fault.tenant or "all",
        "expected": " or ".join(each.value for each in fault.causes)
        + (f" of {fault.culprit}" if fault.culprit else ""),
        "named": "" if cause is None else cause.value + (f" of {culprit}" if culprit else ""),
        "right": cause in fault.causes and culprit == fault.culprit,
        "of_losses": named[cause, culprit] / max(1, len(of_fault)) if cause is not None else 0.0,
        "causes": {f"{cause.value} {culprit}".strip(): count for (cause, culprit), count in named.most_common()},
        "lost_by_clients": sum(by_clients.values()),
        "unexplained": sum((by_clients - counted).values()),
    }


def _show(rows: list[dict[str, Any]], summary: Mapping[str, float]) -> None:
    table = Table("fault", "tenant", "expected", "named", "of its losses %", "lost by clients", "unexplained")
    for row in rows:
        colour = "green" if row["right"] else "red"
        table.add_row(
            *(row["fault"], row["tenant"], row["expected"], f"[{colour}]{row['named'] or 'nothing'}"),
            *(f"{100 * row['of_losses']:.0f}", str(row["lost_by_clients"]), str(row["unexplained"])),
        )
    console = Console()
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {value}")
