"""Runs any contiguous range of a torch.export archive's units with torch, on the CPU or a GPU.

The program's operators run eagerly: a cut costs one more function call. Nothing of an archive is unpickled; see
`archive` and docs/torch.md.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from cotenant.errors import InvalidValueError
from cotenant.execute.contents import HeldFolder
from cotenant.execute.errors import ModelError, TensorError
from cotenant.execute.gpu.streams import wait_for
from cotenant.execute.threads.names import Threads
from cotenant.execute.threads.team import Team
from cotenant.execute.torch.archive import open_copy, read_archive
from cotenant.execute.torch.arrays import tensor_of
from cotenant.execute.torch.fold import fold
from cotenant.execute.torch.fp32 import claim_fp32, release_fp32
from cotenant.execute.torch.index_bounds import bound_indices
from cotenant.execute.torch.input_check import InputCheck
from cotenant.execute.torch.precision import SHORT, lay_out, shorten
from cotenant.execute.torch.recurrent import flatten
from cotenant.execute.torch.segment import Segment, TorchCutter
from cotenant.execute.torch.threads import use_threads
from cotenant.graph.cuts import suggest_cuts
from cotenant.graph.dfg import Dfg, Tensor
from cotenant.graph.errors import GraphError
from cotenant.graph.rewrite.rows import RowGraph
from cotenant.graph.rewrite.torch_rows import row_graph_of_program
from cotenant.graph.torch import dfg_of_graph, named_graph
from cotenant.graph.torch_lower import lower
from cotenant.repository.formats import Arithmetic

if TYPE_CHECKING:
    from cotenant.execute.gpu.streams import StreamLane

MOST_SEGMENTS = 512
"""Ranges of units that are kept built; the least recently used one is dropped."""
_RUNS = 6
_WARM_UP = 2
_SUBMIT_NS = 100_000
"""Upper bound of the time to submit a unit, in ns."""

# Arrays of queries are often read-only; no operator here writes into its inputs.
warnings.filterwarnings("ignore", message="The given NumPy array is not writ", category=UserWarning)


_Ready = tuple[Segment, tuple[torch.Tensor, ...]]
"""A segment and its weights."""


class TorchModel:
    """Runs any contiguous range of units of one torch.export archive. Thread-safe.

    It has the methods of `segments.SegmentedModel`; tensors are torch's. `dfg` has its costs at the smallest shapes.
    `inputs` and `outputs` have None for dynamic dimensions. `uncut_reason` is "", or says why the model has a single
    unit.
    """

    def __init__(
        self,
        path: Path,
        held: HeldFolder,
        file: Path,
        name: str,
        device: str,
        arithmetic: Arithmetic,
        owned: Path | None = None,
    ) -> None:
        self.path = path
        self.name = name
        self.graph_path = file
        """Its copy of the archive, in a folder with a name that identifies the content and torch's version."""
        self.arithmetic = arithmetic
        self._device = torch.device(device)
        self._held = held
        archive = read_archive(path, file)
        weights = archive.weights
        try:
            lowered = lower(archive.program)
            fold(lowered, weights)
            if arithmetic.precision in SHORT:
                shorten(lowered, weights, SHORT[arithmetic.precision])
            if arithmetic.lays_out:
                lay_out(lowered, weights)
            found = bound_indices(lowered, weights, clamps=self._device.type == "cuda")
            limits = {
                name: found[node.name]
                for name, node in zip(archive.inputs, lowered.inputs, strict=True)
                if node.name in found
            }
            self._graph = named_graph(lowered, archive.inputs, archive.outputs)
            self.dfg: Dfg = dfg_of_graph(self._graph, name)
        except GraphError as error:
            raise ModelError(path, str(error), "Change the module, or export it in another way") from error
        self.uncut_reason = lowered.trouble
        self.inputs: tuple[Tensor, ...] = tuple(map(_opened, self.dfg.inputs))
        self.outputs: tuple[Tensor, ...] = tuple(map(_opened, self.dfg.outputs))
        self.kernels = ""
        self.joins = False
        modules = dict(archive.program.graph_module.named_children())
        examples = [node.meta["val"] for node in lowered.inputs]
        self.check = InputCheck(name, self.inputs, examples, lowered.ranges, limits)
        """Raises TensorError for inputs that the model does not take."""
        self.check_values = self.check.check_values
        self._cutter = TorchCutter(self._graph, self.dfg, modules)
        self._weights: dict[str, torch.Tensor] = {}
        self._place_weights(weights)
        self._built: OrderedDict[tuple[int, int], _Ready] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False
        self._cleanup = weakref.finalize(self, shutil.rmtree, owned, True) if owned else None

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        name: str = "",
        device: str = "cpu",
        cache_dir: Path | None = None,
        content: str = "",
        arithmetic: Arithmetic = Arithmetic(),
    ) -> Self:
        """Open the archive at `path`; `name` is for messages and the DFG, by default the file's stem.

        `device` is "cpu" or "cuda:N". A copy of the file is kept under `cache_dir`, or in a temporary directory that
        `close` removes. `content` is "", or the folder name that an earlier call gave; that folder is opened whatever
        is at `path` now.

        Raises ModelError when the file cannot be read or torch cannot load it. Raises it for pickled or compiled parts,
        state between runs, other content than `content`, or an unsupported `arithmetic`.
        """
        path = Path(path)
        owned = None if cache_dir else Path(tempfile.mkdtemp(prefix="cotenant-torch-"))
        try:
            held, file = open_copy(path, cache_dir or owned or Path(), content)
            return cls(path, held, file, name or path.stem, device, arithmetic, owned)
        except BaseException:
            if owned:
                shutil.rmtree(owned, ignore_errors=True)
            raise

    @property
    def device(self) -> str:
        """The device of its weights: "cpu" or "cuda:N"."""
        return str(self._device)

    @property
    def unit_count(self) -> int:
        """Number of units; boundaries are 0 to this number."""
        return len(self.dfg.units)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory; shared memory counts once."""
        stores = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in self._weights.values()}
        return sum(stores.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """Its copy of the archive."""
        return (self.graph_path,)

    def suggest_cuts(self, weights: Sequence[float], max_weight: float) -> tuple[int, ...]:
        """Boundaries such that segments weigh at most `max_weight`; prefers cheap cuts; see `graph.cuts`."""
        return suggest_cuts(self.dfg, weights, max_weight)

    def dfg_at(self, shapes: Mapping[str, Sequence[int]]) -> Dfg:
        """The same operators and units as `dfg`, with MACs and bytes at the given input shapes.

        Raises GraphError when the shapes do not fit the declared inputs.
        """
        return dfg_of_graph(self._graph, self.name, shapes)

    def row_graph(self, shapes: Mapping[str, Sequence[int]]) -> RowGraph:
        """Units that treat every row by itself, at these shapes."""
        return row_graph_of_program(self._graph, self.dfg, shapes)

    def prepare(self, ranges: Iterable[tuple[int, int]], threads: Threads = 1) -> None:
        """Build these ranges of units, in addition to those already built; they serve any number of threads.

        Raises InvalidValueError for a range outside the model, ModelError when it is closed.
        """
        for start, end in ranges:
            self._segment(start, end)

    def keep(self, threads: Iterable[Threads]) -> None:
        """Do nothing: built ranges serve any number of threads."""

    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: Threads | Team = 1, version: int = 0
    ) -> dict[str, torch.Tensor]:
        """Run units [start, end); return the tensors live at `end`, or the outputs when `end == unit_count`.

        `tensors` are the model's inputs at 0, else the tensors live at `start`: numpy arrays or torch tensors. Tensors
        that these units do not read may be left out, and are then left out of the result. Runs on the calling thread
        and its current stream, and never waits for a device. On a GPU the results are valid in the order of the stream.
        Results may share memory with `tensors`.

        Raises TensorError when a tensor is missing or does not fit, InvalidValueError for a range outside the model.
        Raises ModelError when torch fails; its cause is torch's error.
        """
        segment, weights = self._segment(start, end)
        if start == 0:
            self.check(tensors)
        names = [tensor.name for tensor in self.inputs] if start == 0 else self.dfg.live(start)
        if segment.device.type == "cpu":
            assert not isinstance(threads, Team)  # teams are for models with `joins`
            use_threads(threads)
        try:
            with torch.inference_mode():
                values = {name: self._tensor(tensors[name]) for name in names if name in tensors}
                results = segment.function(*[values[name] for name in segment.inputs], *weights)
        except KeyError as error:
            text = f"model {self.name!r}: tensor {error.args[0]!r} is live before unit {start}: pass it"
            raise TensorError(text) from None
        except TensorError:
            raise
        except Exception as error:
            place = f"units {start} to {end} failed: {first_line(error)}"
            raise ModelError(self.path, place, "Check the shapes and values of its inputs") from error
        values.update(zip(segment.outputs, results, strict=True))
        wanted = self.dfg.live(end) if end < self.unit_count else self._graph.outputs
        return {name: values[name] for name in wanted if name in values}

    def load_units(
        self, units: Sequence[int], io: tuple[Sequence[str], Sequence[str]], *, on_host: bool
    ) -> tuple[Segment, dict[str, torch.Tensor]]:
        """These units as a function, on the CPU or the model's device, and their weights by name, on the model's
        device.

        `io` are the tensors that they read from and make for other units. Raises ModelError when the units need a size
        that cannot be computed from them, or the model is closed.
        """
        try:
            segment = self._cutter.segment_of(units, *io, torch.device("cpu") if on_host else self._device)
            return segment, {name: self._weights[name] for name in segment.weights}
        except (AssertionError, KeyError) as error:
            reason = f"units {units[0]} to {units[-1]} cannot be run separately ({error})"
            raise ModelError(self.path, reason, "Open the model, and run its units in order") from error

    def why_eager(self, start: int, end: int) -> str:
        """Why units [start, end) cannot be captured as a graph of a GPU; "" if no reason is known."""
        return self._cutter.why_eager(start, end)

    def unit_ns(self, inputs: Mapping[str, Any], lane: StreamLane | None = None) -> tuple[int, ...]:
        """Median latency of each unit in ns, run one by one; without `lane` on one thread of the CPU.

        With `lane` by the clock of the device, on its stream, which is kept busy until all units are submitted.
        """
        at = [self._segment(unit, unit + 1) for unit in range(self.unit_count)]
        samples: list[list[int]] = [[] for _ in at]
        if lane is None:
            use_threads(1)
        with torch.inference_mode():
            for _ in range(_WARM_UP + _RUNS):
                values = {name: self._tensor(value) for name, value in inputs.items()}
                marks = []
                if lane is not None:
                    lane.hold(self.unit_count * _SUBMIT_NS)
                    marks.append(lane.record(True))
                for unit, (segment, weights) in enumerate(at):
                    began = time.perf_counter_ns()
                    results = segment.function(*[values[name] for name in segment.inputs], *weights)
                    samples[unit].append(time.perf_counter_ns() - began)
                    if lane is not None:
                        marks.append(lane.record(True))
                    values.update(zip(segment.outputs, results, strict=True))
                    values = {name: values[name] for name in self.dfg.live(unit + 1)}
                if marks:
                    wait_for(marks[-1])
                for unit, (before, after) in enumerate(pairwise(marks)):
                    samples[unit][-1] = after.ns_since(before)
        return tuple(max(1, round(median(each[_WARM_UP:]))) for each in samples)

    def close(self) -> None:
        """Free its weights; runs under way end normally, later ones raise ModelError."""
        with self._lock:
            self._is_closed = True
            self._built = OrderedDict()
            self._weights = {}
        release_fp32(self)
        self._held.close()
        if self._cleanup is not None:
            self._cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights to the device, and wait for it. Weights that share memory still share it there."""
        if self._device.type == "cuda" and (other := claim_fp32(self, self.arithmetic.precision)):
            raise ModelError(
                self.path,
                f"its precision is {self.arithmetic.precision!r}, and that of {other!r} in the same process is not: "
                "CUDA has one setting of FP32 for a process",
                "Give both the same precision; 'fp16' and 'bf16' go with either",
            )
        moved: dict[int, torch.Tensor] = {}
        placed: dict[str, torch.Tensor] = {}
        try:
            for name, weight in weights.items():
                if weight.device == self._device:
                    placed[name] = weight
                    continue
                store = weight.untyped_storage()
                if store.data_ptr() not in moved:
                    flat = torch.empty(0, dtype=torch.uint8, device=weight.device).set_(store)
                    moved[store.data_ptr()] = flat.to(self._device)
                there = moved[store.data_ptr()].untyped_storage()
                empty = torch.empty(0, dtype=weight.dtype, device=self._device)
                placed[name] = empty.set_(there, weight.storage_offset(), weight.shape, weight.stride())
            if self._device.type == "cuda":
                flatten(self._graph.lowered, placed)
        except (RuntimeError, AssertionError) as error:
            reason = f"its weights cannot be taken to {self._device}: {first_line(error)}"
            raise ModelError(self.path, reason, "Check the device, or give it more memory") from error
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # launches on other streams read them
        self._weights = placed

    def _segment(self, start: int, end: int) -> _Ready:
        with self._lock:
            found = self._built.get((start, end))
            if found is not None:
                self._built.move_to_end((start, end))
                return found
            if self._is_closed:
                raise ModelError(self.path, "it has been closed", "Open it again")
            if not 0 <= start < end <= self.unit_count:
                expected = f"0 <= start < end <= {self.unit_count}"
                raise InvalidValueError(f"model {self.name!r}", "range of units", (start, end), expected)
            segment = self._cutter.segment(start, end, self._device)
            found = self._built[start, end] = segment, tuple(self._weights[name] for name in segment.weights)
            if len(self._built) > MOST_SEGMENTS:
                self._built.popitem(last=False)
            return found

    def _tensor(self, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            try:
                value = tensor_of(np.asarray(value, order="C"))  # `ascontiguousarray` would make 0-d arrays 1-d
            except (TypeError, ValueError) as error:
                raise TensorError(f"model {self.name!r}: a tensor is no numeric array ({error})") from error
        tensor: torch.Tensor = value
        return tensor if tensor.device == self._device else tensor.to(self._device, non_blocking=True)


def _opened(tensor: Tensor) -> Tensor:
    shape = None if tensor.shape is None else tuple(dim if isinstance(dim, int) else None for dim in tensor.shape)
    return Tensor(tensor.name, tensor.dtype, shape, tensor.size_bytes)


def first_line(error: BaseException) -> str:
    """The message of an error of torch or CUDA, without its advice for programmers."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
