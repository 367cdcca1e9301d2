"""Times of kernel candidates under memory pressure, and the choice of a version for each level.

Pressure is the bandwidth of antagonists over the measured bandwidth of all cores; levels are evenly spaced from 0 to 1.
Compare VELTAIR, Fig. 6, and the pruning of its section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median

import numpy as np

from cotenant.measure.antagonist import ARRAY_BYTES, Antagonist, antagonists, measure_bandwidth, streaming
from cotenant.techniques.layer_blocks.compile.native import KernelStep, Runtime, address
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.selection import least_regret
from cotenant.techniques.layer_blocks.compile.store import KernelCandidate, Store
from cotenant.techniques.layer_blocks.compile.trial import Trial

LEVELS = 5
"""Levels of pressure, as many as the paper's versions."""
_ROUNDS, _LEAST_NS = 5, 200_000
"""Measurements of each candidate beside each number of antagonists, and the least time of each in ns."""

_WINDOW_S = 0.1


class PressureBench:
    """A core to measure on, and antagonists on others, which together use up to `most_bytes_per_s`."""

    def __init__(self, others: Sequence[Antagonist], most_bytes_per_s: int) -> None:
        self._others, self.most_bytes_per_s = others, most_bytes_per_s

    def times(
        self, problem: Problem, candidates: Sequence[KernelCandidate], store: Store, runtime: Runtime
    ) -> dict[str, tuple[float, ...]]:
        """CPU time in ns of each candidate at each of LEVELS, on the calling thread, by its name.

        Lower quartiles of interleaved measurements beside none, some, ... all antagonists, interpolated to the levels.
        Above the highest measured pressure the time is constant.
        """
        counts = sorted({round(at * len(self._others) / (LEVELS - 1)) for at in range(LEVELS)})
        trial = Trial(problem, store.target.lanes)
        steps = [trial.step(address(store.load(each.library))) for each in candidates]
        row = (KernelStep * len(steps))(*steps)
        repeats = max(1, _LEAST_NS // max(1, *(each.cpu_ns for each in candidates)))
        samples: list[list[list[int]]] = [[] for _ in counts]
        drawn: list[list[float]] = [[] for _ in samples]
        for _ in range(_ROUNDS):
            for at, (count, level) in enumerate(zip(counts, samples, strict=True)):
                with streaming(self._others[:count]) as moved:
                    runtime.cpu_ns(row)  # reloads the cache lines that the antagonists have evicted
                    level.append(runtime.cpu_ns(row, repeats))
                drawn[at].append(sum(each.bytes_per_s for each in moved))
        taken = np.array([np.quantile(np.array(level), 0.25, axis=0) for level in samples])
        pressures = [min(1.0, median(each) / self.most_bytes_per_s) for each in drawn]
        return {each.name: at_levels(pressures, taken[:, at].tolist()) for at, each in enumerate(candidates)}


@contextmanager
def pressure_bench(cores: Sequence[int], array_bytes: int = ARRAY_BYTES) -> Iterator[PressureBench]:
    """Antagonists on all cores but the first, until the block ends."""
    most = max(measure_bandwidth(cores, window_s=_WINDOW_S, rounds=_ROUNDS, array_bytes=array_bytes))
    with antagonists(cores[1:], array_bytes) as others:
        yield PressureBench(others, most)


def at_levels(pressures: Sequence[float], taken: Sequence[float], levels: int = LEVELS) -> tuple[float, ...]:
    """Times at evenly spaced levels, interpolated; made nondecreasing in the pressure."""
    order = np.argsort(pressures, kind="stable")
    known = np.maximum.accumulate(np.array(taken, np.float64)[order])
    made = np.interp(np.linspace(0.0, 1.0, levels), np.array(pressures)[order], known)
    return tuple(float(each) for each in made)


def versions_by_level(times: Mapping[str, Sequence[float]]) -> list[str]:
    """The fastest candidate for each level, of those that `least_regret` keeps."""
    chosen = least_regret(times)
    levels = len(times[chosen[0]])
    return [min(chosen, key=lambda name: (times[name][level], chosen.index(name))) for level in range(levels)]
