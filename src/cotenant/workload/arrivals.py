"""Arrival times, drawn in blocks: the same seed gives the same arrivals wherever they are used.

Tenant i draws from the i-th child of the seed (`numpy.random.SeedSequence.spawn`), so a tenant added at the end leaves
the arrivals of the others as they were. Blocks of draws have a fixed size per tenant: how the merge consumes them
cannot change them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cotenant.errors import InvalidValueError
from cotenant.workload.spec import NS_PER_S, ArrivalProcess, Gamma, Mmpp, Poisson, Trace, Uniform, Workload

Times = npt.NDArray[np.int64]

_DRAWS = 8192
"""Gaps drawn at a time and tenant: enough that the cost of a numpy call does not show."""
_MERGED = 65_536
"""Arrivals merged at a time, about."""


class Arrival(NamedTuple):
    """One query to come: nanoseconds from the start of the run, position of its tenant, its number within the tenant.

    Arrivals compare in the total order of a run: time, then tenant, then number.
    """

    time_ns: int
    tenant: int
    seq: int


class ArrivalBlock(NamedTuple):
    """Consecutive arrivals as columns of int64, in the order of `Arrival`."""

    time_ns: Times
    tenant: Times
    seq: Times


def arrivals(workload: Workload, seed: int | None = None) -> Iterator[Arrival]:
    """Yield every arrival in [0, duration), in the order (time, tenant, number); `seed` replaces the workload's own."""
    make = Arrival._make
    for block in arrival_blocks(workload, seed):
        yield from map(make, zip(block.time_ns.tolist(), block.tenant.tolist(), block.seq.tolist(), strict=True))


def arrival_blocks(workload: Workload, seed: int | None = None) -> Iterator[ArrivalBlock]:
    """Yield the arrivals of `arrivals` as columns, some ten thousand at a time; never an empty block.

    Raises InvalidValueError when the seed is negative.
    """
    seed = workload.seed if seed is None else seed
    if seed < 0:
        raise InvalidValueError("workload", "seed", seed, "an integer from 0")
    children = np.random.SeedSequence(seed).spawn(len(workload.tenants))
    streams = [
        _Stream(_draw(tenant.process, np.random.default_rng(child)))
        for tenant, child in zip(workload.tenants, children, strict=True)
    ]
    # The bound from below is for traces: one burst has an absurd mean rate and would make windows of nanoseconds.
    window_ns = max(1, workload.duration_ns // 1000, int(_MERGED / workload.mean_rate * NS_PER_S))
    end_ns = 0
    while end_ns < workload.duration_ns:
        end_ns = min(workload.duration_ns, end_ns + window_ns)
        parts = [stream.until(end_ns) for stream in streams]
        times = np.concatenate([part for part, _ in parts])
        if times.size == 0:
            continue
        tenants = np.repeat(np.arange(len(parts)), [part.size for part, _ in parts])
        seqs = np.concatenate([np.arange(first, first + part.size) for part, first in parts])
        # The parts stand in tenant order, each ascending: a stable sort by time alone gives the total order.
        order = np.argsort(times, kind="stable")
        yield ArrivalBlock(times[order], tenants[order], seqs[order])


class _Stream:
    """Ascending times of one tenant, handed out up to a given time."""

    def __init__(self, blocks: Iterator[Times]) -> None:
        self._blocks = blocks
        self._held: Times = np.empty(0, np.int64)
        self._exhausted = False
        self._seq = 0

    def until(self, end_ns: int) -> tuple[Times, int]:
        """Take the times before `end_ns`; returns them and the number of the first."""
        parts = [self._held]
        while not self._exhausted and (parts[-1].size == 0 or parts[-1][-1] < end_ns):
            block = next(self._blocks, None)
            if block is None:
                self._exhausted = True
            else:
                parts.append(block)
        held = np.concatenate(parts)
        cut = int(np.searchsorted(held, end_ns, side="left"))
        self._held = held[cut:]
        first, self._seq = self._seq, self._seq + cut
        return held[:cut], first


def _draw(process: ArrivalProcess, rng: np.random.Generator) -> Iterator[Times]:
    match process:
        case Poisson(rate):
            return _renewal(lambda: rng.exponential(1.0 / rate, _DRAWS))
        case Gamma(rate, cv):
            shape = cv**-2
            return _renewal(lambda: rng.gamma(shape, 1.0 / (rate * shape), _DRAWS))
        case Uniform(rate):
            return _uniform(rate, rng)
        case Mmpp():
            return _mmpp(process, rng)
        case Trace():
            return _replay(process)


def _nanoseconds(seconds: npt.NDArray[np.floating[Any]]) -> Times:
    times: Times = np.rint(seconds * NS_PER_S).astype(np.int64)
    return times


def _renewal(gaps: Callable[[], npt.NDArray[np.float64]]) -> Iterator[Times]:
    now_s = 0.0
    while True:
        times_s = now_s + np.cumsum(gaps())
        now_s = float(times_s[-1])
        yield _nanoseconds(times_s)


def _uniform(rate: float, rng: np.random.Generator) -> Iterator[Times]:
    phase = rng.random()
    first = 0
    while True:
        yield _nanoseconds((np.arange(first, first + _DRAWS) + phase) / rate)
        first += _DRAWS


def _mmpp(process: Mmpp, rng: np.random.Generator) -> Iterator[Times]:
    """Draw dwell times of many states, then Poisson counts, then places within the dwell (order statistics)."""
    rates, dwells_s = np.array(process.rates), np.array(process.mean_dwell_s)
    states = len(rates)
    per_state = float((rates * dwells_s).mean())
    visits = min(_DRAWS, max(states, math.ceil(_DRAWS / per_state)))
    state = int(rng.choice(states, p=dwells_s / dwells_s.sum()))
    now_s = 0.0
    while True:
        visited = (state + np.arange(visits)) % states
        lengths_s = rng.exponential(dwells_s[visited])
        starts_s = now_s + np.concatenate(([0.0], np.cumsum(lengths_s)))
        counts = rng.poisson(rates[visited] * lengths_s)
        places = rng.random(int(counts.sum()))
        times_s = np.repeat(starts_s[:-1], counts) + places * np.repeat(lengths_s, counts)
        state = int((visited[-1] + 1) % states)
        now_s = float(starts_s[-1])
        yield _nanoseconds(np.sort(times_s))


def _replay(trace: Trace) -> Iterator[Times]:
    times = np.array(trace.times_ns, np.int64)
    yield times if trace.scale == 1.0 else np.rint(times / trace.scale).astype(np.int64)
