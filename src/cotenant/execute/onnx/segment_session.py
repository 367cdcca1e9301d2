"""onnxruntime sessions for segments: options, tensors, one arena for all of them, and weights that they share."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

from cotenant.execute.errors import ModelError
from cotenant.execute.sched_slice import default_slice
from cotenant.execute.threads.names import Threads, thread_count

Value = Any
"""A tensor as a numpy array or an `onnxruntime.OrtValue`; for types that have no OrtValue in Python (strings,
sequences), what `InferenceSession.run` takes and gives."""
_PROVIDERS = ["CPUExecutionProvider"]
_FATAL_ONLY = 4
ort.set_default_logger_severity(_FATAL_ONLY)  # of what is logged outside of sessions
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64
_SHARED_TYPES = frozenset(
    (
        TensorProto.FLOAT,
        TensorProto.DOUBLE,
        TensorProto.FLOAT16,
        TensorProto.INT8,
        TensorProto.INT16,
        TensorProto.INT32,
        TensorProto.INT64,
        TensorProto.UINT8,
        TensorProto.UINT16,
        TensorProto.UINT32,
        TensorProto.UINT64,
        TensorProto.BOOL,
    )
)
"""Element types with a numpy twin; weights of others are mapped from their file by onnxruntime."""


def normal_threads(threads: Threads) -> Threads:
    """Key of the set of sessions: a session with one thread has no pool, so that every core shares it.

    Raises ValueError when there are no threads or a core is listed twice.
    """
    count = thread_count(threads)
    return threads if count > 1 else 1


def session_options(threads: Threads, *, optimise: bool) -> ort.SessionOptions:
    """Options that every session here has: no spinning, sequential, no log: what fails is raised."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads if isinstance(threads, int) else len(threads)
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = _FATAL_ONLY
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if not isinstance(threads, int):
        pool = ";".join(str(core + 1) for core in threads[1:])  # onnxruntime counts processors from 1
        options.add_session_config_entry("session.intra_op_thread_affinities", pool)
    return options


def segment_options(
    threads: Threads, folder: Path, *, optimise: bool = False, is_most: bool = False
) -> ort.SessionOptions:
    """Options of a segment: its graph is optimised already unless it was stored plain; its buffers come from one arena.

    One arena hands the next segment the memory that the last one just left, still in cache; a memory pattern would
    reserve a block per session instead. What is most of its model has such a block, as the whole has: 1 % of CPU time.
    """
    options = session_options(threads, optimise=optimise)
    options.enable_mem_pattern = is_most
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    if not is_most and _shared_arena():
        options.add_session_config_entry("session.use_env_allocators", "1")
    return options


def as_ort_value(value: Value) -> ort.OrtValue:
    """A tensor as onnxruntime takes it, copied where it does not lie in one piece."""
    if isinstance(value, ort.OrtValue):
        return value
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    return ort.OrtValue.ortvalue_from_numpy(array if array.flags.c_contiguous else np.ascontiguousarray(array))


def load_session(path: Path, model: Path | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """Load `model` (a file, or a serialised one), which belongs to the model file at `path`.

    Raises ModelError with onnxruntime's reason and what to do about it.
    """
    try:
        source = model if isinstance(model, bytes) else str(model)
        with default_slice():  # its pool computes
            return ort.InferenceSession(source, options, providers=_PROVIDERS)
    except Exception as error:  # onnxruntime's own classes share no base
        reason = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error).strip())
        reason = re.sub(r"^Load model from .*? failed: ?", "", reason)
        reason = re.sub(r"/onnxruntime_src/\S+:\d+ .*\) (?=[A-Z(])", "", reason).rstrip(".")
        raise ModelError(path, f"onnxruntime {ort.__version__} cannot load it: {reason}", _mend(reason)) from error


def _mend(reason: str) -> str:
    if "NOT_IMPLEMENTED" in reason or "is not a registered" in reason or "Could not find an implementation" in reason:
        return "Export it without this operator, or with an opset that this onnxruntime supports"
    if "locale" in reason:
        return "Install the locale that it names (on Debian: apt-get install locales-all)"
    if "opset" in reason or "IR version" in reason:
        return "Export it for an older opset, or install a newer onnxruntime"
    return "The file may be damaged or not a valid ONNX model: check it with onnx.checker and export it again"


