"""The campaign that compiles the models of a repository: search for kernels, choice of versions, comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from cotenant.errors import ConfigError
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.linux import available_cores, pin
from cotenant.measure.campaign import OnStep, leaving_out
from cotenant.measure.inputs import DeclaredShape, check_shapes, make_inputs
from cotenant.repository import ModelVersion, find_versions, graphs_path, model_names
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import CANDIDATES, SearchEffort
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.compile.selection import KernelVersion
from cotenant.techniques.layer_blocks.compile.store import KernelCandidate, Store
from cotenant.techniques.layer_blocks.compile.toolchain import find_compiler
from cotenant.techniques.layer_blocks.execute.choice import (
    FORMAT,
    ChosenKernels,
    KernelChoice,
    choice_path,
    save_choice,
)
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.execute.loaded_kernels import apply, runtime_of, store_of
from cotenant.techniques.layer_blocks.execute.store_sweep import sweep
from cotenant.techniques.layer_blocks.measure.kernel_judge import DIFFERS, error_of, judged_error
from cotenant.techniques.layer_blocks.measure.version_pressure import pressure_bench, versions_by_level
from cotenant.work import Share

_ROUNDS = 45
_SLACK_NS = 15_000_000_000
"""Time limit of the rounds of a comparison, in ns."""
_NO_SLOWER = 1.0
"""Largest ratio to onnxruntime's time at which a segment stays on kernels."""
_GAIN = 0.97
"""Largest ratio of a whole model's time to _NO_SLOWER at which it runs on kernels
(docs/decisions/0058-plans-win-by-a-margin.md)."""
_TOLERANCE = 1e-3


class CompiledResult(Struct, frozen=True):
    """The result for a model. `units` of `of_units` run on kernels; `layers` are problems with up to `versions`
    versions. `ratios` are times over onnxruntime's by number of cores (CPU time on one, wall time on more); empty
    without kernels. `error` is the largest relative error of an output. It is None if an answer differs in shape,
    integers, NaN or infinities; then onnxruntime runs the model."""

    units: int
    of_units: int
    layers: int
    versions: int
    ratios: dict[int, float]
    error: float | None


@dataclass(frozen=True, slots=True)
class CompileEffort:
    """Candidates per layer, and the time limit in s, after which only missing kernels are built."""

    candidates: int = CANDIDATES
    budget_s: float = float("inf")
    under_pressure: bool = False
    """Also measure candidates under memory contention, and keep versions for that."""


@dataclass(slots=True)
class _Opened:
    found: ModelVersion
    compiled: CompiledModel
    plain: SegmentedModel
    shapes: tuple[DeclaredShape, ...]
    problems: list[Problem]


def compile_repository(
    root: Path, lanes: Sequence[Share], effort: CompileEffort = CompileEffort(), on_step: OnStep = lambda *_: None
) -> tuple[dict[str, CompiledResult], dict[str, str]]:
    """Compile every ONNX model of a repository for its declared shapes. Returns results and errors, by model.

    Resumes if interrupted. Raises CompileError without a compiler, ConfigError without an ONNX model.
    """
    backend, store = CKernel(find_compiler()), store_of(graphs_path(root))
    results: dict[str, CompiledResult] = {}
    errors: dict[str, str] = {}
    before = available_cores()
    with ExitStack() as stack:
        opened = _opened(root, store, errors, stack)
        order = _by_weight(opened, errors, root)
        try:
            cores = tuple(dict.fromkeys(core for lane in lanes for core in lane.cores))
            pin(cores[:1])
            more = len(opened) + len(order) * effort.under_pressure
            failed: dict[Problem, str] = {}
            found = _searched(order, store, backend, effort, len(before), on_step, more, failed)
            pressed: Mapping[Problem, Mapping[str, Sequence[float]]] = {}
            most = 0
            if effort.under_pressure:
                pressed, most = _pressed(found, store, cores, on_step, len(order), len(opened), failed)
            for at, each in enumerate(opened):
                name = each.found.tenant
                on_step(len(order) + more - len(opened) + at, len(order) + more, f"{name} against onnxruntime")
                with leaving_out(errors, name):
                    for problem in each.problems:
                        if problem in failed:
                            raise CompileError(f"{_words(problem)}: {failed[problem]}")
                    results[name] = _judged(root, each, found, pressed, most, store, lanes)
        finally:
            pin(before)
        on_step(len(order) + more, len(order) + more, "")
        if not errors:  # the needs of a model that could not be opened are unknown
            sweep(store, backend, set(order), {_content(each) for each in opened})
    return results, errors


