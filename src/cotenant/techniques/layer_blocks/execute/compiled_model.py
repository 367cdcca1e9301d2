"""An ONNX model with units on compiled kernels, in blocks without Python in between; onnxruntime runs the others."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TypeProto, numpy_helper
from typing_extensions import override

from cotenant.errors import CotenantError
from cotenant.execute.contents import HeldFolder
from cotenant.execute.onnx.segment_session import as_ort_value, normal_threads
from cotenant.execute.onnx.segment_store import Stored
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.runner import array_of
from cotenant.execute.threads.names import Threads
from cotenant.execute.threads.team import Team
from cotenant.graph.dfg import Dfg, Tensor, build_dfg
from cotenant.linux import available_cores
from cotenant.techniques.layer_blocks.compile.native import Runtime
from cotenant.techniques.layer_blocks.compile.packing import Array
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.selection import KernelVersion
from cotenant.techniques.layer_blocks.execute.lease import Kept, Kernels, Lease, PreparedPlan, ShapeRefusedError
from cotenant.techniques.layer_blocks.execute.memory import PackedWeights
from cotenant.techniques.layer_blocks.execute.nodes import HEAVY, Lowering, shapes_of
from cotenant.techniques.layer_blocks.execute.unit_plan import BufferPlace, UnitPlanner

_MOST_PLANS = 16
"""Plans in the cache at most, one for each set of input shapes."""
_RUNS = 5
_log = logging.getLogger(__name__)


class CompiledModel(SegmentedModel):
    """Runs any range of units of one ONNX model; see `execute.runner.Runner`.

    Before `use` all units run on onnxruntime. `version` of a run selects the kernels: 0 is the fastest on its cores,
    and units with fewer versions take their last one. Cores that join a team take part from the next step on, in
    onnxruntime from its next segment on. Tensors between two parts of a run stay in place.
    """

    is_plain = True
    joins = True

    def __init__(self, path: Path, held: HeldFolder, stored: Stored, name: str, owned: Path | None = None) -> None:
        graph = stored.skeleton.graph
        self._initialisers = {each.name: each for each in graph.initializer}
        constants = {
            each.name: numpy_helper.to_array(each) if not each.external_data else _Shape(tuple(each.dims))
            for each in graph.initializer
        }
        self._lowering = Lowering({name: node for node in graph.node for name in node.output}, constants)
        self._kernels: Kernels = {}
        self._runtime: Runtime | None = None
        self._lanes = 1
        self.most_bytes_per_s = 0
        """Measured memory bandwidth of all cores, if kernels were measured under pressure; else 0."""
        self._left_out: frozenset[int] = frozenset()
        self._by_engine: frozenset[int] = frozenset()
        self._prepared: dict[tuple[tuple[int, ...], ...], PreparedPlan] = {}
        self._weights_of = PackedWeights(self._constant)
        self._groups: list[list[int]] = []
        self._planning = threading.Lock()
        super().__init__(path, held, stored, name, owned)

    def use(
        self,
        kernels: Kernels,
        runtime: Runtime,
        lanes: int,
        left_out: Collection[int] = (),
        by_engine: Collection[int] = (),
    ) -> None:
        """Use these kernels, the versions of each problem, for vectors of `lanes` numbers.

        Units in `left_out` stay with onnxruntime. With a number of threads in `by_engine` onnxruntime runs the whole
        model.
        """
        with self._planning:
            self._kernels, self._runtime, self._lanes = kernels, runtime, lanes
            self._left_out, self._by_engine = frozenset(left_out), frozenset(by_engine)
            self._prepared = {}

    def planner(self, shapes: Mapping[str, Sequence[int]], lanes: int) -> UnitPlanner:
        """A planner of kernels at these shapes of all inputs."""
        dfg = self.dfg_at(shapes)
        lookup = self._lowering.certain(dfg, shapes_of(dfg))
        units = [self._lowering.unit(dfg, unit.index, lookup) for unit in dfg.units]
        return UnitPlanner(dfg, units, lanes, lambda name: tuple(self._initialisers[name].dims))

    @override
    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: Threads | Team = 1, version: int = 0
    ) -> dict[str, Any]:
        can_expand = isinstance(threads, Team)
        team, fixed = (threads, _of_team(threads)) if isinstance(threads, Team) else (Team(_cores(threads)), threads)
        if self._runtime is None or not self._plain:
            return super().run(start, end, _arrays(tensors), fixed)
        self._check_range(start, end)
        count = fixed if isinstance(fixed, int) else len(fixed)
        if count in self._by_engine and not can_expand and (start, end) == (0, self.unit_count):
            return super().run(start, end, tensors, fixed)
        if start:  # other given tensors may be gone
            tensors = {name: tensors[name] for name in self.dfg.live(start) if name in tensors}
        lease, token = self._leased(start, tensors)
        if lease is None:
            return super().run(start, end, _arrays(tensors), fixed)
        try:
            return self._run_leased(lease, token, start, end, tensors, team, version, None if can_expand else fixed)
        except ShapeRefusedError as error:
            if any(isinstance(each, Kept) for each in tensors.values()):
                raise  # the steps so far have overwritten their inputs
            if start == 0:
                lease.prepared.refused = str(error)
                _log.warning("model %s: onnxruntime runs it at these shapes: %s", self.name, error)
            return super().run(start, end, tensors, fixed)
        finally:
            lease.busy.release()

    @override
    def unit_ns(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        by_engine = super().unit_ns(inputs)
        if self._runtime is None or not self._plain:
            return by_engine
        lease, token = self._leased(0, inputs)
        assert lease is not None
        try:
            self._run_leased(lease, token, 0, self.unit_count, inputs, Team((0,)), 0, 1)
            plan = lease.prepared.plan
            samples = [self._runtime.cpu_ns(lease.steps) for _ in range(_RUNS)]
        finally:
            lease.busy.release()
        times = np.median(np.array(samples), axis=0)
        return tuple(
            max(1, int(sum(times[plan.starts[unit] : plan.starts[unit + 1]]))) if ours else by_engine[unit]
            for unit, ours in enumerate(plan.ours)
        )

    def unit_kernels(self, shapes: Mapping[str, Sequence[int]]) -> list[list[Sequence[KernelVersion]]]:
        """By unit, the versions of each of its kernels at these shapes; empty for a unit on onnxruntime."""
        prepared = self.prepared(shapes)
        plan = prepared.plan
        return [
            [
                prepared.kernels[step.run]
                for step in plan.steps[plan.starts[unit] : plan.starts[unit + 1]]
                if ours and isinstance(step.run, Problem)
            ]
            for unit, ours in enumerate(plan.ours)
        ]

    def segment_ns(self, inputs: Mapping[str, Any]) -> dict[tuple[int, int], tuple[float, float]]:
        """CPU time in ns of each segment of units on kernels, layout changes included, and of the same on
        onnxruntime."""
        lease, token = self._leased(0, inputs)
        assert lease is not None
        assert self._runtime is not None
        try:
            self._run_leased(lease, token, 0, self.unit_count, inputs, Team((0,)), 0, 1)
            plan, shapes = lease.prepared.plan, lease.prepared.shapes
            steps = np.median(np.array([self._runtime.cpu_ns(lease.steps) for _ in range(_RUNS)]), axis=0)
        finally:
            lease.busy.release()
        edges = [
            at for at in range(self.unit_count + 1) if at in (0, self.unit_count) or plan.ours[at] != plan.ours[at - 1]
        ]
        segments = [(start, end) for start, end in itertools.pairwise(edges) if plan.ours[start]]
        found: dict[tuple[int, int], tuple[float, float]] = {}
        for start, end in segments:
            ours = float(sum(steps[plan.starts[start] : plan.starts[end]]))
            for at in range(plan.starts[end], len(plan.steps)):  # layout changes for its readers
                source = plan.steps[at].pointers[0]
                if (
                    plan.steps[at].run == "blocks_out"
                    and isinstance(source, BufferPlace)
                    and start <= source.first < end
                ):
                    ours += float(steps[at])
            names = self.dfg.segment_io(start, end)[0]
            given = {name: as_ort_value(np.zeros(shapes[name], np.float32)) for name in names}
            samples = []
            for _ in range(_RUNS):
                values = dict(given)
                began = time.thread_time_ns()
                for segment in self._segments_of(1, start, end):
                    if segment.session is not None:
                        self.run_segment(segment, values)
                samples.append(time.thread_time_ns() - began)
            found[start, end] = ours, float(np.median(samples[1:]))
        return found

    @override
    def prepare(self, ranges: Iterable[tuple[int, int]], threads: Threads = 1) -> None:
        count = threads if isinstance(threads, int) else len(threads)
        wanted = []
        for start, end in ranges:
            self._check_range(start, end)
            is_whole = (start, end) == (0, self.unit_count)
            if self._runtime is None or (is_whole and count in self._by_engine):
                wanted.append((start, end))
        super().prepare(wanted, threads)

    def prepared(self, shapes: Mapping[str, Sequence[int]]) -> PreparedPlan:
        """The plan for these shapes of the inputs."""
        return self._prepare(tuple(tuple(shapes[tensor.name]) for tensor in self.inputs))

    def _dfg(self, types: Mapping[str, TypeProto], shapes: Mapping[str, Sequence[int]]) -> Dfg:
        dfg = super()._dfg(types, shapes)
        if self.uncut_reason:
            return dfg
        if not self._groups:  # units are the same at all shapes
            self._groups = self._lowering.groups(dfg, shapes_of(dfg, is_open=True))
        return build_dfg(dfg.model, dfg.operators, self._groups, dfg.inputs, dfg.outputs, dfg.tensors, dfg.assumed)

    def _prepare(self, key: tuple[tuple[int, ...], ...]) -> PreparedPlan:
        """The plan for inputs of these shapes, in their order."""
        found = self._prepared.get(key)
        if found is not None:
            return found
        with self._planning:
            found = self._prepared.get(key)
            if found is None:
                if len(self._prepared) >= _MOST_PLANS:
                    self._prepared = {}
                shapes = {tensor.name: dims for tensor, dims in zip(self.inputs, key, strict=True)}
                found = self._planned(self.planner(shapes, self._lanes))
                self._prepared = {**self._prepared, key: found}
        return found

    def _planned(self, planner: UnitPlanner) -> PreparedPlan:
        assert self._runtime is not None
        plan = planner.plan(lambda problem: bool(self._kernels.get(problem)), self._left_out)
        nodes = [n for unit, ours in enumerate(plan.ours) if ours for n in planner.nodes(unit) if n.kind in HEAVY]
        problems = {node: planner.problem(node) for node in nodes}
        weights = self._weights_of.packed(problems, self._lanes)
        return PreparedPlan(plan, planner.shapes, self._kernels, weights, self._runtime, self._lanes)

    def _constant(self, name: str) -> Array:
        found: Array = numpy_helper.to_array(self._initialisers[name], str(self._folder))
        return found

    def _leased(self, start: int, tensors: Mapping[str, Any]) -> tuple[Lease | None, object]:
        """Memory for the run, with its `busy` lock: that of its tensors if they are still in place, else new memory."""
        if start == 0:
            self.check_inputs(tensors)
            return self._new_lease(self._prepare(tuple(_shape_of(tensors[tensor.name]) for tensor in self.inputs)))
        shapes = {name: _shape_of(each) for name, each in tensors.items()}
        kept = [each for each in tensors.values() if isinstance(each, Kept)]
        for each in kept:
            if each.lease.prepared.fits(shapes) and each.lease.busy.acquire(blocking=False):
                if each.lease.position == start:
                    return each.lease, each.token
                each.lease.busy.release()
        prepared = self._fitting(shapes, [each.lease.prepared for each in kept[:1]])
        return (None, None) if prepared is None else self._new_lease(prepared)

    def _fitting(self, shapes: Mapping[str, tuple[int, ...]], plans: Sequence[PreparedPlan]) -> PreparedPlan | None:
        """The plan for tensors of these shapes: one of `plans`, a known one, or a known one at other rows."""
        known = self._prepared
        for plan in (*plans, *known.values()):
            if plan.fits(shapes):
                return plan
        for key, plan in known.items():
            times = plan.rows(shapes)
            rows = [_scaled(tensor, dims, times) for tensor, dims in zip(self.inputs, key, strict=True)]
            with suppress(CotenantError):  # no graph has so many rows
                found = None if None in rows else self._prepare(tuple(dims for dims in rows if dims is not None))
                if found is not None and found.fits(shapes):
                    return found
        return None

    def _new_lease(self, prepared: PreparedPlan) -> tuple[Lease | None, object]:
        if prepared.refused:
            return None, None
        lease = prepared.lease()
        lease.busy.acquire()
        return lease, self._token(lease)

    def _token(self, lease: Lease) -> object:
        """The reference that tensors of a run hold; when the last one goes, the run's memory is given back."""
        token = _Token()
        weakref.finalize(token, lease.prepared.give_back, lease).atexit = False
        return token

    def _run_leased(
        self,
        lease: Lease,
        token: object,
        start: int,
        end: int,
        tensors: Mapping[str, Any],
        team: Team,
        version: int,
        threads: Threads | None,
    ) -> dict[str, Any]:
        """Run units [start, end) by a team; onnxruntime has `threads`, by default as many as the team at that time."""
        plan = lease.prepared.plan
        names = set(tensors)
        for name, value in tensors.items():
            if isinstance(value, Kept) and value.lease is lease:
                continue
            if start == 0:
                lease.set_plain(name, value)
            elif lease.plain.get(name) is not value:
                lease.take_in(name, value, start)
        at = start
        while at < end:
            stop = at + 1
            while stop < end and plan.ours[stop] == plan.ours[at]:
                stop += 1
            lease.run_steps(at, stop, team, version)
            if plan.ours[at]:
                names.update(name for unit in self.dfg.units[at:stop] for name in unit.outputs)
            else:
                self._by_sessions(lease, names, at, stop, threads or _of_team(team))
            at = stop
        lease.position = end
        if end == self.unit_count:
            lease.run_steps(end, end + 1, team, version)
            return self.outputs_of({name: lease.plain[name] for name in self.dfg.live(end) if name in names})
        found: dict[str, Any] = {}
        for name in self.dfg.live(end):
            if name in names:
                plain = lease.plain.get(name)
                found[name] = plain if plain is not None else Kept(lease, token, name, lease.prepared.shapes[name])
        return found

    def _by_sessions(self, lease: Lease, names: set[str], start: int, end: int, threads: Threads) -> None:
        """Run units [start, end) on onnxruntime; adds their outputs to `names`."""
        key = threads if threads == 1 else normal_threads(threads)
        inputs, made = self.dfg.segment_io(start, end)
        values = {name: as_ort_value(lease.plain[name]) for name in inputs if name in names}
        for segment in self._segments_of(key, start, end):
            if segment.session is not None:
                self.run_segment(segment, values)
        for name in made:
            lease.set_plain(name, values[name])
        names.update(made)


class _Token:
    """A reference to a run's memory: see `CompiledModel._token`."""


class _Shape:
    """A constant with only its shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.size = 0


def _cores(threads: Threads) -> tuple[int, ...]:
    """The cores of a number of threads, or the threads as given."""
    if isinstance(threads, int):
        return available_cores()[:threads] if threads > 1 else (0,)
    return threads


def _of_team(team: Team) -> Threads:
    """The threads for onnxruntime: it has no pool for one core."""
    return team.cores if len(team.cores) > 1 else 1


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array_of(each) if isinstance(each, Kept) else each for name, each in tensors.items()}


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape() if callable(getattr(value, "shape", None)) else np.shape(value))


def _scaled(declared: Tensor, dims: tuple[int, ...], times: Fraction | None) -> tuple[int, ...] | None:
    """The shape of an input with its rows times a ratio, if rows are open; None if that is not whole."""
    if times is None or (count := dims[0] * times if dims else times).denominator != 1:
        return None
    return (int(count), *dims[1:]) if declared.shape and declared.shape[0] is None else dims
