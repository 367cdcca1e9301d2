"""Crashes: processes of a server killed under load; what a kill costs a tenant, the others, and for how long.

ResNet-50, MiniLM and magika have the SLOs of the quick start, scaled to their latencies on this machine. Each request
over HTTP is one query. Arrivals are open loop, Poisson; each tenant demands the same share of 40 % of the machine
(profiled latencies, all cores). The server has two front-end processes. At regular times the worker of MiniLM, a
front-end and the engine get SIGKILL, in turns. Attainment in the seconds after a kill is compared with that in the
seconds before the next one, in the same run.

A query is lost when its client gets no outcome for it, or several. It is also lost when the server still has it at the
end. While there is no engine, queries are answered with 503: these are refused, not lost. Every answer is compared with
the answer to its inputs alone (`foreign_answers`). Recovery runs from the kill to the first answer to a query that
arrived after it. The query is of MiniLM after a kill of its worker, else of any tenant; `all_recovered_s` is that of
the last tenant. The server says how much of it was a worker's new process and how much its model.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench._registry import BenchError
from bench._server import ENGINE, FRONT_END, cache_folder, processes_of, rss_mb, serving, without_workers, worker_pid
from bench._tenants import prepare, sample_all, warm_up, workload
from cotenant.load import LiveStats, LoadResult, run_load_process
from cotenant.metrics import QueryRecord
from cotenant.serve.server_process import RunningServer
from cotenant.types import ANSWERS, Outcome
from cotenant.workload import Workload, arrival_blocks, for_capacity

MODELS = ("magika", "minilm", "resnet50")
VICTIM = "minilm"
OTHERS = tuple(model for model in MODELS if model != VICTIM)
FRONTENDS = 2
LOAD = 0.4
CYCLES, QUICK_CYCLES = 4, 1
PERIODS_S = {"worker": 8.0, "frontend": 8.0, "engine": 20.0}
"""From a kill of a kind to the next kill, in seconds. Each kind has its turn every 36 s: a process that is lost again
within 30 s is replaced later. An engine has all models to load."""
AFTER_PART = 0.5
"""How much of the time after a kill counts as its window; the rest up to the next kill is calm."""
WARM_UP_S = 3.0
SEED = 1
_NO_OUTCOME = "no answer within the client's limit"


@dataclass(slots=True)
class Kill:
    """A kill: of what, its wall-clock time, and the seconds that a worker's new process and its model took."""

    kind: str
    at_s: float
    process_s: float | None = None
    model_s: float | None = None


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure; models are kept in the user's cache folder."""
    kinds = [*PERIODS_S] * (QUICK_CYCLES if quick else CYCLES)
    root, service_ns = prepare(cache_folder() / "crash", MODELS, "", quick)
    rates = dict(for_capacity(service_ns, len(os.sched_getaffinity(0)), LOAD))
    inputs = sample_all(root, MODELS)
    with serving(root, "--frontends", str(FRONTENDS)) as server:
        asyncio.run(warm_up(server.http_url, "", inputs, strict=False))
        killer = Killer(server, kinds)
        load = workload(root, "", rates, SEED, sum(PERIODS_S[kind] for kind in kinds), WARM_UP_S)
        result = run_load_process(
            load, http_url=server.http_url, inputs=inputs, on_tick=killer.tick, tick_s=0.05, check=True
        )
        time.sleep(0.5)
        killer.note_recovery()
        page = _page(server)
        resident = {model: round(rss_mb(worker_pid(server, model)), 1) for model in MODELS}
        resident["server"] = round(rss_mb(*without_workers(server)), 1)
    start_s = datetime.fromisoformat(result.started_at).timestamp()
    queries = [record for record in result.records if record.scheduled_ns >= result.warmup_ns]
    rows = rows_of(queries, killer.kills, start_s)
    names = (f'nv_inference_pending_request_count{{model="{model}"}}' for model in MODELS)
    lost = lost_queries(load, result) + sum(round(_value(page, name)) for name in names if name in page)
    summary = summary_of(rows, lost, resident) | {"foreign_answers": result.wrong_answers}
    _show(rows, summary, rates)
    for tenant in result.tenants:
        for outcome in (Outcome.FAILED.value, Outcome.REJECTED.value):
            for reason, count in tenant.reasons.get(outcome, {}).items():
                print(f"{tenant.name}: {count} {outcome}: {reason}")
    if quick:
        print(f"quick: {QUICK_CYCLES} kill of a kind instead of {CYCLES}, a coarser profile")
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


