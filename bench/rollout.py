"""Rollout: reloads of a model under load. No query is to be lost.

A tenant of the quick start sends 0.7 of the queries that the server can do. Meanwhile its model is loaded again and
again over the API. Each time a worker of its own is warm before the old one goes.
`failed`: queries that failed, or were refused for anything but time. `attainment`: the share of queries in the SLO,
over the run. `attainment_calm`: the same without reloads.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console

from bench._server import cache_folder, serving
from bench._tenants import Inputs, ours, prepare, sample_all, saturation, workload
from cotenant.load import run_load_process
from cotenant.load.clients import model_path
from cotenant.types import Outcome

MODEL = "minilm"
PART = 0.7
RELOADS, QUICK_RELOADS = 20, 3
CALM_S, QUICK_CALM_S = 20.0, 4.0
PAUSE_S = 0.5
_SERVER = '[device]\nlanes = "single"\n'
_LIMIT_S = 120.0


def run(quick: bool, data_dir: Path | None) -> dict[str, object]:
    """Measure. `data_dir` is not used; models are kept in the user's cache folder."""
    console = Console()
    root, _ = prepare(cache_folder() / "rollout", (MODEL,), _SERVER, quick)
    inputs = sample_all(root, (MODEL,))
    capacity = saturation(ours("fcfs", root, "--policy", "fcfs", "--drop", "none"), {MODEL: 1.0}, inputs, quick)
    rate = PART * capacity
    console.print(f"capacity: {capacity:.1f} queries/s, sent: {rate:.1f}/s", highlight=False)
    calm = _row(root, inputs, rate, QUICK_CALM_S if quick else CALM_S, 0)
    rolled = _row(root, inputs, rate, QUICK_CALM_S if quick else CALM_S, QUICK_RELOADS if quick else RELOADS)
    summary = {
        "failed": rolled["failed"],
        "attainment": rolled["attainment"],
        "attainment_calm": calm["attainment"],
        "reloads": rolled["reloads"],
        "reload_s": rolled["reload_s"],
    }
    for name, value in summary.items():
        console.print(f"{name}: {value:.4g}", highlight=False)
    if quick:
        console.print(f"quick: {QUICK_RELOADS} reloads instead of {RELOADS}, a coarser profile")
    return {"summary": summary, "rows": [calm, rolled], "seeds": [1]}


def _row(root: Path, inputs: Inputs, rate: float, calm_s: float, reloads: int) -> dict[str, Any]:
    """One run: load for `calm_s`, or, with reloads, until the last of them has ended."""
    took: list[float] = []
    with serving(root) as server:

        def reload() -> None:
            for _ in range(reloads):
                time.sleep(PAUSE_S)
                began = time.monotonic()
                path = f"{server.http_url}/v2/repository/{model_path(MODEL).removeprefix('/v2/')}/load"
                urllib.request.urlopen(path, b"{}", timeout=_LIMIT_S).close()
                took.append(time.monotonic() - began)

        thread = threading.Thread(target=reload, daemon=True)
        thread.start()
        records = []
        while True:
            load = workload(root, "", {MODEL: rate}, 1 + len(records), calm_s, 0.0)
            records += run_load_process(load, http_url=server.http_url, inputs=inputs).records
            if not thread.is_alive():
                break
    outcomes = [each.outcome for each in records]
    return {
        "reloads": len(took),
        "reload_s": sum(took) / max(1, len(took)),
        "queries": len(outcomes),
        "failed": outcomes.count(Outcome.FAILED),
        "refused": outcomes.count(Outcome.REJECTED) + outcomes.count(Outcome.DROPPED),
        "attainment": outcomes.count(Outcome.ANSWERED) / max(1, len(outcomes)),
    }
