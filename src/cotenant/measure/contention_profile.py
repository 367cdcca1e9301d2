"""Contention profile: slowdowns of models beside antagonists, fitted to `world.contention`, saved in a file.

- `measure_bandwidth`: memory traffic of one core, two, ...
- `measure_pressure`: indicators of the present memory traffic
- `measure_sensitivity`: a model alone and beside antagonists, alternately
- `fit_contention`: parameters of `world.contention` that explain both
- `calibrate`: all of these for a repository, saved beside its profile

If the traffic grows in proportion to the cores, the memory is not saturated. The fit then has no bandwidth limit, and
the world no contention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from cotenant.config import ServerConfig
from cotenant.errors import CotenantError
from cotenant.execute.layout import cores_alone, lanes_of
from cotenant.fair_share import fair_shares
from cotenant.files import load, save
from cotenant.graph.dfg import Dfg
from cotenant.linux import available_cores, pin, require
from cotenant.measure.antagonist import (
    ARRAY_BYTES,
    ROUNDS,
    WINDOW_S,
    Antagonist,
    Canary,
    antagonists,
    measure_bandwidth,
    streaming,
)
from cotenant.measure.cache_counters import CacheCounters
from cotenant.predict.pressure import (
    CacheReading,
    CounterModel,
    SlowdownScale,
    fit_counters,
    fit_slowdowns,
)
from cotenant.profiles.device import Device, this_device
from cotenant.profiles.profile_file import Profile, ProfileError, load_profile
from cotenant.repository import contention_path, default_version, model_names, profile_path
from cotenant.world.contention import Contention, Phase, Traffic, phase_time_ns

if TYPE_CHECKING:
    from cotenant.execute.runner import Runner
    from cotenant.measure.solo import Effort

FORMAT = "cotenant-contention/1"
SATURATED = 0.9
"""The memory is saturated if n cores together draw less than this share of n times the traffic of one."""
TOLERANCE = 0.02
"""A slowdown up to 1 plus this cannot be distinguished from none, with medians of interleaved runs."""
MOST_SHARE = 4.0
"""Largest `memory_share`: bytes may be fetched repeatedly, and read before they are overwritten."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One model alone and beside antagonists with `antagonist_bytes_per_s` each: medians of interleaved runs."""

    solo_ns: int
    beside_ns: int
    antagonist_bytes_per_s: tuple[int, ...]
    runs: int

    @property
    def slowdown(self) -> float:
        """Latency beside the antagonists over that alone."""
        return self.beside_ns / self.solo_ns


@dataclass(frozen=True, slots=True)
class ModelContention:
    """Traffic of one model; `is_identified` is False if it is only counted in the graph, since no slowdown shows it."""

    traffic: Traffic
    is_identified: bool
    sensitivity: Sensitivity | None = None


@dataclass(frozen=True, slots=True)
class PressureScales:
    """Indicators of pressure on one device: a canary that takes `canary_ns` alone, and cache counters.

    `slowdowns` is None if antagonists do not slow the canary down, `counters` if they cannot be read (`no_counters`).
    """

    canary_ns: int
    slowdowns: SlowdownScale | None
    counters: CounterModel | None
    no_counters: str = ""


@dataclass(frozen=True, slots=True)
class ContentionProfile:
    """Contention of the models of one repository on one device.

    `drawn_bytes_per_s` is the traffic of one core, two, ... together. `bandwidth_bytes_per_s` is None if the memory was
    not saturated.
    """

    device: Device
    created: str
    drawn_bytes_per_s: tuple[int, ...]
    bandwidth_bytes_per_s: int | None
    models: dict[str, ModelContention]
    pressure: PressureScales | None = None
    format: str = FORMAT

    def contention(self) -> Contention:
        """The parameters of the world."""
        traffic = {name: model.traffic for name, model in self.models.items()}
        return Contention(self.bandwidth_bytes_per_s, self.drawn_bytes_per_s[0], traffic)


def save_contention(path: Path, found: ContentionProfile) -> None:
    """Write the profile atomically."""
    save(path, found)


def load_contention(path: Path) -> ContentionProfile:
    """Read a contention profile. Raises ProfileError for any other file."""
    hint = "make it with 'cotenant profile REPO --contention'"
    return load(path, ContentionProfile, FORMAT, ProfileError, hint)