class Killer:
    """Kills processes at their times; called by the load generator's ticks."""

    def __init__(self, server: RunningServer, kinds: Sequence[str]) -> None:
        self._server = server
        self._kinds = kinds
        self._due = [*accumulate((PERIODS_S[kind] for kind in kinds), initial=WARM_UP_S)][:-1]
        self.kills: list[Kill] = []

    def tick(self, stats: LiveStats) -> None:
        """Kill if it is time."""
        number = len(self.kills)
        if number < len(self._due) and stats.elapsed_ns >= self._due[number] * 1e9:
            self.note_recovery()
            kind = self._kinds[number]
            pid = self._find(kind)
            self.kills.append(Kill(kind, time.time()))
            os.kill(pid, signal.SIGKILL)

    def _find(self, kind: str) -> int:
        """The process to kill: of front-ends the oldest one."""
        if kind == "worker":
            return worker_pid(self._server, VICTIM)
        found = processes_of(self._server, ENGINE if kind == "engine" else FRONT_END)
        if not found:
            raise BenchError(f"the server has no {kind} process when one is to be killed")
        return found[0]

    def note_recovery(self) -> None:
        """Before the next kill: what the server says of the last worker that was replaced."""
        if self.kills and (last := self.kills[-1]).kind == "worker":
            page = _page(self._server)
            last.process_s = round(_value(page, f'cotenant_worker_start_seconds{{tenant="{VICTIM}"}}'), 3)
            last.model_s = round(_value(page, f'cotenant_worker_load_seconds{{tenant="{VICTIM}"}}'), 3)


# --- the server -------------------------------------------------------------------------------------------------------


def _page(server: RunningServer) -> str:
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
        page: str = answer.read().decode()
        return page


