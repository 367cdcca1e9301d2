"""Faults of a cluster under load: nodes, gateway, head of Ray and controller get SIGSTOP for 9 s, and SIGKILL, in turn.

`cotenant cluster up` runs two nodes of one core each on the loopback address, with Ray on the same machine. ResNet-50,
MiniLM and magika have four times the SLOs of the quick start, and are planned from their profile for rates that need
both nodes. A part of these rates is sent, open loop, Poisson, over HTTP, so that one node could carry it. A fault of a
node is one of its agent and its server. Load generator, gateway, controller and Ray share the two cores with the nodes:
the times are those of such a machine.

The remaining node cannot plan for all three: a tenant that its plan leaves out is backfilled there. Recovery runs from
SIGKILL of a node to the arrival of the last query that was refused or failed because of it. A query is lost when client
and gateway do not agree on exactly one outcome of it. The gateway's own counts decide, once they stand still. A killed
gateway takes its counts with it: only those of its successor are compared. Every answer is compared with the answer to
its inputs alone (`foreign_answers`).

`longest_gap_s` is the longest time in which a tenant sent queries and got no answer. It leaves out the time in which
the gateway was stopped, and faults of the controller or of Ray's head, which end the cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench._cluster_counts import lost_queries, read_counts, settled
from bench._cluster_faults import (
    CONTROLLER,
    GATEWAY,
    NODE,
    RAY_HEAD,
    STOP_S,
    Family,
    Fault,
    Faults,
    Strike,
    longest_gap_s,
)
from bench._registry import BenchError
from bench._server import cache_folder
from bench._tenants import (
    SAMPLES,
    WARM_UPS,
    Inputs,
    clients,
    prepare,
    sample_all,
    scaled_slos_ms,
    set_slo,
    warm_up,
    workload,
)
from cotenant.cluster.types import Counts
from cotenant.load import LoadResult, run_load_process
from cotenant.load.http import HttpPool
from cotenant.serve.server_process import running
from cotenant.techniques.partitions.plan.follow import largest_fit
from cotenant.techniques.partitions.plan.planners import make_planner
from cotenant.techniques.partitions.plan.sources import basis_of, read_profile_costs
from cotenant.techniques.partitions.plan.types import DeviceType, Load
from cotenant.types import Outcome
from cotenant.workload import Workload, for_capacity

NAME = "cluster"
MODELS = ("magika", "minilm", "resnet50")
SLO_TIMES = 4
"""SLOs over those of the quick start, as a core of the node is shared with everything else."""
NODES = 2
PLANNED, SENT = 0.8, 0.35
"""The planned rates, as a share of the most that the planner fits onto all nodes; and the part of them that is sent."""
PLANNER, HEADROOM = "elastic_int", 0.1
PERIOD_S, QUICK_PERIOD_S = 5.0, 3.0
CYCLE_PERIODS = 5
"""Periods from one kill to the next: two to recover, and time for the node to come back."""
BEFORE_S = 5.0
FAULTS = (
    *(Fault(NODE), Fault(NODE), Fault(NODE), Fault(NODE, STOP_S)),
    *(Fault(GATEWAY, STOP_S), Fault(CONTROLLER, STOP_S), Fault(RAY_HEAD, STOP_S)),
)
"""Those after which client and gateway count the same."""
LAST = ((Fault(RAY_HEAD),), (Fault(GATEWAY), Fault(CONTROLLER)))
"""Those at the end of the first cluster, and those of a second one."""
QUICK_FAULTS = (Fault(NODE),)
END_S = 60.0
"""All processes of a cluster that cannot go on must have ended within this time."""
WARM_UP_S = 2.0
SEED = 1
ECHOES, QUICK_ECHOES = 400, 50
SETTLE_S = 30.0
"""Queries that clients have cancelled may be inside for so long after the load."""
_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Up:
    """A cluster that is up."""

    url: str
    grpc: str
    pid: int
    log: Path

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        with urllib.request.urlopen(f"{self.url}/v2/cotenant/cluster", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def counts(self) -> dict[str, Counts]:
        """What the gateway has counted by now, by tenant; `status` has what the controller heard of it last."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return read_counts(answer.read().decode())


