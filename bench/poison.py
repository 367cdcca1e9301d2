"""Poison: some queries make the model raise; what that costs the good ones that are merged with them.

One model of many layers behind a table of marks (`bench/_carry.py`), `max_batch` 8, served on one core by a worker
process under edf. Good queries come open loop, Poisson, at 60 % of the server's rate in a closed loop. In every other
phase 2 % of all queries bring a mark that is not in the table. A batch that fails is run again in halves, so no good
query may fail (`innocent_failures`). Those runs are the cost of a bad query: `attainment_drop_points` is the share of
good queries in time without bad ones, less that with them. Both are medians over the phases of one server.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from bench._carry import MOST_ROWS, Arrays, numbers, picky, write_model
from bench._server import serving
from bench._tenants import QUICK_EFFORT, SAMPLES, closed_loop, profiled
from cotenant.load.clients import http_reply, model_path
from cotenant.load.http import HttpPool
from cotenant.repository import SERVER_FILE
from cotenant.types import Outcome
from cotenant.wire.decode import http_outputs
from cotenant.wire.encode import http_request

BAD_SHARE = 0.02
LOAD = 0.6
SLO_MS = 100.0
PHASES, QUICK_PHASES = 8, 2
PHASE_S, QUICK_PHASE_S = 8.0, 3.0
WARM_UP_S, SATURATE_S = 1.0, 3.0
SEED = 7
_GIVE_UP_S = 30.0
_BAD_MARK = 99


@dataclass(slots=True)
class Phase:
    """What a phase came to. `good` and `bad` are queries; `innocent` failed though they were good."""

    bad_share: float
    good: int = 0
    in_time: int = 0
    late: int = 0
    dropped: int = 0
    innocent: int = 0
    foreign: int = 0
    bad: int = 0
    bad_answered: int = 0

    @property
    def attainment_pct(self) -> float:
        """Of the good ones."""
        return 100 * self.in_time / max(1, self.good)


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure; nothing is kept."""
    phases, phase_s = (QUICK_PHASES, QUICK_PHASE_S) if quick else (PHASES, PHASE_S)
    core = sorted(os.sched_getaffinity(0))[0]
    with tempfile.TemporaryDirectory(prefix="cotenant-poison-") as name:
        root = Path(name) / "models"
        write_model(root, "picky", picky(), MOST_ROWS, slo_ms=SLO_MS)
        (root / SERVER_FILE).write_text(f"[device]\ncores = [{core}]\n", encoding="utf-8")
        profiled(root, QUICK_EFFORT)
        with serving(root) as server:
            client = _Client(server.http_url)
            capacity, rows = uvloop.run(client.measure(phases, phase_s))
    summary = _summary(capacity, rows)
    _show(rows, summary)
    if quick:
        print(f"quick: {phases} phases of {phase_s:g} s instead of {PHASES} of {PHASE_S:g}")
    return {
        "summary": summary,
        "rows": [asdict(row) | {"attainment_pct": round(row.attainment_pct, 2)} for row in rows],
        "seeds": [SEED],
    }


class _Client:
    """Sends queries of one row, good and bad ones, and checks the answers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._rng = Random(SEED)
        self._numbers: Iterator[int] = count(1)

    async def measure(self, phases: int, phase_s: float) -> tuple[float, list[Phase]]:
        """What the server can do, and the phases, without and with bad queries in turn."""
        good = {"picky": [self._inputs(is_bad=False) for _ in range(SAMPLES)]}
        saturate = partial(closed_loop, self._url, "", {"picky": 1.0}, good)
        self._pool = HttpPool(self._url)
        try:
            await saturate(WARM_UP_S)
            capacity = await saturate(SATURATE_S)
            rows = [
                await self._phase(BAD_SHARE if number % 2 else 0.0, LOAD * capacity, phase_s)
                for number in range(phases)
            ]
        finally:
            self._pool.close()
        return capacity, rows

    async def _phase(self, bad_share: float, rate: float, seconds: float) -> Phase:
        phase, tasks = Phase(bad_share), set[asyncio.Task[None]]()
        due = time.monotonic()
        end = due + seconds
        while (due := due + self._rng.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.add(asyncio.ensure_future(self._query(phase, is_bad=self._rng.random() < bad_share, began=due)))
        await asyncio.gather(*tasks)
        return phase

    def _inputs(self, *, is_bad: bool) -> Arrays:
        return {"x": numbers(next(self._numbers), 1), "mark": np.array([_BAD_MARK if is_bad else 1])}

    async def _query(self, phase: Phase, *, is_bad: bool, began: float) -> None:
        inputs = self._inputs(is_bad=is_bad)
        sent = inputs["x"]
        body, headers = http_request(inputs, {})
        message = self._pool.prepare("POST", f"{model_path('picky')}/infer", headers, body)
        answer = await self._pool.request(message, _GIVE_UP_S)
        is_answered = answer.status == 200
        phase.bad += is_bad
        phase.good += not is_bad
        if is_bad:
            phase.bad_answered += is_answered
        elif is_answered:
            got: Any = http_outputs(answer.body)["y"]
            if got.shape != sent.shape or (got != sent).any():
                phase.foreign += 1
            elif time.monotonic() - began <= SLO_MS / 1e3:
                phase.in_time += 1
            else:
                phase.late += 1
        elif http_reply(answer).outcome in (Outcome.DROPPED, Outcome.REJECTED):
            phase.dropped += 1
        else:
            phase.innocent += 1


def _summary(capacity: float, rows: list[Phase]) -> dict[str, float]:
    calm, poisoned = ([row.attainment_pct for row in rows if bool(row.bad_share) is is_bad] for is_bad in (False, True))
    return {
        "innocent_failures": sum(row.innocent for row in rows),
        "foreign_answers": sum(row.foreign for row in rows),
        "bad_answered": sum(row.bad_answered for row in rows),
        "attainment_drop_points": round(statistics.median(calm) - statistics.median(poisoned), 2),
        "attainment_without_pct": round(statistics.median(calm), 2),
        "attainment_with_pct": round(statistics.median(poisoned), 2),
        "good": sum(row.good for row in rows),
        "bad": sum(row.bad for row in rows),
        "capacity_per_s": round(capacity, 1),
    }


def _show(rows: list[Phase], summary: dict[str, float]) -> None:
    console = Console()
    table = Table("bad", "good queries", "in time", "late", "dropped", "failed", "foreign", "in time %")
    table.title = f"{100 * BAD_SHARE:g} % of the queries make the model raise; load {LOAD:g}, SLO {SLO_MS:g} ms"
    for row in rows:
        values = (row.bad, row.good, row.in_time, row.late, row.dropped, row.innocent, row.foreign)
        table.add_row(*map(str, values), f"{row.attainment_pct:.1f}")
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {value}")
