"""What a served run costs besides its models: read from the server's trace, its threads and the client's answers.

These are the simulator's assumptions (`sim.scenario.Assumptions`). They are measured in a run of their own, with other
arrivals than those that are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp, log, sqrt
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np

from bench._registry import BenchError
from bench._server import FRONT_END, command, family
from cotenant import trace
from cotenant.load import LiveStats, LoadResult
from cotenant.predict.table import TablePredictor
from cotenant.sim.scenario import Assumptions
from cotenant.types import ANSWERS

_CLIPPED = 0.01
"""Share of the launches at each end with a ratio clipped to that of the last one inside: stalls of the machine."""
_LEAST = 0.01
"""Slowness is at least this, whatever a stalled run shows."""
_NORMAL_P90, _NORMAL_P95 = 1.2816, 1.6449
"""Percentiles of the standard normal distribution."""
_WAYS = 2
"""The margin that a server learns has the way of an answer twice."""


@dataclass(frozen=True, slots=True)
class Service:
    """Measured in one served run.

    `launch_ns` is the mean time of a launch from its decision to the event of its end, less the time that the model
    runs. `front_end_ns` is processor time of everything but the lanes, server and client, over the queries that
    arrived. The wire is the latency of an answered query at the client, less the time from its arrival to its answer in
    the core. `wire_ns` is the median, `shortest_wire_ns` the 5th percentile. `wire_noise` is the deviation of the
    logarithm of the excess over half of the shortest, by its median and 90th percentile.
    `slowness` is, by tenant, the time that the model runs over the profile's latency, both summed over launches.
    `noise` is the deviation of the logarithm of that from launch to launch. It comes from successive differences within
    a tenant (von Neumann 1941). A slow drift of the machine is no noise of launches, and predictions follow it.
    `busy_share` is the share of the lanes' time in which launches were under way. `reply_ns` is the 95th percentile of
    the time from the end of a query to its written answer, as the server has learnt it; 0 where it learns none.
    """

    launch_ns: float
    front_end_ns: float
    wire_ns: float
    shortest_wire_ns: float
    wire_noise: float
    slowness: dict[str, float]
    noise: float
    busy_share: float
    reply_ns: float = 0.0

    def assumptions(self, queries_per_s: float, cores: int, own_share: float) -> Assumptions:
        """What to assume at a rate of queries; `own_share` is the front-ends' share of the cores in this run.

        The slowness of this run has what its own front-ends took in it, so that is taken out of it. Only the sum of
        the ways there and back can be measured: the way there gets half of the shortest, the way back the rest.
        """
        share = queries_per_s * self.front_end_ns / 1e9 / cores
        request_ns = round(self.shortest_wire_ns / 2)
        response_ns = round(self.wire_ns) - request_ns
        long_ns = response_ns * exp(_NORMAL_P95 * self.wire_noise)
        return Assumptions(
            noise=self.noise,
            decision_ns=round(self.launch_ns),
            front_end_share=min(share, 0.9),
            request_ns=request_ns,
            response_ns=response_ns,
            response_noise=self.wire_noise,
            reply_share=min(1.0, self.reply_ns / long_ns) if self.reply_ns else 1.0,
            inflation={name: slow * (1.0 - own_share) for name, slow in self.slowness.items()},
        )


def between(one: Service, other: Service) -> Service:
    """What to assume between two runs: a machine drifts. The means."""
    first, second = asdict(one), asdict(other)
    slowness = {name: (slow + other.slowness[name]) / 2 for name, slow in one.slowness.items()}
    return Service(
        **{name: (first[name] + second[name]) / 2 for name in first if name != "slowness"}, slowness=slowness
    )


class Meter:
    """Processor time of front-ends and client while queries are sent: give `tick` to the load generator."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._first: tuple[float, int, int] | None = None
        self._last: tuple[float, int, int] | None = None

    def tick(self, stats: LiveStats) -> None:
        """Look once. The first and the last look while sending count."""
        if not stats.sending:
            return
        clients = [child.pid for child in active_children() if child.name == "cotenant-load" and child.pid]
        spent = front_end_cpu_ns(self._server) + sum(_cpu_ns(pid, _any) for pid in clients)
        look = (time.monotonic(), stats.elapsed_ns, spent)
        self._first, self._last = self._first or look, look

    def per_query_ns(self, scheduled_ns: Iterable[int]) -> float:
        """Processor time over the queries that were due between the two looks. Raises BenchError without both."""
        if self._first is None or self._last is None or self._first == self._last:
            raise BenchError("the run was too short to measure what its front-ends cost")
        _, begin, before = self._first
        _, end, after = self._last
        due = sum(begin <= at < end for at in scheduled_ns)
        return (after - before) / max(1, due)


def front_end_cpu_ns(pid: int) -> int:
    """Processor time of all threads of a server and its children that are no lanes.

    Lanes have a higher nice value than the server's first thread, as has all of a front-end process.
    """
    nice = os.getpriority(os.PRIO_PROCESS, pid)
    return sum(
        _cpu_ns(
            each, _any if FRONT_END in command(each) else lambda thread: os.getpriority(os.PRIO_PROCESS, thread) <= nice
        )
        for each in family(pid)
    )


def _any(_: int) -> bool:
    return True