def run(
    quick: bool,
    data_dir: Path,
    profile: Path | None = None,
    util: Path | None = None,
    constants: Path | None = None,
) -> dict[str, object]:
    """Measure; models are kept in the user's cache folder. Files of other devices and `data_dir` are not used."""
    if profile or util or constants:
        print("figures of other devices are not used: this benchmark profiles and serves on this machine")
    faults = QUICK_FAULTS if quick else FAULTS
    period_s = QUICK_PERIOD_S if quick else PERIOD_S
    if len(os.sched_getaffinity(0)) < NODES:
        raise BenchError(f"two nodes need {NODES} cores")
    root, service_ns = prepare(cache_folder() / "cluster", MODELS, "", quick)
    for model, slo_ms in scaled_slos_ms(service_ns).items():
        set_slo(root, model, SLO_TIMES * slo_ms)
    planned = _plannable(root, service_ns)
    sent = {model: rate * SENT for model, rate in planned.items()}
    inputs = sample_all(root, MODELS)
    with cluster(root, planned, period_s) as up:
        asyncio.run(warm_up(up.url, "", inputs))
        done, result = _struck(up, faults, period_s, workload_of(root, sent), inputs)
        counts = settled(up.counts, _sent(result), SETTLE_S)
        lost = lost_queries(_sent(result), counts)
        status = up.status()
        added_ms = asyncio.run(_added_ms(up, inputs, QUICK_ECHOES if quick else ECHOES))
        rows = _rows(result, done, status, period_s)
        if not quick:
            rows += _ended(up, LAST[0], period_s, workload_of(root, sent), inputs)
    if not quick:
        with cluster(root, planned, period_s) as up:
            rows += _ended(up, LAST[1], period_s, workload_of(root, sent), inputs)
    lost += sum(row["lost"] for row in rows)
    reasons = _reasons(result)
    summary = _summary(rows, lost, counts, reasons, added_ms)
    summary["foreign_answers"] = result.wrong_answers
    _show(rows, summary, sent, planned, reasons)
    if quick:
        print(
            f"quick: SIGKILL of one node alone, a period of {QUICK_PERIOD_S:g} instead of {PERIOD_S:g} s, "
            "a coarser profile"
        )
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


def workload_of(root: Path, sent: Mapping[str, float]) -> Callable[[float], Workload]:
    """Arrivals for so many seconds after warming up."""
    return lambda seconds: workload(root, "", sent, SEED, seconds, WARM_UP_S)


def _struck(
    up: Up, faults: Sequence[Fault], period_s: float, load: Callable[[float], Workload], inputs: Inputs
) -> tuple[list[Strike], LoadResult]:
    """Send load, and do the faults one after the other."""
    cycle_s = period_s * CYCLE_PERIODS
    schedule = Faults(up, faults, WARM_UP_S + BEFORE_S, cycle_s)
    try:
        result = run_load_process(
            load(cycle_s * len(faults) + BEFORE_S),
            http_url=up.url,
            grpc_url=up.grpc,
            inputs=inputs,
            on_tick=schedule.tick,
            tick_s=0.05,
            check=True,
        )
    finally:
        schedule.end()
    schedule.done[-1].look()
    return schedule.done, result


def _ended(
    up: Up, faults: Sequence[Fault], period_s: float, load: Callable[[float], Workload], inputs: Inputs
) -> list[dict[str, Any]]:
    """Faults of which the last one ends the cluster: rows, with the processes that did not end with it."""
    family, rows = Family(up.pid), []
    for fault in faults:
        done, result = _struck(up, (fault,), period_s, load, inputs)
        rows += _rows(result, done, {"changes": []}, period_s)
        if not fault.ends_all:
            sent = sum(_sent(result).values())
            came = {tenant: each.offered for tenant, each in up.counts().items()}
            counts = settled(up.counts, came, SETTLE_S).values()
            rows[-1]["lost"] = sum(abs(each.offered - each.ended) for each in counts)
            rows[-1]["lost"] += max(0, sum(each.offered for each in counts) - sent)
    log = up.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = [line for line in log if line.startswith("cotenant:")]
    return [*rows[:-1], rows[-1] | {"longest_gap_s": None, "outlived": family.outlived(END_S), "said": said}]


