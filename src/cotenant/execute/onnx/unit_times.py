"""Latencies of single units, from onnxruntime's profiler.

Profiling an operator takes longer than a light operator does. This overhead is measured on a chain of light operators,
and subtracted.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from cotenant.execute.onnx.segment_session import session_options
from cotenant.execute.threads.names import Threads
from cotenant.graph.dfg import Dfg

RUNS = 6
_WARM_UP = 2
_BUDGET_S = 4.0
"""Time in seconds after which runs beyond the first RUNS are skipped."""
_KERNEL = "_kernel_time"
_CHAIN = 64
"""Number of operators in the chain that measures the overhead."""


def unit_times(
    graph_path: Path, dfg: Dfg, inputs: Mapping[str, Any], threads: Threads = 1, runs: int = RUNS
) -> tuple[int, ...]:
    """Latency of each unit in ns. If the profiler reports no operator, the units' MACs.

    Runs the optimised graph with the profiler on; operators are matched by their index in that graph. Each operator
    gets the mean of the faster half of its runs, since the profiler reports whole microseconds.
    """
    operators = _operator_ns(str(graph_path), inputs, threads, runs)
    if not operators:
        return tuple(max(1, unit.macs) for unit in dfg.units)
    added, least = _timing_ns(threads)
    return tuple(
        max(1, round(sum(max(least, operators[i] - added) for i in unit.operators if i in operators)))
        for unit in dfg.units
    )


def tensor_bytes(graph_path: Path, names: Sequence[str], inputs: Mapping[str, Any]) -> dict[str, int]:
    """Sizes in bytes of tensors of a graph, measured in a run on these inputs, where they cannot be inferred."""
    model = onnx.load(str(graph_path), load_external_data=False)
    declared = {info.name for info in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in declared)
    options = session_options(1, optimise=False)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph_path.parent))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = session.run(list(names), dict(inputs))
    return {name: int(np.asarray(value).nbytes) for name, value in zip(names, values, strict=True)}


@cache
def _timing_ns(threads: Threads) -> tuple[float, float]:
    """Overhead of the profiler per operator, and the time of the lightest operator without it, in ns."""
    names = [f"x{i}" for i in range(_CHAIN + 1)]
    nodes = [helper.make_node("Neg", [names[i]], [names[i + 1]]) for i in range(_CHAIN)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in (names[0], names[-1])]
    graph = helper.make_graph(nodes, "light", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    inputs = {names[0]: np.ones(1, np.float32)}
    timed = mean(_operator_ns(model, inputs, threads, 4 * RUNS).values())
    session = ort.InferenceSession(model, session_options(threads, optimise=False), providers=["CPUExecutionProvider"])
    samples = []
    for _ in range(4 * RUNS):
        began = time.perf_counter_ns()
        session.run(None, inputs)
        samples.append(time.perf_counter_ns() - began)
    least = _quicker(samples) / _CHAIN
    return max(0.0, timed - least), least


def _operator_ns(model: str | bytes, inputs: Mapping[str, Any], threads: Threads, runs: int) -> dict[int, float]:
    """The profiler's time of each operator in ns, by its index in the graph."""
    with tempfile.TemporaryDirectory(prefix="cotenant-profile-") as folder:
        options = session_options(threads, optimise=False)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "units")
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        began = time.monotonic()
        for number in range(_WARM_UP + runs):
            if number < _WARM_UP + RUNS or time.monotonic() - began < _BUDGET_S:
                session.run(None, dict(inputs))
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    samples: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
            samples[int(event["args"]["node_index"])].append(event["dur"] * 1000.0)
    return {index: _quicker(values[_WARM_UP:] or values) for index, values in samples.items()}


def _quicker(samples: Sequence[float]) -> float:
    """The mean of the faster half."""
    middle = median(samples)
    return mean(each for each in samples if each <= middle)