def traffic_of(dfgs: Sequence[Dfg]) -> Traffic:
    """Bytes counted in a model's graph, for one row at each declared shape. Weights are read once for each launch."""
    return Traffic(
        tuple(unit.weight_bytes for unit in dfgs[0].units),
        tuple(tuple(unit.read_bytes + unit.write_bytes for unit in dfg.units) for dfg in dfgs),
    )


def measure_pressure(
    core: int,
    others: Sequence[Antagonist],
    most_bytes_per_s: int,
    *,
    window_s: float = WINDOW_S,
    rounds: int = ROUNDS,
    open_counters: Callable[[Sequence[int]], CacheCounters] = CacheCounters,
) -> PressureScales:
    """Calibrate the indicators of pressure on a core, beside none, one, ... and all of the antagonists alternately.

    Pressure is the antagonists' share of `most_bytes_per_s`. Medians over rounds; pins the thread while it measures.
    """
    affinity = available_cores()
    cores = [core, *(each.core for each in others)]
    counters, no_counters = None, ""
    try:
        counters = open_counters(cores)
    except CotenantError as error:
        no_counters = str(error)
    found: list[list[tuple[float, float, CacheReading]]] = [[] for _ in range(len(others) + 1)]
    silent = CacheReading(0.0, 0.0)
    try:
        pin((core,))
        canary = Canary()
        canary.ns()
        for _ in range(rounds):
            for count in range(len(others) + 1):
                with streaming(others[:count]) as moved:
                    if counters is not None:
                        counters.read()
                    began = time.perf_counter()
                    took: list[int] = []
                    while not took or time.perf_counter() - began < window_s:
                        took.append(canary.ns())
                    reading = silent if counters is None else counters.read()
                drawn = sum(each.bytes_per_s for each in moved)
                found[count].append((median(took), min(1.0, drawn / most_bytes_per_s), reading))
    finally:
        pin(affinity)
        if counters is not None:
            counters.close()
    canaries = [median(ns for ns, _, _ in level) for level in found]
    pressures = [median(pressure for _, pressure, _ in level) for level in found]
    every = [each for level in found for each in level]
    fitted = None
    if counters is not None:
        fitted = fit_counters([reading for _, _, reading in every], [pressure for _, pressure, _ in every])
    slowdowns = fit_slowdowns([ns / canaries[0] for ns in canaries], pressures)
    return PressureScales(round(canaries[0]), slowdowns, fitted, no_counters)


def measure_sensitivity(
    model: Runner, inputs: Mapping[str, Any], core: int, others: Sequence[Antagonist], effort: Effort
) -> Sensitivity:
    """Run the whole model on one core, alternately alone and beside antagonists on other cores.

    Latencies are processor time of the calling thread, which runs the model. That includes waits for the memory, but
    not time of other processes on the core. Pins the thread while it measures.
    """
    affinity = available_cores()
    whole = (0, model.unit_count)
    model.prepare([whole])

    def run() -> int:
        start_ns = time.thread_time_ns()
        model.run(*whole, inputs)
        return time.thread_time_ns() - start_ns

    solo: list[int] = []
    beside: list[int] = []
    drawn: list[list[float]] = [[] for _ in others]
    try:
        pin((core,))
        for _ in range(effort.warm_up):
            run()
        began = time.perf_counter()
        while len(solo) < effort.min_runs or (
            time.perf_counter() - began < effort.budget_s and len(solo) < effort.max_runs
        ):
            solo.append(run())
            with streaming(others) as moved:
                run()  # the first run reloads data that the antagonists evicted from the cache
                beside.append(run())
            for values, each in zip(drawn, moved, strict=True):
                values.append(each.bytes_per_s)
    finally:
        pin(affinity)
    return Sensitivity(
        round(median(solo)), round(median(beside)), tuple(round(median(values)) for values in drawn), len(solo)
    )


def fit_bandwidth(drawn_bytes_per_s: Sequence[int]) -> int | None:
    """Bandwidth of the memory from the traffic of one core, two, ...; None if it is not saturated."""
    saturated = drawn_bytes_per_s[-1] < SATURATED * len(drawn_bytes_per_s) * drawn_bytes_per_s[0]
    return max(drawn_bytes_per_s) if saturated else None


def predicted_slowdown(phases: Sequence[Phase], others: Sequence[int], bandwidth: int) -> float:
    """Slowdown of a launch on its own core beside neighbours with a demand of `others` bytes per second."""
    weights = [1] * (1 + len(others))
    beside = sum(
        phase_time_ns(phase, int(fair_shares((phase.bytes_per_s, *others), weights, bandwidth)[0])) for phase in phases
    )
    return beside / sum(phase.alone_ns for phase in phases)


