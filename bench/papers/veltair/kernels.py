"""Generated kernels beside onnxruntime: every distinct convolution of ResNet-50 and MobileNet-V2, and whole models.

A layer runs with the operators fused to it. In onnxruntime the same operator runs through an IO binding, as its
optimiser rewrote it (its own blocked layout, changes of layout left out). Yardsticks run beside them in processes of
their own, where they are installed. They are oneDNN (package onednn-cpu-gomp) and TVM (package apache-tvm, the best of
a few trials of its search).
Runs alternate, each after one that is not timed; figures are lower quartiles: of CPU time on one core, of wall time on
two. Kernels are the fastest of some candidates; they are kept in the user's cache.
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
from bench.papers.veltair._yardstick import TVM_TRIALS, Yardstick, timed
from cotenant import zoo
from cotenant.execute.onnx.segment_session import session_options
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import CANDIDATES, SearchEffort
from cotenant.techniques.layer_blocks.compile.native import KernelStep, Runtime
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.compile.selection import pick
from cotenant.techniques.layer_blocks.compile.store import KernelCandidate, Store
from cotenant.techniques.layer_blocks.compile.target import this_maker, this_target
from cotenant.techniques.layer_blocks.compile.toolchain import find_compiler
from cotenant.techniques.layer_blocks.compile.trial import Trial
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.execute.loaded_kernels import runtime_of, version_of

NAME = "veltair-kernels"
SEED = 1
MODELS = ("resnet50", "mobilenet_v2")
YARDSTICKS = {"onednn": "oneDNN", "tvm": "TVM"}
_SHAPES = {"input": (1, 3, 224, 224)}
_QUICK_CANDIDATES, _QUICK_BUDGET_S, _QUICK_EVERY = 3, 12.0, 7
_ROUNDS, _QUICK_ROUNDS = 15, 7
_ACTIVATIONS = {"relu": "Relu", "clip": "Clip"}


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Compile, then measure. `data_dir` is not used."""
    folder = cache_folder() / NAME
    store, backend = Store(folder / "store", this_target(), this_maker()), CKernel(find_compiler())
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
    found = {each: _found(each, store, backend, effort) for each in wanted}
    os.sched_setaffinity(0, cores[:1])
    others = _Others(folder, cores, may_search=not quick)
    try:
        rows = [_layer(each, found[each], store, runtime, cores, rounds, others) for each in layers]
        models = {name: _whole(*whole, found, store, runtime, cores, rounds) for name, whole in wholes.items()}
    finally:
        others.close()
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
        **{
            f"geomean_over_{name}_{count}": _geomean([row[key] for row in rows if row[key]])
            for name in YARDSTICKS
            for count in (1, 2)
            if any(row[key := f"over_{name}_{count}"] for row in rows)
        },
        "load_average": os.getloadavg()[0],
        "build_s_per_version": sum(built) / len(built),
        "candidates": max(len(candidates) for candidates in found.values()),
    }
    _print(rows, models, summary, quick, others.notes)
    return {"summary": summary, "rows": [*rows, *models.values()], "seeds": [SEED]}


class _Others:
    """The yardsticks, by name and number of cores; `notes` say why one has empty rows."""

    def __init__(self, folder: Path, cores: Sequence[int], *, may_search: bool) -> None:
        self._may_search = may_search
        self._made = {
            (name, count): Yardstick(name, cores[:count], folder / name)
            for name in YARDSTICKS
            for count in (1, 2)[: len(cores)]
        }
        self.notes = {name: each.note for (name, _), each in self._made.items() if each.note}

    def ready(self, problem: Problem, count: int) -> dict[str, Callable[[], int]]:
        """What samples a layer with so many cores, by name, of those that can run it."""
        found = {}
        for (name, cores), each in self._made.items():
            if cores == count:
                note = each.open(problem, may_search=self._may_search)
                if note:
                    self.notes.setdefault(name, note)
                else:
                    found[name] = each.sample
        return found

    def close(self) -> None:
        for each in self._made.values():
            each.close()


def _found(problem: Problem, store: Store, backend: CKernel, effort: SearchEffort) -> Sequence[KernelCandidate]:
    known = [each for each in store.candidates(problem) if each.cpu_ns]
    return known if len(known) >= effort.candidates - 2 else search(problem, store, backend, effort)


