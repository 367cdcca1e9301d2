"""onnxruntime sessions of segments: options, tensors, a common memory arena, and shared weights."""

from __future__ import annotations

import io
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
from cotenant.linux import private_memory

Value = Any
"""A numpy array or an `onnxruntime.OrtValue`; strings and sequences as `InferenceSession.run` takes them."""
_PROVIDERS = ["CPUExecutionProvider"]
_FATAL_ONLY = 4
ort.set_default_logger_severity(_FATAL_ONLY)  # of logs outside of sessions
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
"""Element types that numpy has; onnxruntime maps weights of other types from their file."""


def normal_threads(threads: Threads) -> Threads:
    """Key of the sessions for these threads. A session with one thread has no pool, so all single cores share it.

    Raises ValueError when there are no threads or a core is listed twice.
    """
    count = thread_count(threads)
    return threads if count > 1 else 1


def session_options(threads: Threads, *, optimise: bool) -> ort.SessionOptions:
    """Options of every session: no spinning, sequential execution, no log (errors are raised)."""
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
    """Options of a segment: optimised already unless its graph was stored plain; buffers come from one arena.

    With one arena, a segment gets the memory that the last one has just freed, still in the cache. A memory pattern
    would reserve a block for each session. `is_most`: it is most of its model and uses a pattern, as the whole does.
    """
    options = session_options(threads, optimise=optimise)
    options.enable_mem_pattern = is_most
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    if not is_most and _shared_arena():
        options.add_session_config_entry("session.use_env_allocators", "1")
    return options


def as_ort_value(value: Value) -> ort.OrtValue:
    """A tensor as an OrtValue; copied where it is not contiguous."""
    if isinstance(value, ort.OrtValue):
        return value
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    return ort.OrtValue.ortvalue_from_numpy(array if array.flags.c_contiguous else np.ascontiguousarray(array))


def load_session(path: Path, model: Path | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """Load `model` (a file, or a serialised model) of the model file at `path`.

    Raises ModelError with onnxruntime's reason and a hint.
    """
    try:
        source = model if isinstance(model, bytes) else str(model)
        with default_slice():  # for the threads of its pool
            return ort.InferenceSession(source, options, providers=_PROVIDERS)
    except Exception as error:  # onnxruntime's exceptions have no common base class
        reason = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error).strip())
        reason = re.sub(r"^Load model from .*? failed: ?", "", reason)
        reason = re.sub(r"/onnxruntime_src/\S+:\d+ .*(?:\)|<lambda\(\)>) (?=[A-Z(])", "", reason).rstrip(".")
        raise ModelError(path, f"onnxruntime {ort.__version__} cannot load it: {reason}", _hint(reason)) from error


def _hint(reason: str) -> str:
    if "NOT_IMPLEMENTED" in reason or "is not a registered" in reason or "Could not find an implementation" in reason:
        return "Export it without this operator, or with an opset that this onnxruntime supports"
    if "locale" in reason:
        return "Install the locale that it names (on Debian: apt-get install locales-all)"
    if "opset" in reason or "IR version" in reason:
        return "Export it for an older opset, or install a newer onnxruntime"
    return "The file may be damaged or not a valid ONNX model: check it with onnx.checker and export it again"


class Weights:
    """The weights of one model, read once and shared by the sessions of all its segments and thread counts.

    They are in one anonymous mapping, on huge pages where the system has them. Convolutions are slower on weights that
    are mapped from a file, on small pages.
    """

    def __init__(self, file: Path, tensors: Iterable[TensorProto]) -> None:
        self._file = file
        self._tensors = [t for t in tensors if t.data_location == TensorProto.EXTERNAL and t.data_type in _SHARED_TYPES]
        self._values: dict[str, ort.OrtValue] | None = None
        self._lock = threading.Lock()

    def values(self) -> Mapping[str, ort.OrtValue]:
        """All shared weights by name; the first call reads them."""
        with self._lock:
            if self._values is None:
                self._values = self._read()
            return self._values

    def add_to(self, options: ort.SessionOptions, names: Sequence[str]) -> None:
        """Add the weights among `names` to the options of a session; this object must outlive the session."""
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
        memory = private_memory(total + _HUGE_PAGE)
        raw = np.frombuffer(memory, dtype=np.uint8)
        at = -raw.ctypes.data % _HUGE_PAGE
        values: dict[str, ort.OrtValue] = {}
        with self._file.open("rb", buffering=0) as file:
            for tensor, place, size in zip(self._tensors, places, sizes, strict=True):
                chunk = raw[at : at + size]
                at += _aligned(size)
                _fill(file, int(place.get("offset", 0)), chunk.data)
                kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
                values[tensor.name] = ort.OrtValue.ortvalue_from_numpy(chunk.view(kind).reshape(tuple(tensor.dims)))
        return values


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """Units with their session, and the tensors that they read and make."""

    start: int
    end: int
    session: ort.InferenceSession | None  # None: no unit makes a tensor that is read later
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dead: tuple[str, ...]  # tensors live at its start and not at its end
    weights: Weights | None = None  # kept alive: the session reads them in place
    bindings: deque[ort.IOBinding] = field(default_factory=deque)  # idle; each serves one call at a time
    to_shrink: deque[ort.RunOptions] = field(default_factory=deque)  # at most one, for the next run

    def options(self) -> ort.RunOptions | None:
        """Options of the next run."""
        if not self.to_shrink:
            return None
        try:
            return self.to_shrink.pop()
        except IndexError:  # another run has taken them
            return None


def shrinking() -> ort.RunOptions:
    """Options of a run that returns free memory of the session's arena to the system when it ends."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _fill(file: io.FileIO, offset: int, target: memoryview) -> None:
    file.seek(offset)
    while target:
        count = file.readinto(target)
        if not count:
            raise EOFError(f"weights end at byte {offset}")
        target = target[count:]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_arena_lock = threading.Lock()
_arena_made: bool | None = None


def _shared_arena() -> bool:
    """Make the CPU arena of the process once; False when this onnxruntime cannot."""
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
