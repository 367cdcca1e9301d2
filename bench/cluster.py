"""A node lost under load: two nodes on one machine, agent and server of one get SIGKILL, and the plan is made anew.

`cotenant cluster up` with two nodes of one core each on the loopback address (Ray on the same machine), ResNet-50,
MiniLM and magika with four times the SLOs of the quick start, planned from their profile for rates that need both
nodes; a part of these rates is sent, open loop, Poisson, over HTTP, so that one node could carry it. Nodes take turns
in being killed; a new agent takes the place of a killed one. Load generator, gateway, controller and Ray share the
two cores with the nodes: the times are those of such a machine.

The node that is left cannot plan for all three: whom its plan leaves out is a guest there. Recovery runs from the
kill to the arrival of the last query that was refused or failed because of it. A query is lost when client and
gateway do not agree on exactly one outcome of it, by the gateway's own counts once they stand still. Every answer is
held against what its inputs were answered alone (`foreign_answers`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

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
from cotenant.load import LiveStats, LoadResult, run_load_process
from cotenant.load.http import HttpPool
from cotenant.plan.follow import largest_fit
from cotenant.plan.planners import make_planner
from cotenant.plan.sources import basis_of, read_profile_costs
from cotenant.plan.types import DeviceType, Load
from cotenant.serve.server_process import running
from cotenant.types import Outcome
from cotenant.workload import for_capacity

NAME = "cluster"
MODELS = ("magika", "minilm", "resnet50")
SLO_TIMES = 4
"""SLOs over those of the quick start, as a core of the node is shared with everything else."""
NODES = 2
PLANNED, SENT = 0.8, 0.35
"""What is planned for, as a share of the most that the planner fits onto all nodes; and what is sent of that."""
PLANNER, HEADROOM = "elastic_int", 0.1
PERIOD_S, QUICK_PERIOD_S = 5.0, 3.0
CYCLE_PERIODS = 5
"""Periods from one kill to the next: two to recover, and time for the node to come back."""
BEFORE_S = 5.0
KILLS, QUICK_KILLS = 6, 1
WARM_UP_S = 2.0
SEED = 1
ECHOES, QUICK_ECHOES = 400, 50
SETTLE_S = 30.0
"""Queries that clients have given up may be inside for so long after the load."""
FIELDS = {
    "cotenant_gateway_offered_total": "offered",
    "cotenant_gateway_retries_total": "retried",
    "cotenant_gateway_repeats_total": "repeated",
}
"""The field of `Counts` for each counter without outcomes."""
_STOP_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Up:
    """A cluster that is up."""

    url: str
    grpc: str

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
    kills = QUICK_KILLS if quick else KILLS
    period_s = QUICK_PERIOD_S if quick else PERIOD_S
    cycle_s = period_s * CYCLE_PERIODS
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
        killer = Killer(up, kills, cycle_s)
        load = workload(root, "", sent, SEED, cycle_s * kills + BEFORE_S, WARM_UP_S)
        result = run_load_process(
            load, http_url=up.url, grpc_url=up.grpc, inputs=inputs, on_tick=killer.tick, tick_s=0.05, check=True
        )
        counts = settled(up.counts, _sent(result), SETTLE_S)
        status = up.status()
        added_ms = asyncio.run(_added_ms(up, inputs, QUICK_ECHOES if quick else ECHOES))
    rows = _rows(result, killer.at_ns, status, period_s)
    reasons = _reasons(result)
    summary = _summary(rows, lost_queries(_sent(result), counts), counts, reasons, added_ms)
    summary["foreign_answers"] = result.wrong_answers
    _show(rows, summary, sent, planned, reasons)
    if quick:
        print(
            f"quick: {QUICK_KILLS} kill instead of {KILLS}, a period of {QUICK_PERIOD_S:g} instead of {PERIOD_S:g} s, "
            "a coarser profile"
        )
    return {"summary": summary, "rows": rows, "seeds": [SEED]}


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


class Killer:
    """Kills a node that serves at its times; called by the load generator's ticks."""

    def __init__(self, up: Up, kills: int, cycle_s: float) -> None:
        self._up = up
        self._due = [WARM_UP_S + BEFORE_S + cycle_s * index for index in range(kills)]
        self.at_ns: list[int] = []
        """When, in nanoseconds from the start of the load."""

    def tick(self, stats: LiveStats) -> None:
        """Kill if it is time."""
        if len(self.at_ns) < len(self._due) and stats.elapsed_ns >= self._due[len(self.at_ns)] * 1e9:
            kill_node(self._up, len(self.at_ns))
            self.at_ns.append(stats.elapsed_ns)