def _plannable(root: Path, service_ns: dict[str, float]) -> dict[str, float]:
    """Rates at which every model takes the same share of the nodes, PLANNED of the most that fit."""
    tables = read_profile_costs(root)
    rates = for_capacity(service_ns, NODES, 1.0)
    core = DeviceType("core", ((1,),), 1 << 53)
    basis = basis_of({"": tables}, [core] * NODES, MODELS)
    loads = [Load(model, model, rate, tables.known[model].slo_ns) for model, rate in rates.items()]
    fitted = largest_fit(make_planner(PLANNER, HEADROOM), loads, basis.devices, basis.costs)
    if fitted.plan is None:
        raise BenchError(f"no share of the rates fits {NODES} nodes: {fitted.breaks}")
    return {model: rate * fitted.share * PLANNED for model, rate in rates.items()}


@contextmanager
def cluster(root: Path, rates: dict[str, float], period_s: float) -> Iterator[Up]:
    """`cotenant cluster up` on free ports until the block ends. Raises StartError when it does not start."""
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as name:
        folder = Path(name)
        tables = ['[[device]]\nname = "core"\ncores = 1']
        tables += [f'[[tenant]]\nname = "{model}"\nrate = {rate:.4f}' for model, rate in rates.items()]
        (folder / "tenants.toml").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
        words = ["cluster", "up", str(folder / "tenants.toml"), str(root), "--local-nodes", str(NODES), "--floor", "1"]
        words += ["--period", str(period_s), "--planner", PLANNER, "--headroom", str(HEADROOM)]
        with running(*words, log=folder / "log", environment={"TMPDIR": name}, stop_s=_STOP_S) as up:
            yield Up(up.http_url, up.grpc_url, up.process.pid, folder / "log")


def _sent(result: LoadResult) -> dict[str, int]:
    """Queries by tenant, with those of the warming up and those that were asked alone."""
    return {model: len(result.log.columns(model).outcome) + WARM_UPS + SAMPLES for model in MODELS}


async def _added_ms(up: Up, inputs: Inputs, echoes: int) -> float:
    """What the gateway adds to a query of the smallest model: medians of turns through it and past it."""
    [node] = [n for t in up.status()["tenants"] if t["tenant"] == MODELS[0] for n in t["nodes"]][:1]
    direct = next(each["http"] for each in up.status()["nodes"] if each["node"] == node)
    pools = [HttpPool(up.url), HttpPool(f"http://{direct}")]
    took: list[list[float]] = [[], []]
    senders = [clients(pool, "", inputs)[MODELS[0]] for pool in pools]
    for number in range(echoes):
        for sender, times in zip(senders, took, strict=True):
            began = time.perf_counter()
            reply = await sender.send(number % len(inputs[MODELS[0]]), 10.0)
            if reply.outcome is None:
                times.append((time.perf_counter() - began) * 1e3)
    for pool in pools:
        pool.close()
    return statistics.median(took[0]) - statistics.median(took[1])


# --- results ----------------------------------------------------------------------------------------------------------


