"""Latencies of single units, read from the engine's own timing of each operator.

That timing takes longer than a light operator does (5 us against 0.2 where this was written). What it adds is measured
on a chain of operators that do next to nothing, and taken off.
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
"""Runs beyond the first RUNS end when they have taken so long."""
_KERNEL = "_kernel_time"
_CHAIN = 64
"""Operators of the chain that does nothing."""


def unit_times(
    graph_path: Path, dfg: Dfg, inputs: Mapping[str, Any], threads: Threads = 1, runs: int = RUNS
) -> tuple[int, ...]:
    """Latency of each unit in ns. Units that the engine does not time get what their MACs suggest.

    The optimised graph is run with the engine's profiler on; operators are matched by their place in that graph. An
    operator takes the mean of its quicker half of runs: the engine tells whole microseconds.
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
    """Sizes of tensors of a graph as they are when it runs on these inputs: those of which no size can be inferred."""
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
    """What the engine's timing adds to an operator, and what the lightest operator takes without it."""
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
    """What the engine tells of each operator, by its place in the graph."""
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
    """The mean of the quicker half."""
    middle = median(samples)
    return mean(each for each in samples if each <= middle)
