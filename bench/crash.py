"""Crashes: workers of one tenant killed again and again under load; what that costs it, and what it costs the others.

ResNet-50, MiniLM and magika with the SLOs of the quick start, one query a request, over HTTP; open loop, Poisson
arrivals, each tenant asking for the same share of 40 % of the machine (profiled latencies, all cores). The worker of
MiniLM gets SIGKILL at regular times. Attainment of the other two in the seconds after a kill is held against that in
the seconds before the next one, in the same run. A query is lost when the server counts no outcome for it, or more than
one. Every answer is held against what its inputs were answered alone (`foreign_answers`). Recovery runs from the kill
to the first answer to a query that arrived after it; the server says how much of it was the new process and how much
its model.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import time
import urllib.request
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench._registry import BenchError
from bench._server import cache_folder, rss_mb, serving, without_workers, worker_pid
from bench._tenants import SAMPLES, WARM_UPS, core_times, sample_all, warm_up, workload
from cotenant.load import LiveStats, LoadResult, run_load_process
from cotenant.serve.server_process import RunningServer
from cotenant.types import ANSWERS, Outcome
from cotenant.workload import for_capacity
from cotenant.zoo import build_repository

MODELS = ("magika", "minilm", "resnet50")
VICTIM = "minilm"
OTHERS = tuple(model for model in MODELS if model != VICTIM)
LOAD = 0.4
KILLS, QUICK_KILLS = 12, 2
PERIOD_S = 8.0
AFTER_S = 4.0
"""How much of the time after a kill counts as its window; the rest up to the next kill is calm."""
WARM_UP_S = 3.0
SEED = 1


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure; models are kept in the user's cache folder."""
    kills = QUICK_KILLS if quick else KILLS
    root, rates = _repository(cache_folder() / "crash", quick)
    inputs = sample_all(root, MODELS)
    with serving(root) as server:
        asyncio.run(warm_up(server.http_url, "", inputs, strict=False))
        killer = Killer(server, kills)
        load = workload(root, "", rates, SEED, PERIOD_S * kills, WARM_UP_S)
        result = run_load_process(
            load, http_url=server.http_url, inputs=inputs, on_tick=killer.tick, tick_s=0.05, check=True
        )
        time.sleep(0.5)
        killer.note_recovery()
        page = _page(server)
        resident = {model: round(rss_mb(worker_pid(server, model)), 1) for model in MODELS}
        resident["server"] = round(rss_mb(*without_workers(server)), 1)
    rows = _rows(result, killer)
    lost = _lost(result, page)
    summary = _summary(rows, lost, resident) | {"foreign_answers": result.wrong_answers}
    _show(rows, summary, rates)
    if quick:
        print(f"quick: {QUICK_KILLS} kills instead of {KILLS}, a coarser profile")
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


class Killer:
    """Kills the victim's worker at its times; called by the load generator's ticks."""

    def __init__(self, server: RunningServer, kills: int) -> None:
        self._server = server
        self._due = [WARM_UP_S + PERIOD_S * index for index in range(kills)]
        self.at_s: list[float] = []
        """Wall-clock times of the kills."""
        self.splits: list[tuple[float, float]] = []
        """Seconds that the new process took to come up, and to load its model, by kill."""

    def tick(self, stats: LiveStats) -> None:
        """Kill if it is time."""
        if len(self.at_s) < len(self._due) and stats.elapsed_ns >= self._due[len(self.at_s)] * 1e9:
            self.note_recovery()
            pid = worker_pid(self._server, VICTIM)
            self.at_s.append(time.time())
            os.kill(pid, signal.SIGKILL)

    def note_recovery(self) -> None:
        """Before the next kill: what the server says of the last replacement."""
        if self.at_s:
            page = _page(self._server)
            names = ("cotenant_worker_start_seconds", "cotenant_worker_load_seconds")
            start_s, load_s = (_value(page, f'{name}{{tenant="{VICTIM}"}}') for name in names)
            self.splits.append((start_s, load_s))


# --- models and load --------------------------------------------------------------------------------------------------


def _repository(root: Path, quick: bool) -> tuple[Path, dict[str, float]]:
    """The models, profiled; the rates at which each takes the same share of LOAD of the machine."""
    build_repository(root, models=MODELS)
    service = core_times(root, MODELS, quick)
    return root, dict(for_capacity(service, len(os.sched_getaffinity(0)), LOAD))


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


