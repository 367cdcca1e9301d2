"""Promises of plans: what `plan --misses` promises, what a server answers at these rates, and what a simulation says.

Random workloads of two or three models, as many as a plan puts into one partition: a model of a few microseconds,
tabular, text, speech and vision models of up to a few hundred milliseconds, over HTTP and gRPC. Each is planned on one
core: all rates grow together as far as the plan allows at MISSES. A server on that core runs the plan, the client has
another core.

- `promised_minus_served_points`: promised attainment (1 - MISSES) minus the served one, of each tenant with
  LEAST_QUERIES queries, and of the others together.
- `promised_rate_over_sustained`: the promised rates over the largest rates, in steps, at which the server misses at
  most MISSES of all SLOs.
- `simulated_minus_served_points`: difference between a simulation of the same arrivals and what was served.
- `trivial_model_rate_error_pct`: the same ratio for the model of microseconds alone, as an error.

Rows are kept as they come: a run that was cut short goes on where it was.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

import cotenant
from bench._campaign import timed_rows
from bench._registry import BenchError
from bench._server import TINY_CONFIG, cache_folder, serving
from bench._tenants import Inputs, prepare, sample_all, scaled_slos_ms, set_slo
from cotenant.load import run_load_process
from cotenant.metrics import Summary
from cotenant.workload import Poisson, TenantLoad, Workload
from cotenant.zoo import build

MODELS = ("silero_vad", "ocr_orientation", "magika", "minilm", "ocr_recognition", "ocr_detection", "resnet50")
TRIVIAL = "tiny"
WORKLOADS, QUICK_WORKLOADS = 12, 1
MISSES = 0.01
LEAST_QUERIES = 300
SECONDS, QUICK_SECONDS = 12.0, 3.0
STEPS = (1.11, 1.25, 1.5, 2.0)
LOWER = (0.8, 0.6, 0.4, 0.2)
"""Factors on the promised rates at which the sustained ones are sought, upwards or downwards."""
MOST_MODELS = 3
"""Slots of a partition that the planner "ours" considers."""
LOOSER = 4
"""Factor on the SLOs of the quick start."""
LEAST_SLO_MS = 400
_CLIENT_CORE, _SERVER_CORE = 0, 1
_SERVER = "[device]\ncores = [1]\n"
_SETTINGS = {"device.cores": [_SERVER_CORE]}
_PLANNER = "ours"
_LEAST_BASE = 1e-3


def run(quick: bool, data_dir: Path | None) -> dict[str, object]:
    """Measure. `data_dir` is not used; models are kept in the user's cache folder. Raises BenchError."""
    if len(os.sched_getaffinity(0)) < 2:
        raise BenchError("promise: the client and the server need a core each")
    console = Console()
    seconds = QUICK_SECONDS if quick else SECONDS
    root, alone_ns = prepare(cache_folder() / "promise", MODELS, _SERVER, quick)
    for model, slo_ms in scaled_slos_ms(alone_ns).items():
        set_slo(root, model, max(LEAST_SLO_MS, LOOSER * slo_ms))  # on one core, each model waits for all others
    _add_trivial(root, quick=quick)
    inputs = sample_all(root, MODELS)

    def row_of(task: int) -> list[dict[str, Any]]:
        return [_row(root, task, alone_ns, inputs, seconds)]

    tasks = range(-1, QUICK_WORKLOADS if quick else WORKLOADS)
    rows = timed_rows("promise", (sys.modules[__name__],), list(tasks), row_of, _told, quick=quick)
    summary = judge(rows)
    _show(console, rows)
    if quick:
        print(f"quick: {QUICK_WORKLOADS} workload of {QUICK_SECONDS:g} s instead of {WORKLOADS} of {SECONDS:g} s")
    return {"summary": summary, "rows": rows, "seeds": [row["seed"] for row in rows]}