class Weights:
    """The weights of one model, read once and shared by the sessions of all its segments and thread counts.

    They lie in one anonymous mapping on huge pages where the system has them: weights mapped from a file are on small
    pages, which costs convolutions about 5 %.
    """

    def __init__(self, file: Path, tensors: Iterable[TensorProto]) -> None:
        self._file = file
        self._tensors = [t for t in tensors if t.data_location == TensorProto.EXTERNAL and t.data_type in _SHARED_TYPES]
        self._values: dict[str, ort.OrtValue] | None = None
        self._lock = threading.Lock()

    def values(self) -> Mapping[str, ort.OrtValue]:
        """All shared weights by name, read at the first call."""
        with self._lock:
            if self._values is None:
                self._values = self._read()
            return self._values

    def lend(self, options: ort.SessionOptions, names: Sequence[str]) -> None:
        """Give the weights among `names` to a session; this object must outlive it."""
        values = self.values()
        for name in names:
            if name in values:
                options.add_initializer(name, values[name])

    def _read(self) -> dict[str, ort.OrtValue]:
        places = [{item.key: item.value for item in tensor.external_data} for tensor in self._tensors]
        sizes = [int(place["length"]) for place in places]
        total = sum(_aligned(size) for size in sizes)
        if not total:
            return {}
        memory = _private_memory(total + _HUGE_PAGE)
        raw = np.frombuffer(memory, dtype=np.uint8)
        at = -raw.ctypes.data % _HUGE_PAGE
        values: dict[str, ort.OrtValue] = {}
        with self._file.open("rb", buffering=0) as file:
            for tensor, place, size in zip(self._tensors, places, sizes, strict=True):
                piece = raw[at : at + size]
                at += _aligned(size)
                _fill(file.fileno(), int(place.get("offset", 0)), piece.data)
                kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
                values[tensor.name] = ort.OrtValue.ortvalue_from_numpy(piece.view(kind).reshape(tuple(tensor.dims)))
        return values


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """Units with their session, and what they take and give."""

    start: int
    end: int
    session: ort.InferenceSession | None  # None: nothing in it reaches its end
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dead: tuple[str, ...]  # live at its start and not at its end
    weights: Weights | None = None  # kept for as long as the session may run: it reads them in place
    bindings: deque[ort.IOBinding] = field(default_factory=deque)  # idle ones; each serves one call at a time
    to_shrink: deque[ort.RunOptions] = field(default_factory=deque)  # at most one: of its next run

    def options(self) -> ort.RunOptions | None:
        """Options of the next run."""
        if not self.to_shrink:
            return None
        try:
            return self.to_shrink.pop()
        except IndexError:  # another run has taken them
            return None


def shrinking() -> ort.RunOptions:
    """Options of a run that gives free memory of its session's arena back to the system when it ends."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _private_memory(size: int) -> mmap.mmap:
    """Anonymous memory on huge pages where the system gives them; shared mappings, Python's default, get none."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: small ones work too
            pass
    return memory


def _fill(descriptor: int, offset: int, target: memoryview) -> None:
    while target:
        count = os.preadv(descriptor, [target], offset)
        if not count:
            raise EOFError(f"weights end at byte {offset}")
        offset += count
        target = target[count:]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def return_memory() -> None:
    """Hand freed memory back to the system: glibc keeps what closed sessions leave, hundreds of MB for large models."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):  # another C library: it has its own ways
        pass


_arena_lock = threading.Lock()
_arena_made: bool | None = None


def _shared_arena() -> bool:
    """Make the process-wide CPU arena once; False when this onnxruntime cannot."""
    global _arena_made
    with _arena_lock:
        if _arena_made is None:
            place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
            try:
                ort.create_and_register_allocator(place, ort.OrtArenaCfg(0, -1, -1, -1))
                _arena_made = True
            except Exception as error:
                _arena_made = "already" in str(error).lower()
        return _arena_made
