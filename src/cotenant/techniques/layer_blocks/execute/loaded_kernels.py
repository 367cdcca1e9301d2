"""Loads the kernels that were chosen for an ONNX model, and opens the model with them."""

from __future__ import annotations

import hashlib
import logging
import threading
from itertools import repeat
from pathlib import Path

import msgspec

from cotenant.errors import CotenantError
from cotenant.execute.errors import ModelError
from cotenant.execute.onnx.segment_store import PLAIN, content_of
from cotenant.execute.strategy import ModelFile
from cotenant.files import load
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.native import Runtime, address
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.selection import KernelVersion
from cotenant.techniques.layer_blocks.compile.store import KernelCandidate, Store
from cotenant.techniques.layer_blocks.compile.target import this_maker, this_target
from cotenant.techniques.layer_blocks.compile.toolchain import find_compiler
from cotenant.techniques.layer_blocks.execute.choice import FOLDER, FORMAT, KernelChoice, choice_path
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel

_HINT = "run cotenant compile again"
_log = logging.getLogger(__name__)


def store_of(cache_dir: Path) -> Store:
    """The kernel store in a graph cache."""
    return Store(cache_dir / FOLDER, this_target(), this_maker())


def open_chosen(file: ModelFile, cache_dir: Path) -> CompiledModel | None:
    """Open an ONNX file with the kernels that `cotenant compile` chose for it in this cache; None without a choice.

    If they cannot be used, it logs a warning with the cause. Raises ModelError if `file.content` was opened with
    kernels that can no longer be used, and as `SegmentedModel.open`.
    """
    if file.content and not file.content.endswith(PLAIN):
        return None
    place = choice_path(cache_dir, file.content.partition("-")[0] or content_of(Path(file.path)))
    if not place.exists():
        return None
    try:
        choice = load(place, KernelChoice, FORMAT, CompileError, _HINT)
        store = store_of(cache_dir)
        model = CompiledModel.open(
            file.path, cache_dir=cache_dir, name=file.name, device=file.device, content=file.content
        )
        try:
            apply(model, choice, store)
        except CotenantError:
            model.close()
            raise
    except CompileError as error:
        if file.content:
            raise ModelError(Path(file.path), f"its kernels cannot be used: {error}", "Load the model again") from error
        _log.warning("model %s: its compiled kernels are not used: %s", file.name or file.path, error)
        return None
    return model


def apply(model: CompiledModel, choice: KernelChoice, store: Store) -> None:
    """Let a model use the chosen kernels.

    Raises CompileError when the choice is for another graph, lists a kernel for another problem, or cannot be loaded.
    """
    if choice.units != model.unit_count:
        raise CompileError(f"they were chosen for {choice.units} units, and there are {model.unit_count}; {_HINT}")
    kernels = {
        each.problem: [
            version_of(store, _found(store, key, each.problem), level_ns)
            for key, level_ns in zip(each.libraries, each.level_ns or repeat(()), strict=False)
        ]
        for each in choice.kernels
    }
    model.use(kernels, runtime_of(store), store.target.lanes, choice.left_out, choice.by_engine)
    model.most_bytes_per_s = choice.most_bytes_per_s
    model.kernels = hashlib.sha256(msgspec.json.encode(choice)).hexdigest()[:16]


def _found(store: Store, key: str, problem: Problem) -> KernelCandidate:
    """The candidate of this name. Raises CompileError when there is none, or it solves another problem."""
    candidate = store.find(key)
    if candidate.problem != problem:
        raise CompileError(f"{key} solves {candidate.problem}, and the choice lists it for {problem}; {_HINT}")
    return candidate


def version_of(store: Store, candidate: KernelCandidate, level_ns: tuple[int, ...] = ()) -> KernelVersion:
    """A candidate, loaded. Raises CompileError when loading fails."""
    where = address(store.load(candidate.library))
    return KernelVersion(where, candidate.tasks, candidate.cpu_ns, level_ns)


_runtimes: dict[str, Runtime] = {}
_runtimes_lock = threading.Lock()


def runtime_of(store: Store) -> Runtime:
    """The process's runtime library, loaded once: its threads are pinned to cores."""
    with _runtimes_lock:
        if store.target.name not in _runtimes:
            _runtimes[store.target.name] = store.runtime(find_compiler)
        return _runtimes[store.target.name]