def judge(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The summary of all rows; the row with seed -1 is that of the trivial model."""
    mixed = [row for row in rows if row["seed"] >= 0]
    points = sorted(point for row in mixed for point in row["promised_minus_served_points"])
    differences = [point for row in mixed for point in row["simulated_minus_served_points"]]
    [trivial] = [row["promised_over_sustained"] for row in rows if row["seed"] < 0]
    return {
        "promised_minus_served_points": statistics.median(points),
        "promised_minus_served_points_p90": points[min(len(points) - 1, int(0.9 * len(points)))],
        "promised_rate_over_sustained": statistics.median([row["promised_over_sustained"] for row in mixed]),
        "simulated_minus_served_points": statistics.median(map(abs, differences)),
        "trivial_model_rate_error_pct": 100 * abs(trivial - 1),
    }


def pooled(
    served: Mapping[str, tuple[int, int]], others: Mapping[str, float] | None = None
) -> dict[str, tuple[float, float]]:
    """Attainment (0 to 1) served, and that of `others` or 1 - MISSES, of each tenant with enough queries.

    Tenants with fewer than LEAST_QUERIES queries are one, called "". `served`: queries and those in time, by tenant.
    """
    found: dict[str, tuple[float, float]] = {}
    few = [name for name, (count, _) in served.items() if 0 < count < LEAST_QUERIES]
    for name, (count, _) in served.items():
        if count >= LEAST_QUERIES:
            found[name] = _shares(served, others, [name])
    if few:
        found[""] = _shares(served, others, few)
    return found


def _shares(
    served: Mapping[str, tuple[int, int]], others: Mapping[str, float] | None, names: Sequence[str]
) -> tuple[float, float]:
    count = sum(served[name][0] for name in names)
    expected = 1 - MISSES if others is None else sum(others[name] * served[name][0] for name in names) / count
    return sum(served[name][1] for name in names) / count, expected


def _add_trivial(root: Path, *, quick: bool) -> None:
    """Add the model of microseconds, and measure it and the cost of requests."""
    folder = root / TRIVIAL
    if not folder.exists():
        folder.mkdir()
        (folder / "config.toml").write_text(TINY_CONFIG.replace("1000", str(LEAST_SLO_MS)), encoding="utf-8")
        build(TRIVIAL, folder / "1" / "model.onnx")
    cotenant.profile(root, budget_s=0.05 if quick else 0.5)


def _row(root: Path, seed: int, alone_ns: Mapping[str, float], inputs: Inputs, seconds: float) -> dict[str, Any]:
    loads = _loads(seed, alone_ns)
    with tempfile.TemporaryDirectory() as folder:
        factor, plan = _planned(root, Path(folder), loads)
        promised = [TenantLoad(each.name, each.model, each.process.scaled(factor), each.protocol) for each in loads]
        workload = Workload(tuple(promised), round(seconds * 1e9), seed=max(1, seed))
        with serving(root, "--plan", str(plan), cores=(_SERVER_CORE,)) as server, _client_core():
            urls = {"http_url": server.http_url, "grpc_url": server.grpc_url}
            served = _counts(run_load_process(workload, inputs=inputs, **urls).summary)

            def holds(step: float) -> bool:
                tried = Workload(
                    tuple(
                        TenantLoad(each.name, each.model, each.process.scaled(step), each.protocol) for each in promised
                    ),
                    round(seconds / 2 * 1e9),
                    seed=max(1, seed),
                )
                counts = _counts(run_load_process(tried, inputs=inputs, **urls).summary).values()
                return sum(good for _, good in counts) >= (1 - MISSES) * sum(count for count, _ in counts)

            is_kept = sum(good for _, good in served.values()) >= (1 - MISSES) * sum(
                each for each, _ in served.values()
            )
            sustained = _sustained(holds, is_kept=is_kept)
        simulated = cotenant.simulate(workload, root, settings={**_SETTINGS, "plan.file": str(plan)}, noise=0.05)
    expected = {each.tenant: each.attainment or 0.0 for each in simulated.summary.tenants}
    return {
        "seed": seed,
        "models": [each.model for each in loads],
        "rates_per_s": {each.name: round(each.process.mean_rate, 3) for each in promised},
        "served": {name: [count, good] for name, (count, good) in served.items()},
        "promised_minus_served_points": [100 * (promise - share) for share, promise in pooled(served).values()],
        "simulated_minus_served_points": [100 * (told - share) for share, told in pooled(served, expected).values()],
        "promised_over_sustained": 1 / sustained,
    }


def _sustained(holds: Any, *, is_kept: bool) -> float:
    """The largest of the steps at which the server keeps its SLOs; the step below the lowest if none does."""
    if not is_kept:
        return next((step for step in LOWER if holds(step)), LOWER[-1] / 2)
    best = 1.0
    for step in STEPS:
        if not holds(step):
            break
        best = step
    return best


def _loads(seed: int, alone_ns: Mapping[str, float]) -> list[TenantLoad]:
    """Random models, protocols and shares of the core; seed -1 is the trivial model alone."""
    if seed < 0:
        return [TenantLoad(TRIVIAL, TRIVIAL, Poisson(100.0))]
    draw = Random(f"promise {seed}")
    chosen = draw.sample([TRIVIAL, *MODELS], draw.randint(2, MOST_MODELS))
    loads = []
    for model in chosen:
        share = draw.uniform(0.02, 0.2) / len(chosen)
        rate = share * 1e9 / max(alone_ns.get(model, 0.0), 300_000.0)
        loads.append(TenantLoad(model, model, Poisson(round(rate, 3)), draw.choice(("http", "grpc"))))
    return loads


def _planned(root: Path, folder: Path, loads: Sequence[TenantLoad]) -> tuple[float, Path]:
    """The factor on all rates that a plan promises, and its file."""

    def written(factor: float) -> Path:
        tables = [f'[[tenant]]\nname = "{each.name}"\nrate = {each.process.mean_rate * factor:.4f}\n' for each in loads]
        path = folder / "tenants.toml"
        path.write_text('[[device]]\nname = "core"\ncores = 1\n\n' + "\n".join(tables), encoding="utf-8")
        return path

    base = 1.0
    while not (first := cotenant.plan(written(base), root, planner=_PLANNER, misses=MISSES, headroom=0.0)).fits:
        base /= 4
        if base < _LEAST_BASE:
            broken = first.to_json()["broken"]
            raise BenchError(f"promise: {[each.model for each in loads]} do not fit one core: {broken}")
    factor = base * float(first.to_json()["growth"]["factor"])
    while factor > 0.01:  # searches simulate less: a plan of these very rates has to confirm them
        made = cotenant.plan(written(factor), root, planner=_PLANNER, misses=MISSES, headroom=0.0, quick=True)
        if made.fits:
            path = folder / "plan.toml"
            made.save(path)
            return factor, path
        factor *= 0.95
    raise BenchError("promise: no plan confirms its promise")


def _counts(summary: Summary) -> dict[str, tuple[int, int]]:
    return {each.tenant: (each.offered, each.answered) for each in summary.tenants}


@contextmanager
def _client_core() -> Iterator[None]:
    """Keep this process, and the load generators that it starts, on the client's core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {_CLIENT_CORE})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _told(rows: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{', '.join(row['models'])}: {row['promised_over_sustained']:.2f} of sustained" for row in rows)


def _show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=None)
    for head in ("seed", "models", "promised - served", "simulated - served", "promised / sustained"):
        table.add_column(head, justify="right" if head != "models" else "left")
    for row in rows:
        worst = [max(row[f"{name}_minus_served_points"], key=abs) for name in ("promised", "simulated")]
        cells = [f"{each:.1f}" for each in worst]
        table.add_row(str(row["seed"]), str(len(row["models"])), *cells, f"{row['promised_over_sustained']:.2f}")
    console.print(table)
