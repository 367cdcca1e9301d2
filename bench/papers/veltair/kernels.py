"""Generated kernels beside onnxruntime: every distinct convolution of ResNet-50 and MobileNet-V2, and whole models.

A layer runs with what is fused to it. onnxruntime gets the same operator in the form its optimiser gives it (its own
blocked layout, changes of layout left out) through an IO binding. Runs alternate; figures are lower quartiles: of CPU
time on one core, of wall time on two. Kernels are the fastest of some candidates; they are kept in the user's cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from bench._server import cache_folder
from cotenant import zoo
from cotenant.compile.native import KernelStep, Runtime
from cotenant.compile.problem import Problem
from cotenant.compile.search import CANDIDATES, SearchEffort, Trial, search
from cotenant.compile.selection import pick
from cotenant.compile.store import KernelCandidate, Store
from cotenant.compile.target import this_maker, this_target
from cotenant.compile.toolchain import Compiler, find_compiler
from cotenant.execute.compiled.choice import runtime_of, version_of
from cotenant.execute.compiled.compiled_model import CompiledModel
from cotenant.execute.onnx.segment_session import session_options
from cotenant.execute.onnx.segments import SegmentedModel

NAME = "veltair-kernels"
SEED = 1
MODELS = ("resnet50", "mobilenet_v2")
_SHAPES = {"input": (1, 3, 224, 224)}
_QUICK_CANDIDATES, _QUICK_BUDGET_S, _QUICK_EVERY = 3, 12.0, 7
_ROUNDS, _QUICK_ROUNDS = 25, 7
_ACTIVATIONS = {"relu": "Relu", "clip": "Clip"}


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Compile, then measure. `data_dir` is not used."""
    folder = cache_folder() / NAME
    store, compiler = Store(folder / "store", this_target(), this_maker()), find_compiler()
    runtime = runtime_of(store)
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    layers: dict[Problem, str] = {}
    wholes: dict[str, tuple[CompiledModel, SegmentedModel, list[Problem]]] = {}
    for name in MODELS:
        path = folder / f"{name}.onnx"
        if not path.exists():
            zoo.build(name, path)
        compiled = CompiledModel.open(path, cache_dir=folder / "graphs")
        asked = compiled.planner(_SHAPES, store.target.lanes).problems()
        problems = list(dict.fromkeys(each for unit in asked.values() for each in unit))
        wholes[name] = compiled, SegmentedModel.open(path, cache_dir=folder / "graphs"), problems
        layers |= {each: name for each in problems if not each.rows and each not in layers}
    if quick:
        layers = dict(list(layers.items())[::_QUICK_EVERY])
        del wholes["resnet50"]
    deadline = time.monotonic() + _QUICK_BUDGET_S if quick else float("inf")
    effort = SearchEffort(_QUICK_CANDIDATES if quick else CANDIDATES, deadline, len(before))
    wanted = dict.fromkeys([*layers, *(each for *_, problems in wholes.values() for each in problems)])
    found = {each: _found(each, store, runtime, compiler, effort) for each in wanted}
    os.sched_setaffinity(0, cores[:1])
    try:
        rows = [_layer(each, found[each], store, runtime, cores, rounds) for each in layers]
        models = {name: _whole(*whole, found, store, runtime, cores, rounds) for name, whole in wholes.items()}
    finally:
        os.sched_setaffinity(0, before)
        for compiled, plain, _ in wholes.values():
            compiled.close()
            plain.close()
    built = [each.library.build_s for candidates in found.values() for each in candidates]
    dense = [row["over_ort_1"] for row in rows if row["kind"] == "dense"]
    depthwise = [row["over_ort_1"] for row in rows if row["kind"] == "depthwise"]
    summary = {
        "dense_geomean_over_ort_1": _geomean(dense),
        "depthwise_geomean_over_ort_1": _geomean(depthwise),
        "geomean_over_ort_2": _geomean([row["over_ort_2"] for row in rows if row["over_ort_2"]]),
        "geomean_over_ort_1": _geomean([*dense, *depthwise]),
        **{f"{name}_over_ort": figures["over_ort_1"] for name, figures in models.items()},
        **{f"{name}_over_ort_2": figures["over_ort_2"] for name, figures in models.items() if figures["over_ort_2"]},
        "build_s_per_version": sum(built) / len(built),
        "candidates": max(len(candidates) for candidates in found.values()),
    }
    _print(rows, models, summary, quick)
    return {"summary": summary, "rows": [*rows, *models.values()], "seeds": [SEED]}