def _opened(root: Path, store: Store, errors: dict[str, str], stack: ExitStack) -> list[_Opened]:
    made = []
    for model in model_names(root):
        with leaving_out(errors, model):
            for found in find_versions(root, model, {}):
                if found.path.suffix != ".onnx":
                    continue
                cache = graphs_path(root)
                compiled = stack.enter_context(CompiledModel.open(found.path, cache_dir=cache, name=found.tenant))
                plain = stack.enter_context(SegmentedModel.open(found.path, cache_dir=cache, name=found.tenant))
                shapes = check_shapes(found.tenant, compiled.inputs, found.config.model.shapes)
                problems: dict[Problem, None] = {}
                for shape in shapes if not compiled.uncut_reason else ():
                    by_unit = compiled.planner(shape, store.target.lanes).problems()
                    problems |= dict.fromkeys(each for unit in by_unit.values() for each in unit)
                made.append(_Opened(found, compiled, plain, shapes, list(problems)))
    return made


def _content(each: _Opened) -> str:
    """The digest of a model, as `content_of` gives it."""
    return each.plain.graph_path.parent.name[:32]


def _by_weight(opened: Sequence[_Opened], errors: Mapping[str, str], root: Path) -> list[Problem]:
    """The problems of all models, in descending order of work. Raises ConfigError when there is no model."""
    if not opened and not errors:
        raise ConfigError(f"{root}: holds no ONNX model; only these can be compiled")
    weights: dict[Problem, int] = {}
    for each in opened:
        for problem in each.problems:
            weights[problem] = weights.get(problem, 0) + problem.macs
    return sorted(weights, key=lambda problem: -weights[problem])


def _words(problem: Problem) -> str:
    high, wide = problem.kernel
    plane = f"{problem.height} x {problem.width}"
    return f"{problem.channels} to {problem.filters} channels, {plane}, {high} x {wide}"


def _searched(
    order: Sequence[Problem],
    store: Store,
    backend: CKernel,
    effort: CompileEffort,
    workers: int,
    on_step: OnStep,
    more: int,
    failed: dict[Problem, str],
) -> dict[Problem, list[KernelCandidate]]:
    """Candidates of each problem, or why it `failed`. After the budget each problem without candidates gets one."""
    deadline = time.monotonic() + effort.budget_s
    each = SearchEffort(effort.candidates, deadline, workers)
    found = {}
    for at, problem in enumerate(order):
        on_step(at, len(order) + more, _words(problem))
        with leaving_out(failed, problem):
            found[problem] = search(problem, store, backend, each)
    return found


def _pressed(
    found: Mapping[Problem, Sequence[KernelCandidate]],
    store: Store,
    cores: Sequence[int],
    on_step: OnStep,
    before: int,
    more: int,
    failed: dict[Problem, str],
) -> tuple[dict[Problem, Mapping[str, Sequence[float]]], int]:
    """Times of all candidates under pressure, and the measured memory bandwidth of all cores in bytes/s.

    `failed` gets the reasons of problems that cannot be measured. Raises ConfigError for less than two cores.
    """
    if len(cores) < 2:
        raise ConfigError("--pressure needs two cores or more: kernels are measured beside other load")
    times: dict[Problem, Mapping[str, Sequence[float]]] = {}
    with pressure_bench(cores) as bench:
        for at, (problem, each) in enumerate(found.items()):
            on_step(before + at, 2 * before + more, f"{_words(problem)}, under pressure")
            with leaving_out(failed, problem):
                times[problem] = bench.times(problem, each, store, runtime_of(store))
    return times, bench.most_bytes_per_s


