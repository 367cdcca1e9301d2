"""Applications: DAGs of models with one SLO for the whole query.

Planners know loads only. `stage_loads` divides the SLO `S` of an application into stage budgets `s_i`:

    minimise sum_i needed_share(load of stage i with SLO s_i)   subject to   sum of s_i along every path <= S

Source: GPU-let (ATC 2022), section 5.1, has two applications and does not define the division. Nexus (SOSP 2019),
section 4.2, minimises the number of devices over trees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from cotenant.errors import InvalidValueError
from cotenant.files import Milliseconds
from cotenant.techniques.partitions.plan.rounds import RoundCache, round_cache_of
from cotenant.techniques.partitions.plan.types import NS_PER_S, Costs, DeviceType, Load, Name, Rate, checked

_STEPS = 32
"""Grid points for the end of a stage, besides the points at which one more batch fits."""
_REFINED = 3
_SWEEPS = 8
_LEAST_GAIN = 1e-6
_HOPELESS = 1e24


class Stage(Struct, frozen=True, forbid_unknown_fields=True):
    """One model of an application. `after`: names of the stages that it depends on; empty for a source."""

    name: Name
    model: Name
    after: tuple[Name, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidValueError("stage", "name", self.name, "a name")


class Application(Struct, frozen=True, forbid_unknown_fields=True):
    """A DAG of stages, each of which a query runs once. `slo_ns`: from a query's arrival to its last answer.

    Raises InvalidValueError for a value out of its range, two stages of one name, unknown dependencies, and cycles.
    """

    name: Name
    slo_ns: Milliseconds = field(name="slo_ms")
    rate_per_s: Rate = field(name="rate")
    stages: tuple[Stage, ...] = field(name="stage")

    def __post_init__(self) -> None:
        where = f"application {self.name!r}"
        if not 0 < self.rate_per_s < math.inf:
            raise InvalidValueError(where, "rate_per_s", self.rate_per_s, "a positive finite number")
        if self.slo_ns < max(1, len(self.stages)):
            raise InvalidValueError(
                where, "slo_ns", self.slo_ns, "a positive latency target, 1 for each stage at least"
            )
        names = [stage.name for stage in self.stages]
        if not names or len(dict.fromkeys(names)) < len(names):
            raise InvalidValueError(where, "stages", names, "at least one stage, each with a name of its own")
        for stage in self.stages:
            for needed in stage.after:
                if needed not in names:
                    known = ", ".join(names)
                    raise InvalidValueError(f"{where}, stage {stage.name!r}", "after", needed, f"one of {known}")
        try:
            self.order()
        except CycleError as error:
            circle = " -> ".join(error.args[1])
            raise InvalidValueError(where, "stages", circle, "stages that do not wait in a circle") from None

    def order(self) -> tuple[Stage, ...]:
        """The stages in a topological order."""
        by_name = {stage.name: stage for stage in self.stages}
        sorter = TopologicalSorter({stage.name: stage.after for stage in self.stages})
        return tuple(by_name[name] for name in sorter.static_order())

    def tenant(self, stage: Stage) -> str:
        """Name of a stage's load in plans."""
        return f"{self.name}.{stage.name}"


def stage_loads(application: Application, devices: Sequence[DeviceType], costs: Costs) -> tuple[Load, ...]:
    """One load per stage, in their order, at the application's rate and with the stage's budget as SLO.

    Coordinate descent:

    1. Divide the SLO in proportion to each stage's latency at its most efficient batch.
    2. Move the end of one stage, or the common end of all predecessors of a stage, to the point of least total
       `needed_share`. Repeat while the total falls.

    Exact up to the grid if each path has one end to choose, as in the paper's applications. If no division can serve
    all stages, the proportional one stays, and the planner reports which stage breaks.

    Raises PlanError for unequal devices of one name, and what the costs raise.
    """
    kinds = tuple(checked((), devices).values())
    split = _Split(application, kinds, round_cache_of(costs))
    slos = split.best()
    return tuple(
        Load(application.tenant(stage), stage.model, application.rate_per_s, slos[stage.name])
        for stage in application.stages
    )


def needed_share(cache: RoundCache, load: Load, kinds: Sequence[DeviceType]) -> float:
    """Least share of a device that a load takes, if other loads fill the rest of its partitions.

    A rate that does not fill a partition must collect its batch within the SLO. Then batch b in a partition of size p
    runs for `L(b, p)` in each duty cycle `min(b / rate, SLO - L(b, p))`. Infinite if no batch meets the SLO.
    """
    return float(_Needs(cache, load.model, load.rate_per_s, kinds).at(np.array([load.slo_ns]))[0])


