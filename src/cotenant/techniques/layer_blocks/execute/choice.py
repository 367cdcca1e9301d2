"""Opening a model of ONNX with the kernels that were chosen for it, where there are some."""

from __future__ import annotations

import hashlib
import logging
import threading
from itertools import repeat
from pathlib import Path

import msgspec
from msgspec import Struct

from cotenant.errors import CotenantError
from cotenant.execute.errors import ModelError
from cotenant.execute.onnx.segment_store import PLAIN, content_of
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.files import load, save
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.native import Runtime, address
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.selection import KernelVersion
from cotenant.techniques.layer_blocks.compile.store import KernelCandidate, Store
from cotenant.techniques.layer_blocks.compile.target import this_maker, this_target
from cotenant.techniques.layer_blocks.compile.toolchain import find_compiler
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.placement.execute.placed_model import PlacedModel
from cotenant.work import CPU

FOLDER, CHOICES = "compiled", "choices"
"""In a cache: the store of candidates, and in it a file for the content of each model that was compiled."""
FORMAT = "cotenant-compiled/2"
_MEND = "run cotenant compile again"
_log = logging.getLogger(__name__)


class ChosenKernels(Struct, frozen=True, forbid_unknown_fields=True):
    """The versions of a problem, by the keys of their libraries: first the fastest alone.

    Where it was measured beside others who use the memory, version q is the one for level q of the pressure (one may
    stand at several), and `level_ns` has the time of each at each level. Others follow, or stand from small blocks on.
    """

    problem: Problem
    libraries: tuple[str, ...]
    level_ns: tuple[tuple[int, ...], ...] = ()


class KernelChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen for a model: kernels, units left to onnxruntime, numbers of threads at which it runs it whole.

    `most_bytes_per_s` is what all cores drew from the memory, where kernels were measured beside others who do.
    """

    format: str
    units: int
    kernels: tuple[ChosenKernels, ...]
    left_out: tuple[int, ...] = ()
    by_engine: tuple[int, ...] = ()
    most_bytes_per_s: int = 0


def store_of(cache_dir: Path) -> Store:
    """The candidates of the models whose graphs are in a cache."""
    return Store(cache_dir / FOLDER, this_target(), this_maker())


def choice_path(cache_dir: Path, content: str) -> Path:
    """Where the choice for a model lies; `content` as `content_of` gives it."""
    return cache_dir / FOLDER / CHOICES / f"{content}.json"


def save_choice(path: Path, choice: KernelChoice) -> None:
    """Keep a choice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, choice)


def open_onnx(
    path: Path, *, cache_dir: Path | None = None, name: str = "", device: str = CPU, content: str = ""
) -> SegmentedModel:
    """Open an ONNX file, see `SegmentedModel.open`, with the kernels that `cotenant compile` chose for it here.

    Where they cannot be used, a warning says why, and it runs on onnxruntime as ever, where it may be placed.
    """
    given = {"cache_dir": cache_dir, "name": name, "device": device, "content": content}
    is_other = bool(content) and not content.endswith(PLAIN)
    if cache_dir is None or is_other or not (cache_dir / FOLDER / CHOICES).is_dir():
        return PlacedModel.open(path, **given)  # type: ignore[arg-type]
    place = choice_path(cache_dir, content.partition("-")[0] or content_of(Path(path)))
    if not place.exists():
        return PlacedModel.open(path, **given)  # type: ignore[arg-type]
    try:
        choice = load(place, KernelChoice, FORMAT, CompileError, _MEND)
        store = store_of(cache_dir)
        model = CompiledModel.open(path, **given)  # type: ignore[arg-type]
        try:
            apply(model, choice, store)
        except CotenantError:
            model.close()
            raise
    except CompileError as error:
        if content:
            raise ModelError(Path(path), f"its kernels cannot be used: {error}", "Load the model again") from error
        _log.warning("model %s: its compiled kernels are not used: %s", name or path, error)
        return PlacedModel.open(path, **given)  # type: ignore[arg-type]
    return model


def apply(model: CompiledModel, choice: KernelChoice, store: Store) -> None:
    """Run a model on what was chosen.

    Raises CompileError when it is of another graph, lists a kernel for another problem, or cannot be loaded.
    """
    if choice.units != model.unit_count:
        raise CompileError(f"they were chosen for {choice.units} units, and there are {model.unit_count}; {_MEND}")
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
        raise CompileError(f"{key} solves {candidate.problem}, and the choice lists it for {problem}; {_MEND}")
    return candidate


def version_of(store: Store, candidate: KernelCandidate, level_ns: tuple[int, ...] = ()) -> KernelVersion:
    """A candidate, loaded. Raises CompileError when it cannot be."""
    where = address(store.load(candidate.library))
    return KernelVersion(where, candidate.tasks, candidate.cpu_ns, level_ns)


_runtimes: dict[str, Runtime] = {}
_runtimes_lock = threading.Lock()


def runtime_of(store: Store) -> Runtime:
    """One library of steps a process: its threads are the cores'."""
    with _runtimes_lock:
        if store.target.name not in _runtimes:
            _runtimes[store.target.name] = store.runtime(find_compiler)
        return _runtimes[store.target.name]
