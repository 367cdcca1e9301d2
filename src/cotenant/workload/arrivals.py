"""Arrival times, drawn in blocks. Equal seeds give equal arrivals.

Tenant i draws from the i-th child of the seed (`numpy.random.SeedSequence.spawn`). So a tenant added at the end does
not change the arrivals of the others. Blocks of draws have a fixed size for each tenant, independent of the merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cotenant.errors import InvalidValueError
from cotenant.workload.spec import (
    NS_PER_S,
    ArrivalProcess,
    Gamma,
    Mmpp,
    Poisson,
    Trace,
    Uniform,
    Workload,
)

Times = npt.NDArray[np.int64]

_DRAWS = 8192
"""Number of gaps in one draw for a tenant: enough to make the cost of a numpy call negligible."""
_MERGED = 65_536
"""Approximate number of arrivals in one merge."""
_MANY = 65_536
"""Expected arrivals of a block of MMPP states from which on it is drawn in parts, up to the end of the run."""
_REGULAR, _LONG_S = 1e-9, 1e30
"""Coefficient of variation below which gaps count as constant, and the longest mean gap."""
_FAR_NS = 1 << 62
"""Largest time, a century: larger ones are clamped to fit into 64 bits."""


class Arrival(NamedTuple):
    """Arrival of a query: time from the start of the run, position of its tenant, number within the tenant.

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
    """Yield each arrival in [0, duration), in order of time, tenant, number. `seed` replaces that of the workload."""
    make = Arrival._make
    for block in arrival_blocks(workload, seed):
        yield from map(make, zip(block.time_ns.tolist(), block.tenant.tolist(), block.seq.tolist(), strict=True))