def _judged(
    root: Path,
    each: _Opened,
    found: Mapping[Problem, Sequence[KernelCandidate]],
    pressed: Mapping[Problem, Mapping[str, Sequence[float]]],
    most: int,
    store: Store,
    lanes: Sequence[Share],
) -> CompiledResult:
    """Choose versions, leave segments to onnxruntime where it is faster, and store the choice."""
    model = each.compiled
    sizes = {1: lanes[0].cores[:1]} | {lane.size: lane.cores for lane in lanes}
    kernels = tuple(
        _chosen(problem, found[problem], pressed.get(problem, {}), list(sizes)) for problem in each.problems
    )
    apply(model, KernelChoice(FORMAT, model.unit_count, kernels), store)
    plans = [model.prepared(shape).plan for shape in each.shapes] if each.problems else []
    if not any(any(plan.ours) for plan in plans):
        choice_path(graphs_path(root), _content(each)).unlink(missing_ok=True)
        return CompiledResult(0, model.unit_count, len(each.problems), 0, {}, 0.0)
    left_out = _slower(model, each.shapes)
    choice = KernelChoice(FORMAT, model.unit_count, kernels, left_out)
    apply(model, choice, store)
    ratios: dict[int, float] = {}
    error = max(judged_error(model, each.plain, shape) for shape in each.shapes)
    for cores in sizes.values():
        threads = cores if len(cores) > 1 else 1
        calls = _calls(each, threads)
        for compiled, plain in calls:
            error = max(error, error_of(compiled(), plain()))
        ratios[len(cores)] = max(_ratio(compiled, plain, is_wall=len(cores) > 1) for compiled, plain in calls)
    planned = model.prepared(each.shapes[0])
    if error > _TOLERANCE or not any(planned.plan.ours) or min(ratios.values()) > _GAIN * _NO_SLOWER:
        choice_path(graphs_path(root), _content(each)).unlink(missing_ok=True)
    else:
        slow = tuple(count for count, ratio in ratios.items() if ratio > _GAIN * _NO_SLOWER)
        kept = KernelChoice(FORMAT, model.unit_count, kernels, left_out, slow, most)
        save_choice(choice_path(graphs_path(root), _content(each)), kept)
    ours = sum(planned.plan.ours)
    known = None if error == DIFFERS else error
    return CompiledResult(ours, model.unit_count, len(each.problems), planned.versions, ratios, known)


def _chosen(
    problem: Problem,
    candidates: Sequence[KernelCandidate],
    times: Mapping[str, Sequence[float]],
    sizes: Sequence[int],
) -> ChosenKernels:
    if not times:
        return ChosenKernels(problem, tuple(versions_of(candidates, sizes)))
    by_level = versions_by_level(times)
    names = (*by_level, *(name for name in _wide(candidates, sizes) if name not in by_level))
    return ChosenKernels(problem, names, tuple(tuple(max(1, round(ns)) for ns in times[name]) for name in names))


def _wide(candidates: Sequence[KernelCandidate], sizes: Sequence[int]) -> list[str]:
    """The fastest candidate on each of these numbers of cores."""
    loaded = {c.name: KernelVersion(0, c.tasks, c.cpu_ns) for c in candidates}
    return [min(loaded, key=lambda key: loaded[key].ns_on(cores)) for cores in sizes]


def versions_of(candidates: Sequence[KernelCandidate], sizes: Sequence[int]) -> list[str]:
    """The libraries of a layer's versions, each once: the fastest alone, and the fastest on each number of cores."""
    fastest = min(candidates, key=lambda each: (each.cpu_ns, each.name)).name
    return list(dict.fromkeys([fastest, *_wide(candidates, sizes)]))


def _slower(model: CompiledModel, shapes: Sequence[DeclaredShape]) -> tuple[int, ...]:
    """Units of segments that onnxruntime runs in less time, layout changes included."""
    slow: dict[int, None] = {}
    for shape in shapes:
        times = model.segment_ns(make_inputs(model.inputs, shape, 1, False))
        for (start, end), (ours, theirs) in times.items():
            if ours > theirs * _NO_SLOWER:
                slow |= dict.fromkeys(range(start, end))
    return tuple(slow)


Call = Callable[[], Mapping[str, Any]]


def _calls(each: _Opened, threads: int | tuple[int, ...]) -> list[tuple[Call, Call]]:
    """For each shape, a run of the model on kernels and one on onnxruntime."""
    made = []
    for shape in each.shapes:
        inputs = make_inputs(each.plain.inputs, shape, 1, False)

        def on(model: SegmentedModel, inputs: Mapping[str, Any] = inputs) -> Call:
            model.prepare([(0, model.unit_count)], threads)
            return lambda: model.run(0, model.unit_count, inputs, threads)

        made.append((on(each.compiled), on(each.plain)))
    return made


def _ratio(ours: Call, theirs: Call, *, is_wall: bool) -> float:
    """Ratio of the lower quartiles of interleaved runs."""
    clock = time.perf_counter_ns if is_wall else time.thread_time_ns
    samples: tuple[list[int], list[int]] = ([], [])
    began = time.perf_counter_ns()
    for _ in range(_ROUNDS):
        for call, into in zip((ours, theirs), samples, strict=True):
            start = clock()
            call()
            into.append(clock() - start)
        if time.perf_counter_ns() - began > _SLACK_NS:
            break
    first, second = (float(np.quantile(each, 0.25, method="lower")) for each in samples)
    return first / max(1.0, second)