def _cpu_ns(pid: int, counts: Callable[[int], bool]) -> int:
    total = 0
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        try:
            if counts(int(task.name)):
                total += int((task / "schedstat").read_text().split()[0])
        except (OSError, ProcessLookupError):  # the thread has ended
            continue
    return total


def model_ns(url: str) -> dict[str, int]:
    """Nanoseconds that the engine has run each model, summed over queries, from the server's statistics."""
    with urllib.request.urlopen(f"{url}/v2/models/stats", timeout=10) as answer:
        listed = json.load(answer)["model_stats"]
    return {each["name"]: int(each["inference_stats"]["compute_infer"]["ns"]) for each in listed}


def read_service(
    path: Path,
    table: TablePredictor,
    result: LoadResult,
    ran_ns: Mapping[str, int],
    front_end_ns: float,
    cores: int,
) -> Service:
    """Put a run together from its trace (at `path`) and what the client and the meter saw.

    `ran_ns` is what `model_ns` grew by; the trace begins with warming up, which is left out.
    """
    arrived, launches, ended, span_ns, reply_ns = _read_trace(path, len(result.log))
    wall = sum(took * len(launch["queries"]) for launch, took in launches)
    weight = sum(len(launch["queries"]) for launch, _ in launches)
    launch_ns = max(0.0, (wall - sum(ran_ns.values())) / weight)
    pairs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for launch, took in launches:
        work = trace.work_of(launch)
        pairs[work.tenant].append((took, table.latency_ns(work, len(launch["share"]["cores"]))))
    squares: list[float] = []
    slowness = {}
    for tenant, those in sorted(pairs.items()):
        # Ratios of sums: what all launches took together is what decides how many queries can be answered.
        over = sum(took for took, _ in those) - launch_ns * len(those)
        slow = max(_LEAST, over / sum(believed for _, believed in those))
        logs = _clip([log(took / (launch_ns + slow * believed)) for took, believed in those])
        squares += [(after - before) ** 2 / 2 for before, after in pairwise(logs)]
        slowness[tenant] = slow
    noise = sqrt(statistics.fmean(squares))
    # A log-normal factor has a mean above 1: the world multiplies by it, so its mean is taken out here.
    slowness = {tenant: slow / exp(noise**2 / 2) for tenant, slow in slowness.items()}
    shortest, middle, long = np.percentile(_wires_ns(result, arrived, ended), (5, 50, 90)).clip(min=1.0).tolist()
    wire_noise = log((long - shortest / 2) / (middle - shortest / 2)) / _NORMAL_P90
    busy = sum(took for _, took in launches) / (span_ns * cores)
    return Service(launch_ns, front_end_ns, middle, shortest, wire_noise, slowness, noise, busy, reply_ns / _WAYS)


Launched = tuple[dict[str, Any], int]


def _read_trace(
    path: Path, sent: int
) -> tuple[dict[str, list[tuple[int, int]]], list[Launched], dict[int, int], int, int]:
    """Figures of one run.

    (number, time) of the arrivals by tenant, launches with their durations, answered queries' ends, time spanned, and
    the last margin for the way of answers.
    """
    reply_ns = 0
    _, records = trace.read(path)
    arrivals: list[tuple[int, int, str]] = []
    began: dict[int, tuple[dict[str, Any], int]] = {}
    launches: list[Launched] = []
    ended: dict[int, int] = {}
    for record in records:
        if record.kind == "QueryArrived":
            query = record.event["query"]
            arrivals.append((query["id"], query["arrival_ns"], query["tenant"]))
        elif record.kind == "LaunchEnded":
            launch, at = began.pop(record.event["launch"])
            launches.append((launch, record.time_ns - at))
        elif record.kind == "PredictorChanged":
            reply_ns = record.event["predictor"].get("margin", {}).get("reply_ns", 0)
        for kind, action in record.actions:
            if kind == "Launch":
                began[action["id"]] = action, record.time_ns
            elif kind == "Respond" and action["outcome"] in ANSWERS:
                ended[action["query"]] = record.time_ns
    first = len(arrivals) - sent
    if first < 0:
        raise BenchError(f"{path}: has {len(arrivals)} arrivals of {sent} queries that were sent")
    by_tenant: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, at, tenant in arrivals[first:]:
        by_tenant[tenant].append((number, at))
    counted = [each for each in launches if min(each[0]["queries"]) >= first]
    return by_tenant, counted, ended, arrivals[-1][1] - arrivals[first][1], reply_ns


def _wires_ns(result: LoadResult, arrived: Mapping[str, list[tuple[int, int]]], ended: Mapping[int, int]) -> list[int]:
    """Of each answered query. The client's nth query of a tenant is the core's nth."""
    extra = []
    for tenant, numbers in arrived.items():
        columns = result.log.columns(tenant)
        order = columns.scheduled_ns.argsort(kind="stable")
        for (number, at), row in zip(numbers, order, strict=True):
            if number in ended and columns.completed[row]:
                latency = int(columns.ended_ns[row] - columns.scheduled_ns[row])
                extra.append(latency - (ended[number] - at))
    return extra


def _clip(values: list[float]) -> list[float]:
    ordered = sorted(values)
    outside = int(len(ordered) * _CLIPPED)
    low, high = ordered[outside], ordered[-1 - outside]
    return [min(max(value, low), high) for value in values]