def _found(
    problem: Problem, store: Store, runtime: Runtime, compiler: Compiler, effort: SearchEffort
) -> Sequence[KernelCandidate]:
    known = [each for each in store.candidates(problem) if each.cpu_ns]
    return known if len(known) >= effort.candidates - 2 else search(problem, store, runtime, compiler, effort)


def _layer(
    problem: Problem,
    candidates: Sequence[KernelCandidate],
    store: Store,
    runtime: Runtime,
    cores: Sequence[int],
    rounds: int,
) -> dict[str, Any]:
    trial = Trial(problem, store.target.lanes)
    versions = [version_of(store, each) for each in candidates]
    block = runtime.block()

    def ours(others: Sequence[int]) -> Callable[[], object]:
        steps = (KernelStep * 1)(trial.step(pick(versions, 0, 1 + len(others)).address))
        return lambda: runtime.run(block, steps, 0, 1, others, wait=True)

    one = _timed(ours(()), _engine(problem, trial, (cores[0],)), rounds, is_wall=False)
    row = {
        "kind": "depthwise" if problem.is_depthwise else "dense",
        "layer": f"{problem.channels} > {problem.filters}, {problem.height} x {problem.width}, "
        f"{problem.kernel[0]} x {problem.kernel[1]} / {problem.stride[0]}",
        "gflops_1": 2 * problem.macs / one[0],
        "us_1": one[0] / 1e3,
        "ort_us_1": one[1] / 1e3,
        "over_ort_1": one[0] / one[1],
        "over_ort_2": None,
    }
    if len(cores) > 1:
        two = _timed(ours(cores[1:]), _engine(problem, trial, tuple(cores)), rounds, is_wall=True)
        row["over_ort_2"] = two[0] / two[1]
    return row


def _engine(problem: Problem, trial: Trial, cores: tuple[int, ...]) -> Callable[[], object]:
    """The same layer on onnxruntime: what its optimiser makes of it, without the changes of layout around it."""
    given: dict[str, Any] = {}
    if problem.activation.kind:
        given["activation"] = _ACTIVATIONS[problem.activation.kind]
    if problem.activation.parameters:
        given["activation_params"] = list(problem.activation.parameters)
    inputs = ["x", "w", "b", *(["z"] if problem.adds else [])]
    node = helper.make_node(
        "FusedConv",
        inputs,
        ["y"],
        domain="com.microsoft",
        kernel_shape=problem.kernel,
        strides=problem.stride,
        pads=problem.pads,
        group=problem.groups,
        **given,
    )
    weights = [numpy_helper.from_array(trial.weights, "w"), numpy_helper.from_array(trial.bias, "b")]
    shapes = {"x": (1, problem.channels, problem.height, problem.width)}
    out = (1, problem.filters, problem.out_height, problem.out_width)
    shapes |= {"z": out} if problem.adds else {}
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in shapes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
        weights,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = ort.InferenceSession(
        _blocked(model), session_options(cores if len(cores) > 1 else 1, optimise=False), ["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    for info in session.get_inputs():
        dims = [d if isinstance(d, int) else shapes["x"][at] for at, d in enumerate(info.shape)]
        value = ort.OrtValue.ortvalue_from_numpy(np.random.default_rng(SEED).standard_normal(dims, np.float32))
        binding.bind_ortvalue_input(info.name, value)
    (output,) = session.get_outputs()
    binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    binding.bind_ortvalue_output(output.name, binding.get_outputs()[0])  # no memory is asked for from now on
    return lambda: session.run_with_iobinding(binding)


def _blocked(model: onnx.ModelProto) -> bytes:
    """The model as onnxruntime optimises it, cut down to its convolution, whose tensors lie in blocks of channels."""
    folder = cache_folder() / NAME
    file = folder / "layer.onnx"
    options = session_options(1, optimise=True)
    options.optimized_model_filepath = str(file)
    ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    made = onnx.load(str(file))
    file.unlink()
    node = next(each for each in made.graph.node if each.op_type.endswith("Conv"))
    constants = [each for each in made.graph.initializer if each.name in node.input]
    held = {each.name for each in constants}
    shapes = {info.name: [d.dim_value for d in info.type.tensor_type.shape.dim] for info in model.graph.input}
    first = shapes["x"]
    is_blocked = node.domain == "com.microsoft.nchwc"
    dims = {node.input[0]: _padded(first) if is_blocked and first[1] > 3 else first}
    if len(node.input) > 3:
        dims[node.input[3]] = _padded(shapes["z"]) if is_blocked else shapes["z"]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, dims[name]) for name in node.input if name not in held
    ]
    output = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "layer", values, [output], constants)
    done = helper.make_model(graph, opset_imports=list(made.opset_import), ir_version=9)
    return bytes(done.SerializeToString())


