"""What a server needs for a request besides the model: processor time by process, and latency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log

import numpy as np

HTTP, JSON, GRPC = "http", "json", "grpc"
PROTOCOLS = (HTTP, JSON, GRPC)
"""HTTP with binary tensors, HTTP with tensors as JSON numbers, and gRPC."""
FRONT_END, ENGINE, WORKER = "front_end", "engine", "worker"
PROCESSES = (FRONT_END, ENGINE, WORKER)
MOST_BUSY = 0.85
"""Share of a core that a process with one loop can be busy while its queue stays short."""
_KIB = 1024


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """Processor time of one process for a request, in nanoseconds: at 64 bytes, and for each further KiB."""

    ns: int
    ns_per_kib_in: float = 0.0
    ns_per_kib_out: float = 0.0

    def of(self, sizes: tuple[int, int]) -> int:
        """Nanoseconds for a request with `sizes` bytes of input and output tensors."""
        taken, given = sizes
        return self.ns + round((self.ns_per_kib_in * taken + self.ns_per_kib_out * given) / _KIB)


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Cost of a request of one protocol.

    `front_end` reads it and writes the answer, `engine` decides, `worker` copies tensors. `refused_front_end_ns` and
    `refused_engine_ns` are processor times of a refused request of 64 bytes. `alone_ns`: latency of a lone request from
    its first byte to its written answer, without the time of the model.
    """

    front_end: ProcessCost
    engine: ProcessCost
    worker: ProcessCost
    refused_front_end_ns: int
    refused_engine_ns: int
    alone_ns: int


@dataclass(frozen=True, slots=True)
class RateFactors:
    """Processor times at a rate of requests over those of `RequestCost`: few requests wake processes up one by one."""

    rate_per_s: float
    front_end: float
    engine: float
    worker: float


@dataclass(frozen=True, slots=True)
class ServerCost:
    """Cost of requests by protocol on one machine, measured with `front_ends` front-end processes.

    With `front_ends` 0 the engine does their work. A launch costs `launch_engine_ns` and `launch_worker_ns` besides its
    requests and the model. `by_rate` is in ascending order of rates, and at least one row.
    """

    front_ends: int
    requests: dict[str, RequestCost]
    launch_engine_ns: int
    launch_worker_ns: int
    by_rate: tuple[RateFactors, ...] = (RateFactors(1.0, 1.0, 1.0, 1.0),)

    def factor(self, process: str, rate_per_s: float) -> float:
        """Factor of a process at a rate of all requests, interpolated over the logarithm of the rate."""
        rates = [log(each.rate_per_s) for each in self.by_rate]
        return float(np.interp(log(max(rate_per_s, 1e-9)), rates, [getattr(each, process) for each in self.by_rate]))

    @property
    def busiest_per_s(self) -> float:
        """The highest rate of requests that was measured."""
        return self.by_rate[-1].rate_per_s

    def request_ns(self, protocol: str, sizes: tuple[int, int], rate_per_s: float) -> int:
        """Processor time of all processes for a request with so many bytes, at a rate of all requests."""
        request = self.requests[protocol]
        times = (getattr(request, each).of(sizes) * self.factor(each, rate_per_s) for each in PROCESSES)
        return int(sum(times))

    @property
    def launch_ns(self) -> int:
        """Latency of a launch besides the model: the decision and the hand-over."""
        return self.launch_engine_ns + self.launch_worker_ns


@dataclass(frozen=True, slots=True)
class RequestRate:
    """Requests that a server gets: `rate_per_s` requests per second of one protocol, `sizes` bytes in and out each."""

    protocol: str
    rate_per_s: float
    sizes: tuple[int, int]


def busy(cost: ServerCost, demands: Iterable[RequestRate]) -> dict[str, float]:
    """Cores that each process needs for requests: `front_end`, `engine` and `worker`. Launches are not counted.

    A front-end or an engine cannot use more than one core: see `overload`.
    """
    wanted = list(demands)
    total = sum(each.rate_per_s for each in wanted)
    return {
        process: sum(
            each.rate_per_s * getattr(cost.requests[each.protocol], process).of(each.sizes) / 1e9 for each in wanted
        )
        * cost.factor(process, total)
        for process in PROCESSES
    }


def overload(cost: ServerCost, demands: Iterable[RequestRate]) -> str:
    """Why the server cannot process so many requests, with the remedy; "" if it can."""
    wanted = list(demands)
    cores = busy(cost, wanted)
    total = sum(each.rate_per_s for each in wanted)
    least = cores["front_end"] / MOST_BUSY
    if cost.front_ends and least > cost.front_ends:
        return (
            f"{total:g} requests/s need {cores['front_end']:.2f} s of front-end processes in each second, and "
            f"{cost.front_ends} can be busy for {MOST_BUSY * cost.front_ends:g} s: serve with --frontends "
            f"{int(least) + 1}, send several rows in a request, or lower the rates"
        )
    if cores["engine"] > MOST_BUSY:
        return (
            f"{total:g} requests/s need {cores['engine']:.2f} s of the engine in each second, and it can be busy for "
            f"{MOST_BUSY:g} s: send several rows in a request, lower the rates, or use more nodes"
        )
    return ""