def _value(page: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    if found is None:
        raise BenchError(f"the metrics page has no {name}")
    return float(found[1])


# --- results ----------------------------------------------------------------------------------------------------------


def lost_queries(load: Workload, result: LoadResult) -> int:
    """Queries of a load without exactly one outcome at the client; one that was never answered has none."""
    names = [tenant.name for tenant in load.tenants]
    sent = Counter(
        (names[tenant], time_ns)
        for block in arrival_blocks(load)
        for tenant, time_ns in zip(block.tenant.tolist(), block.time_ns.tolist(), strict=True)
    )
    ended = Counter((record.tenant, record.scheduled_ns) for record in result.records)
    unanswered = sum(tenant.reasons.get(Outcome.FAILED.value, {}).get(_NO_OUTCOME, 0) for tenant in result.tenants)
    return (sent - ended).total() + (ended - sent).total() + unanswered


def rows_of(queries: Sequence[QueryRecord], kills: Sequence[Kill], start_s: float) -> list[dict[str, Any]]:
    """One row a kill, with the queries that were inside then. `start_s` is the time that their times count from."""
    rows = []
    kills_ns = [round((kill.at_s - start_s) * 1e9) for kill in kills]
    for number, kill in enumerate(kills):
        kill_ns, period_ns = kills_ns[number], round(PERIODS_S[kill.kind] * 1e9)
        calm_ns = kill_ns + round(AFTER_PART * period_ns)
        end_ns = kills_ns[number + 1] if number + 1 < len(kills) else kill_ns + period_ns
        first_s = {model: _first_s(queries, model, kill_ns) for model in MODELS}
        concerned = (VICTIM,) if kill.kind == "worker" else MODELS
        answered = [first_s[model] for model in concerned if first_s[model] is not None]
        row: dict[str, Any] = {
            "kill": number,
            "kind": kill.kind,
            "at_s": round(kill_ns / 1e9, 2),
            "recovery_s": min(answered, default=None),
            "all_recovered_s": max(answered) if len(answered) == len(concerned) else None,
            "replacing_s": kill.process_s,
            "reloading_s": kill.model_s,
        }
        for name, tenants in (("victim", (VICTIM,)), ("others", OTHERS)):
            mine = [query for query in queries if query.tenant in tenants]
            after = [query for query in mine if query.scheduled_ns < calm_ns and query.ended_ns >= kill_ns]
            calm = [query for query in mine if query.scheduled_ns >= calm_ns and query.ended_ns < end_ns]
            row |= {
                f"{name}_after": len(after),
                f"{name}_after_in_time": _count(after, Outcome.ANSWERED),
                f"{name}_calm": len(calm),
                f"{name}_calm_in_time": _count(calm, Outcome.ANSWERED),
                f"{name}_failed": _count((*after, *calm), Outcome.FAILED),
                f"{name}_refused": _count((*after, *calm), Outcome.REJECTED),
            }
        rows.append(row)
    return rows


def _first_s(queries: Iterable[QueryRecord], tenant: str, kill_ns: int) -> float | None:
    """From a kill to a tenant's first answer to a query that arrived after it."""
    ends = [
        query.ended_ns
        for query in queries
        if query.tenant == tenant and query.scheduled_ns > kill_ns and query.outcome in ANSWERS
    ]
    return round((min(ends) - kill_ns) / 1e9, 3) if ends else None


def _count(queries: Iterable[QueryRecord], outcome: Outcome) -> int:
    return sum(query.outcome is outcome for query in queries)


def summary_of(rows: Sequence[dict[str, Any]], lost: int, resident: dict[str, float]) -> dict[str, float]:
    """Figures by kind; those of kills of the worker have no prefix."""
    missing = [f"{row['kind']} at {row['at_s']:g} s" for row in rows if row["all_recovered_s"] is None]
    if missing:
        raise BenchError(f"a tenant did not recover from these kills: {', '.join(missing)}")
    summary: dict[str, float] = {"lost_queries": lost}
    for kind in PERIODS_S:
        mine = [row for row in rows if row["kind"] == kind]
        prefix = "" if kind == "worker" else f"{kind}_"
        recoveries = [row["recovery_s"] for row in mine]
        after, calm = (_share(mine, "others", part) for part in ("after", "calm"))
        summary |= {
            f"{prefix}others_attainment_drop_points": round(calm - after, 2),
            f"{prefix}others_attainment_after_pct": round(after, 2),
            f"{prefix}others_attainment_calm_pct": round(calm, 2),
            f"{prefix}others_failed": sum(row["others_failed"] for row in mine),
            f"{prefix}others_refused": sum(row["others_refused"] for row in mine),
            f"{prefix}victim_attainment_pct": round(_share(mine, "victim", "after", "calm"), 2),
            f"{prefix}victim_failed": sum(row["victim_failed"] for row in mine),
            f"{prefix}victim_refused": sum(row["victim_refused"] for row in mine),
            f"{prefix}recovery_s": round(statistics.median(recoveries), 3),
            f"{prefix}recovery_max_s": round(max(recoveries), 3),
            f"{prefix}all_recovered_max_s": round(max(row["all_recovered_s"] for row in mine), 3),
        }
    workers = [row for row in rows if row["kind"] == "worker"]
    return summary | {
        "replacing_s": round(statistics.median(row["replacing_s"] for row in workers), 3),
        "reloading_s": round(statistics.median(row["reloading_s"] for row in workers), 3),
        **{f"rss_{name}_mb": value for name, value in resident.items()},
    }


def _share(rows: Iterable[dict[str, Any]], name: str, *parts: str) -> float:
    """Answers in time in these parts of rows, in percent of the queries."""
    rows = list(rows)
    in_time = sum(row[f"{name}_{part}_in_time"] for row in rows for part in parts)
    return 100 * in_time / max(1, sum(row[f"{name}_{part}"] for row in rows for part in parts))


def _show(rows: Sequence[dict[str, Any]], summary: dict[str, float], rates: dict[str, float]) -> None:
    console = Console()
    mix = ", ".join(f"{model} {rates[model]:.1f}/s" for model in MODELS)
    table = Table(
        "kill at s", "of", "recovery s", "all s", f"{VICTIM} after", "calm", "others after", "calm", "failed", "refused"
    )
    table.title = f"SIGKILL for the worker of {VICTIM}, a front-end and the engine; {mix}"
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("at_s", "kind", "recovery_s", "all_recovered_s")),
            *(
                f"{row[f'{name}_{part}_in_time']} of {row[f'{name}_{part}']}"
                for name in ("victim", "others")
                for part in ("after", "calm")
            ),
            *(str(row[f"victim_{what}"] + row[f"others_{what}"]) for what in ("failed", "refused")),
        )
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {value}")