def _rows(result: LoadResult, done: Sequence[Strike], status: dict[str, Any], period_s: float) -> list[dict[str, Any]]:
    """One row a fault."""
    queries = list(result.records)
    changes = iter([change for change in status["changes"] if change["reason"] == "nodes were lost"])
    rows = []
    for number, strike in enumerate(done):
        at_ns, fault = strike.at_ns, strike.fault
        recover_ns = at_ns + round(2 * period_s * 1e9)
        end_ns = at_ns + round((period_s * CYCLE_PERIODS - BEFORE_S) * 1e9)
        before = [q for q in queries if at_ns - BEFORE_S * 1e9 <= q.scheduled_ns and q.ended_ns < at_ns]
        during = [q for q in queries if q.ended_ns >= at_ns and q.scheduled_ns < recover_ns]
        after = [q for q in queries if recover_ns <= q.scheduled_ns < end_ns]
        unanswered = [
            q.scheduled_ns
            for q in (*during, *after)
            if q.outcome not in (Outcome.ANSWERED, Outcome.LATE, Outcome.DROPPED)
        ]
        change = next(changes, {}) if fault.party == NODE else {}
        rows.append(
            {
                "fault": fault.name,
                "number": number,
                "at_s": round(at_ns / 1e9, 2),
                "recovery_s": round(max(0.0, (max(unanswered, default=at_ns) - at_ns) / 1e9), 3),
                "longest_gap_s": round(
                    longest_gap_s(queries, strike.resumed_ns if fault.halts_all else at_ns, end_ns), 2
                ),
                "healthy_nodes_killed": 0 if fault.ends_all else strike.killed,
                "lost": 0,
                "replanned_s": change.get("took_s"),
                "share": change.get("share"),
                "left_out": " ".join(change.get("left_out", ())),
                **{
                    f"{name}_pct": _in_time_pct(each)
                    for name, each in (("before", before), ("during", during), ("after", after))
                },
                "during": len(during),
                "unanswered": len(unanswered),
            }
        )
    return rows


def _reasons(result: LoadResult) -> dict[str, int]:
    """The messages that clients got, and how often."""
    found: dict[str, int] = {}
    for tenant in result.tenants:
        for said in tenant.reasons.values():
            for reason, count in said.items():
                found[reason] = found.get(reason, 0) + count
    return found


def _in_time_pct(queries: Sequence[Any]) -> float:
    return round(100 * sum(query.outcome is Outcome.ANSWERED for query in queries) / max(1, len(queries)), 2)


def _summary(
    rows: list[dict[str, Any]], lost: int, counts: Mapping[str, Counts], reasons: dict[str, int], added_ms: float
) -> dict[str, float]:
    nodes = [row for row in rows if row["fault"] == Fault(NODE).name]
    return {
        "lost_queries": lost,
        "healthy_nodes_killed": sum(row["healthy_nodes_killed"] for row in rows),
        "longest_gap_s": max(row["longest_gap_s"] or 0.0 for row in rows),
        "outlived": sum(row.get("outlived", 0) for row in rows),
        "recovery_s": statistics.median(row["recovery_s"] for row in nodes),
        "recovery_max_s": max(row["recovery_s"] for row in nodes),
        "attainment_before_pct": round(statistics.mean(row["before_pct"] for row in nodes), 2),
        "attainment_during_pct": round(statistics.mean(row["during_pct"] for row in nodes), 2),
        "attainment_after_pct": round(statistics.mean(row["after_pct"] for row in nodes), 2),
        "unanswered": sum(row["unanswered"] for row in rows),
        "retried": sum(each.retried for each in counts.values()),
        "repeated": sum(each.repeated for each in counts.values()),
        "client_errors": sum(
            count
            for reason, count in reasons.items()
            if reason.startswith(("ConnectionError", "ConnectionRe", "TimeoutError"))
        ),
        "gateway_added_ms": round(added_ms, 3),
    }


def _show(
    rows: list[dict[str, Any]],
    summary: dict[str, float],
    sent: dict[str, float],
    planned: dict[str, float],
    reasons: dict[str, int],
) -> None:
    console = Console()
    mix = ", ".join(f"{model} {sent[model]:.1f} of {planned[model]:.1f}/s" for model in MODELS)
    table = Table("fault", "gap s", "killed", "before %", "during %", "after %", "unanswered")
    table.title = f"Faults of a cluster of two nodes; sent of planned: {mix}"
    for row in rows:
        table.add_row(
            row["fault"],
            *(str(row[key]) for key in ("longest_gap_s", "healthy_nodes_killed")),
            *(str(row[f"{key}_pct"]) for key in ("before", "during", "after")),
            f"{row['unanswered']} of {row['during']}",
        )
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {value}")
    for reason, count in reasons.items():
        console.print(f"{count} x {reason}", highlight=False, markup=False)