def fit_contention(
    drawn_bytes_per_s: Sequence[int],
    traffic: Traffic,
    unit_weights: Sequence[float],
    sensitivity: Sensitivity,
    shape: int = 0,
) -> tuple[Traffic, bool]:
    """Find the `memory_share` of a model that explains its slowdown, and whether the measurement determines it.

    The slowdown never falls with the share, so bisection finds it. A share of 1 means that all counted bytes reach the
    memory. It is kept if it agrees with the measurement, and where the memory is not saturated.
    """
    bandwidth = fit_bandwidth(drawn_bytes_per_s)
    if bandwidth is None:
        return replace(traffic, memory_share=1.0), False
    others = [drawn_bytes_per_s[0]] * len(sensitivity.antagonist_bytes_per_s)
    total = sum(unit_weights)

    def slowdown(share: float) -> float:
        moved = replace(traffic, memory_share=share).unit_bytes(shape, 1)
        phases = []
        for weight, unit_bytes in zip(unit_weights, moved, strict=True):
            alone = max(1, round(sensitivity.solo_ns * weight / total))
            most = min(bandwidth, drawn_bytes_per_s[0])
            phases.append(Phase(alone, min(most, round(unit_bytes * 1e9 / alone))))
        return predicted_slowdown(phases, others, bandwidth)

    measured = sensitivity.slowdown
    low, high = (0.0, 1.0) if slowdown(1.0) > measured else (1.0, MOST_SHARE)
    if abs(slowdown(1.0) - measured) <= TOLERANCE:
        return replace(traffic, memory_share=1.0), measured > 1 + TOLERANCE
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if slowdown(middle) <= measured else (low, middle)
    return replace(traffic, memory_share=round(low, 4)), True


def contended_cores(root: Path, settings: ServerConfig) -> tuple[int, ...]:
    """The server's cores, for contention. Raises ConfigError for a GPU, CotenantError for a single core and for another
    system than Linux."""
    require("cotenant profile --contention")
    cores = cores_alone(settings.device, "contention is measured", str(root))
    if len(cores) < 2:
        raise CotenantError(f"contention needs two cores at least to be measured, there is {len(cores)}")
    return cores


def calibrate(
    root: Path,
    settings: ServerConfig,
    effort: Effort,
    *,
    window_s: float = WINDOW_S,
    rounds: int = ROUNDS,
    array_bytes: int = ARRAY_BYTES,
) -> ContentionProfile:
    """Measure and fit the models of a profiled repository, and save the result. See `measure_bandwidth`.

    Raises ProfileError without a profile, and as `contended_cores`.
    """
    from cotenant.measure.inputs import make_inputs
    from cotenant.measure.opened_model import open_version

    cores = contended_cores(root, settings)
    profile: Profile = load_profile(profile_path(root))
    drawn = measure_bandwidth(cores, window_s=window_s, rounds=rounds, array_bytes=array_bytes)
    models: dict[str, ModelContention] = {}
    with antagonists(cores[1:], array_bytes) as others:
        pressure = measure_pressure(cores[0], others, max(drawn), window_s=window_s, rounds=rounds)
        for name in model_names(root):
            found = default_version(root, name)
            measured = profile.models.get(found.tenant)
            if measured is None:
                continue
            opened = open_version(root, found, placed=False)
            with opened.runner as runner:
                sweep = opened.sweep(lanes_of(settings.device, cores), effort)
                shape = opened.shapes.index(sweep.largest_shape)  # at which the units were measured
                inputs = make_inputs(runner.inputs, sweep.largest_shape, 1, sweep.max_batch > 1, opened.samples)
                sensitivity = measure_sensitivity(runner, inputs, cores[0], others, effort)
                counted = traffic_of([runner.dfg_at(declared) for declared in opened.shapes])
                weights = [float(ns) for ns in measured.unit_ns]
                traffic, is_identified = fit_contention(drawn, counted, weights, sensitivity, shape)
                models[found.tenant] = ModelContention(traffic, is_identified, sensitivity)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    made = ContentionProfile(this_device(), created, drawn, fit_bandwidth(drawn), models, pressure)
    save_contention(contention_path(root), made)
    return made