def _padded(dims: Sequence[int]) -> list[int]:
    return [dims[0], -(-dims[1] // 16) * 16, *dims[2:]]


def _whole(
    compiled: CompiledModel,
    plain: SegmentedModel,
    problems: Sequence[Problem],
    found: dict[Problem, Sequence[KernelCandidate]],
    store: Store,
    runtime: Runtime,
    cores: Sequence[int],
    rounds: int,
) -> dict[str, Any]:
    kernels = {each: [version_of(store, candidate) for candidate in found[each]] for each in problems}
    compiled.use(kernels, runtime, store.target.lanes)
    inputs = {"input": np.random.default_rng(SEED).standard_normal(_SHAPES["input"], np.float32)}
    figures: dict[str, Any] = {"kind": "model", "layer": compiled.path.stem, "over_ort_2": None}
    for count in (1, 2)[: len(cores)]:
        threads = 1 if count == 1 else tuple(cores)

        def call(model: SegmentedModel, threads: Any = threads) -> Callable[[], dict[str, Any]]:
            model.prepare([(0, model.unit_count)], threads)
            return lambda: model.run(0, model.unit_count, inputs, threads)

        ours, theirs = _timed(call(compiled), call(plain), rounds, is_wall=count > 1)
        figures |= {f"us_{count}": ours / 1e3, f"ort_us_{count}": theirs / 1e3, f"over_ort_{count}": ours / theirs}
    right, got = (model.run(0, model.unit_count, inputs)["logits"] for model in (plain, compiled))
    figures["error"] = float(np.max(np.abs(got - right)) / np.max(np.abs(right)))
    figures["gflops_1"] = 2 * sum(unit.macs for unit in plain.dfg.units) / (figures["us_1"] * 1e3)
    return figures


def _timed(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int, *, is_wall: bool
) -> tuple[float, float]:
    clock = time.perf_counter_ns if is_wall else time.thread_time_ns
    samples: list[list[int]] = [[], []]
    ours()
    theirs()
    for _ in range(rounds):
        for call, into in zip((ours, theirs), samples, strict=True):
            began = clock()
            call()
            into.append(clock() - began)
    first, second = (float(np.quantile(each, 0.25, method="lower")) for each in samples)
    return first, second


def _geomean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")


def _print(rows: list[dict[str, Any]], models: dict[str, dict[str, Any]], summary: dict[str, Any], quick: bool) -> None:
    table = Table("layer", "kind", "GFLOPS", "us", "onnxruntime us", "over it, 1 core", "2 cores")
    for row in [*rows, *models.values()]:
        two = f"{row['over_ort_2']:.2f}" if row["over_ort_2"] else ""
        figures = (f"{row['gflops_1']:.0f}", f"{row['us_1']:.0f}", f"{row['ort_us_1']:.0f}", f"{row['over_ort_1']:.2f}")
        table.add_row(row["layer"], row["kind"], *figures, two)
    console = Console()
    console.print(table)
    console.print(", ".join(f"{name} {value:.3g}" for name, value in summary.items()))
    if quick:
        console.print(
            f"quick: every {_QUICK_EVERY}th layer, up to {_QUICK_CANDIDATES} candidates each, MobileNet-V2 whole"
        )