def _lost(result: LoadResult, page: str) -> int:
    """Queries without exactly one outcome: those the server has none for, and any that the two sides count apart."""
    lost = 0
    for model in MODELS:
        outcomes = sum(_value(page, f'cotenant_queries_total{{outcome="{o.value}",tenant="{model}"}}') for o in Outcome)
        sent = len(result.log.columns(model).outcome) + WARM_UPS + SAMPLES  # warming up, and asked alone
        pending = _value(page, f'nv_inference_pending_request_count{{model="{model}"}}')
        lost += abs(sent - round(outcomes)) + round(pending)
    return lost


# --- results ----------------------------------------------------------------------------------------------------------


def _rows(result: LoadResult, killer: Killer) -> list[dict[str, Any]]:
    """One row a kill."""
    start_s = datetime.fromisoformat(result.started_at).timestamp()
    queries = [record for record in result.records if record.scheduled_ns >= result.warmup_ns]
    rows = []
    for number, (wall_s, (up_s, load_s)) in enumerate(zip(killer.at_s, killer.splits, strict=True)):
        kill_ns = round((wall_s - start_s) * 1e9)
        calm_ns, end_ns = kill_ns + round(AFTER_S * 1e9), kill_ns + round(PERIOD_S * 1e9)
        others = [query for query in queries if query.tenant in OTHERS]
        victims = [query for query in queries if query.tenant == VICTIM]
        answers = [q.ended_ns for q in victims if q.scheduled_ns > kill_ns and q.outcome in ANSWERS]
        after = [query for query in others if kill_ns <= query.scheduled_ns < calm_ns]
        calm = [query for query in others if calm_ns <= query.scheduled_ns < end_ns]
        hit = [query for query in victims if kill_ns <= query.scheduled_ns < end_ns]
        rows.append(
            {
                "kill": number,
                "at_s": round(kill_ns / 1e9, 2),
                "recovery_s": round((min(answers) - kill_ns) / 1e9, 3) if answers else None,
                "replacing_s": round(up_s, 3),
                "reloading_s": round(load_s, 3),
                "others_after": len(after),
                "others_after_in_time": _in_time(after),
                "others_calm": len(calm),
                "others_calm_in_time": _in_time(calm),
                "others_failed": sum(query.outcome is Outcome.FAILED for query in (*after, *calm)),
                "victim": len(hit),
                "victim_in_time": _in_time(hit),
                "victim_failed": sum(query.outcome is Outcome.FAILED for query in hit),
            }
        )
    return rows


def _in_time(queries: Iterable[Any]) -> int:
    return sum(query.outcome is Outcome.ANSWERED for query in queries)


def _summary(rows: list[dict[str, Any]], lost: int, resident: dict[str, float]) -> dict[str, float]:
    def total(key: str) -> int:
        return sum(row[key] for row in rows)

    after = 100 * total("others_after_in_time") / max(1, total("others_after"))
    calm = 100 * total("others_calm_in_time") / max(1, total("others_calm"))
    recoveries = [row["recovery_s"] for row in rows if row["recovery_s"] is not None]
    if len(recoveries) < len(rows):
        raise BenchError(f"the tenant did not recover from {len(rows) - len(recoveries)} of {len(rows)} kills")
    return {
        "lost_queries": lost,
        "others_attainment_drop_points": round(calm - after, 2),
        "others_attainment_after_pct": round(after, 2),
        "others_attainment_calm_pct": round(calm, 2),
        "others_failed": total("others_failed"),
        "victim_attainment_pct": round(100 * total("victim_in_time") / max(1, total("victim")), 2),
        "victim_failed": total("victim_failed"),
        "recovery_s": round(statistics.median(recoveries), 3),
        "recovery_max_s": round(max(recoveries), 3),
        "replacing_s": round(statistics.median(row["replacing_s"] for row in rows), 3),
        "reloading_s": round(statistics.median(row["reloading_s"] for row in rows), 3),
        **{f"rss_{name}_mb": value for name, value in resident.items()},
    }


def _show(rows: list[dict[str, Any]], summary: dict[str, float], rates: dict[str, float]) -> None:
    console = Console()
    mix = ", ".join(f"{model} {rates[model]:.1f}/s" for model in MODELS)
    table = Table("kill at s", "recovery s", "process s", "model s", "others after", "others calm", f"{VICTIM} in time")
    table.title = f"SIGKILL for the worker of {VICTIM}; {mix}"
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("at_s", "recovery_s", "replacing_s", "reloading_s")),
            *(f"{row[f'{key}_in_time']} of {row[key]}" for key in ("others_after", "others_calm", "victim")),
        )
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {value}")