def arrival_blocks(workload: Workload, seed: int | None = None) -> Iterator[ArrivalBlock]:
    """Yield the same arrivals in non-empty blocks of columns. Raises InvalidValueError for a negative seed."""
    seed = workload.seed if seed is None else seed
    if seed < 0:
        raise InvalidValueError("workload", "seed", seed, "an integer from 0")
    children = np.random.SeedSequence(seed).spawn(len(workload.tenants))
    end_s = workload.duration_ns / NS_PER_S
    streams = [
        _Stream(_draw(tenant.process, np.random.default_rng(child), end_s))
        for tenant, child in zip(workload.tenants, children, strict=True)
    ]
    # The lower bound is for traces: one burst has a huge mean rate, which would make windows of nanoseconds.
    expected = workload.mean_rate * end_s
    part = _MERGED / expected if expected > _MERGED else 1.0
    window_ns = max(1, workload.duration_ns // 1000, int(workload.duration_ns * part))
    end_ns = 0
    while end_ns < workload.duration_ns:
        end_ns = min(workload.duration_ns, end_ns + window_ns)
        parts = [stream.until(end_ns) for stream in streams]
        times = np.concatenate([part for part, _ in parts])
        if times.size == 0:
            continue
        tenants = np.repeat(np.arange(len(parts)), [part.size for part, _ in parts])
        seqs = np.concatenate([np.arange(first, first + part.size) for part, first in parts])
        # Parts are in the order of tenants, each ascending: a stable sort by time gives the total order.
        order = np.argsort(times, kind="stable")
        yield ArrivalBlock(times[order], tenants[order], seqs[order])


class _Stream:
    """Ascending times of one tenant, taken up to a given time."""

    def __init__(self, blocks: Iterator[Times]) -> None:
        self._blocks = blocks
        self._held: Times = np.empty(0, np.int64)
        self._exhausted = False
        self._seq = 0

    def until(self, end_ns: int) -> tuple[Times, int]:
        """Remove and return the times before `end_ns`, and the number of the first."""
        parts = [self._held]
        while not self._exhausted and (parts[-1].size == 0 or parts[-1][-1] < end_ns):
            block = next(self._blocks, None)
            if block is None:
                self._exhausted = True
            else:
                parts.append(block)
        held = parts[0] if len(parts) == 1 else np.concatenate(parts)  # avoids a copy, since there may be many windows
        cut = int(np.searchsorted(held, end_ns, side="left"))
        self._held = held[cut:]
        first, self._seq = self._seq, self._seq + cut
        return held[:cut], first


def _draw(process: ArrivalProcess, rng: np.random.Generator, end_s: float) -> Iterator[Times]:
    """Blocks of times, up to the first that reaches the end."""
    match process:
        case Poisson(rate):
            mean_s = _inverse(rate)
            return _renewal(lambda: rng.exponential(mean_s, _DRAWS), end_s)
        case Gamma(rate, cv):
            shape = cv**-2 if cv > _REGULAR else _REGULAR**-2
            mean_s = _inverse(rate * shape)
            return _renewal(lambda: rng.gamma(shape, mean_s, _DRAWS), end_s)
        case Uniform(rate):
            return _uniform(rate, rng, end_s)
        case Mmpp():
            return _mmpp(process, rng, end_s)
        case Trace():
            return _replay(process)


def _inverse(rate: float) -> float:
    """Mean gap in seconds, at most `_LONG_S` for very small rates."""
    return min(1.0 / rate, _LONG_S) if rate else _LONG_S


def _nanoseconds(seconds: npt.NDArray[np.floating[Any]]) -> Times:
    times: Times = np.rint(np.minimum(seconds * NS_PER_S, _FAR_NS)).astype(np.int64)
    return times


def _renewal(gaps: Callable[[], npt.NDArray[np.float64]], end_s: float) -> Iterator[Times]:
    now_s = 0.0
    while now_s < end_s:
        times_s = now_s + np.cumsum(gaps())
        now_s = float(times_s[-1])
        yield _nanoseconds(times_s)


def _uniform(rate: float, rng: np.random.Generator, end_s: float) -> Iterator[Times]:
    phase = rng.random()
    first = 0
    while first <= end_s * rate:
        yield _nanoseconds((np.arange(first, first + _DRAWS) + phase) / max(rate, 1 / _LONG_S))
        first += _DRAWS


def _mmpp(process: Mmpp, rng: np.random.Generator, end_s: float) -> Iterator[Times]:
    """Draw dwell times of many states, then Poisson counts, then times within the dwell (order statistics).

    A block with more than `_MANY` arrivals is drawn in parts, and its states are cut at the end of the run.
    """
    rates, dwells_s = np.array(process.rates), np.array(process.mean_dwell_s)
    states = len(rates)
    per_state = float((rates * dwells_s).mean())
    visits = _DRAWS if per_state <= 1 else min(_DRAWS, max(states, math.ceil(_DRAWS / per_state)))
    state = int(rng.choice(states, p=dwells_s / dwells_s.sum()))
    now_s = 0.0
    while now_s < end_s:
        visited = (state + np.arange(visits)) % states
        lengths_s = rng.exponential(dwells_s[visited])
        starts_s = now_s + np.concatenate(([0.0], np.cumsum(lengths_s)))
        state = int((visited[-1] + 1) % states)
        now_s = float(starts_s[-1])
        if (rates[visited] * lengths_s).sum() > _MANY:
            lengths_s = np.clip(end_s - starts_s[:-1], 0.0, lengths_s)
            for rate, start_s, length_s in zip(rates[visited], starts_s[:-1], lengths_s, strict=True):
                parts = max(1, math.ceil(rate * length_s / _MANY))
                for part in range(parts):
                    places = part + np.sort(rng.random(rng.poisson(rate * length_s / parts)))
                    yield _nanoseconds(start_s + places * (length_s / parts))
            continue
        counts = rng.poisson(rates[visited] * lengths_s)
        places = rng.random(int(counts.sum()))
        times_s = np.repeat(starts_s[:-1], counts) + places * np.repeat(lengths_s, counts)
        yield _nanoseconds(np.sort(times_s))


def _replay(trace: Trace) -> Iterator[Times]:
    times = np.array([min(each, _FAR_NS) for each in trace.times_ns], np.int64)
    yield (
        times
        if trace.scale == 1.0
        else np.rint(np.minimum(times, _FAR_NS * trace.scale) / trace.scale).astype(np.int64)
    )