class _Needs:
    """Needed share of one model at one rate. Arrays have the shape (SLOs, partitions, batches)."""

    def __init__(self, cache: RoundCache, model: str, rate: float, kinds: Sequence[DeviceType]) -> None:
        sizes = [(kind, size) for kind in kinds for size in kind.sizes]
        self._batches = np.array(cache.costs.batches(model), np.float64)
        curves = [cache.curve(model, size, kind.name).latency_ns for kind, size in sizes]
        self._ns = np.array(curves, np.float64).reshape(-1, len(self._batches))  # of no devices as well
        self.edges = np.unique(2 * self._ns.astype(np.int64))
        """SLOs in ns at which one more batch can fill a partition."""
        self._parts = np.array([size / kind.whole for kind, size in sizes])
        self._rate = rate / NS_PER_S

    def at(self, slos: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The share at each of some SLOs in ns; infinite where no batch meets the SLO."""
        slo = slos.astype(np.float64)[:, None, None]
        most = np.where(2 * self._ns <= slo, self._batches / self._ns, 0.0).max(axis=2, initial=0.0)
        rate = np.minimum(self._rate, most)
        with np.errstate(divide="ignore", invalid="ignore"):
            duty = np.minimum(self._batches / rate[:, :, None] * (1 + 1e-9), slo - self._ns)
            taken = (self._rate / rate * self._parts)[:, :, None] * self._ns / duty
        share: npt.NDArray[np.float64] = np.where((duty >= self._ns) & (rate > 0)[:, :, None], taken, np.inf).min(
            axis=(1, 2), initial=np.inf
        )
        return share


class _Split:
    """Coordinate descent for one application. Ends of stages are nanoseconds after a query's arrival."""

    def __init__(self, application: Application, kinds: tuple[DeviceType, ...], cache: RoundCache) -> None:
        self._application = application
        self._kinds = kinds
        self._cache = cache
        self._order = application.order()
        self._models = {stage.name: stage.model for stage in self._order}
        self._after = {stage.name: stage.after for stage in self._order}
        self._next: dict[str, list[str]] = {stage.name: [] for stage in self._order}
        for stage in self._order:
            for needed in stage.after:
                self._next[needed].append(stage.name)
        self._needs = {
            model: _Needs(cache, model, application.rate_per_s, kinds) for model in dict.fromkeys(self._models.values())
        }

    def best(self) -> dict[str, int]:
        ends = self._proportional()
        moves = list(dict.fromkeys(self._moves()))
        for _ in range(_SWEEPS):
            gained = 0.0
            for group in moves:
                ends, gain = self._moved(ends, group)
                gained += gain
            if gained <= 0:
                break
        return {name: end - self._start(ends, name) for name, end in ends.items()}

    def _moves(self) -> list[tuple[str, ...]]:
        single = [(name,) for name in self._models if self._next[name]]
        together = [
            tuple(name for name in after if not any(other in self._next[name] for other in after))
            for after in self._after.values()
        ]
        return single + [group for group in together if len(group) > 1]

    def _proportional(self) -> dict[str, int]:
        """Ends in proportion to the latencies at the most efficient batches, each as late as its successors allow."""
        needs = {name: self._typical_ns(model) for name, model in self._models.items()}
        before: dict[str, tuple[int, int]] = {}
        """Longest path to each stage: nanoseconds, and number of stages."""
        for stage in self._order:
            paths = [(before[name][0] + needs[name], before[name][1] + 1) for name in stage.after]
            before[stage.name] = (
                max((ns for ns, _ in paths), default=0),
                max((count for _, count in paths), default=0),
            )
        slo = self._application.slo_ns
        deepest = max(count for _, count in before.values()) + 1
        scale = (slo - deepest) / max(ns + needs[name] for name, (ns, _) in before.items())
        ends: dict[str, int] = {}
        for stage in self._order:
            starts = [math.floor(before[name][0] * scale) + before[name][1] for name in self._next[stage.name]]
            ends[stage.name] = min(starts, default=slo)
        return ends

    def _typical_ns(self, model: str) -> int:
        """Latency at the batch of the largest rate under the whole SLO; the least latency if no batch meets it."""
        slo = self._application.slo_ns
        times = []
        for kind in self._kinds:
            curve = self._cache.curve(model, kind.whole, kind.name)
            batch = self._cache.best_batch(model, slo, kind.whole, kind.name)
            times.append(curve.latency_ns[curve.position[batch]] if batch else min(curve.latency_ns))
        return min(times, default=1)

    def _start(self, ends: Mapping[str, int], name: str) -> int:
        return max((ends[needed] for needed in self._after[name]), default=0)

    def _share(self, name: str, slos: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        share = self._needs[self._models[name]].at(slos)
        # An infeasible budget costs more than any feasible one, and less the longer it is: descent leaves it this way.
        return np.where(np.isinf(share), _HOPELESS / np.maximum(1, slos), share)

    def _moved(self, ends: dict[str, int], group: tuple[str, ...]) -> tuple[dict[str, int], float]:
        """The ends with the best common end of a group of stages, and the decrease of the total share."""
        followers = list(dict.fromkeys(other for name in group for other in self._next[name]))
        low = max(self._start(ends, name) for name in group) + 1
        high = min(ends[name] for name in followers) - 1
        if low > high:
            return ends, 0.0

        def cost(places: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
            """Total needed share of the stages that the move changes."""
            total = np.zeros(len(places))
            for name in group:
                total += self._share(name, places - self._start(ends, name))
            for name in followers:
                fixed = max((ends[needed] for needed in self._after[name] if needed not in group), default=0)
                total += self._share(name, ends[name] - np.maximum(places, fixed))
            return total

        before = sum(
            float(self._share(name, np.array([ends[name] - self._start(ends, name)]))[0])
            for name in (*group, *followers)
        )
        best, least = ends, before
        edges = [self._start(ends, name) + self._needs[self._models[name]].edges for name in group]
        edges += [ends[name] - self._needs[self._models[name]].edges for name in followers]
        for _ in range(_REFINED):
            places = np.unique(np.concatenate((*edges, np.linspace(low, high, _STEPS).astype(np.int64))))
            places = places[(places >= low) & (places <= high)]
            costs = cost(places)
            at = int(np.argmin(costs))
            if costs[at] >= least * (1 - _LEAST_GAIN):
                break
            best, least = {**ends, **dict.fromkeys(group, int(places[at]))}, float(costs[at])
            low, high = int(places[max(0, at - 1)]), int(places[min(len(places) - 1, at + 1)])
        return best, before - least