def kill_node(up: Up, turn: int) -> None:
    """SIGKILL for agent and server of one of the nodes that serve, as for a node that loses its power."""
    serving = [node for node in up.status()["nodes"] if node["state"] == "serving" and node["pid"]]
    victim = serving[turn % len(serving)]
    for pid in (victim["agent_pid"], victim["pid"]):
        os.kill(pid, signal.SIGKILL)


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
            yield Up(up.http_url, up.grpc_url)


def read_counts(page: str) -> dict[str, Counts]:
    """The counts of a gateway by tenant, from its page for Prometheus."""
    found: dict[str, dict[str, int]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                field = sample.labels.get("outcome") or FIELDS[sample.name]
                found.setdefault(sample.labels["tenant"], {})[field] = round(sample.value)
    return {tenant: Counts(**fields) for tenant, fields in found.items()}


def settled(look: Callable[[], Mapping[str, Counts]], sent: Mapping[str, int], limit_s: float) -> Mapping[str, Counts]:
    """The counts once every query that was sent has come and has ended, or those at the end of `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        counts = look()
        if not lost_queries(sent, counts) or time.monotonic() > deadline:
            return counts
        time.sleep(_POLL_S)


def lost_queries(sent: Mapping[str, int], counts: Mapping[str, Counts]) -> int:
    """Queries that were sent and did not come, or came and did not end, and those that did so twice."""
    found = {tenant: counts.get(tenant, Counts()) for tenant in sent}
    return sum(abs(sent[name] - each.offered) + abs(each.offered - each.ended) for name, each in found.items())


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


def _rows(result: LoadResult, kills: Sequence[int], status: dict[str, Any], period_s: float) -> list[dict[str, Any]]:
    """One row a kill."""
    queries = list(result.records)
    changes = [change for change in status["changes"] if change["reason"] == "nodes were lost"]
    rows = []
    for number, kill_ns in enumerate(kills):
        recover_ns = kill_ns + round(2 * period_s * 1e9)
        end_ns = kill_ns + round((period_s * CYCLE_PERIODS - BEFORE_S) * 1e9)
        before = [q for q in queries if kill_ns - BEFORE_S * 1e9 <= q.scheduled_ns and q.ended_ns < kill_ns]
        during = [q for q in queries if q.ended_ns >= kill_ns and q.scheduled_ns < recover_ns]
        after = [q for q in queries if recover_ns <= q.scheduled_ns < end_ns]
        unanswered = [
            q.scheduled_ns
            for q in (*during, *after)
            if q.outcome not in (Outcome.ANSWERED, Outcome.LATE, Outcome.DROPPED)
        ]
        rows.append(
            {
                "kill": number,
                "at_s": round(kill_ns / 1e9, 2),
                "recovery_s": round(max(0.0, (max(unanswered, default=kill_ns) - kill_ns) / 1e9), 3),
                "replanned_s": changes[number]["took_s"] if number < len(changes) else None,
                "share": changes[number]["share"] if number < len(changes) else None,
                "nodes": changes[number]["nodes"] if number < len(changes) else None,
                "left_out": " ".join(changes[number]["left_out"]) if number < len(changes) else None,
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
    """What clients were told, and how often."""
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
    return {
        "lost_queries": lost,
        "recovery_s": statistics.median(row["recovery_s"] for row in rows),
        "recovery_max_s": max(row["recovery_s"] for row in rows),
        "attainment_before_pct": round(statistics.mean(row["before_pct"] for row in rows), 2),
        "attainment_during_pct": round(statistics.mean(row["during_pct"] for row in rows), 2),
        "attainment_after_pct": round(statistics.mean(row["after_pct"] for row in rows), 2),
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
    table = Table("kill at s", "recovery s", "changed in s", "guests", "before %", "during %", "after %", "unanswered")
    table.title = f"SIGKILL for agent and server of one of two nodes; sent of planned: {mix}"
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("at_s", "recovery_s", "replanned_s", "left_out")),
            *(str(row[f"{key}_pct"]) for key in ("before", "during", "after")),
            f"{row['unanswered']} of {row['during']}",
        )
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {value}")
    for reason, count in reasons.items():
        console.print(f"{count} x {reason}", highlight=False, markup=False)
