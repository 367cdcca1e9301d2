"""Requests in a simulated server, before and after the scheduler: queues of front-ends and of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotenant.profiles.server_cost import PROCESSES, RequestRate, ServerCost, busy, overload
from cotenant.workload import Workload, arrivals

MOST_TAKEN = 0.9
"""Largest share of the lanes that requests take in a simulation."""
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Mean load of a server by requests: cores that each process needs, and the share of the lanes that they take.

    `problem` says why the server cannot process so many requests, or is "".
    """

    cores: Mapping[str, float]
    lanes_share: float
    problem: str

    @property
    def text(self) -> str:
        """The load in one sentence."""
        parts = ", ".join(f"{name.replace('_', '-')} {cores:.2f}" for name, cores in self.cores.items())
        return f"server: requests need {parts} cores, and take {self.lanes_share:.1%} of the lanes"


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """Requests of a workload and their cost on a server with `cores` cores.

    `sizes`: bytes of the input and output tensors of a request, by name of the load. The order of queries is that of
    their arrival: a front-end and the engine each handle one request at a time.
    """

    cost: ServerCost
    sizes: Mapping[str, tuple[int, int]]
    cores: int

    def way(self, workload: Workload, seed: int | None, lanes: int) -> Way:
        """The queues of a run with `lanes` cores for launches, at its start.

        Processes that share cores with the lanes take longer by 1 / (1 - share of these cores that requests take).
        """
        times = []
        demands = self._demands(workload, seed)
        total = sum(demand.rate_per_s for demand in demands)
        slowdown = 1.0 / (1.0 - self._load(demands, lanes).lanes_share)
        factor = {process: self.cost.factor(process, total) * slowdown for process in PROCESSES}
        for load in workload.tenants:
            request, sizes = self.cost.requests[load.protocol], self.sizes[load.name]
            front_ns, engine_ns, worker_ns = (
                round(getattr(request, process).of(sizes) * factor[process]) for process in PROCESSES
            )
            times.append((front_ns, engine_ns + worker_ns))
        return Way(times, max(1, self.cost.front_ends))

    def later_ns(self, protocol: str) -> int:
        """Latency of a request besides the processor times: between processes, and until the answer is written."""
        request = self.cost.requests[protocol]
        spent_ns = request.front_end.ns + request.engine.ns + request.worker.ns + self.cost.launch_ns
        return max(0, request.alone_ns - spent_ns)

    def load(self, workload: Workload, seed: int | None, lanes: int) -> ServerLoad:
        """The mean load of the server in a run with `lanes` cores for launches.

        The server's processes use cores outside the lanes first. None of them is busier than all the time.
        """
        return self._load(self._demands(workload, seed), lanes)

    def _demands(self, workload: Workload, seed: int | None) -> list[RequestRate]:
        """The mean demand of a run."""
        sent = Counter(position for _, position, _ in arrivals(workload, seed))
        seconds = workload.duration_ns / _NS_PER_S
        return [
            RequestRate(load.protocol, sent[position] / seconds, self.sizes[load.name])
            for position, load in enumerate(workload.tenants)
        ]

    def _load(self, demands: Sequence[RequestRate], lanes: int) -> ServerLoad:
        wanted = busy(self.cost, demands)
        limits = {"front_end": float(max(1, self.cost.front_ends)), "engine": 1.0, "worker": float(self.cores)}
        used = sum(min(cores, limits[process]) for process, cores in wanted.items())
        share = min(MOST_TAKEN, max(0.0, used - max(0, self.cores - lanes)) / lanes)
        return ServerLoad(wanted, share, overload(self.cost, demands))


class Way:
    """Queues of the front-ends and of the engine, first in, first out.

    `times`: ns of a front-end and of the engine for a request, by position of the load.
    """

    def __init__(self, times: Sequence[tuple[int, int]], front_ends: int) -> None:
        self._times = times
        self._front_ends = [0] * front_ends
        self._engine = 0

    def enter(self, position: int, sent_ns: int) -> tuple[int, int]:
        """When a front-end begins to read a request, and when the scheduler has it. Requests come in order."""
        front_ns, engine_ns = self._times[position]
        ends = self._front_ends
        chosen = ends.index(min(ends))
        begun = max(sent_ns, ends[chosen])
        ends[chosen] = begun + front_ns
        self._engine = max(self._engine, begun + front_ns) + engine_ns
        return begun, self._engine