def _layer(
    problem: Problem,
    candidates: Sequence[KernelCandidate],
    store: Store,
    runtime: Runtime,
    cores: Sequence[int],
    rounds: int,
    others: _Others,
) -> dict[str, Any]:
    trial = Trial(problem, store.target.lanes)
    versions = [version_of(store, each) for each in candidates]
    block = runtime.block()

    def ours(helpers: Sequence[int]) -> Callable[[], object]:
        steps = (KernelStep * 1)(trial.step(pick(versions, 0, 1 + len(helpers)).address))
        return lambda: runtime.run(block, steps, 0, 1, helpers, wait=True)

    row: dict[str, Any] = {
        "kind": "depthwise" if problem.is_depthwise else "dense",
        "layer": f"{problem.channels} > {problem.filters}, {problem.height} x {problem.width}, "
        f"{problem.kernel[0]} x {problem.kernel[1]} / {problem.stride[0]}",
        "over_ort_2": None,
        **{f"over_{name}_{count}": None for name in YARDSTICKS for count in (1, 2)},
    }
    for count in (1, 2)[: len(cores)]:
        calls = {
            **_samplers(ours(cores[1:count]), _engine(problem, trial, tuple(cores[:count])), is_wall=count > 1),
            **others.ready(problem, count),
        }
        found = _timed(calls, rounds)
        row |= {f"{'' if name == 'ours' else name + '_'}us_{count}": ns / 1e3 for name, ns in found.items()}
        row |= {f"over_{name}_{count}": found["ours"] / ns for name, ns in found.items() if name != "ours"}
    row["gflops_1"] = 2 * problem.macs / (row["us_1"] * 1e3)
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
    """The model as onnxruntime optimises it, cut down to its convolution, with tensors in blocks of channels."""
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
    # Channels are filled up to whole blocks of the processor's size: the weights say to how many.
    weights = next(each.dims for each in constants if each.name == node.input[1])
    groups = next((each.i for each in node.attribute if each.name == "group"), 1)
    dims = {node.input[0]: [1, weights[1] * groups, *first[2:]] if is_blocked else first}
    if len(node.input) > 3:
        dims[node.input[3]] = [1, weights[0], *shapes["z"][2:]] if is_blocked else shapes["z"]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, dims[name]) for name in node.input if name not in held
    ]
    output = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "layer", values, [output], constants)
    done = helper.make_model(graph, opset_imports=list(made.opset_import), ir_version=9)
    return bytes(done.SerializeToString())


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

        found_ns = _timed(_samplers(call(compiled), call(plain), is_wall=count > 1), rounds)
        ours, theirs = found_ns["ours"], found_ns["ort"]
        figures |= {f"us_{count}": ours / 1e3, f"ort_us_{count}": theirs / 1e3, f"over_ort_{count}": ours / theirs}
    right, got = (model.run(0, model.unit_count, inputs)["logits"] for model in (plain, compiled))
    figures["error"] = float(np.max(np.abs(got - right)) / np.max(np.abs(right)))
    figures["gflops_1"] = 2 * sum(unit.macs for unit in plain.dfg.units) / (figures["us_1"] * 1e3)
    return figures


def _samplers(
    ours: Callable[[], object], theirs: Callable[[], object], *, is_wall: bool
) -> dict[str, Callable[[], int]]:
    return {
        "ours": lambda: timed(ours, is_wall=is_wall),
        "ort": lambda: timed(theirs, is_wall=is_wall),
    }


def _timed(calls: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """The lower quartile of each, in ns, taken in turn."""
    samples: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(call())
    return {name: float(np.quantile(each, 0.25, method="lower")) for name, each in samples.items()}


def _geomean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")


def _print(
    rows: list[dict[str, Any]],
    models: dict[str, dict[str, Any]],
    summary: dict[str, Any],
    quick: bool,
    notes: dict[str, str],
) -> None:
    names = [f"over {title}, {count}" for title in YARDSTICKS.values() for count in (1, 2)]
    table = Table("layer", "kind", "GFLOPS", "us", "onnxruntime us", "over it, 1 core", "2 cores", *names)
    for row in [*rows, *models.values()]:
        figures = (f"{row['gflops_1']:.0f}", f"{row['us_1']:.0f}", f"{row['ort_us_1']:.0f}", f"{row['over_ort_1']:.2f}")
        keys = ["over_ort_2", *(f"over_{name}_{count}" for name in YARDSTICKS for count in (1, 2))]
        ratios = [f"{row[key]:.2f}" if row.get(key) else "" for key in keys]
        table.add_row(row["layer"], row["kind"], *figures, *ratios)
    console = Console(width=200)
    console.print(table)
    console.print(", ".join(f"{name} {value:.3g}" for name, value in summary.items()))
    for name, note in notes.items():
        console.print(f"{YARDSTICKS[name]} has empty rows: {note}", markup=False)
    if "tvm" not in notes:
        console.print(f"TVM: the best of {TVM_TRIALS} trials a layer, far from what hours of its search would find")
    if quick:
        console.print(
            f"quick: every {_QUICK_EVERY}th layer, up to {_QUICK_CANDIDATES} candidates each, MobileNet-V2 whole; "
            "TVM only where it was tuned before"
        )
