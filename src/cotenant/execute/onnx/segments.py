"""Runs any contiguous range of a model's units with onnxruntime.

The graph that onnxruntime's optimiser made is cut, and its segments are loaded with optimisation off. So fused
operators and the blocked convolution layout are kept, and a cut costs one call and reading its tensors again. Segments
share weights and arena; single-threaded sessions are shared by all cores. See docs/segments.md.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime as ort
from onnx import TypeProto

from cotenant.errors import InvalidValueError
from cotenant.execute.contents import HeldFolder
from cotenant.execute.errors import ModelError, TensorError
from cotenant.execute.onnx.segment_cut import OnnxCutter, sealed_tensors
from cotenant.execute.onnx.segment_session import (
    LoadedSegment,
    Value,
    Weights,
    as_ort_value,
    load_session,
    normal_threads,
    segment_options,
    session_options,
    shrinking,
)
from cotenant.execute.onnx.segment_store import GRAPH, WEIGHTS, Stored, open_store, types_at
from cotenant.execute.onnx.unit_times import unit_times
from cotenant.execute.runner import array_of
from cotenant.execute.threads.names import Threads
from cotenant.execute.threads.team import Team
from cotenant.graph.cuts import suggest_cuts
from cotenant.graph.datatypes import NUMPY_TYPES
from cotenant.graph.dfg import Dfg, Tensor
from cotenant.graph.onnx import dfg_of
from cotenant.graph.rewrite.onnx_rows import row_graph_of
from cotenant.graph.rewrite.rows import RowGraph
from cotenant.linux import return_memory
from cotenant.work import CPU

_Names = tuple[str, ...]
_Io = tuple[_Names, _Names]


class SegmentedModel:
    """Runs any contiguous range of units of one ONNX model with onnxruntime. Thread-safe.

    `dfg` is the optimised graph, with costs at the declared shapes, open dimensions taken as 1. `inputs` and `outputs`
    are the model's, with None for open dimensions. `uncut_reason` is "", or says why the model has a single unit.
    """

    is_plain = False
    """Whether the graph keeps tensors in the layout of ONNX: each segment then converts them itself."""

    kernels = ""
    joins = False

    def __init__(self, path: Path, held: HeldFolder, stored: Stored, name: str, owned: Path | None = None) -> None:
        for tensor in (*stored.inputs, *stored.outputs):
            if _has_ort_value(tensor) and tensor.dtype not in NUMPY_TYPES:
                reason = f"{tensor.name!r} is a {tensor.dtype}, which onnxruntime does not exchange with Python"
                raise ModelError(path, reason, "Cast it to a float within the model")
        self.path = path
        self.name = name
        self.inputs: tuple[Tensor, ...] = stored.inputs
        self.outputs: tuple[Tensor, ...] = stored.outputs
        self._plain = all(_has_ort_value(tensor) for tensor in (*stored.inputs, *stored.outputs))
        self.uncut_reason = stored.uncut_reason or (
            "" if self._plain else "it has inputs or outputs that are not numeric"
        )
        self._held = held
        self._stored = stored
        self._sealed = sealed_tensors(stored)
        self.dfg: Dfg = self._dfg(stored.types, {})
        self._folder = stored.folder
        self._cutter = OnnxCutter(stored, self.dfg)
        self._weights = Weights(stored.folder / WEIGHTS, self._cutter.shared_weights)
        self._constants = stored.constant_outputs()
        self._segments: dict[tuple[Threads, int, int], LoadedSegment] = {}
        self._plans: dict[tuple[Threads, int, int], tuple[LoadedSegment, ...]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._cleanup = weakref.finalize(self, shutil.rmtree, owned, True) if owned else None

    @classmethod
    def open(
        cls, path: Path, *, cache_dir: Path | None = None, name: str = "", device: str = CPU, content: str = ""
    ) -> Self:
        """Open the ONNX file at `path`; `name` is for messages and the DFG, by default the file's stem.

        Copies of the model's files and the optimised graph are kept under `cache_dir`, or in a temporary directory that
        `close` removes. Later changes of the files have no effect. `content` is as in `open_store`.

        Raises ModelError when the file cannot be read or run, or refers to weights outside its directory.
        """
        path = Path(path)
        owned = None if cache_dir else Path(tempfile.mkdtemp(prefix="cotenant-segments-"))
        try:
            held, stored = open_store(path, cache_dir or owned or Path(), content, plain=cls.is_plain)
            return cls(path, held, stored, name or path.stem, owned)
        except BaseException:
            if owned:
                shutil.rmtree(owned, ignore_errors=True)
            raise

    @property
    def unit_count(self) -> int:
        """Number of units; boundaries are 0 to this number."""
        return len(self.dfg.units)

    @property
    def graph_path(self) -> Path:
        """The optimised graph on disk; removed by `close` if there is no cache."""
        return self._folder / GRAPH

    @property
    def files(self) -> tuple[Path, ...]:
        """Copies of the model's own files, the ONNX file first, from which it is loaded."""
        return self._stored.files

    def suggest_cuts(self, weights: Sequence[float], max_weight: float) -> tuple[int, ...]:
        """Boundaries from 0 to `unit_count` such that segments weigh at most `max_weight`; prefers cheap cuts.

        See `graph.cuts.suggest_cuts`, also for the errors.
        """
        return suggest_cuts(self.dfg, weights, max_weight)

    def dfg_at(self, shapes: Mapping[str, Sequence[int]]) -> Dfg:
        """The same operators and units as `dfg`, with MACs and bytes at the given input shapes.

        Raises GraphError when the shapes do not fit the declared inputs, ModelError when onnxruntime refuses them.
        """
        types = types_at(self._folder, shapes) if not self._stored.uncut_reason else {}
        return self._dfg(types, shapes)

    def row_graph(self, shapes: Mapping[str, Sequence[int]]) -> RowGraph:
        """Units that treat every row by itself, at these shapes."""
        return row_graph_of(self._stored.skeleton, self.dfg, shapes, partial(types_at, self._folder))

    def prepare(self, ranges: Iterable[tuple[int, int]], threads: Threads = 1) -> None:
        """Load sessions for these ranges of units, in addition to those already loaded.

        The range (0, unit_count) gets an ordinary session of the model. `threads` is a number, or the cores to run on:
        the caller is pinned to the first, the session's pool to the others.

        Raises InvalidValueError for a range outside the model, ModelError when a session cannot be loaded.
        """
        key = normal_threads(threads)
        for start, end in ranges:
            self._check_range(start, end)
            self._segment(key, start, end)

    def keep(self, threads: Iterable[Threads]) -> None:
        """Unload sessions of other threads; runs under way end normally, later runs load theirs again."""
        kept = [normal_threads(each) for each in threads]
        with self._lock:
            self._segments = {key: segment for key, segment in self._segments.items() if key[0] in kept}
            self._plans = {}
        return_memory()

    def run(
        self, start: int, end: int, tensors: Mapping[str, Value], threads: Threads | Team = 1, version: int = 0
    ) -> dict[str, Value]:
        """Run units [start, end); return the tensors live at `end`, or the outputs when `end == unit_count`.

        `tensors` are the model's inputs at 0, else the tensors live at `start`. Tensors that these units do not read
        may be left out, and are then left out of the result. Tensors between segments are OrtValues; a run of the whole
        model may return arrays. `runner.to_numpy` converts results to arrays. Constant outputs are read-only arrays.
        Uses the longest prepared ranges first, and loads sessions for the gaps.

        Raises TensorError when a tensor is missing or does not fit, InvalidValueError for a range outside the model,
        ModelError when onnxruntime fails.
        """
        assert not isinstance(threads, Team)  # teams are for models with `joins`
        key = threads if threads == 1 else normal_threads(threads)
        plan = self._segments_of(key, start, end)
        if start == 0:
            self.check_inputs(tensors)
        if not self._plain or (start == 0 and plan[0].end == self.unit_count):
            return self._run_plain(plan[0], tensors)  # arrays in and out cost half of a binding
        try:
            names = tensors if start == 0 else self.dfg.live(start)
            values = {name: as_ort_value(tensors[name]) for name in names if name in tensors}
        except (RuntimeError, TypeError, ValueError) as error:
            raise TensorError(f"model {self.name!r}: a tensor is no numeric array or OrtValue ({error})") from error
        if len(values) < len(names):
            for name in self.dfg.segment_io(start, end)[0]:
                if name not in values:
                    raise TensorError(f"model {self.name!r}: tensor {name!r} is live before unit {start}: pass it")
        for segment in plan:
            if segment.session is not None:
                self.run_segment(segment, values)
            for name in segment.dead:
                values.pop(name, None)
        if end < self.unit_count:
            return {name: values[name] for name in self.dfg.live(end) if name in values}
        return self.outputs_of(values)

    def shrink(self) -> None:
        """Let the next run of each session return free memory of its arena to the system."""
        for segment in self._segments.values():
            segment.to_shrink.clear()
            segment.to_shrink.append(shrinking())

    def unit_ns(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Latency of each unit in ns, by onnxruntime's profiler."""
        return unit_times(self.graph_path, self.dfg, inputs)

    def close(self) -> None:
        """Unload sessions and weights; runs under way end normally, later ones raise ModelError."""
        with self._lock:
            self._is_closed = True
            self._segments = {}
            self._plans = {}
            self._weights = Weights(self._folder / WEIGHTS, ())
        self._held.close()
        if self._cleanup is not None:
            self._cleanup()
        return_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _dfg(self, types: Mapping[str, TypeProto], shapes: Mapping[str, Sequence[int]]) -> Dfg:
        return dfg_of(
            self._stored.skeleton,
            name=self.name,
            shapes=shapes,
            known=types,
            sealed=self._sealed,
            is_cuttable=not self.uncut_reason,
        )

    def _check_range(self, start: int, end: int) -> None:
        if not 0 <= start < end <= self.unit_count:
            expected = f"0 <= start < end <= {self.unit_count}"
            raise InvalidValueError(f"model {self.name!r}", "range of units", (start, end), expected)

    def check_inputs(self, tensors: Mapping[str, Value]) -> None:
        """Raise TensorError for inputs that the model does not take."""
        for tensor in self.inputs:
            value = tensors.get(tensor.name)
            if value is None:
                names = ", ".join(t.name for t in self.inputs)
                raise TensorError(f"model {self.name!r}: input {tensor.name!r} is missing; its inputs are {names}")
            if not self._plain:
                continue
            given = tuple(value.shape() if isinstance(value, ort.OrtValue) else np.shape(value))
            if tensor.shape is not None and not _fits(given, tensor.shape):
                raise TensorError(
                    f"model {self.name!r}: input {tensor.name!r} has shape {given}, expected {tensor.shape}"
                )
            dtype = value.data_type() if isinstance(value, ort.OrtValue) else _ORT_TYPES.get(np.asarray(value).dtype)
            if dtype != tensor.dtype and tensor.dtype in NUMPY_TYPES:
                raise TensorError(f"model {self.name!r}: input {tensor.name!r} is {dtype}, expected {tensor.dtype}")
        if len(tensors) > len(self.inputs):
            extra = sorted(set(tensors) - {t.name for t in self.inputs})[0]
            raise TensorError(f"model {self.name!r} has no input {extra!r}; leave it out")

    def run_segment(
        self, segment: LoadedSegment, values: dict[str, Value], options: ort.RunOptions | None = None
    ) -> None:
        """Run a segment that has a session: reads and adds tensors in `values`. Raises ModelError."""
        session = segment.session
        assert session is not None
        try:
            binding = segment.bindings.pop()
        except IndexError:
            binding = session.io_binding()
        for name in segment.inputs:
            binding.bind_ortvalue_input(name, values[name])
        for name in segment.outputs:
            binding.bind_output(name)
        try:
            session.run_with_iobinding(binding, options or segment.options())
        except Exception as error:
            raise self._failed(segment, error) from error
        values.update(zip(segment.outputs, binding.get_outputs(), strict=True))
        binding.clear_binding_inputs()  # an idle binding must not keep tensors alive, nor write into them again
        binding.clear_binding_outputs()
        segment.bindings.append(binding)

    def outputs_of(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """The model's outputs, in order, from the tensors of all units and the constant outputs."""
        known = {**values, **self._constants}
        return {t.name: known[t.name] for t in self.outputs if t.name in known}

    def _run_plain(self, segment: LoadedSegment, tensors: Mapping[str, Value]) -> dict[str, Value]:
        assert segment.session is not None
        feeds = {name: array_of(value) for name, value in tensors.items()}
        if self._plain:
            feeds = {name: np.asarray(value) for name, value in feeds.items()}
        try:
            outputs = segment.session.run(list(segment.outputs), feeds, segment.options())
            made = dict(zip(segment.outputs, outputs, strict=True))
        except Exception as error:
            raise self._failed(segment, error) from error
        return self.outputs_of(made)  # constants of the session would be freed with it

    def _failed(self, segment: LoadedSegment, error: Exception) -> ModelError:
        place = f"units {segment.start} to {segment.end} failed: {error}"
        return ModelError(self.path, place, "Check the shapes and values of its inputs")

    def _segment(self, key: Threads, start: int, end: int) -> LoadedSegment:
        with self._lock:
            if self._is_closed:
                raise ModelError(self.path, "it has been closed", "Open it again")
            found = self._segments.get((key, start, end))
            if found is None:
                found = self._load(key, start, end)
                self._segments = {**self._segments, (key, start, end): found}
                self._plans = {}
            return found

    def _load(self, key: Threads, start: int, end: int) -> LoadedSegment:
        dead = tuple(sorted(set(self.dfg.live(start)) - set(self.dfg.live(end))))
        if (start, end) == (0, self.unit_count):
            whole = load_session(
                self.path, self._stored.files[0], session_options(key, optimise=self._stored.is_optimised)
            )
            inputs, outputs = (tuple(t.name for t in tensors) for tensors in (self.inputs, self.outputs))
            return LoadedSegment(start, end, whole, inputs, outputs, dead)
        return self.load_units(key, range(start, end), self.dfg.segment_io(start, end), dead)

    def load_units(
        self, key: Threads, units: Sequence[int], io: _Io, dead: _Names = (), is_most: bool = False
    ) -> LoadedSegment:
        """Load these units, with the tensors that they read from and make for other units; see `LoadedSegment`.

        The caller owns the segment. `is_most`: see `segment_options`. Raises ModelError when it cannot be loaded.
        """
        start, end, (inputs, outputs) = min(units), max(units) + 1, io
        if not outputs:
            return LoadedSegment(start, end, None, inputs, (), dead)
        cut = self._cutter.cut(units, inputs, outputs)
        is_optimised = self.is_plain and self._stored.is_optimised
        options = segment_options(key, self._folder, optimise=is_optimised, is_most=is_most)
        try:
            self._weights.add_to(options, cut.weights)
        except OSError as error:
            reason = f"its copy in {self._folder} cannot be read ({error.strerror or error})"
            raise ModelError(self.path, reason, "Load the model again") from error
        session = load_session(self.path, cut.model, options)
        return LoadedSegment(start, end, session, inputs, outputs, dead, self._weights)

    def _segments_of(self, key: Threads, start: int, end: int) -> tuple[LoadedSegment, ...]:
        """Segments that cover [start, end): at each boundary the longest prepared one; new ones in the gaps."""
        found = self._plans.get((key, start, end))
        return self._plan(key, start, end) if found is None else found

    def _plan(self, key: Threads, start: int, end: int) -> tuple[LoadedSegment, ...]:
        self._check_range(start, end)
        while True:
            known = self._segments
            plan: list[LoadedSegment] = []
            at = start
            while at < end:
                ready = [r for r in known if r[0] == key and at <= r[1] and r[2] <= end]
                here = [r[2] for r in ready if r[1] == at]
                stop = max(here) if here else min((r[1] for r in ready), default=end)
                plan.append(self._segment(key, at, stop))
                at = stop
            with self._lock:
                if self._segments is known:  # else a longer segment may have been loaded meanwhile
                    self._plans = {**self._plans, (key, start, end): tuple(plan)}
                    return tuple(plan)


_ORT_TYPES = {dtype: name for name, dtype in NUMPY_TYPES.items()}


def _has_ort_value(tensor: Tensor) -> bool:
    return tensor.dtype.startswith("tensor(") and tensor.dtype != "tensor(string)"


def _fits(given: tuple[int, ...], declared: Sequence[object]) -> bool:
    return len(given) == len(declared) and all(d in (None, g) for g, d in zip(given, declared, strict=True))
